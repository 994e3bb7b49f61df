/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sched.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/params.h"
#include "sim/task.h"
#include "util/log.h"

static const char *const kind_names[SIM_KINDS] = {"program", "stream", "agent", "proxy"};

/* ---- Chance ------------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t sim_draw(uint64_t n)
{
    sim.rng += 0x9e3779b97f4a7c15u;
    return n > 1 ? mix(sim.rng) % n : 0;
}

void sim_trace(uint64_t value)
{
    sim.hash = mix(sim.hash * 31 + value);
}

uint64_t sim_now(void)
{
    return sim.now;
}

int sim_rank(void)
{
    return sim.current ? sim.current->rank : -1;
}

const void *sim_task_id(void)
{
    return sim.current;
}

char *sim_last_error(void)
{
    return sim.current ? sim.current->last_error : NULL;
}

void sim_set_data(void *data)
{
    sim.current->data = data;
}

void *sim_data(void)
{
    return sim.current ? sim.current->data : NULL;
}

int sim_has_died(int rank)
{
    return sim.rank[rank].dead;
}

int sim_is_stopped(int rank)
{
    return sim.rank[rank].thaw && !sim.rank[rank].dead;
}

int sim_is_dead(int rank)
{
    return sim.rank[rank].dead && sim.rank[rank].thaw == SIM_NEVER;
}

/* ---- Tasks -------------------------------------------------------------------------------------------------- */

static void task_main(void *arg)
{
    struct sim_task *t = arg;

    t->fn(t->arg);
    t->state = TASK_ENDED;
    fiber_leave(1);
}

int sim_spawn(enum sim_kind kind, int rank, int index, void (*fn)(void *), void *arg)
{
    struct sim_task *t;

    if (!sim.active || rank < 0 || rank >= sim.o.nranks)
        return -1;
    t = task_new();
    if (!t)
        return -1;
    t->kind = kind;
    t->rank = rank;
    t->index = index;
    t->number = sim.born++;
    t->fn = fn;
    t->arg = arg;
    t->when = sim.now;
    t->priority = (uint32_t)sim_draw(1u << 30);
    t->fiber = fiber_new(task_main, t);
    if (!t->fiber) {
        task_free(t);
        return -1;
    }
    sim.living_programs += kind == SIM_PROGRAM;
    task_make_runnable(t);
    return 0;
}

static void task_end(struct sim_task *t)
{
    sim.living_programs -= t->kind == SIM_PROGRAM;
    fiber_free(t->fiber);
    task_free(t);
}

void sim_yield(void)
{
    if (sim.current)
        fiber_leave(0);
}

static uint64_t source_next(void)
{
    return sim.source.next_ns ? sim.source.next_ns(sim.source.self) : SIM_NEVER;
}

/* With clocks: whoever is earlier than the running task goes first. */
static void give_way(void)
{
    const struct sim_task *first = task_first();

    if ((first && first->when < sim.now) || source_next() <= sim.now)
        fiber_leave(0);
}

void sim_look(void)
{
    sim.looks++;
}

void sim_point(void)
{
    if (!sim.current)
        return;
    if (sim.o.policy == SIM_EARLIEST) {
        give_way();
        return;
    }
    if (sim.o.point_every == 0 || sim.points-- > 0)
        return;
    sim.points = sim_draw(2 * (uint64_t)sim.o.point_every);
    fiber_leave(0);
}

void sim_spend(uint64_t ns)
{
    if (sim.current && sim.o.policy == SIM_EARLIEST)
        sim.now += ns;
}

int sim_park(const void *key, uint64_t until_ns, const char *what)
{
    struct sim_task *t = sim.current;

    t->what = what;
    task_park(t, key, until_ns);
    if (until_ns < sim.next_timer)
        sim.next_timer = until_ns;
    fiber_leave(0);
    return t->woken;
}

int sim_park_bell(struct doorbell *bell, uint32_t seen, uint64_t until_ns, const char *what)
{
    return bell->seq != seen || sim_park(bell, until_ns, what);
}

