/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of one EPX rank of the benchmark share. */
#ifndef EPX_TOOLS_BENCH_WORKER_H
#define EPX_TOOLS_BENCH_WORKER_H

#include "device/device.h"
#include "tests/lib/bench_work.h"
#include "tests/lib/bench_shm.h"

struct bench_rank {
    struct bench_shm_rank self;
    const struct bench_config *config;
    struct bench_work work;
    epx_group *group;
    epx_handle *handle;
    epx_stream stream; /* NULL: the group's own */
    epx_stats before;  /* at the end of the last operation */
    int traced;        /* tracing is on: what is counted otherwise is not counted now */

    epx_tensor fp8_tokens, fp8_scales; /* BENCH_FP8_INPUT: what dispatch is given */
    void **plain;                      /* tensors in memory of malloc */
    int nplain;
};

/* 0 for EPX_OK; otherwise stores in the shared memory what call failed and why, and returns -1. */
int bench_call(struct bench_rank *rank, const char *what, epx_status status);
/* Stores an error of this rank in the shared memory; returns -1. */
int bench_complain(struct bench_rank *rank, const char *format, ...) __attribute__((format(printf, 2, 3)));
struct device *bench_device(const struct bench_rank *rank);
/* Memory as the tensors have it; NULL after a message, or without memory. Copies into it: 0, or -1 after a message. */
void *bench_tensor_alloc(struct bench_rank *rank, size_t bytes);
int bench_tensor_copy(struct bench_rank *rank, void *to, const void *from, size_t bytes);

/* ---- bench_ops.c; each returns 0, or -1 after bench_call */

int bench_issue_update(struct bench_rank *rank);
int bench_issue_dispatch(struct bench_rank *rank);
int bench_issue_combine(struct bench_rank *rank);
int bench_sync(struct bench_rank *rank, const char *what);
/* The same for many operations, which may take longer than the driver waits for a sign of life. */
int bench_sync_series(struct bench_rank *rank, const char *what);
/* The operations, as a struct bench_runner wants them; self is a struct bench_rank. */
int bench_op_update(void *self);
int bench_op_dispatch(void *self, int variant);
int bench_op_combine(void *self, int variant);

/* ---- bench_events.c */

/* A series of operations: a captured graph where the device has graphs, else the calls that issue it. */
struct bench_series {
    int (*issue)(struct bench_rank *rank);
    struct device_graph *graph; /* NULL: `issue` is called anew each time */
};

int bench_series_make(struct bench_rank *rank, struct bench_series *series, int (*issue)(struct bench_rank *rank));
/* Queues it on the rank's stream. */
int bench_series_run(struct bench_rank *rank, const struct bench_series *series);
void bench_series_free(struct bench_rank *rank, struct bench_series *series);

/* For the line of progress. */
void bench_set_stage(struct bench_rank *rank, enum bench_stage stage);
/* Waits for the driver's command, checks, measures by time stamps or replays (bench_replay.c). 0, or -1 after a
 * message. */
int bench_events_run(struct bench_rank *rank);

/* ---- bench_layer.c */

int bench_layer_run(struct bench_rank *rank);

/* ---- bench_replay.c */

int bench_replay_run(struct bench_rank *rank);

#endif
