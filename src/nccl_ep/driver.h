/* SPDX-License-Identifier: Apache-2.0 */
/* What is asked of the CUDA driver, found in the process or opened at run time: it is where a GPU is, whichever runtime
 * the program was linked with. */
#ifndef EPX_NCCL_EP_DRIVER_H
#define EPX_NCCL_EP_DRIVER_H

#include <stddef.h>

enum {
    DRIVER_SUCCESS = 0,
    DRIVER_NOT_READY = 600,
    DRIVER_MULTIPROCESSOR_COUNT = 16,
    DRIVER_CAPABILITY_MAJOR = 75,
    DRIVER_CAPABILITY_MINOR = 76
};

typedef unsigned long long driver_address;

struct driver {
    int (*init)(unsigned int flags);
    int (*device_get)(int *device, int ordinal);
    int (*device_attribute)(int *value, int attribute, int device);
    int (*current_device)(int *device);
    int (*context_retain)(void **context, int device);
    int (*context_release)(int device);
    int (*context_push)(void *context);
    int (*context_pop)(void **context);
    int (*mem_alloc)(driver_address *at, size_t bytes);
    int (*mem_free)(driver_address at);
    /* In the order of a stream. The call without one returns when the driver has read `from`, and the bytes may come to
     * the GPU later: behind work of streams that do not wait for the default one. */
    int (*copy_in)(driver_address to, const void *from, size_t bytes, void *stream);
    int (*copy_out)(void *to, driver_address from, size_t bytes);
    int (*stream_create)(void **stream, unsigned int flags);
    int (*stream_query)(void *stream);
    int (*stream_destroy)(void *stream);
};

/* NULL where there is no driver, or one that lacks something. */
const struct driver *driver_open(void);

#endif
