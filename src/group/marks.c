/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Marks of kernels become spans of the trace, on tracks of their own:
 *
 *   gpu        operation [ phase [ wait ] phase ... ] [ phase ... ]      as agent 0 saw it; one [ ] per launch
 *   gpu waits  waits for signals of other agents of its block, which go on beside the phases
 *
 * Times are the device's. Its clock is compared with the host's when the group begins and when it ends; what lies
 * between is interpolated (trace_track_clock).
 */
#include "group/marks.h"

#include <stdlib.h>
#include <string.h>

#include "group/signals.h"
#include "kernel/marks.h"
#include "kernel/stages.h"
#include "util/clock.h"
#include "util/log.h"
#include "util/trace.h"

#define MARK_TEXT(name, text) [MARK_##name] = text,
static const char *const mark_texts[PHASE_MARK_COUNT] = {PHASE_MARKS(MARK_TEXT)};
#define KERNEL_TEXT(name, text) [KERNEL_##name] = text,
static const char *const kernel_texts[KERNEL_COUNT] = {KERNELS(KERNEL_TEXT)};

enum { NO_OPERATION = -1 };

/* What a launch that is a stage does until it ends (kernel/stages.h). */
static int last_phase(int kernel, int stage)
{
    static const uint8_t notify[] = {[HN_ROUTE] = MARK_ROUTE, [HN_COUNTS] = MARK_COUNTS, [HN_PLACES] = MARK_PLACES};
    static const uint8_t dispatch[] = {
        [HD_READY] = MARK_READY,     [HD_ROWS] = MARK_ROWS, [HD_LANDED] = MARK_LANDED,
        [HD_FORWARD] = MARK_FORWARD, [HD_DATA] = MARK_DATA, [HD_COPY_OUT] = MARK_COPY_OUT};
    static const uint8_t combine[] = {[HC_STAGE] = MARK_STAGE,   [HC_DATA] = MARK_DATA, [HC_ASK] = MARK_ASK,
                                      [HC_LANDED] = MARK_LANDED, [HC_SUM] = MARK_SUM,   [HC_DONE] = MARK_DONE};
    const int s = STAGE_NUMBER(stage);

    if (kernel == KERNEL_HT_NOTIFY && s <= HN_PLACES)
        return notify[s];
    if (kernel == KERNEL_HT_DISPATCH && s <= HD_COPY_OUT)
        return dispatch[s];
    return kernel == KERNEL_HT_COMBINE && s <= HC_DONE ? combine[s] : MARK_END;
}

/* Where the device's clock is now. Non-zero: not known. */
static int compare_clocks(struct epx_group *group, const char *when)
{
    struct group_marks *m = &group->marks;
    int64_t ahead;
    uint64_t error;
    const epx_status status = group->device->ops->clock(group->device, &ahead, &error);

    if (status != EPX_OK) {
        log_line(LOG_WARN, "EPX_TRACE: the clock of device %s is not known %s: %s", group->device->ops->name, when,
                 epx_strerror(status));
        return 1;
    }
    trace_track_clock(m->track, clock_ns() + (uint64_t)ahead, ahead, error);
    trace_track_clock(m->waits, clock_ns() + (uint64_t)ahead, ahead, error);
    return 0;
}

/* Signals of all kinds and slots share what is kept. */
static uint32_t signal_depth(int slots)
{
    uint32_t depth = MARK_SIGNALS_KEPT;

    while ((uint64_t)depth * SIG_COUNT * (uint64_t)slots > MARK_SIGNALS_KEPT)
        depth /= 2;
    return depth;
}

void group_marks_open(struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    struct group_marks *m = &group->marks;
    void *memory = NULL;

    if (!trace_on() || !(ops->caps & DEVICE_MARKS))
        return;
    m->operation = NO_OPERATION;
    m->track = trace_track("gpu");
    m->waits = trace_track("gpu waits");
    m->copy = calloc(1, sizeof(*m->copy));
    if (!m->track || !m->waits || !m->copy || ops->mem_alloc(group->device, sizeof(*m->copy), &memory) != EPX_OK) {
        log_line(LOG_WARN, "EPX_TRACE: no memory for marks of kernels");
        return;
    }
    m->copy->head.slots = (uint32_t)group->set.sig_slots;
    m->copy->head.depth = signal_depth(group->set.sig_slots);
    m->signals = m->copy->head.slots * m->copy->head.depth * SIG_COUNT;
    if (ops->copy(group->device, memory, m->copy, offsetof(struct kernel_marks, signals)) != EPX_OK ||
        compare_clocks(group, "when the group begins")) {
        ops->mem_free(group->device, memory);
        return;
    }
    m->device = memory;
}

/* ---- From marks to spans ---- */

static void add(struct epx_group *group, struct trace_buffer *track, struct trace_event e)
{
    e.rank = group->rank;
    trace_add_to(track, &e);
}

static void add_phase(struct epx_group *group, int stage, int name, uint64_t begin, uint64_t end)
{
    add(group, group->marks.track,
        (struct trace_event){.begin_ns = begin,
                             .end_ns = end,
                             .category = "phase",
                             .name = mark_texts[name],
                             .of = kernel_texts[group->marks.operation],
                             .label = {"agent", "stage"},
                             .value = {0, (uint64_t)stage},
                             .peer = -1,
                             .kind = TRACE_SPAN});
}

