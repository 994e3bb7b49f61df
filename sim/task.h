/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler's own view of tasks, shared by its files: sched.c decides who runs and what time it is, task.c keeps
 * the lists.
 *
 *   all        every task that has not ended, by slot
 *   runnable   those that may run (policies that draw), by place
 *   parked     those that wait, by the hash of their key
 *   times      a heap by (when, number): parked tasks that wait no longer than `when`; with clocks (SIM_EARLIEST) also
 *              runnable tasks, by their own clock
 *
 * Whoever is woken together goes on in the order of slots, so that what a seed means does not depend on the lists.
 */
#ifndef EPX_SIM_TASK_H
#define EPX_SIM_TASK_H

#include "sim/fiber.h"
#include "sim/sched.h"
#include "util/runtime.h"

enum { SIM_KEYS = 1 << 12 };

enum task_state { TASK_RUNNABLE, TASK_PARKED, TASK_FROZEN, TASK_ENDED };

struct sim_task {
    struct fiber *fiber;
    enum sim_kind kind;
    enum task_state state;
    int rank, index;
    int number; /* in order of birth: what the hash knows it by */
    int slot;   /* in the list of all tasks */
    int place;  /* in the list of runnable tasks */
    int timed;  /* 1 + its place in the heap of times; 0 = not there */
    int woken;
    uint32_t priority;
    const void *key;
    uint64_t when; /* parked: until then; with clocks, its clock while it is runnable */
    const char *what;
    void (*fn)(void *);
    void *arg, *data;
    struct sim_task *next; /* spare, or parked with a key of the same hash */
    char last_error[RUNTIME_ERROR_BYTES];
};

struct rank_state {
    uint64_t thaw; /* 0 = runs; otherwise when it goes on */
    int dead;
    int counts, transfers, copies, rows; /* sim_transfer(), sim_copies(), sim_writes_row() */
};

struct sim {
    int active;
    struct sim_options o;
    struct sim_source source;
    uint64_t rng, now, steps, hash, looks;
    uint64_t next_timer; /* no parked task is due before */
    uint64_t points;     /* until the next one that counts */
    int deaths, stalls, born, programs, living_programs;
    uint64_t first_fault_ns; /* when the first fault took place */
    struct rank_state rank[SIM_MAX_RANKS];
    struct sim_task *current;
    struct sim_task **runnable, **all, **times, **found;
    uint32_t *priority; /* [place] */
    int nrunnable, nall, ntimes, room;
    struct sim_task *spare;
    struct sim_task *parked[SIM_KEYS];
};
extern struct sim sim;

/* All lists have room for one more. 0 or -1. */
int task_reserve(void);
/* A new task, in no list but that of all. NULL without memory. */
struct sim_task *task_new(void);
/* Ends it: spare from now on. */
void task_free(struct sim_task *t);
void task_lists_free(void);

/* May run now. */
void task_make_runnable(struct sim_task *t);
/* Out of the list of runnable tasks: it runs, or its rank is frozen. */
void task_take(struct sim_task *t);
/* The running task waits for sim_wake(key), and until `when`. */
void task_park(struct sim_task *t, const void *key, uint64_t when);
/* Parked, and now free to go on. */
void task_unpark(struct sim_task *t, int woken);
/* All that are parked on `key` and ready, by slot, in sim.found; how many. *left: those that are not ready. */
int task_find(const void *key, int *left);
/* All that are parked until sim.now or earlier, likewise. */
int task_find_due(void);
/* The first of the heap of times, or NULL. */
struct sim_task *task_first(void);

#endif
