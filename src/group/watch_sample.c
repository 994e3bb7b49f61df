/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counters for epx top where kernels cannot write the page, as on a GPU:
 *
 *   epx top                                      a thread of this rank
 *   page.looks += 1, wakes it           ->       sleeps on page.looks: nothing is done where nobody looks
 *   waits a moment for page.sampled     <-       copies what kernels count in device memory into the page
 *
 * From the first look on kernels also keep how long operations take (kernel/times.h), until nobody has looked for
 * WATCHED_S. The copy has a stream of its own in the device, as epx_group_stats: it needs no kernel and waits for none,
 * so that graphs that are replayed and groups that hang are seen too.
 *
 * Kernels that wait for longer than a slice say again and again for whom (control.waits, kernel/waiting_for.h). While
 * somebody looks, the thread looks at that word every LOOK_NS: a word that changes is a wait.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "group/abort.h"
#include "group/watch.h"
#include "kernel/signals.h"
#include "util/clock.h"
#include "util/log.h"

#define WATCHED_S 10
#define STOP_NS 2000000000u /* a copy that takes longer than this will not end */
#define LOOK_NS 100000000u

enum { SAMPLER_NONE, SAMPLER_RUNS, SAMPLER_STOPS, SAMPLER_ENDED };

static const uint8_t kernel_of[OP_COUNT] = {[OP_LL_DISPATCH] = KERNEL_LL_DISPATCH,
                                            [OP_LL_COMBINE] = KERNEL_LL_COMBINE,
                                            [OP_HT_NOTIFY] = KERNEL_HT_NOTIFY,
                                            [OP_HT_DISPATCH] = KERNEL_HT_DISPATCH,
                                            [OP_HT_COMBINE] = KERNEL_HT_COMBINE};

/* Kernels keep times from now on. Each look says it again: epx_group_recover copies all of the group. */
static epx_status watch_times(struct epx_group *group, int is_first)
{
    const struct device_ops *ops = group->device->ops;
    const struct kernel_times none = {0};
    const int32_t on = 1;
    epx_status status = EPX_OK;

    if (is_first)
        status = ops->copy(group->device, group->shadow.times, &none, sizeof(none));
    return status == EPX_OK ? ops->copy(group->device, &group->dev->is_watched, &on, sizeof(on)) : status;
}

static void unwatch_times(struct epx_group *group)
{
    const int32_t off = 0;

    (void)group->device->ops->copy(group->device, &group->dev->is_watched, &off, sizeof(off));
}

/* Of operations that began since somebody looks. LogFMT's combine is a combine, as it is for the epochs. */
static void sample_times(const struct epx_group *group)
{
    struct kernel_times t;

    if (group->device->ops->copy(group->device, &t, group->shadow.times, sizeof(t)) != EPX_OK)
        return;
    for (int i = 0; i < TIME_BUCKETS; i++) {
        t.count[KERNEL_LL_COMBINE][i] += t.count[KERNEL_LL_COMBINE_LOGFMT][i];
        for (int op = 0; op < OP_COUNT; op++)
            __atomic_store_n(&group->watch->times[kernel_of[op]][i], t.count[kernel_of[op]][i], __ATOMIC_RELAXED);
    }
}

/* All ranks begin the same operations: their numbers count them, also those of graphs. */
static void sample(const struct epx_group *group)
{
    const struct device_ops *ops = group->device->ops;
    const struct group_dev *g = &group->shadow;
    struct watch *w = group->watch;
    uint64_t epochs[OP_COUNT], counted[sizeof(struct device_stats) / sizeof(uint64_t)];

    if (ops->copy(group->device, epochs, g->state->epoch, sizeof(epochs)) != EPX_OK ||
        ops->copy(group->device, counted, g->stats, sizeof(counted)) != EPX_OK)
        return;
    for (int op = 0; op < OP_COUNT; op++)
        __atomic_store_n(&w->count[kernel_of[op]], epochs[op], __ATOMIC_RELAXED);
    for (size_t i = 0; i < sizeof(counted) / sizeof(counted[0]); i++)
        __atomic_store_n((uint64_t *)&w->stats + i, counted[i], __ATOMIC_RELAXED);
    if (g->enable_mask)
        ops->copy(group->device, watch_mask(w), g->mask, (size_t)g->nranks * sizeof(int32_t));
    sample_times(group);
}

/* control.waits, as the thread has seen it. */
struct seen_wait {
    uint64_t word, changed_ns;
    uint64_t since_ns;        /* 0: nobody is waited for */
    uint64_t epoch[OP_COUNT]; /* when it changed last */
};

/* As wait_slice() in kernel/waiting_for.h. */
static uint64_t slice_ns(const struct epx_group *group)
{
    const uint64_t slice = (uint64_t)group->set.timeout_ms * 1000000u / WAIT_SLICES;

    return slice < WAIT_SLICE_MAX_NS ? slice : WAIT_SLICE_MAX_NS;
}

/* A wait is over when its word stays as it is while operations go on, or for two slices. It began a slice before its
 * first word, or earlier, which nobody has seen. */
