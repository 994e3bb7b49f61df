/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a card wrote into a heap must be visible to the GPU's kernels before the proxy tells them of it by a counter,
 * which lies in host memory and reaches them another way than the bytes did.
 *
 *   card --bytes--> heap       in host memory: the proxy saw the completion after the bytes were there, and so do
 *   card --completion--> CPU   kernels that acquire the counter: nothing to do
 *   proxy --counter--> kernel  in GPU memory: the driver says whether the GPU orders such writes before what it reads
 *                              later; where it does not, the proxy asks the driver to flush, once per poll of
 *                              the network
 */
#ifndef EPX_DEVICE_ARRIVALS_H
#define EPX_DEVICE_ARRIVALS_H

enum arrival_rule {
    ARRIVALS_VISIBLE, /* nothing to do */
    ARRIVALS_FLUSH,   /* flush, then count */
    ARRIVALS_NEVER    /* no way to make them visible: heaps must lie in host memory */
};

/* As the driver tells it, in CUDA's numbers: cudaDevAttrGPUDirectRDMASupported, ...WritesOrdering,
 * ...FlushWritesOptions. */
struct gpu_direct {
    int supported;
    int ordering; /* 0: none, 100: for the GPU that owns the memory, 200: for all */
    int flush;    /* bits: 1: by a call of the host, 2: by operations on a stream */
};

/* Who reads a heap that a card wrote to is its owner; others read what the owner has told them of. */
static inline enum arrival_rule arrival_rule(int heap_in_host_memory, const struct gpu_direct *d)
{
    if (heap_in_host_memory)
        return ARRIVALS_VISIBLE;
    if (!d->supported)
        return ARRIVALS_NEVER;
    if (d->ordering >= 100)
        return ARRIVALS_VISIBLE;
    return d->flush & 1 ? ARRIVALS_FLUSH : ARRIVALS_NEVER;
}

#endif
