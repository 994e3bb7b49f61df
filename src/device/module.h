/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that needs a vendor's library lives in a module of its own, libepx_NAME.so, which the library opens when a
 * group asks for that device. The module calls nothing of the library but what it is given here.
 */
#ifndef EPX_DEVICE_MODULE_H
#define EPX_DEVICE_MODULE_H

#include "device/device.h"

/* Goes up whenever this file, device.h or what a kernel shares with the host (kernel/params.h, kernel/heap.h) changes
 * its layout. */
#define DEVICE_MODULE_VERSION 16

struct device_host {
    uint32_t version;
    uint32_t params_bytes; /* sizeof(struct group_dev) + sizeof(struct handle_dev): catches what the version missed */
    uint64_t build;        /* build_number(): of the same sources */
    epx_status (*fail)(epx_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
    int relaxed_atomics;          /* HIP: words by relaxed operations between explicit fences (EPX_AGGRESSIVE_ATOMIC) */
    int fabric_files;             /* CUDA: file descriptors in the place of fabric handles (EPX_FABRIC=files) */
    const struct device_ops *cpu; /* heaps in host memory are the CPU device's */
};

#define DEVICE_MODULE_SYMBOL "epx_device_module"
/* The table, or NULL if library and module do not fit. */
typedef const struct device_ops *(*device_module_fn)(const struct device_host *host);

/* The table of libepx_NAME.so. Opened once; stays. */
epx_status device_module_open(const char *name, const struct device_ops **ops);

#endif