static void sample_wait(struct epx_group *group, struct seen_wait *seen, int is_first)
{
    const uint64_t word = group_waits_word(group), now = clock_ns(), slice = slice_ns(group);
    struct watch_wait *wait = &group->watch->waits[0];
    uint64_t epoch[OP_COUNT];

    if (group->device->ops->copy(group->device, epoch, group->shadow.state->epoch, sizeof(epoch)) != EPX_OK)
        return;
    const int moved = memcmp(epoch, seen->epoch, sizeof(epoch)) != 0;
    if (is_first) {
        seen->since_ns = 0;
    } else if (word != seen->word) {
        seen->since_ns = seen->since_ns && !moved ? seen->since_ns : now - slice;
        seen->changed_ns = now;
    } else if (moved || now - seen->changed_ns > 2 * slice + LOOK_NS) {
        seen->since_ns = 0;
    }
    seen->word = word;
    memcpy(seen->epoch, epoch, sizeof(epoch));
    wait->peer = WAITS_PEER(word);
    wait->phase = PHASE_NONE; /* is not said */
    __atomic_store_n(&wait->since_ns, seen->since_ns, __ATOMIC_RELAXED);
}

/* Sleeps until somebody looks, while somebody does for LOOK_NS at most. */
static void next_look(struct watch *w, uint32_t seen, int is_watched)
{
    const struct timespec limit = {.tv_nsec = LOOK_NS};

    syscall(SYS_futex, &w->looks, FUTEX_WAIT, seen, is_watched ? &limit : NULL, NULL, 0);
}

/* Nobody has looked for long: kernels need not keep times any more, and what they wait for is not followed. */
static void stop_watching(struct epx_group *group)
{
    unwatch_times(group);
    __atomic_store_n(&group->watch->waits[0].since_ns, 0, __ATOMIC_RELAXED);
}

static void *run(void *arg)
{
    struct epx_group *group = arg;
    struct watch *w = group->watch;
    struct seen_wait wait = {0};
    uint64_t looked_ns = 0;
    uint32_t seen = 0;
    int is_watched = 0;

    /* Acquire: pairs with the release of watch_sampler_stop. */
    while (__atomic_load_n(&group->sampler_state, __ATOMIC_ACQUIRE) == SAMPLER_RUNS) {
        const uint32_t looks = __atomic_load_n(&w->looks, __ATOMIC_ACQUIRE); /* pairs with the add of epx top */

        if (is_watched && looks == seen && clock_ns() - looked_ns > WATCHED_S * (uint64_t)1000000000) {
            stop_watching(group);
            is_watched = 0;
        }
        if (is_watched || looks != seen)
            sample_wait(group, &wait, !is_watched);
        if (looks == seen) {
            next_look(w, seen, is_watched);
            continue;
        }
        is_watched = watch_times(group, !is_watched) == EPX_OK;
        looked_ns = clock_ns();
        sample(group);
        __atomic_store_n(&w->sampled, looks, __ATOMIC_RELEASE); /* pairs with the acquire of epx top */
        seen = looks;
    }
    /* Release: pairs with the acquire of watch_sampler_stop. */
    __atomic_store_n(&group->sampler_state, SAMPLER_ENDED, __ATOMIC_RELEASE);
    return NULL;
}

void watch_sampler_start(struct epx_group *group)
{
    sigset_t all, before;

    if (!group->watch || group->device->ops->caps & DEVICE_HOST_ACCESS || group->sampler_state != SAMPLER_NONE)
        return;
    group->sampler_state = SAMPLER_RUNS;
    sigfillset(&all); /* signals are the program's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&group->sampler, NULL, run, group) == 0)
        __atomic_store_n(&group->watch->is_sampled, 1, __ATOMIC_RELEASE); /* pairs with the acquire of epx top */
    else
        group->sampler_state = SAMPLER_NONE;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A device that does not end a copy keeps the thread, and what the thread uses. */
void watch_sampler_stop(struct epx_group *group)
{
    const struct timespec pause = {.tv_nsec = 200000};
    const uint64_t until = clock_ns() + STOP_NS;
    int runs = SAMPLER_RUNS;

    if (group->sampler_state == SAMPLER_NONE)
        return;
    __atomic_store_n(&group->watch->is_sampled, 0, __ATOMIC_RELEASE);
    /* Fails only if it has ended. */
    __atomic_compare_exchange_n(&group->sampler_state, &runs, SAMPLER_STOPS, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    __atomic_add_fetch(&group->watch->looks, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &group->watch->looks, FUTEX_WAKE, 1, NULL, NULL, 0);
    while (__atomic_load_n(&group->sampler_state, __ATOMIC_ACQUIRE) != SAMPLER_ENDED && clock_ns() < until)
        nanosleep(&pause, NULL);
    if (group->sampler_state == SAMPLER_ENDED) {
        pthread_join(group->sampler, NULL);
        group->sampler_state = SAMPLER_NONE;
        return;
    }
    log_line(LOG_WARN, "rank %d: device %s does not end a copy for epx top; memory of the group is not freed",
             group->rank, group->device->ops->name);
    pthread_detach(group->sampler);
    group->kept = 1;
}
