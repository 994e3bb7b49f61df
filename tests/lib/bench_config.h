/* SPDX-License-Identifier: Apache-2.0 */
/* What one benchmark run is about, shared by the driver, EPX's ranks and the MPI baseline. */
#ifndef EPX_TESTS_LIB_BENCH_CONFIG_H
#define EPX_TESTS_LIB_BENCH_CONFIG_H

#include <stdint.h>

enum bench_dtype { BENCH_BF16, BENCH_FP8_CAST, BENCH_FP8_INPUT }; /* cast by dispatch, or given as fp8 */

struct bench_config {
    int32_t mode;   /* epx_mode, one */
    int32_t layout; /* epx_layout */
    int32_t ranks, nodes;
    int32_t tokens; /* per rank */
    int32_t hidden, topk, experts;
    int32_t fp8;       /* enum bench_dtype: rows of dispatch are fp8 with one float scale per 128 channels */
    int32_t routing;   /* enum workload_routing */
    int32_t alignment; /* high throughput, expert-major */
    int32_t logfmt;
    int32_t agents;       /* 0 = automatic */
    int32_t device;       /* epx_device */
    int32_t plain_memory; /* tensors in ordinary memory instead of epx_alloc's */
    int32_t corrupt;      /* spoil a result before it is checked: 1 EPX's dispatch, 2 EPX's combine, 3 MPI's dispatch */
    int32_t timeout_ms;   /* of every wait in the shared memory */
    int32_t group_timeout_ms; /* epx_group_config.timeout_ms */
    int32_t threads;          /* ranks are threads of one process */
    int32_t events;       /* times by the device's time stamps, per rank, instead of by the clock between barriers */
    int32_t staged;       /* low latency: send_only, then epx_complete */
    int32_t replays;      /* instead of measuring: as many replays of one graph with changing routing, checked */
    int32_t overlap;      /* with replays: copies on another stream meanwhile */
    int32_t zero_copy;    /* fail if combine copied rows before other ranks read them */
    int32_t layer;        /* `epx bench layer`: whole layers with fresh routing */
    int32_t traced;       /* some rounds are traced */
    int32_t check, iters; /* with events and layer: as on the command line */
    int32_t warmup;       /* likewise: untimed pairs, or layers, before a series */
    uint64_t seed;
    char net[16];
};

#endif
