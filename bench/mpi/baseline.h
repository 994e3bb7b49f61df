/* SPDX-License-Identifier: Apache-2.0 */
/* The work of EPX as a good MPI programmer writes it: dispatch and combine over a plan, in several variants. */
#ifndef EPX_MPI_BASELINE_H
#define EPX_MPI_BASELINE_H

#include "exchange.h"
#include "plan.h"
#include "tests/lib/bench_work.h"
#include "tests/lib/bench_shm.h"

struct baseline {
    const struct bench_config *config;
    struct bench_work *work;
    struct plan plan;
    struct exchange exchange;
    int32_t *all_idx;    /* [R][B][K] */
    void *stage;         /* copies as they arrive, before they are expanded */
    void *returned;      /* rows that come back in combine */
    float *stage_scales; /* expert-major: scales and weights of the copies */
    float *stage_weights;
    uint8_t *cast; /* fp8: this rank's tokens and scales */
    float *cast_scales;
};

/* 0, or -1 without memory. */
int baseline_open(struct baseline *b, const struct bench_config *config, struct bench_work *work);

/* Names of the variants in shared memory: those of dispatch and of combine are independent. */
void baseline_variants(const struct bench_config *config, struct bench_team *team);

/* Routing: in high throughput once and kept, in low latency at the start of every dispatch. */
int baseline_update(void *self);
int baseline_dispatch(void *self, int variant);
int baseline_combine(void *self, int variant);

#endif
