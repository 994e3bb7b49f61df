/* SPDX-License-Identifier: Apache-2.0 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static struct ofi_lib lib;
static const char *missing; /* why there is none */
static char missing_text[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* POSIX lets an object pointer hold a function; ISO C wants the detour. */
static int load(void *handle, const char *name, void *slot)
{
    void *symbol = dlsym(handle, name);

    if (!symbol) {
        snprintf(missing_text, sizeof(missing_text), "libfabric.so.1 has no %s", name);
        return -1;
    }
    memcpy(slot, &symbol, sizeof(symbol));
    return 0;
}

/* Never closed: providers leave threads and handlers behind. */
static void open_once(void)
{
    void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);

    missing = missing_text;
    if (!handle) {
        snprintf(missing_text, sizeof(missing_text), "libfabric is not installed: %s", dlerror());
        return;
    }
    if (load(handle, "fi_getinfo", &lib.getinfo) || load(handle, "fi_freeinfo", &lib.freeinfo) ||
        load(handle, "fi_dupinfo", &lib.dupinfo) || load(handle, "fi_fabric", &lib.fabric) ||
        load(handle, "fi_strerror", &lib.strerror) || load(handle, "fi_version", &lib.version))
        return;
    if (FI_VERSION_LT(lib.version(), OFI_API)) {
        snprintf(missing_text, sizeof(missing_text), "libfabric is version %u.%u, expected %u.%u or later",
                 FI_MAJOR(lib.version()), FI_MINOR(lib.version()), FI_MAJOR(OFI_API), FI_MINOR(OFI_API));
        return;
    }
    missing = NULL;
}

const struct ofi_lib *ofi_lib_get(const char **text)
{
    pthread_once(&once, open_once);
    *text = missing ? missing : "";
    return missing ? NULL : &lib;
}

#endif