int sim_wake(const void *key)
{
    int left = 0;
    const int n = task_find(key, &left);

    for (int i = 0; i < n; i++)
        task_unpark(sim.found[i], 1);
    return left;
}

/* ---- Faults ------------------------------------------------------------------------------------------------- */

static void rank_thaw(int rank)
{
    int i;

    sim.rank[rank].thaw = 0;
    for (i = 0; i < sim.nall; i++)
        if (sim.all[i]->rank == rank && sim.all[i]->state == TASK_FROZEN)
            task_make_runnable(sim.all[i]);
    if (sim.source.rank_runs)
        sim.source.rank_runs(sim.source.self, rank);
}

void sim_rouse(int rank, uint64_t ns)
{
    const uint64_t then = sim.now + ns;

    if (rank >= sim.o.nranks || !sim.rank[rank].thaw || sim.rank[rank].thaw <= then || sim.rank[rank].dead)
        return;
    sim.rank[rank].thaw = then;
    if (then < sim.next_timer)
        sim.next_timer = then;
}

static void rank_freeze(const struct sim_fault *fault)
{
    struct rank_state *r = &sim.rank[fault->rank];
    int i, lives = 0;

    for (i = 0; i < sim.nall; i++)
        lives |= sim.all[i]->rank == fault->rank && sim.all[i]->kind == SIM_PROGRAM;
    if (!lives || r->dead)
        return;
    sim_trace(0xfa017u + (uint64_t)fault->rank);
    r->thaw = fault->ns == SIM_NEVER ? SIM_NEVER : sim.now + fault->ns;
    if (fault->ns != SIM_NEVER) {
        sim.stalls++;
        if (sim.source.rank_runs && r->thaw < sim.next_timer)
            sim.next_timer = r->thaw; /* also where none of its tasks would run before */
        return;
    }
    r->dead = 1;
    sim.deaths++;
    if (sim.source.rank_dies)
        sim.source.rank_dies(sim.source.self, fault->rank);
}

static void faults_due(void)
{
    int i;

    for (i = 0; i < sim.o.nfaults; i++) {
        struct sim_fault *f = &sim.o.fault[i];
        const int due = f->after_ns ? sim.first_fault_ns && sim.now >= sim.first_fault_ns + f->after_ns
                                    : f->at == sim.steps && !f->transfer && !f->copy && !f->row;

        if (!due)
            continue;
        if (i == 0)
            sim.first_fault_ns = sim.now;
        if (f->after_ns)
            f->after_ns = SIM_NEVER - sim.first_fault_ns; /* once */
        rank_freeze(f);
    }
}

void sim_count_transfers(void)
{
    sim.rank[sim.current->rank].counts = 1;
}

/* One more of what is counted. `number`: which of struct sim_fault says at which one the rank stops. */
static void count_one(int *count, size_t number)
{
    struct rank_state *r = &sim.rank[sim.current->rank];

    if (r->thaw)
        return;
    ++*count;
    for (int i = 0; i < sim.o.nfaults; i++) {
        const struct sim_fault *f = &sim.o.fault[i];

        if (f->rank == sim.current->rank && *(const int *)((const char *)f + number) == *count)
            rank_freeze(f);
    }
    if (r->thaw)
        fiber_leave(0);
}

void sim_transfer(void)
{
    if (sim.rank[sim.current->rank].counts)
        count_one(&sim.rank[sim.current->rank].transfers, offsetof(struct sim_fault, transfer));
}

void sim_copies(void)
{
    if (sim.rank[sim.current->rank].counts)
        count_one(&sim.rank[sim.current->rank].copies, offsetof(struct sim_fault, copy));
}

void sim_writes_row(void)
{
    count_one(&sim.rank[sim.current->rank].rows, offsetof(struct sim_fault, row));
}

