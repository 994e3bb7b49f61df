/* SPDX-License-Identifier: Apache-2.0 */
#include "lanes.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim/fiber.h"

enum { IDLE_TURNS = 20 }; /* in which all that may go on polled, before the block sleeps a little */

struct warp {
    uint64_t value[2][LANES_MOST]; /* of this barrier, and of the last, which slow lanes still read */
    unsigned arrived, rounds;
    enum lane_sync what;
    uint64_t gathered_value[2][LANES_MOST], gathered[2];
    unsigned gatherings;
};

/* A fiber that runs one thread after the other, for whichever block: making one takes two system calls. */
struct lane_fiber {
    struct fiber *fiber;
    struct thread *thread;
    struct lane_fiber *next;
};

static struct lane_fiber *idle;
static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;

struct thread {
    struct lane_fiber *own;
    unsigned index;
    const unsigned *until; /* waits while this has the value `seen` */
    unsigned seen;
    int gathers, ended;
};

static _Thread_local struct block {
    const struct lanes_launch *launch;
    unsigned index, arrived, rounds;
    unsigned voted, ballots; /* of lanes_block_any: so far; how many there were */
    int yes[2];              /* of this ballot, and of the last, which slow threads still read */
    unsigned ended;          /* threads */
    unsigned paused;         /* threads that polled in this turn */
    struct thread threads[THREADS_MOST];
    struct warp warps[THREADS_MOST / 32];
} * block;
static _Thread_local struct thread *now;

struct index3 lanes_thread(void)
{
    return (struct index3){now->index, 0, 0};
}

struct index3 lanes_block(void)
{
    return (struct index3){block->index, 0, 0};
}

struct index3 lanes_block_size(void)
{
    return (struct index3){block->launch->threads, 1, 1};
}

struct index3 lanes_grid_size(void)
{
    return (struct index3){block->launch->blocks, 1, 1};
}

static void give_up(const char *why)
{
    fprintf(stderr, "lanes: block %u, thread %u (lane %u): %s\n", block->index, now->index,
            now->index % block->launch->lanes, why);
    abort();
}

static void wait_while(const unsigned *word, unsigned seen)
{
    now->until = word;
    now->seen = seen;
    while (*word == seen)
        fiber_leave(0);
    now->until = NULL;
}

const uint64_t *lanes_exchange(enum lane_sync what, uint64_t value)
{
    const unsigned lanes = block->launch->lanes;
    struct warp *w = &block->warps[now->index / lanes];
    const unsigned round = w->rounds;

    if (w->arrived == 0)
        w->what = what;
    else if (w->what != what)
        give_up("lanes of one warp are at different barriers");
    w->value[round % 2][now->index % lanes] = value;
    if (++w->arrived == lanes) {
        w->arrived = 0;
        w->rounds++;
    } else {
        wait_while(&w->rounds, round);
    }
    return w->value[round % 2];
}

const uint64_t *lanes_gather(uint64_t value, uint64_t *lanes)
{
    struct warp *w = &block->warps[now->index / block->launch->lanes];
    const unsigned gathering = w->gatherings;

    w->gathered_value[gathering % 2][now->index % block->launch->lanes] = value;
    now->gathers = 1;
    wait_while(&w->gatherings, gathering);
    now->gathers = 0;
    *lanes = w->gathered[gathering % 2];
    return w->gathered_value[gathering % 2];
}

void lanes_block_meet(void)
{
    const unsigned round = block->rounds;

    if (++block->arrived == block->launch->threads) {
        block->arrived = 0;
        block->rounds++;
    } else {
        wait_while(&block->rounds, round);
    }
}

static void count_votes(void)
{
    if (!block->voted || block->voted + block->ended < block->launch->threads)
        return;
    block->voted = 0;
    block->yes[++block->ballots % 2] = 0;
}

int lanes_block_any(int v)
{
    const unsigned ballot = block->ballots;

    block->yes[ballot % 2] |= v != 0;
    block->voted++;
    count_votes();
    if (block->ballots == ballot)
        wait_while(&block->ballots, ballot);
    return block->yes[ballot % 2];
}

void lanes_pause(void)
{
    block->paused++;
    fiber_leave(0);
}

/* Not inlined: a fiber moves from one thread of the CPU to another, and must not remember where `block` was. */
__attribute__((noinline)) static void run_thread(struct lane_fiber *own)
{
    block->launch->kernel(block->launch->params, block->launch->info);
    own->thread->ended = 1;
    block->ended++;
    count_votes(); /* those that wait for this thread's vote go on without it */
}

static void fiber_main(void *arg)
{
    for (;;) {
        run_thread(arg);
        fiber_leave(0);
    }
}

static struct lane_fiber *fiber_take(void)
{
    struct lane_fiber *own;

    pthread_mutex_lock(&idle_lock);
    own = idle;
    if (own)
        idle = own->next;
    pthread_mutex_unlock(&idle_lock);
    if (own)
        return own;
    own = calloc(1, sizeof(*own));
    if (own)
        own->fiber = fiber_new(fiber_main, own);
    return own;
}

static void fiber_give(struct lane_fiber *own)
{
    pthread_mutex_lock(&idle_lock);
    own->next = idle;
    idle = own;
    pthread_mutex_unlock(&idle_lock);
}

static int waits(const struct thread *t)
{
    return t->until && *t->until == t->seen;
}

/* Lets those of a warp go on that gather, once none of its lanes can come to them any more. Returns how many. */
static unsigned let_go(unsigned warp)
{
    const struct thread *lane = &block->threads[warp * block->launch->lanes];
    struct warp *w = &block->warps[warp];
    uint64_t lanes = 0;

    for (unsigned i = 0; i < block->launch->lanes; i++) {
        if (!lane[i].ended && !waits(&lane[i]))
            return 0;
        if (!lane[i].ended && lane[i].gathers)
            lanes |= (uint64_t)1 << i;
    }
    if (lanes)
        w->gathered[w->gatherings++ % 2] = lanes;
    return (unsigned)__builtin_popcountll(lanes);
}

/* One turn of each that may go on; returns how many were entered, or may be next. */
static unsigned turn(void)
{
    unsigned entered = 0;

    block->paused = 0;
    for (unsigned i = 0; i < block->launch->threads; i++) {
        struct thread *t = &block->threads[i];
        if (!t->ended && !waits(t)) {
            now = t;
            fiber_enter(t->own->fiber);
            entered++;
        }
        if (i % block->launch->lanes == block->launch->lanes - 1)
            entered += let_go(i / block->launch->lanes);
    }
    return entered;
}

void lanes_run_block(const struct lanes_launch *launch, unsigned index)
{
    unsigned idle = 0;

    block = calloc(1, sizeof(*block));
    if (!block) {
        fprintf(stderr, "lanes: no memory\n");
        abort();
    }
    block->launch = launch;
    block->index = index;
    for (unsigned i = 0; i < launch->threads; i++) {
        block->threads[i].index = i;
        now = &block->threads[i];
        now->own = fiber_take();
        if (!now->own || !now->own->fiber)
            give_up("no memory for a fiber");
        now->own->thread = now;
    }
    while (block->ended < launch->threads) {
        const unsigned entered = turn();
        if (!entered)
            give_up("those that are left wait for lanes that have ended");
        idle = entered == block->paused ? idle + 1 : 0;
        if (idle > IDLE_TURNS)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        else if (idle)
            sched_yield();
    }
    for (unsigned i = 0; i < launch->threads; i++)
        fiber_give(block->threads[i].own);
    free(block);
    block = NULL;
}
