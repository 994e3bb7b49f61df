/* SPDX-License-Identifier: Apache-2.0 */
/* What CPU agents add to a trace: operations, their phases, waits for peers, signals to peers. */
#include "device/cpu/cpu.h"
#include "kernel/params.h"
#include "util/clock.h"
#include "util/trace.h"

#define PHASE_TEXT(phase, maskable, text) [PHASE_##phase] = text,
#define SIGNAL_TEXT(kind, operation, counts, flow, owed, maskable, text) [PHASE_##kind] = text,
static const char *const phase_texts[PHASE_COUNT] = {OTHER_PHASES(PHASE_TEXT) SIGNALS(SIGNAL_TEXT)};

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
uint64_t cpu_trace_begin(struct agent *agent, const char *kernel, int rank)
{
    if (!trace_on() || agent->env != &cpu_thread_env)
        return 0;
    agent->traced = kernel;
    agent->rank = rank;
    agent->mark_ns = clock_ns();
    return agent->mark_ns;
}

void cpu_mark(struct agent *agent, const char *phase)
{
    const uint64_t now = clock_ns();

    add_span(agent, "phase", phase, agent->traced, agent->mark_ns, now);
    agent->mark_ns = now;
}

void cpu_trace_end(struct agent *agent, uint64_t began)
{
    if (!agent->traced)
        return;
    cpu_mark(agent, "end");
    add_span(agent, "operation", agent->traced, NULL, began, agent->mark_ns);
    agent->traced = NULL;
}

void cpu_trace_wait(const struct agent *agent, uint64_t began, uint64_t now)
{
    const struct trace_event e = {.begin_ns = began,
                                  .end_ns = now,
                                  .category = "wait",
                                  .name = "wait",
                                  .of = phase_texts[agent->wait_phase],
                                  .label = {"agent"},
                                  .value = {(uint64_t)agent->index},
                                  .what = agent->wait_what,
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
