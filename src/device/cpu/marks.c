/* SPDX-License-Identifier: Apache-2.0 */
/* What CPU agents add to a trace, and show to epx top: operations, their phases, waits for peers, signals to peers. */
#include "device/cpu/cpu.h"
#include "kernel/marks.h"
#include "kernel/params.h"
#include "util/clock.h"
#include "util/trace.h"
#include "util/watch.h"

#define PHASE_TEXT(phase, maskable, text) [PHASE_##phase] = text,
#define SIGNAL_TEXT(kind, operation, counts, flow, owed, maskable, text) [PHASE_##kind] = text,
static const char *const phase_texts[PHASE_COUNT] = {OTHER_PHASES(PHASE_TEXT) SIGNALS(SIGNAL_TEXT)};

#define MARK_TEXT(name, text) [MARK_##name] = text,
static const char *const mark_texts[PHASE_MARK_COUNT] = {PHASE_MARKS(MARK_TEXT)};

static void add_span(const struct agent *agent, const char *category, const char *name, const char *of, uint64_t begin,
                     uint64_t end)
{
    const struct trace_event e = {.begin_ns = begin,
                                  .end_ns = end,
                                  .category = category,
                                  .name = name,
                                  .of = of,
                                  .label = {"agent"},
                                  .value = {(uint64_t)agent->index},
                                  .rank = agent->rank,
                                  .peer = -1,
                                  .kind = TRACE_SPAN};

    trace_add(&e);
}

/* Agents that run in a simulation have another clock, and are not traced. */
uint64_t cpu_kernel_begin(struct agent *agent, const struct group_dev *g, enum kernel_id id, const char *name)
{
    const int traced = trace_on() && g && agent->env == &cpu_thread_env;
    struct watch *w = g ? g->watch : NULL;
    uint64_t now;

    if (!traced && !w)
        return 0;
    now = clock_ns();
    agent->watch = w;
    if (w && agent->index == 0) {
        __atomic_store_n(&w->running, (uint32_t)id, __ATOMIC_RELAXED);
        __atomic_store_n(&w->running_ns, now, __ATOMIC_RELAXED);
    }
    agent->traced = traced ? name : NULL;
    agent->rank = g ? g->rank : 0;
    agent->mark_ns = now;
    return now;
}

void cpu_mark(struct agent *agent, int name)
{
    const uint64_t now = clock_ns();

    add_span(agent, "phase", mark_texts[name], agent->traced, agent->mark_ns, now);
    agent->mark_ns = now;
}

void cpu_watch_clear(struct agent *agent)
{
    agent->wait_since_ns = 0;
    if (agent->watch && agent->index < WATCH_AGENTS)
        __atomic_store_n(&agent->watch->waits[agent->index].since_ns, 0, __ATOMIC_RELAXED);
}

/* By agent 0: one writer each. */
static void count_operation(struct watch *w, const struct group_dev *g, enum kernel_id id, uint64_t ns)
{
    uint32_t *bucket = &w->times[id][time_bucket(ns)];

    __atomic_store_n(&w->running_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&w->count[id], w->count[id] + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&w->total_ns[id], w->total_ns[id] + ns, __ATOMIC_RELAXED);
    __atomic_store_n(bucket, *bucket + 1, __ATOMIC_RELAXED);
    for (int r = 0; g->enable_mask && r < g->nranks; r++)
        __atomic_store_n(&watch_mask(w)[r], __atomic_load_n(&g->mask[r], __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

void cpu_kernel_end(struct agent *agent, const struct group_dev *g, enum kernel_id id, uint64_t began)
{
    if (!began)
        return;
    if (agent->traced) {
        cpu_mark(agent, MARK_END);
        add_span(agent, "operation", agent->traced, NULL, began, agent->mark_ns);
        agent->traced = NULL;
    }
    if (!agent->watch)
        return;
    cpu_watch_clear(agent);
    if (agent->index == 0)
        count_operation(agent->watch, g, id, clock_ns() - began);
    agent->watch = NULL;
}

void cpu_trace_wait(const struct agent *agent, uint64_t began, uint64_t now, int is_over)
{
    const struct trace_event e = {.begin_ns = began,
                                  .end_ns = now,
                                  .category = "wait",
                                  .name = "wait",
                                  .of = phase_texts[agent->wait_phase],
                                  .label = {"agent"},
                                  .value = {(uint64_t)agent->index},
                                  .what = is_over ? agent->wait_what : 0,
                                  .rank = agent->rank,
                                  .peer = agent->wait_peer,
                                  .kind = TRACE_SPAN};

    trace_add(&e);
}

/* Before the words are stored: whoever sees one has a later time. */
void cpu_trace_signal(const struct agent *agent, int nranks, int kind, int slot, uint64_t value)
{
    const struct trace_event e = {.begin_ns = clock_ns(),
                                  .category = "signal",
                                  .name = "signal",
                                  .of = phase_texts[PHASE_COUNT - SIG_COUNT + kind],
                                  .what = TRACE_WHAT(kind, slot, value),
                                  .rank = agent->rank,
                                  .peer = -1,
                                  .ranks = nranks,
                                  .kind = TRACE_SIGNAL};

    trace_add(&e);
}
