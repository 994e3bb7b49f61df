/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulator's scheduler: every agent, stream, proxy and rank's program is a task, a fiber on the one thread that
 * calls sim_run; which of them runs next, how long things take and what goes wrong is drawn from one seed.
 *
 *   runnable --- picked by the seed ---> runs until it parks, ends, or a point (sim_point) lets another go first
 *   parked on a key, until a time   ---> runnable again when the key is woken or the time has come
 *
 * Time is virtual: every step takes a little, and when nobody can run the clock jumps to the next event. The same seed
 * gives the same run, bit by bit, which the hash of all choices shows.
 *
 * One simulation at a time in a process: kernels and host code find it through the functions below.
 */
#ifndef EPX_SIM_SCHED_H
#define EPX_SIM_SCHED_H

#include <stddef.h>
#include <stdint.h>

enum { SIM_MAX_RANKS = 2048, SIM_MAX_FAULTS = 4 };

#define SIM_NEVER UINT64_MAX

/* How the next task is picked. */
enum sim_policy {
    SIM_UNIFORM,  /* each with the same chance */
    SIM_PRIORITY, /* the one with the highest priority, which is redrawn now and then: long runs of one task */
    SIM_LAGGARD,  /* one rank goes on only when the others cannot, or seldom */
    SIM_POLICIES,
    SIM_EARLIEST = SIM_POLICIES /* nothing is drawn: every task has a clock (sim_spend), and the earliest runs */
};

/* At step `at`, all tasks of a rank stop: for `ns`, or for good (SIM_NEVER): then the others see a dead rank. With
 * `transfer`: not at a step, but before so many transfers of its connections have taken place (sim/conn.c), counted
 * since sim_count_transfers(). With `copy`: before so many copies of its device, likewise (what a recovery resets).
 * With `row`: before the row of that number that it writes into memory of another rank of its node. With `after_ns`:
 * not at a step, but so long after the first fault. */
struct sim_fault {
    uint64_t at, after_ns;
    uint64_t ns;
    int rank, transfer, copy, row;
};

enum sim_kind { SIM_PROGRAM, SIM_STREAM, SIM_AGENT, SIM_PROXY, SIM_KINDS };

struct sim_options {
    uint64_t seed;
    int nranks;
    enum sim_policy policy;
    int laggard;      /* rank, for SIM_LAGGARD */
    int point_every;  /* at one point in so many, on average, another task may go first; 0 = only where a task waits */
    uint64_t step_ns; /* average time of one step */
    uint64_t max_steps; /* more is a run that does not end */
    struct sim_fault fault[SIM_MAX_FAULTS];
    int nfaults;
    /* SIM_EARLIEST: how long a task needs to see that another one has woken it; NULL = no time. */
    uint64_t (*wake_ns)(enum sim_kind from, int from_rank, enum sim_kind to, int to_rank);
    /* SIM_EARLIEST: would a task with this sim_data() go on if it were woken? NULL = always. */
    int (*ready)(const void *data);
};

/* Something else with events of its own in virtual time: the network. */
struct sim_source {
    uint64_t (*next_ns)(void *self);              /* SIM_NEVER = none */
    void (*advance)(void *self, uint64_t now_ns); /* does what is due */
    void (*rank_dies)(void *self, int rank);
    void (*rank_runs)(void *self, int rank); /* again; NULL = it need not know */
    void *self;
};

struct sim_totals {
    uint64_t steps, now_ns, hash;
    uint64_t looks;     /* at words of peers, by agents that wait */
    int deaths, stalls; /* faults that took place */
};

/* 0, or -1: no memory, too many ranks, or a simulation exists already. */
int sim_begin(const struct sim_options *options);
void sim_set_source(const struct sim_source *source);
/* Runs until all programs have ended: 0. Otherwise -1, and `why` says who waits for what. */
int sim_run(char *why, size_t bytes);
void sim_totals(struct sim_totals *totals);
/* Tasks that have not ended lose what they hold. */
void sim_end(void);

/* ---- Tasks -------------------------------------------------------------------------------------------------- */

/* 0, or -1 without memory. `fn` returns when the task is done. */
int sim_spawn(enum sim_kind kind, int rank, int index, void (*fn)(void *), void *arg);
/* Of the running task; -1 outside. */
int sim_rank(void);
/* The running task, to be compared; NULL outside. */
const void *sim_task_id(void);
/* Where the running task's epx_last_error() is; NULL outside. */
char *sim_last_error(void);
/* Whatever the running task keeps for itself; NULL at first. */
void sim_set_data(void *data);
void *sim_data(void);
/* A rank that stalls wakes up after `ns`, unless it would earlier. */
void sim_rouse(int rank, uint64_t ns);
/* The transfers of the running task's rank count from now on; one is about to take place, unless the rank stops. */
void sim_count_transfers(void);
void sim_transfer(void);
/* A copy of the device is about to be made, likewise. */
void sim_copies(void);
/* A row is about to be written, likewise, but these count from the beginning. */
void sim_writes_row(void);
/* By a fault, and not for good. */
int sim_is_stopped(int rank);
/* By a fault, and not raised again. */
int sim_is_dead(int rank);
/* The same, though it may have been raised in the end. */
int sim_has_died(int rank);

/* ---- What a task calls ----------------------------------------------------------------------------------------- */

/* An agent looks at a word that another rank, or a proxy, advances. */
void sim_look(void);
/* Another task may go first. Cheap, for use before every primitive of a kernel. */
void sim_point(void);
/* The running task's clock goes on (SIM_EARLIEST). */
void sim_spend(uint64_t ns);
/* Another task may go first, always. */
void sim_yield(void);
/* Until sim_wake(key), or `until_ns`, whichever is first. `what` is for the report. Returns non-zero if woken. */
int sim_park(const void *key, uint64_t until_ns, const char *what);
/* All that are parked on `key` may go on. Returns how many stay there, because they are not ready. */
int sim_wake(const void *key);
/* The same for a bell (kernel/heap.h) that was last seen at `seen`. */
struct doorbell;
int sim_park_bell(struct doorbell *bell, uint32_t seen, uint64_t until_ns, const char *what);

uint64_t sim_now(void);
/* 0 .. n-1. */
uint64_t sim_draw(uint64_t n);
/* Mixes an event into the hash. */
void sim_trace(uint64_t value);

#endif
