/* SPDX-License-Identifier: Apache-2.0 */
#include "device/module.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/env.h"
#include "util/status.h"

#define MODULES_MAX 2

static struct module {
    char name[16];
    const struct device_ops *ops;
} modules[MODULES_MAX];
static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER;

/* The folder of the library (or of the program that contains it) as "path/", or "". */
static void own_folder(char *folder, size_t bytes)
{
    Dl_info info;
    ssize_t length;
    char *slash;

    folder[0] = '\0';
    if (!dladdr((const void *)&modules_lock, &info) || !info.dli_fname)
        return;
    snprintf(folder, bytes, "%s", info.dli_fname);
    if (!strchr(folder, '/')) { /* a program, by the name it was called */
        length = readlink("/proc/self/exe", folder, bytes - 1);
        folder[length > 0 ? length : 0] = '\0';
    }
    slash = strrchr(folder, '/');
    if (slash)
        slash[1] = '\0';
    else
        folder[0] = '\0';
}

static void *open_library(const char *name)
{
    const char *given = env_string("EPX_MODULE_DIR");
    char folder[512], path[640];
    void *library;

    own_folder(folder, sizeof(folder));
    if (given)
        snprintf(path, sizeof(path), "%.511s/libepx_%s.so", given, name);
    else
        snprintf(path, sizeof(path), "%slibepx_%s.so", folder, name);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library || given)
        return library;
    snprintf(path, sizeof(path), "libepx_%s.so", name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static epx_status load(const char *name, const struct device_ops **ops)
{
    static struct device_host host = {.version = DEVICE_MODULE_VERSION,
                                      .params_bytes = sizeof(struct group_dev) + sizeof(struct handle_dev),
                                      .fail = fail,
                                      .cpu = &cpu_device_ops};
    device_module_fn entry;
    void *library = open_library(name);

    host.relaxed_atomics = (int)env_int("EPX_AGGRESSIVE_ATOMIC", 1, 0, 1);
    if (!library)
        return fail(EPX_ERR_UNSUPPORTED, "device %s: cannot open its module: %s", name, dlerror());
    *(void **)&entry = dlsym(library, DEVICE_MODULE_SYMBOL);
    *ops = entry ? entry(&host) : NULL;
    if (!*ops) {
        dlclose(library);
        return fail(EPX_ERR_UNSUPPORTED, "device %s: libepx_%s.so belongs to another build of EPX", name, name);
    }
    return EPX_OK;
}

epx_status device_module_open(const char *name, const struct device_ops **ops)
{
    struct module *m = modules;
    epx_status status = EPX_OK;

    pthread_mutex_lock(&modules_lock);
    while (m < modules + MODULES_MAX - 1 && m->ops && strcmp(m->name, name) != 0)
        m++;
    if (!m->ops) {
        status = load(name, &m->ops);
        snprintf(m->name, sizeof(m->name), "%s", name);
    }
    *ops = m->ops;
    pthread_mutex_unlock(&modules_lock);
    return status;
}