static void add_wait(struct epx_group *group, const struct mark *begin, const struct mark *end)
{
    const int peer = MARK_B(begin->what) == MARK_NOBODY ? -1 : (int)MARK_B(begin->what);
    const int kind = (int)(begin->more & 0xff) - 1;
    const int signalled = kind >= 0 && peer >= 0 && peer != group->rank; /* an own signal is another agent's */

    add(group, MARK_A(end->what) ? group->marks.track : group->marks.waits,
        (struct trace_event){.begin_ns = begin->ns,
                             .end_ns = end->ns,
                             .category = "wait",
                             .name = "wait",
                             .of = phase_name((int)MARK_A(begin->what)),
                             .what = signalled ? TRACE_WHAT(kind, begin->more >> 8, end->more) : 0,
                             .peer = peer,
                             .kind = TRACE_SPAN});
}

static const struct mark *mark_at(const struct group_marks *m, uint64_t i)
{
    return &m->copy->ring[i % MARKS_KEPT];
}

/* The launch whose first mark is number i; its operation is open. */
static void take_launch(struct epx_group *group, uint64_t i, uint32_t n)
{
    struct group_marks *m = &group->marks;
    const struct mark *launch = mark_at(m, i), *end = mark_at(m, i + n + 1);
    const int stage = (int)(launch->more >> 8);
    uint64_t at = launch->ns;

    for (uint64_t k = i + 1; k <= i + n; k++) {
        const struct mark *mark = mark_at(m, k);

        if (MARK_TYPE(mark->what) == MARK_PHASE && MARK_A(mark->what) < PHASE_MARK_COUNT) {
            add_phase(group, stage, (int)MARK_A(mark->what), at, mark->ns);
            at = mark->ns;
        } else if (MARK_TYPE(mark->what) == MARK_WAIT && k < i + n) {
            add_wait(group, mark, mark_at(m, ++k));
        }
    }
    add_phase(group, stage, last_phase(m->operation, stage), at, end->ns);
    if (!(MARK_A(launch->what) & MARK_IS_LAST))
        return;
    add(group, m->track,
        (struct trace_event){.begin_ns = m->operation_ns,
                             .end_ns = end->ns,
                             .category = "operation",
                             .name = kernel_texts[m->operation],
                             .label = {"agent"},
                             .peer = -1,
                             .kind = TRACE_SPAN});
    m->operation = NO_OPERATION;
}

/* Marks m->taken to the last one. Where older ones were overwritten, the first whole operation comes first. */
static void take_marks(struct epx_group *group)
{
    struct group_marks *m = &group->marks;
    uint64_t i = m->taken;

    if (m->copy->head.next - i > MARKS_KEPT) {
        log_line(LOG_WARN, "EPX_TRACE: of %llu marks of kernels the last %d are kept",
                 (unsigned long long)m->copy->head.next, MARKS_KEPT);
        i = m->copy->head.next - MARKS_KEPT;
        m->operation = NO_OPERATION;
    }
    while (i < m->copy->head.next) {
        const struct mark *launch = mark_at(m, i);
        const uint32_t n = launch->more & 0xff;

        if (MARK_TYPE(launch->what) != MARK_LAUNCH || i + n + 2 > m->copy->head.next ||
            MARK_TYPE(mark_at(m, i + n + 1)->what) != MARK_ENDED || MARK_B(launch->what) >= KERNEL_COUNT) {
            i++;
            continue;
        }
        if (MARK_A(launch->what) & MARK_IS_FIRST) {
            m->operation = (int)MARK_B(launch->what);
            m->operation_ns = launch->ns;
        }
        if (m->operation == (int)MARK_B(launch->what))
            take_launch(group, i, n);
        i += n + 2;
    }
    m->taken = m->copy->head.next;
}

static void take_signals(struct epx_group *group)
{
    struct group_marks *m = &group->marks;
    uint64_t last = m->signals_ns;

    for (uint32_t i = 0; i < m->signals; i++) {
        const struct mark_signal *s = &m->copy->signals[i];
        const uint32_t row = i / m->copy->head.depth;

        if (s->ns <= m->signals_ns)
            continue;
        last = s->ns > last ? s->ns : last;
        add(group, m->track,
            (struct trace_event){
                .begin_ns = s->ns,
                .category = "signal",
                .name = "signal",
                .of = phase_name(PHASE_COUNT - SIG_COUNT + (int)(row / m->copy->head.slots)),
                .what = TRACE_WHAT(row / m->copy->head.slots, row % m->copy->head.slots, (uint32_t)s->value),
                .peer = -1,
                .ranks = group->nranks,
                .kind = TRACE_SIGNAL});
    }
    m->signals_ns = last;
}

void group_marks_take(struct epx_group *group)
{
    struct group_marks *m = &group->marks;

    if (!m->device || group->device->ops->copy(group->device, m->copy, m->device, sizeof(*m->copy)) != EPX_OK)
        return;
    if (m->copy->head.lost > m->lost)
        log_line(LOG_WARN, "EPX_TRACE: %llu marks did not fit into those of their launches",
                 (unsigned long long)(m->copy->head.lost - m->lost));
    m->lost = m->copy->head.lost;
    take_marks(group);
    take_signals(group);
}

void group_marks_end(struct epx_group *group)
{
    if (!group->marks.device)
        return;
    group_marks_take(group);
    (void)compare_clocks(group, "when the group ends");
}

void group_marks_free(struct epx_group *group)
{
    if (group->marks.device)
        group->device->ops->mem_free(group->device, group->marks.device);
    group->marks.device = NULL;
    free(group->marks.copy);
    group->marks.copy = NULL;
}
