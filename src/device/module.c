/* SPDX-License-Identifier: Apache-2.0 */
#include "device/module.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/build.h"
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

/* "cuda" -> "CUDA" */
static const char *vendor_name(const char *name)
{
    return strcmp(name, "cuda") == 0 ? "CUDA" : strcmp(name, "hip") == 0 ? "HIP" : name;
}

/* Where a module is looked for first: EPX_MODULE_DIR, else beside the library. */
static void first_path(const char *name, char *path, size_t bytes)
{
    const char *given = env_string("EPX_MODULE_DIR");
    char folder[512];

    own_folder(folder, sizeof(folder));
    if (given)
        snprintf(path, bytes, "%.511s/libepx_%s.so", given, name);
    else
        snprintf(path, bytes, "%slibepx_%s.so", folder, name);
}

static void *open_library(const char *name)
{
    char path[640];
    void *library;

    first_path(name, path, sizeof(path));
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library || env_string("EPX_MODULE_DIR") || access(path, F_OK) == 0)
        return library;
    snprintf(path, sizeof(path), "libepx_%s.so", name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

/* A module that is not there, or one that cannot be loaded: the linker's reason helps with the second only. */
static epx_status fail_missing(const char *name, const char *reason)
{
    char path[640];

    first_path(name, path, sizeof(path));
    if (access(path, F_OK) == 0)
        return fail(EPX_ERR_UNSUPPORTED, "device %s: the %s device module %s cannot be loaded: %s", name,
                    vendor_name(name), path, reason);
    return fail(
        EPX_ERR_UNSUPPORTED,
        "device %s: no %s device module here: there is no %s. Build EPX with it (cmake -DEPX_%s=ON, needs %s), or "
        "set EPX_MODULE_DIR to the folder that has libepx_%s.so",
        name, vendor_name(name), path, vendor_name(name), strcmp(name, "cuda") == 0 ? "nvcc" : "hipcc", name);
}

static epx_status load(const char *name, const struct device_ops **ops)
{
    static struct device_host host = {.version = DEVICE_MODULE_VERSION,
                                      .params_bytes = sizeof(struct group_dev) + sizeof(struct handle_dev),
                                      .fail = fail,
                                      .cpu = &cpu_device_ops};
    device_module_fn entry;
    void *library = open_library(name);

    host.build = build_number();
    host.fabric_files = env_string("EPX_FABRIC") && strcmp(env_string("EPX_FABRIC"), "files") == 0;
    host.relaxed_atomics = (int)env_int("EPX_AGGRESSIVE_ATOMIC", 1, 0, 1);
    if (!library)
        return fail_missing(name, dlerror());
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
