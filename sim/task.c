/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/task.h"

#include <stdlib.h>
#include <string.h>

struct sim sim;

/* ---- Room ---------------------------------------------------------------------------------------------------- */

static int grow_list(struct sim_task ***list, int room)
{
    struct sim_task **larger = realloc(*list, (size_t)room * sizeof(*larger));

    if (!larger)
        return -1;
    *list = larger;
    return 0;
}

int task_reserve(void)
{
    const int room = sim.room ? sim.room * 2 : 64;
    uint32_t *priority;

    if (sim.nall < sim.room)
        return 0;
    if (grow_list(&sim.all, room) || grow_list(&sim.runnable, room) || grow_list(&sim.times, room) ||
        grow_list(&sim.found, room))
        return -1;
    priority = realloc(sim.priority, (size_t)room * sizeof(*priority));
    if (!priority)
        return -1;
    sim.priority = priority;
    sim.room = room;
    return 0;
}

void task_lists_free(void)
{
    while (sim.spare) {
        struct sim_task *t = sim.spare;

        sim.spare = t->next;
        free(t);
    }
    free(sim.all);
    free(sim.runnable);
    free(sim.times);
    free(sim.found);
    free(sim.priority);
}

struct sim_task *task_new(void)
{
    struct sim_task *t = sim.spare;

    if (task_reserve() != 0)
        return NULL;
    if (t)
        sim.spare = t->next;
    else
        t = malloc(sizeof(*t));
    if (!t)
        return NULL;
    memset(t, 0, sizeof(*t));
    t->slot = sim.nall;
    sim.all[sim.nall++] = t;
    return t;
}

void task_free(struct sim_task *t)
{
    struct sim_task *last = sim.all[--sim.nall];

    sim.all[t->slot] = last;
    last->slot = t->slot;
    t->next = sim.spare;
    sim.spare = t;
}

/* ---- The heap of times ---------------------------------------------------------------------------------------- */

static int sooner(const struct sim_task *a, const struct sim_task *b)
{
    return a->when != b->when ? a->when < b->when : a->number < b->number;
}

static void time_put(struct sim_task *t, int at)
{
    sim.times[at] = t;
    t->timed = at + 1;
}

static void time_rise(struct sim_task *t, int at)
{
    for (; at > 0 && sooner(t, sim.times[(at - 1) / 2]); at = (at - 1) / 2)
        time_put(sim.times[(at - 1) / 2], at);
    time_put(t, at);
}

static void time_sink(struct sim_task *t, int at)
{
    int child;

    while ((child = 2 * at + 1) < sim.ntimes) {
        if (child + 1 < sim.ntimes && sooner(sim.times[child + 1], sim.times[child]))
            child++;
        if (!sooner(sim.times[child], t))
            break;
        time_put(sim.times[child], at);
        at = child;
    }
    time_put(t, at);
}

static void time_add(struct sim_task *t)
{
    time_rise(t, sim.ntimes++);
}

static void time_remove(struct sim_task *t)
{
    const int at = t->timed - 1;
    struct sim_task *last;

    if (!t->timed)
        return;
    t->timed = 0;
    last = sim.times[--sim.ntimes];
    if (last == t)
        return;
    if (at > 0 && sooner(last, sim.times[(at - 1) / 2]))
        time_rise(last, at);
    else
        time_sink(last, at);
}

struct sim_task *task_first(void)
{
    return sim.ntimes ? sim.times[0] : NULL;
}

/* ---- Runnable -------------------------------------------------------------------------------------------------- */

void task_make_runnable(struct sim_task *t)
{
    t->state = TASK_RUNNABLE;
    if (sim.o.policy == SIM_EARLIEST) {
        time_add(t);
        return;
    }
    t->place = sim.nrunnable;
    sim.priority[sim.nrunnable] = t->priority;
    sim.runnable[sim.nrunnable++] = t;
}

void task_take(struct sim_task *t)
{
    struct sim_task *last;

    if (sim.o.policy == SIM_EARLIEST) {
        time_remove(t);
        return;
    }
    last = sim.runnable[--sim.nrunnable];
    sim.runnable[t->place] = last;
    sim.priority[t->place] = sim.priority[sim.nrunnable];
    last->place = t->place;
}

/* ---- Parked ---------------------------------------------------------------------------------------------------- */

static struct sim_task **bucket(const void *key)
{
    return &sim.parked[((uintptr_t)key * 0x9e3779b97f4a7c15u) >> 52 & (SIM_KEYS - 1)];
}

void task_park(struct sim_task *t, const void *key, uint64_t when)
{
    struct sim_task **list = bucket(key);

    t->state = TASK_PARKED;
    t->key = key;
    t->when = when;
    t->next = *list;
    *list = t;
    if (when != SIM_NEVER)
        time_add(t);
}

static uint64_t wake_delay(const struct sim_task *t)
{
    if (!sim.current || !sim.o.wake_ns)
        return 0;
    return sim.o.wake_ns(sim.current->kind, sim.current->rank, t->kind, t->rank);
}

void task_unpark(struct sim_task *t, int woken)
{
    struct sim_task **link = bucket(t->key);

    while (*link != t)
        link = &(*link)->next;
    *link = t->next;
    time_remove(t);
    if (sim.o.policy == SIM_EARLIEST)
        t->when = sim.now + (woken ? wake_delay(t) : 0);
    t->woken = woken;
    t->key = NULL;
    task_make_runnable(t);
}

static int by_slot(const void *a, const void *b)
{
    return (*(struct sim_task *const *)a)->slot - (*(struct sim_task *const *)b)->slot;
}

static int sorted(int n)
{
    if (n > 1 && sim.o.policy != SIM_EARLIEST)
        qsort(sim.found, (size_t)n, sizeof(struct sim_task *), by_slot);
    return n;
}

static int is_ready(const struct sim_task *t)
{
    return !sim.o.ready || !t->data || sim.o.ready(t->data);
}

int task_find(const void *key, int *left)
{
    int n = 0;

    for (struct sim_task *t = *bucket(key); t; t = t->next) {
        if (t->key != key)
            continue;
        if (is_ready(t))
            sim.found[n++] = t;
        else
            ++*left;
    }
    return sorted(n);
}

int task_find_due(void)
{
    int n = 0;

    while (sim.ntimes && sim.times[0]->when <= sim.now) {
        sim.found[n++] = sim.times[0];
        time_remove(sim.times[0]);
    }
    return sorted(n);
}