/* When all others have ended, the dead wake up as from a very long sleep, so that they clean up after themselves. */
static int raise_dead(void)
{
    int i, raised = 0;

    for (i = 0; i < sim.nall; i++)
        if (sim.all[i]->kind == SIM_PROGRAM && !sim.rank[sim.all[i]->rank].dead)
            return 0;
    for (i = 0; i < sim.o.nranks; i++) {
        if (sim.rank[i].thaw != SIM_NEVER)
            continue;
        rank_thaw(i);
        raised = 1;
    }
    return raised;
}

/* ---- Time --------------------------------------------------------------------------------------------------- */

static void timers_due(void)
{
    uint64_t next = SIM_NEVER;
    int i, n;

    if (sim.now < sim.next_timer)
        return;
    n = task_find_due();
    for (i = 0; i < n; i++)
        task_unpark(sim.found[i], 0);
    if (task_first())
        next = task_first()->when;
    for (i = 0; i < sim.o.nranks && sim.o.nfaults; i++) {
        if (!sim.rank[i].thaw || sim.rank[i].thaw == SIM_NEVER)
            continue;
        if (sim.rank[i].thaw <= sim.now)
            rank_thaw(i);
        else if (sim.rank[i].thaw < next)
            next = sim.rank[i].thaw;
    }
    sim.next_timer = next;
}

static void events_due(void)
{
    if (source_next() <= sim.now)
        sim.source.advance(sim.source.self, sim.now);
    timers_due();
}

/* Nobody can run: the clock jumps to what comes next. Zero when nothing will ever come. */
static int jump(void)
{
    const uint64_t theirs = source_next();
    uint64_t next = sim.next_timer;

    if (theirs < next)
        next = theirs;
    if (next == SIM_NEVER)
        return 0;
    if (next > sim.now)
        sim.now = next;
    events_due();
    return 1;
}

/* ---- Picking ------------------------------------------------------------------------------------------------ */

static struct sim_task *pick_priority(void)
{
    uint32_t best = 0;
    int i, at = 0;

    for (i = 0; i < sim.nrunnable; i++)
        best = sim.priority[i] > best ? sim.priority[i] : best;
    while (sim.priority[at] != best)
        at++;
    if (sim_draw(32) == 0)
        sim.runnable[at]->priority = (uint32_t)sim_draw(1u << 30);
    return sim.runnable[at];
}

static struct sim_task *pick(void)
{
    struct sim_task *t;

    if (sim.o.policy == SIM_PRIORITY)
        return pick_priority();
    t = sim.runnable[sim_draw((uint64_t)sim.nrunnable)];
    if (sim.o.policy != SIM_LAGGARD || t->rank != sim.o.laggard || sim_draw(64) == 0)
        return t;
    for (int tries = 0; tries < 8 && t->rank == sim.o.laggard; tries++)
        t = sim.runnable[sim_draw((uint64_t)sim.nrunnable)];
    return t;
}

/* The next task that may run, or NULL. Those of frozen ranks are put aside on the way. */
static struct sim_task *next_task(void)
{
    while (sim.nrunnable > 0) {
        struct sim_task *t = pick();

        task_take(t);
        if (!sim.rank[t->rank].thaw)
            return t;
        t->state = TASK_FROZEN;
        if (sim.rank[t->rank].thaw < sim.next_timer)
            sim.next_timer = sim.rank[t->rank].thaw;
    }
    return NULL;
}

static void run_task(struct sim_task *t)
{
    sim_trace((uint64_t)t->number << 40 ^ sim.now);
    sim.current = t;
    log_set_rank(t->rank);
    fiber_enter(t->fiber);
    sim.current = NULL;
    if (t->state == TASK_ENDED)
        task_end(t);
    else if (t->state == TASK_RUNNABLE) {
        t->when = sim.now;
        task_make_runnable(t);
    }
}

/* ---- The whole ---------------------------------------------------------------------------------------------- */

