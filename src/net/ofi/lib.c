/* SPDX-License-Identifier: Apache-2.0 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "util/sigactions.h"

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

static int (*real_getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
                           const struct fi_info *hints, struct fi_info **info);

/* Providers are loaded and initialised by it: they may install signal handlers, as shm does. */
static int getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info)
{
    struct sigactions actions;
    int rc;

    sigactions_save(&actions);
    rc = real_getinfo(version, node, service, flags, hints, info);
    sigactions_restore(&actions, "libfabric");
    return rc;
}

static void *open_library(void)
{
    struct sigactions actions;
    void *handle;

    sigactions_save(&actions);
    handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    sigactions_restore(&actions, "libfabric");
    return handle;
}

/* Never closed: providers leave threads and exit handlers behind. */
static void open_once(void)
{
    void *handle = open_library();

    missing = missing_text;
    if (!handle) {
        snprintf(missing_text, sizeof(missing_text), "libfabric is not installed: %s", dlerror());
        return;
    }
    if (load(handle, "fi_getinfo", &real_getinfo) || load(handle, "fi_freeinfo", &lib.freeinfo) ||
        load(handle, "fi_dupinfo", &lib.dupinfo) || load(handle, "fi_fabric", &lib.fabric) ||
        load(handle, "fi_strerror", &lib.strerror) || load(handle, "fi_version", &lib.version))
        return;
    lib.getinfo = getinfo;
    sigactions_vendor((const void *)(uintptr_t)real_getinfo);
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
