/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --replays N: one graph of (update,) dispatch and combine is replayed with other routing and data in the same tensors,
 * and every result is compared with the oracle. --overlap: beside copies on another stream, whose result is checked
 * too.
 */
#include <string.h>

#include "bench.h"
#include "bench_worker.h"

#define SIDE_BYTES ((size_t)8 << 20)
enum { SEEDS = 5, COPIES = 4 };

/* Work of the caller's own. */
struct side_work {
    struct device_stream *stream;
    unsigned char *pattern; /* host memory that the device reaches */
    void *buffers[2];       /* device memory; the last copy ends in the first */
};

static int issue_layer(struct bench_rank *rank)
{
    if (rank->config->mode == EPX_HIGH_THROUGHPUT && bench_issue_update(rank) != 0)
        return -1;
    return bench_issue_dispatch(rank) != 0 ? -1 : bench_issue_combine(rank);
}

static int side_open(struct bench_rank *rank, struct side_work *side)
{
    struct device *device = bench_device(rank);
    void *pattern = NULL;

    memset(side, 0, sizeof(*side));
    if (!rank->config->overlap)
        return 0;
    if (bench_call(rank, "stream", device->ops->stream_create(device, &side->stream)) != 0 ||
        bench_call(rank, "host memory", device->ops->host_alloc(device, SIDE_BYTES, &pattern)) != 0 ||
        bench_call(rank, "memory", device->ops->mem_alloc(device, SIDE_BYTES, &side->buffers[0])) != 0 ||
        bench_call(rank, "memory", device->ops->mem_alloc(device, SIDE_BYTES, &side->buffers[1])) != 0)
        return -1;
    side->pattern = pattern;
    return 0;
}

static void side_close(struct bench_rank *rank, struct side_work *side)
{
    struct device *device = bench_device(rank);

    if (side->stream != NULL)
        device->ops->stream_destroy(device, side->stream);
    device->ops->host_free(device, side->pattern);
    device->ops->mem_free(device, side->buffers[0]);
    device->ops->mem_free(device, side->buffers[1]);
}

/* Copies a pattern in, to and fro, and out again. */
static int side_begin(struct bench_rank *rank, struct side_work *side, int turn)
{
    struct device *device = bench_device(rank);
    epx_status status;
    int i;

    if (side->stream == NULL)
        return 0;
    memset(side->pattern, turn & 0xff, SIDE_BYTES);
    status = device->ops->stream_copy(device, side->stream, side->buffers[0], side->pattern, SIDE_BYTES);
    for (i = 0; i < COPIES && status == EPX_OK; i++)
        status = device->ops->stream_copy(device, side->stream, side->buffers[(i + 1) % 2], side->buffers[i % 2],
                                          SIDE_BYTES);
    return bench_call(rank, "work on another stream", status);
}

static int side_check(struct bench_rank *rank, struct side_work *side, int turn)
{
    struct device *device = bench_device(rank);
    epx_status status;
    size_t i;

    if (side->stream == NULL)
        return 0;
    status = device->ops->stream_sync(device, side->stream);
    if (status == EPX_OK) {
        memset(side->pattern, ~turn & 0xff, SIDE_BYTES);
        status = device->ops->stream_copy(device, side->stream, side->pattern, side->buffers[0], SIDE_BYTES);
    }
    if (status == EPX_OK)
        status = device->ops->stream_sync(device, side->stream);
    if (bench_call(rank, "work on another stream", status) != 0)
        return -1;
    for (i = 0; i < SIDE_BYTES; i += 61)
        if (side->pattern[i] != (turn & 0xff))
            return bench_complain(rank, "replay %d: work on another stream has a wrong result at byte %zu", turn, i);
    return 0;
}

static int replay(struct bench_rank *rank, const struct bench_series *layer, struct side_work *side, int turn)
{
    struct mismatch m = {{0}};

    if (bench_work_seed(&rank->work, rank->config->seed + (uint64_t)turn % SEEDS) != 0)
        return bench_complain(rank, "no memory for the workload");
    bench_work_poison(&rank->work);
    bench_shm_step(&rank->self);
    if (side_begin(rank, side, turn) != 0 || bench_series_run(rank, layer) != 0 || bench_sync(rank, "replay") != 0 ||
        side_check(rank, side, turn) != 0)
        return -1;
    if (rank->config->corrupt == 2 && turn == 1 && rank->self.rank == rank->config->ranks - 1)
        bench_work_corrupt(&rank->work, 1);
    if (bench_work_check(&rank->work, &m) == 0)
        return 0;
    bench_shm_fail(rank->self.shm, BENCH_MISMATCH, "epx rank %d, replay %d: %s", rank->self.rank, turn, m.text);
    return -1;
}

int bench_replay_run(struct bench_rank *rank)
{
    struct bench_series layer = {0};
    struct side_work side;
    int failed, i;

    failed = side_open(rank, &side) != 0 || bench_series_make(rank, &layer, issue_layer) != 0 ||
             bench_shm_barrier(&rank->self) != 0;
    for (i = 0; i < rank->config->replays && !failed; i++)
        failed = replay(rank, &layer, &side, i);
    bench_series_free(rank, &layer);
    side_close(rank, &side);
    return failed ? -1 : 0;
}
