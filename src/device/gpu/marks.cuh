/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks of a GPU's kernels (kernel/marks.h). Each place is one look at a pointer in shared memory and one branch where
 * nothing is traced. Waits and signals are functions of their own; phases are not: a call, also one that is not made,
 * takes registers from what is around it.
 */
#ifndef EPX_DEVICE_GPU_MARKS_CUH
#define EPX_DEVICE_GPU_MARKS_CUH

#define AG_MARK(ag, name) ((ag)->phases ? mark_phase(ag, name) : (void)0)
#define AG_WAITS(ag, phase, peer) ((ag)->marks ? mark_waits(ag, phase, peer) : (void)0)
#define AG_WAITS_SIGNAL(ag, kind, slot, value) ((ag)->marks ? mark_waits_signal(ag, kind, slot, value) : (void)0)
#define AG_GLANCES_BEGIN(ag) ((ag)->marks ? mark_glances(ag) : (void)0)
#define AG_GLANCED(ag, phase, last, kind, slot, value) \
    ((ag)->marks ? mark_glanced(ag, phase, last, kind, slot, value) : (void)0)
#define AG_SIGNALS(ag, g, kind, slot, value) ((ag)->kept ? mark_signal(ag, kind, slot, value) : (void)0)

/* Room for n marks, for one lane; NULL: the launch has too many. */
KFN struct mark *marks_take(struct launch_marks *m, int n)
{
    const int at = atomicAdd(&m->count, n);

    if (at + n <= MARKS_OF_LAUNCH)
        return &m->list[at];
    if (at < MARKS_OF_LAUNCH)
        m->list[at].what = MARK_NONE;
    return NULL;
}

/* All lanes of the first agent. */
KFN void mark_phase(struct agent *ag, int name)
{
    struct mark *mark = lane_id() == 0 ? marks_take(ag->phases, 1) : NULL;

    if (lane_id() == 0)
        ag->wait_since_ns = 0;
    if (mark) {
        mark->ns = clock_global();
        mark->what = MARK_WHAT(MARK_PHASE, name, 0);
        mark->more = 0;
    }
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
    struct mark *mark = marks_take(ag->marks, 2);

    if (!mark)
        return;
    mark[0].ns = since_ns;
    mark[0].what = MARK_WHAT(MARK_WAIT, ag->wait_phase, ag->wait_peer & 0xffff);
    mark[0].more = ag->wait_kind < 0 ? 0 : (uint32_t)(ag->wait_kind + 1) | (uint32_t)ag->wait_slot << 8;
    mark[1].ns = clock_global();
    mark[1].what = MARK_WHAT(MARK_WAITED, ag->index == 0, 0);
    mark[1].more = (uint32_t)ag->wait_value;
}

/* Lane 0, which has waited since then. Of other agents than the first one, waits for signals alone: they mostly wait
 * for each other. */
KFN_STEP void mark_waited(struct agent *ag, uint64_t start_ns)
{
    if (ag->index == 0 || ag->wait_kind >= 0)
        mark_span(ag, ag->wait_since_ns ? ag->wait_since_ns : start_ns);
    ag->wait_since_ns = 0;
}

KFN_STEP void mark_glances(struct agent *ag)
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
KFN_STEP void mark_signal(struct agent *ag, int kind, int slot, uint64_t value)
{
    struct kernel_marks *m = ag->kept;
    const uint64_t row = (uint64_t)kind * m->slots + (uint64_t)slot;

    if (lane_id() == 0 && (uint32_t)slot < m->slots)
        pair_store(&m->signals[row * m->depth + (value & (m->depth - 1))], clock_global(), value);
    __syncwarp(); /* the other lanes give the signal after this time */
}

/* Lane 0 of each agent. The place in the ring is asked for now, and there when the launch ends. */
KFN void marks_begin(struct agent *ag, const struct launch_info &info, struct launch_marks *m)
{
    if (blockIdx.x != 0)
        return;
    ag->marks = m;
    ag->wait_since_ns = ag->wait_value = 0;
    ag->wait_phase = PHASE_NONE;
    ag->wait_peer = ag->wait_kind = -1;
    ag->wait_slot = 0;
    if (ag->index != 0)
        return;
    ag->phases = m;
    m->to = info.marks;
    m->next = info.marks->next;
    m->began_ns = clock_global();
    m->what = info.mark_what;
    m->more = (uint32_t)info.stage;
    m->count = 0;
}

/* All lanes of an agent of the first block. */
KFN_STEP void marks_end(struct agent *ag)
{
    struct launch_marks *m = ag->marks;

    if (ag->index != 0)
        return;
    __syncwarp();
    const int n = m->count < MARKS_OF_LAUNCH ? m->count : MARKS_OF_LAUNCH;
    ROLLED
    for (int i = lane_id(); i < n; i += WARP)
        m->to->ring[(m->next + 1 + (uint64_t)i) % MARKS_KEPT] = m->list[i];
    if (lane_id() == 0) {
        const struct mark begin = {m->began_ns, m->what, m->more << 8 | (uint32_t)n};
        const struct mark end = {clock_global(), MARK_WHAT(MARK_ENDED, 0, 0), 0};
        m->to->ring[m->next % MARKS_KEPT] = begin;
        m->to->ring[(m->next + 1 + (uint64_t)n) % MARKS_KEPT] = end;
        m->to->lost += (uint64_t)(m->count - n);
        m->to->next = m->next + 2 + (uint64_t)n;
    }
}

#endif