static void describe(char *text, size_t bytes, const char *head)
{
    size_t used =
        (size_t)snprintf(text, bytes, "%s at step %" PRIu64 ", %" PRIu64 " us:", head, sim.steps, sim.now / 1000);

    for (int i = 0; i < sim.nall && used < bytes; i++) {
        const struct sim_task *t = sim.all[i];
        const char *state = t->state == TASK_PARKED ? t->what : t->state == TASK_FROZEN ? "frozen" : "runnable";
        used += (size_t)snprintf(text + used, bytes - used, "%s rank %d %s %d: %s", i ? ";" : "", t->rank,
                                 kind_names[t->kind], t->index, state);
    }
}

static int run_one(struct sim_task *t, char *why, size_t bytes)
{
    if (++sim.steps > sim.o.max_steps) {
        describe(why, bytes, "does not end");
        return -1;
    }
    run_task(t);
    return 0;
}

/* Every task has its own clock, and the earliest runs; the network's events come in their order among them. */
static int run_clocks(char *why, size_t bytes)
{
    while (sim.living_programs > 0) {
        struct sim_task *t = task_first();
        const uint64_t theirs = source_next();

        if (theirs != SIM_NEVER && (!t || theirs <= t->when)) {
            sim.now = theirs;
            sim.source.advance(sim.source.self, theirs);
            continue;
        }
        if (!t) {
            describe(why, bytes, "nobody can go on");
            return -1;
        }
        sim.now = t->when;
        if (t->state == TASK_PARKED) {
            task_unpark(t, 0);
            continue;
        }
        task_take(t);
        if (run_one(t, why, bytes) != 0)
            return -1;
    }
    return 0;
}

/* One clock, and whoever may run next is drawn. */
static int run_drawn(char *why, size_t bytes)
{
    while (sim.living_programs > 0) {
        struct sim_task *t;
        enum sim_kind kind;

        events_due();
        t = next_task();
        if (!t) {
            if (!jump() && !raise_dead()) {
                describe(why, bytes, "nobody can go on");
                return -1;
            }
            continue;
        }
        faults_due();
        kind = t->kind;
        if (run_one(t, why, bytes) != 0)
            return -1;
        sim.now += sim_draw(2 * sim.o.step_ns + 1);
        if (sim.deaths && kind == SIM_PROGRAM && t->state == TASK_ENDED)
            raise_dead();
    }
    return 0;
}

int sim_run(char *why, size_t bytes)
{
    const int rc = sim.o.policy == SIM_EARLIEST ? run_clocks(why, bytes) : run_drawn(why, bytes);

    if (rc == 0 && sim.nall > 0) {
        describe(why, bytes, "all ranks have ended, but tasks remain");
        return -1;
    }
    return rc;
}

int sim_begin(const struct sim_options *options)
{
    if (sim.active || options->nranks < 1 || options->nranks > SIM_MAX_RANKS)
        return -1;
    memset(&sim, 0, sizeof(sim));
    sim.o = *options;
    sim.rng = mix(options->seed + 0x51e0u);
    sim.now = 1000000;
    sim.next_timer = SIM_NEVER;
    if (task_reserve() != 0) {
        task_lists_free();
        return -1;
    }
    sim.active = 1;
    return 0;
}

void sim_set_source(const struct sim_source *source)
{
    if (source)
        sim.source = *source;
    else
        memset(&sim.source, 0, sizeof(sim.source));
}

void sim_totals(struct sim_totals *totals)
{
    *totals = (struct sim_totals){.steps = sim.steps,
                                  .now_ns = sim.now,
                                  .hash = sim.hash,
                                  .looks = sim.looks,
                                  .deaths = sim.deaths,
                                  .stalls = sim.stalls};
}

void sim_end(void)
{
    for (int i = 0; i < sim.nall; i++) {
        fiber_free(sim.all[i]->fiber);
        free(sim.all[i]);
    }
    task_lists_free();
    memset(&sim, 0, sizeof(sim));
    log_set_rank(-1);
}
