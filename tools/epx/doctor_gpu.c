/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs, by the vendors' own libraries opened at run time, and the ways by which a card may reach their memory. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "device/module.h"
#include "device/arrivals.h"
#include "doctor.h"

/* CU_DEVICE_ATTRIBUTE_... */
enum { DIRECT_SUPPORTED = 116, DIRECT_FLUSH = 117, DIRECT_ORDERING = 118, DMA_BUF_SUPPORTED = 124 };

typedef int (*int_call)(int *value);

/* POSIX lets an object pointer hold a function; ISO C wants the detour. */
static int load(void *handle, const char *name, void *slot)
{
    void *symbol = dlsym(handle, name);

    memcpy(slot, &symbol, sizeof(symbol));
    return symbol != NULL;
}

/* The first of several names of a library that is there. */
static void *open_first(const char *const *names, const char **opened)
{
    for (; *names; names++) {
        void *handle = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
        *opened = *names;
        if (handle)
            return handle;
    }
    return NULL;
}

static const char *arrival_text(enum arrival_rule rule)
{
    switch (rule) {
    case ARRIVALS_VISIBLE:
        return "in order, nothing to do";
    case ARRIVALS_FLUSH:
        return "flushed by the proxy before it is counted";
    default:
        return "never certain to be seen: heaps of groups on several nodes lie in host memory";
    }
}

/* Returns how many of the devices can hand out dma-bufs. */
static int show_cuda_devices(struct report *report, void *handle, int count)
{
    int (*get_name)(char *name, int bytes, int device);
    int (*attribute)(int *value, int which, int device);
    int with = 0;

    if (!load(handle, "cuDeviceGetName", &get_name) || !load(handle, "cuDeviceGetAttribute", &attribute))
        return 0;
    for (int i = 0; i < count; i++) {
        char name[128] = "?";
        struct gpu_direct direct = {0, 0, 0};
        int yes = 0;
        get_name(name, sizeof(name), i);
        attribute(&yes, DMA_BUF_SUPPORTED, i);
        attribute(&direct.supported, DIRECT_SUPPORTED, i);
        attribute(&direct.flush, DIRECT_FLUSH, i);
        attribute(&direct.ordering, DIRECT_ORDERING, i);
        report_row(report, "CUDA", "  %d: %s, dma-buf %s", i, name, yes ? "yes" : "no");
        report_row(report, "CUDA", "     what cards write there: %s (GPUDirect %s, ordering %d, flush %d)",
                   arrival_text(arrival_rule(0, &direct)), direct.supported ? "yes" : "no", direct.ordering,
                   direct.flush);
        with += yes;
    }
    return with;
}

/* Returns the number of devices; *dma_bufs of them hand out dma-bufs. The library stays open: drivers want that. */
static int show_cuda(struct report *report, int *dma_bufs)
{
    static const char *const names[] = {"libcuda.so.1", NULL};
    int (*init)(unsigned flags);
    int_call get_count, get_version;
    const char *opened;
    void *handle = open_first(names, &opened);
    int count = 0, version = 0, rc;

    if (!handle) {
        report_row(report, "CUDA", "no driver (libcuda.so.1)");
        return 0;
    }
    if (!load(handle, "cuInit", &init) || !load(handle, "cuDeviceGetCount", &get_count) ||
        !load(handle, "cuDriverGetVersion", &get_version)) {
        report_row(report, "CUDA", "libcuda.so.1 lacks cuInit or cuDeviceGetCount");
        return 0;
    }
    rc = init(0);
    if (rc == 0)
        rc = get_count(&count);
    if (rc != 0) {
        report_row(report, "CUDA", "libcuda.so.1 is there, but finds no device (error %d)", rc);
        return 0;
    }
    get_version(&version);
    report_row(report, "CUDA", "%d device%s, driver for CUDA %d.%d", count, count == 1 ? "" : "s", version / 1000,
               version % 1000 / 10);
    *dma_bufs = show_cuda_devices(report, handle, count);
    return count;
}

static int show_hip(struct report *report)
{
    static const char *const names[] = {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                        NULL};
    int_call get_count;
    const char *opened;
    void *handle = open_first(names, &opened);
    int count = 0, rc;

    if (!handle) {
        report_row(report, "HIP", "no library (libamdhip64.so)");
        return 0;
    }
    if (!load(handle, "hipGetDeviceCount", &get_count)) {
        report_row(report, "HIP", "%s lacks hipGetDeviceCount", opened);
        return 0;
    }
    rc = get_count(&count);
    if (rc != 0)
        report_row(report, "HIP", "%s is there, but finds no device (error %d)", opened, rc);
    else
        report_row(report, "HIP", "%d device%s (%s)", count, count == 1 ? "" : "s", opened);
    return rc == 0 ? count : 0;
}

/* Modules are opened, as a group would: one that is there may still miss its vendor's library. */
static void show_module(struct report *report, const char *row, const char *name, const char *verdict, int devices)
{
    const struct device_ops *ops;

    if (device_module_open(name, &ops) != EPX_OK) {
        report_row(report, row, "not here: %s", epx_last_error());
        report_missing(report, verdict, "%s; EPX's module libepx_%s.so %s", devices ? "there are GPUs" : "no GPU found",
                       name, strstr(epx_last_error(), "cannot be loaded") ? "cannot be loaded" : "is not here");
        if (devices)
            report_advise(report, "To use the GPUs: %s", epx_last_error());
        return;
    }
    report_row(report, row, "libepx_%s.so can be opened", name);
    if (devices)
        report_works(report, verdict, "%d GPU%s", devices, devices == 1 ? "" : "s");
    else
        report_missing(report, verdict, "EPX's module is here, but no GPU was found");
}

static int verbs_has_dma_buf(void)
{
    void *handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    int has = handle && dlsym(handle, "ibv_reg_dmabuf_mr");

    if (handle)
        dlclose(handle);
    return has;
}

/* The kernel registers dma-bufs with verbs since 5.12. */
static int kernel_has_dma_buf(void)
{
    struct utsname name;
    int major = 0, minor = 0;

    return uname(&name) == 0 && sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
           (major > 5 || (major == 5 && minor >= 12));
}

void doctor_gpu(struct report *report)
{
    const int peermem = path_exists("/sys/module/nvidia_peermem") || path_exists("/sys/module/nv_peer_mem");
    const int library = verbs_has_dma_buf(), kernel = kernel_has_dma_buf();
    int dma_bufs = 0, cuda, hip;

    report_section(report, "gpus");
    cuda = show_cuda(report, &dma_bufs);
    hip = show_hip(report);
    show_module(report, "module for CUDA", "cuda", "cuda device", cuda);
    show_module(report, "module for HIP", "hip", "hip device", hip);
    report_section(report, "registration of gpu memory");
    report_row(report, "peermem", "%s",
               peermem ? "yes (nvidia_peermem is loaded)" : "no (nvidia_peermem is not loaded)");
    report_row(report, "dma-buf", "%s: kernel %s, libibverbs %s", kernel && library ? "yes" : "no",
               kernel ? "5.12 or later" : "before 5.12",
               library ? "has ibv_reg_dmabuf_mr" : "has no ibv_reg_dmabuf_mr");
    if (path_exists("/sys/class/infiniband") && (cuda || hip) && !peermem && !(kernel && library && (dma_bufs || hip)))
        report_advise(report,
                      "Cards cannot reach GPU memory directly: modprobe nvidia_peermem, or a driver with dma-buf");
}
