/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks of a GPU's kernels (kernel/marks.h). Each place is one look at a word in shared memory and one branch where
 * nothing is traced. What a mark adds is on the way of the operation, and low latency counts it:
 *
 *   phases    one thread adds them: no atomics, and no more than a load, a clock and three stores in shared memory,
 *             whose address the compiler knows. Not a function of its own: a call, also one that is not made, takes
 *             registers from what is around it.
 *   signals   the time is taken before the signal and stored behind it: the release of the signal would wait for that
 *             store. What is needed to find its place came with the parameters.
 *   the end   stores, and no loads from memory.
 */
#ifndef EPX_DEVICE_GPU_MARKS_CUH
#define EPX_DEVICE_GPU_MARKS_CUH

static __shared__ struct launch_marks block_marks;

#define AG_MARK(ag, name) (threadIdx.x == 0 && block_marks.is_first ? mark_phase(ag, name) : (void)0)
#define AG_WAITS(ag, phase, peer) (block_marks.is_first ? mark_waits(ag, phase, peer) : (void)0)
#define AG_WAITS_SIGNAL(ag, kind, slot, value) \
    (block_marks.is_first ? mark_waits_signal(ag, kind, slot, value) : (void)0)
#define AG_GLANCES_BEGIN(ag) (block_marks.is_first ? mark_glances(ag) : (void)0)
#define AG_GLANCED(ag, phase, last, kind, slot, value) \
    (block_marks.is_first ? mark_glanced(ag, phase, last, kind, slot, value) : (void)0)
#define AG_SIGNALS(ag, g, kind, slot, value) (block_marks.to ? mark_signals(ag) : (void)0)
#define AG_SIGNALLED(ag, kind, slot, value) (block_marks.to ? mark_signalled(ag, kind, slot, value) : (void)0)

/* The first thread of the first block. Marks that are too many share the place that is for the end. */
KFN void mark_phase(struct agent *ag, int name)
{
    const int n = block_marks.nphases;
    struct mark *mark = &block_marks.phases[n < MARKS_OF_PHASES ? n : MARKS_OF_PHASES];

    mark->ns = clock_global();
    mark->what = MARK_WHAT(MARK_PHASE, name, 0);
    mark->more = 0;
    block_marks.nphases = n + 1;
    ag->wait_since_ns = 0;
}

KFN_STEP void mark_waits(struct agent *ag, int phase, int peer)
{
    if (lane_id() == 0) {
        ag->wait_phase = phase;
        ag->wait_peer = peer;
    }
}

KFN_STEP void mark_waits_signal(struct agent *ag, int kind, int slot, uint64_t value)
{
    if (lane_id() == 0) {
        ag->wait_kind = kind;
        ag->wait_slot = slot;
        ag->wait_value = value;
    }
}

/* One lane; a wait that is over. */
KFN void mark_span(struct agent *ag, uint64_t since_ns)
{
    const int at = atomicAdd(&block_marks.nwaits, 2);

    if (at + 2 > MARKS_OF_WAITS)
        return;
    struct mark *mark = &block_marks.waits[1 + at];
    mark[0].ns = since_ns;
    mark[0].what = MARK_WHAT(MARK_WAIT, ag->wait_phase, ag->wait_peer & 0xffff);
    mark[0].more = ag->wait_kind < 0 ? 0 : (uint32_t)(ag->wait_kind + 1) | (uint32_t)ag->wait_slot << 8;
    mark[1].ns = clock_global();
    mark[1].what = MARK_WHAT(MARK_WAITED, ag->index == 0, 0);
    mark[1].more = (uint32_t)ag->wait_value;
}

/* Lane 0, which has waited since then. Of other agents than the first one, waits for signals alone: they mostly wait
 * for each other. A part of a long wait that ended without the signal does not name it. */
KFN_STEP void mark_waited(struct agent *ag, uint64_t start_ns, int is_over)
{
    const int kind = ag->wait_kind;

    if (ag->index == 0 || kind >= 0) {
        ag->wait_kind = is_over ? kind : -1;
        mark_span(ag, ag->wait_since_ns ? ag->wait_since_ns : start_ns);
        ag->wait_kind = kind;
    }
    ag->wait_since_ns = 0;
}

