/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What libepx_cudart.so and libnccl_ep.so ask of each other. Neither links the other: libnccl_ep.so looks for
 * epxCudartAttach in the process, gives its functions and gets those of the stand-in.
 */
#ifndef EPX_NCCL_EP_CAPTURE_H
#define EPX_NCCL_EP_CAPTURE_H

#include <cuda_runtime.h>

/* What EPX has recorded on a stream that captures: one node of a graph. */
struct capture_node {
    void *context;
    int (*launch)(void *context, cudaStream_t stream); /* 0, or an ncclResult_t */
    void (*destroy)(void *context);
};

struct epxCudartHooks {
    /* Waits for EPX's work on the stream; NULL: of the groups of this device. 0, or an ncclResult_t. */
    int (*synchronize)(cudaStream_t stream, int device);
    /* 0 = fn(arg) will run behind the stream's work; 1 = the stream has none, the caller runs it (fn NULL asks only);
     * negative = failed. */
    int (*call)(cudaStream_t stream, void (*fn)(void *arg), void *arg);
    /* 1 = *node is what was recorded since it was last asked; 0 = nothing was; negative = failed. */
    int (*take)(cudaStream_t stream, struct capture_node *node);
};

struct epxCudart {
    int (*is_capturing)(cudaStream_t stream);
    int (*current_device)(void); /* of the calling thread */
};

#endif
