/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many commands per second agents can push to the CPU's proxies, and how long a round trip takes: `epx bench ring`.
 *
 *   rate    agent i pushes 32 commands at a time into ring i % nrings, until the host says stop
 *   trips   agent 0 pushes one command and looks at the word that counts answered puts until it moves
 */
#ifndef EPX_KERNEL_RING_BENCH_H
#define EPX_KERNEL_RING_BENCH_H

#include "kernel/agent.h"
#include "kernel/command.h"
#include "kernel/ring.h"

#define RING_BENCH_PUSHES 16 /* between two looks at the stop word */

/* A rank that ring i serves: rank 0 and rank p share ring p % nrings. */
KFN int ring_bench_peer(const struct ring_bench_params *p, int ring)
{
    return ring ? ring : p->nrings;
}

KFN_STEP void ring_bench_rate(struct agent *ag, const struct ring_bench_params *p)
{
    const int ring = ag_index(ag) % p->nrings, peer = ring_bench_peer(p, ring);
    const uint64_t stride = p->contiguous ? p->bytes : 2 * p->bytes;
    const uint64_t room = p->heap_bytes / (uint64_t)ag_count(ag) / COMMAND_UNIT * COMMAND_UNIT;
    const uint64_t first = room * (uint64_t)ag_index(ag);
    uint64_t offset = 0, pushed = 0;
    enum wait_result result = WAIT_OK;
    struct command_set set;

    for (int n = 0; result == WAIT_OK; n++) {
        if (n % RING_BENCH_PUSHES == 0 && ag_load_acquire(p->stop))
            break;
        for (int i = 0; i < RING_MAX_PUSH; i++, offset += stride) {
            if (offset + stride > room)
                offset = 0;
            command_set_put(ag, &set, i, command_pack((uint32_t)peer, 0, first + offset, first + offset, p->bytes));
        }
        result = ag_push(ag, &p->rings[ring], command_set_list(&set), RING_MAX_PUSH);
        pushed += result == WAIT_OK ? RING_MAX_PUSH : 0;
    }
    if (ag_leader(ag)) {
        p->pushed[ag_index(ag)] = pushed;
        if (result != WAIT_OK)
            ag_store_release(p->failed, 1); /* read after the launch has ended */
    }
}

#define RING_BENCH_LOOKS 64 /* between two looks at the clock */

/*
 * 0, or when *sent reached the target; nothing is read behind it, so that looking is all there is to it. A look takes
 * its time across a bus, and one that comes too early costs that of another: there is a pause before the first.
 */
KFN uint64_t ring_bench_wait(struct agent *ag, const struct ring_bench_params *p, const uint64_t *sent, uint64_t target,
                             uint64_t start)
{
    const uint64_t pushed = p->pause_ns ? ag_now(ag) : 0;

    while (p->pause_ns && ag_now(ag) - pushed < p->pause_ns)
        ;
    for (int n = 1;; n++) {
        if ((int64_t)(ag_look(sent) - target) >= 0)
            return ag_now(ag);
        if (n % RING_BENCH_LOOKS == 0 && ag_now(ag) - start >= p->timeout_ns)
            return 0;
    }
}

/* Each trip begins when the one before it has ended. Times are kept for a while: a push waits for what its agent stored
 * before, which is not part of the measurement. */
KFN_STEP void ring_bench_trips(struct agent *ag, const struct ring_bench_params *p)
{
    const struct ring_dev ring = p->rings[1 % p->nrings];
    const uint64_t *sent = &p->sent[1];
    uint64_t target = ag_load_acquire(sent), start = ag_now(ag), times[RING_BENCH_KEPT], pushed = 0;
    struct command_set set;

    command_set_put(ag, &set, 0, command_pack(1, 0, 0, 0, p->bytes));
    for (int i = 0; i < p->trips; i += RING_BENCH_KEPT) {
        AG_UNROLL
        for (int j = 0; j < RING_BENCH_KEPT; j++) {
            times[j] = 0;
            if (!start || ag_push(ag, &ring, command_set_list(&set), 1) != WAIT_OK)
                continue;
            if (j == 1) /* looking at the clock takes time too: not in every trip */
                pushed = ag_now(ag) - start;
            const uint64_t end = ring_bench_wait(ag, p, sent, ++target, start);
            times[j] = end ? end - start : 0;
            start = end;
        }
        AG_UNROLL
        for (int j = 0; j < RING_BENCH_KEPT; j++)
            if (ag_leader(ag) && i + j < p->trips)
                p->times[i + j] = times[j];
        if (ag_leader(ag))
            p->times[p->trips + i / RING_BENCH_KEPT] = pushed;
    }
}

KFN void kernel_ring_bench(struct agent *ag, const struct ring_bench_params *p)
{
    ag_begin(ag, p->timeout_ns, p->control);
    if (!p->trips)
        ring_bench_rate(ag, p);
    else if (ag_index(ag) == 0)
        ring_bench_trips(ag, p);
}

#endif
