/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs/lib.h"

#if EPX_HAVE_VERBS

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "util/sigactions.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct verbs_lib library;
static int loaded;
static char reason[200];

/* Returns 0 when the symbol is there. `slot` is the address of a function pointer. */
static int resolve(void *handle, const char *name, void *slot)
{
    void *symbol = dlsym(handle, name);

    if (!symbol) {
        snprintf(reason, sizeof(reason), "libibverbs.so.1 has no %s: it is too old", name);
        return -1;
    }
    *(void **)slot = symbol; /* POSIX lets data and function pointers convert */
    return 0;
}

static void load_efa(void)
{
#if EPX_HAVE_EFADV
    void *handle = dlopen("libefa.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!handle)
        return;
    *(void **)(void *)&library.efa_query_device = dlsym(handle, "efadv_query_device");
    *(void **)(void *)&library.efa_create_qp = dlsym(handle, "efadv_create_qp_ex");
    if (!library.efa_create_qp)
        library.efa_query_device = NULL;
#endif
}

static struct {
    __typeof__(ibv_get_device_list) *get_device_list;
    __typeof__(ibv_open_device) *open_device;
} real;

/* Drivers of cards are loaded by the first of these two calls and initialised by the second. */
static struct ibv_device **get_device_list(int *count)
{
    struct ibv_device **list;
    struct sigactions actions;

    sigactions_save(&actions);
    list = real.get_device_list(count);
    sigactions_restore(&actions, "libibverbs");
    return list;
}

static struct ibv_context *open_device(struct ibv_device *device)
{
    struct ibv_context *context;
    struct sigactions actions;

    sigactions_save(&actions);
    context = real.open_device(device);
    sigactions_restore(&actions, "libibverbs");
    return context;
}

/* The libraries stay open: providers leave threads and exit handlers behind. */
static void load_all(void)
{
    void *handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    int bad = 0;

    if (!handle) {
        snprintf(reason, sizeof(reason), "libibverbs.so.1 cannot be opened: %s", dlerror());
        return;
    }
#define VERBS_RESOLVE(name) bad |= resolve(handle, "ibv_" #name, &library.name);
    VERBS_FUNCTIONS(VERBS_RESOLVE)
#undef VERBS_RESOLVE
    bad |= resolve(handle, "_ibv_query_gid_ex", &library.query_gid_ex);
    bad |= resolve(handle, "ibv_qp_to_qp_ex", &library.qp_to_qp_ex);
    if (bad)
        return;
    *(void **)(void *)&library.reg_dmabuf_mr = dlsym(handle, "ibv_reg_dmabuf_mr");
    real.get_device_list = library.get_device_list;
    real.open_device = library.open_device;
    library.get_device_list = get_device_list;
    library.open_device = open_device;
    sigactions_vendor((const void *)(uintptr_t)real.open_device);
    load_efa();
    loaded = 1;
}

static void load(void)
{
    struct sigactions actions;

    sigactions_save(&actions);
    load_all();
    sigactions_restore(&actions, "libibverbs");
}

const struct verbs_lib *verbs_lib_open(const char **why)
{
    pthread_once(&once, load);
    *why = reason;
    return loaded ? &library : NULL;
}

#endif
