/* SPDX-License-Identifier: Apache-2.0 */
#include "nccl_ep/driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include "util/sigactions.h"

static struct driver driver;
static int usable;

static void find_all(void)
{
    static const char *const names[] = {"cuInit",
                                        "cuDeviceGet",
                                        "cuDeviceGetAttribute",
                                        "cuCtxGetDevice",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuDevicePrimaryCtxRelease_v2",
                                        "cuCtxPushCurrent_v2",
                                        "cuCtxPopCurrent_v2",
                                        "cuMemAlloc_v2",
                                        "cuMemFree_v2",
                                        "cuMemcpyHtoDAsync_v2",
                                        "cuMemcpyDtoH_v2",
                                        "cuStreamCreate",
                                        "cuStreamQuery",
                                        "cuStreamDestroy_v2"};
    void **slots = (void **)&driver;
    void *library = RTLD_DEFAULT;

    _Static_assert(sizeof(driver) == sizeof(names) / sizeof(names[0]) * sizeof(void *), "one name for each slot");
    usable = 1;
    if (!dlsym(RTLD_DEFAULT, names[0])) {
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        usable = library != NULL;
    }
    for (size_t i = 0; usable && i < sizeof(names) / sizeof(names[0]); i++) {
        slots[i] = dlsym(library, names[i]);
        usable = slots[i] != NULL;
    }
    usable = usable && driver.init(0) == DRIVER_SUCCESS;
}

static void find_all_guarded(void)
{
    struct sigactions actions;

    sigactions_save(&actions);
    find_all();
    sigactions_restore(&actions, "libcuda");
}

const struct driver *driver_open(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, find_all_guarded);
    return usable ? &driver : NULL;
}
