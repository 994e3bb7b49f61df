/* SPDX-License-Identifier: Apache-2.0 */
/* What one benchmark run is about, shared by the driver, EPX's ranks and the MPI baseline. */
#ifndef EPX_TESTS_LIB_BENCH_CONFIG_H
#define EPX_TESTS_LIB_BENCH_CONFIG_H

#include <stdint.h>

struct bench_config {
    int32_t mode;   /* epx_mode, one */
    int32_t layout; /* epx_layout */
    int32_t ranks, nodes;
    int32_t tokens; /* per rank */
    int32_t hidden, topk, experts;
    int32_t fp8;       /* dispatch casts bf16 to fp8 with one float scale per 128 channels */
    int32_t routing;   /* enum workload_routing */
    int32_t alignment; /* high throughput, expert-major */
    int32_t logfmt;
    int32_t agents;       /* 0 = automatic */
    int32_t device;       /* epx_device */
    int32_t plain_memory; /* tensors in ordinary memory instead of epx_alloc's */
    int32_t corrupt;      /* spoil a result before it is checked: 1 EPX's dispatch, 2 EPX's combine, 3 MPI's dispatch */
    int32_t timeout_ms;   /* of every wait in the shared memory */
    uint64_t seed;
    char net[16];
};

#endif
