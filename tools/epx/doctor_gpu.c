/* SPDX-License-Identifier: Apache-2.0 */
/* GPUs, by the vendors' own libraries opened at run time, and the ways by which a card may reach their memory. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "device/arrivals.h"
#include "device/module.h"
#include "device/probe.h"
#include "doctor.h"

/* CU_DEVICE_ATTRIBUTE_... */
enum { DIRECT_SUPPORTED = 116, DIRECT_FLUSH = 117, DIRECT_ORDERING = 118, DMA_BUF_SUPPORTED = 124 };

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
static int show_cuda_devices(struct report *report, const struct gpu_probe *probe)
{
    int (*get_name)(char *name, int bytes, int device);
    int (*attribute)(int *value, int which, int device);
    int with = 0;

    if (!gpu_probe_load(probe, "cuDeviceGetName", &get_name) ||
        !gpu_probe_load(probe, "cuDeviceGetAttribute", &attribute))
        return 0;
    for (int i = 0; i < probe->count; i++) {
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

/* Returns the number of devices; *dma_bufs of them hand out dma-bufs. */
static int show_cuda(struct report *report, int *dma_bufs)
{
    int (*get_version)(int *value);
    struct gpu_probe probe;
    int version = 0;

    gpu_probe("cuda", &probe);
    if (!probe.count) {
        report_row(report, "CUDA", "%s", probe.why);
        return 0;
    }
    if (gpu_probe_load(&probe, "cuDriverGetVersion", &get_version))
        get_version(&version);
    report_row(report, "CUDA", "%d device%s, driver for CUDA %d.%d", probe.count, probe.count == 1 ? "" : "s",
               version / 1000, version % 1000 / 10);
    *dma_bufs = show_cuda_devices(report, &probe);
    return probe.count;
}

static int show_hip(struct report *report)
{
    struct gpu_probe probe;

    gpu_probe("hip", &probe);
    if (probe.count)
        report_row(report, "HIP", "%d device%s (%s)", probe.count, probe.count == 1 ? "" : "s", probe.name);
    else
        report_row(report, "HIP", "%s", probe.why);
    return probe.count;
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