KFN void mark_glances(struct agent *ag)
{
    if (lane_id() == 0)
        ag->wait_since_ns = clock_global();
}

KFN_STEP void mark_glanced(struct agent *ag, int phase, int last, int kind, int slot, uint64_t value)
{
    const lanes_t missed = __ballot_sync(ALL_LANES, last >= 0);
    const int peer = missed ? (int)__shfl_sync(ALL_LANES, last, lanes_first(missed)) : -1;

    if (lane_id() == 0 && peer >= 0) {
        ag->wait_phase = phase;
        ag->wait_peer = peer;
        ag->wait_kind = kind;
        ag->wait_slot = slot;
        ag->wait_value = value;
        mark_span(ag, ag->wait_since_ns);
        ag->wait_kind = -1;
    }
    if (lane_id() == 0)
        ag->wait_since_ns = 0;
    __syncwarp();
}

/* Before the words are stored: whoever sees one has a later time. */
KFN void mark_signals(struct agent *ag)
{
    if (lane_id() == 0)
        ag->signal_ns = clock_global();
    __syncwarp(); /* the other lanes give the signal after this time */
}

KFN void mark_signalled(struct agent *ag, int kind, int slot, uint64_t value)
{
    const uint32_t slots = block_marks.head.slots, depth = block_marks.head.depth;
    const uint32_t row = (uint32_t)kind * slots + (uint32_t)slot; /* MARK_SIGNALS_KEPT in all */

    if (lane_id() == 0 && (uint32_t)slot < slots)
        pair_store(&block_marks.to->signals[row * depth + ((uint32_t)value & (depth - 1))], ag->signal_ns, value);
}

/* By the last threads of each block, beside those that copy the parameters: one thread's copies wait for each other. */
KFN void marks_head(const struct kernel_marks *from)
{
    const uint32_t i = (uint32_t)(blockDim.x - 1 - threadIdx.x);

    if (i < sizeof(block_marks.head) / 4)
        ((uint32_t *)&block_marks.head)[i] = ((const uint32_t *)&from->head)[i];
}

/* Lane 0 of each agent. block_marks.head comes with the parameters (entry.cuh). */
KFN void marks_begin(struct agent *ag, const struct launch_info &info, struct kernel_marks *marks)
{
    ag->wait_since_ns = ag->wait_value = 0;
    ag->wait_phase = PHASE_NONE;
    ag->wait_peer = ag->wait_kind = -1;
    ag->wait_slot = 0;
    if (threadIdx.x != 0)
        return;
    block_marks.to = marks;
    block_marks.is_first = marks && blockIdx.x == 0;
    block_marks.nphases = block_marks.nwaits = 0;
    block_marks.waits[0].ns = clock_global();
    block_marks.waits[0].what = info.mark_what;
    block_marks.waits[0].more = (uint32_t)info.stage << 8;
}

/* All lanes of the first agent. */
KFN_STEP void marks_end(void)
{
    __syncwarp();
    struct launch_marks *const m = &block_marks;
    const int p = m->nphases < MARKS_OF_PHASES ? m->nphases : MARKS_OF_PHASES;
    const int w = m->nwaits < MARKS_OF_WAITS ? m->nwaits : MARKS_OF_WAITS;
    const uint64_t next = m->head.next, all = (uint64_t)w + (uint64_t)p + 2;

    __syncwarp();
    if (lane_id() == 0) {
        const struct mark end = {clock_global(), MARK_WHAT(MARK_ENDED, 0, 0), 0};
        m->phases[p] = end;
        m->waits[0].more |= (uint32_t)(w + p);
        m->to->head.next = next + all;
        if (m->nphases > p || m->nwaits > w)
            m->to->head.lost += (uint64_t)(m->nphases - p + m->nwaits - w);
    }
    __syncwarp();
    ROLLED
    for (int i = lane_id(); i < (int)all; i += WARP)
        m->to->ring[(next + (uint64_t)i) % MARKS_KEPT] = i <= w ? m->waits[i] : m->phases[i - 1 - w];
}

#endif
