/* SPDX-License-Identifier: Apache-2.0 */
#include "group/abort.h"

#include "device/cpu/agent.h"
#include "group/error.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum {
    PORT_MS = 100, /* for a port of this machine to refuse */
    PAUSE_NS = 200000
};

/* A word of the control block of a rank of this node. */
static uint64_t read_word(struct epx_group *group, const void *heap, size_t offset)
{
    uint64_t word = 0;
    const char *at = (const char *)heap + offset;

    if (group->device->ops->caps & DEVICE_HOST_HEAP)
        return __atomic_load_n((const uint64_t *)at, __ATOMIC_ACQUIRE); /* pairs with the release of who sets it */
    group->device->ops->copy(group->device, &word, at, sizeof(word));
    return word;
}

static uint64_t read_abort_word(struct epx_group *group, const void *heap)
{
    return read_word(group, heap, offsetof(struct control, abort_word));
}

uint64_t abort_word(struct epx_group *group)
{
    return read_abort_word(group, group->heap.base);
}

int group_late_for(struct epx_group *group)
{
    const uint64_t word = abort_word(group);

    /* What this rank says of itself does not count, nor what cannot be. */
    if (!word || ABORT_CULPRIT(word) != group->rank || ABORT_RANK(word) == group->rank)
        return -1;
    return ABORT_RANK(word) < group->nranks ? ABORT_RANK(word) : -1;
}

/* Into the heap of a rank of this node. */
static void store_abort_word(struct epx_group *group, struct control *c, uint64_t word)
{
    const struct device_ops *ops = group->device->ops;

    if (!(ops->caps & DEVICE_HOST_HEAP)) {
        ops->copy(group->device, &c->abort_word, &word, sizeof(word));
        return;
    }
    __atomic_store_n(&c->abort_word, word, __ATOMIC_RELEASE); /* pairs with the acquire in cpu_wait_ge */
    cpu_env_ring(cpu_env_current(), &c->bell);
}

/* As tell_node() in kernel/abort.h: the first word of each rank stays. */
static void tell_node(struct epx_group *group, uint64_t word)
{
    for (int r = 0; r < group->nranks; r++)
        if (r != group->rank && group->bases[r] && !read_abort_word(group, group->bases[r]))
            store_abort_word(group, group->bases[r], word);
}

/* As tell_left_out() in kernel/begin_end.h. */
static void tell_left_out(struct epx_group *group)
{
    const size_t index =
        (size_t)SIG_ABORT * (size_t)group->set.sig_slots * (size_t)group->nranks + (size_t)group->rank; /* slot 0 */
    const uint64_t one = 1;

    for (int r = 0; r < group->nranks; r++) {
        struct signal *signals = group->bases[r] ? (void *)((char *)group->bases[r] + group->plan.signals) : NULL;

        if (!signals || r == group->rank)
            continue;
        if (group->device->ops->caps & DEVICE_HOST_HEAP)
            __atomic_store_n(&signals[index].value, one, __ATOMIC_RELEASE); /* pairs with node_left() */
        else
            group->device->ops->copy(group->device, &signals[index].value, &one, sizeof(one));
    }
}

void group_abort(struct epx_group *group, int status, int culprit)
{
    const uint64_t word = ABORT_CAUSED(status, PHASE_NET, group->rank, culprit < 0 ? group->rank : culprit);

    tell_node(group, word);
    if (group->proxies)
        proxy_alarm(group->proxies, alarm_of_abort(word), 1);
    if (!abort_word(group)) /* last: whoever sees it may end an operation of this rank */
        store_abort_word(group, group->heap.base, word);
}

void group_aborted_by(struct epx_group *group, uint64_t word)
{
    if (!abort_word(group))
        store_abort_word(group, group->heap.base, word);
}

uint64_t group_waits_word(struct epx_group *group)
{
    return read_word(group, group->heap.base, offsetof(struct control, waits));
}

void group_publish_waits(struct epx_group *group, int peer)
{
    struct control *own = group->heap.base;
    const uint64_t word = WAITS_WORD(WAITS_BEAT(group_waits_word(group)) + 1, peer);

    if (group->device->ops->caps & DEVICE_HOST_HEAP)
        __atomic_store_n(&own->waits, word, __ATOMIC_RELEASE); /* for trail_look() */
    else
        group->device->ops->copy(group->device, &own->waits, &word, sizeof(word));
}

void group_abort_alone(struct epx_group *group, int status)
{
    store_abort_word(group, group->heap.base, ABORT_WORD(status, group->rank) | ABORT_LEFT_OUT);
}

void group_abort_left_out(struct epx_group *group, int rank)
{
    if (group->bases[rank])
        store_abort_word(group, group->bases[rank],
                         ABORT_CAUSED(EPX_ERR_TIMEOUT, PHASE_MASKS, group->rank, rank) | ABORT_LEFT_OUT);
}

static int writes(struct epx_group *group, int rank)
{
    return read_word(group, group->bases[rank], offsetof(struct control, not_writing)) != 0;
}

epx_status group_await_writers(struct epx_group *group, const uint8_t *out)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)group->set.timeout_ms * 1000000u;

    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* the abort words before: pairs with the fence in writes_begin() */
    for (int r = 0; r < group->nranks; r++) {
        while (out[r] && r != group->rank && group->bases[r] && writes(group, r)) {
            if (membership_has_ended(group->membership, r, PORT_MS))
                break;
            if (host_now_ns() >= deadline)
                return fail(EPX_ERR_TIMEOUT,
                            "rank %d: rank %d, which is left out, stopped while it wrote rows for the ranks of its "
                            "node, and would go on when it wakes up: end its process, then recover again",
                            group->rank, r);
            pause_ns(PAUSE_NS);
        }
    }
    return EPX_OK;
}

static int has_given_up(const struct epx_group *group)
{
    return __atomic_load_n(&group->gave_up, __ATOMIC_ACQUIRE); /* pairs with the release in give_up() */
}

static void give_up(struct epx_group *group, uint64_t word)
{
    if (word & ABORT_LEFT_OUT) {
        tell_left_out(group);
    } else {
        tell_node(group, word);
        /* As put_abort() in kernel/put.h: who noticed may have ended before its proxy could tell the other nodes. */
        if (group->proxies)
            proxy_alarm(group->proxies, alarm_of_abort(word), ABORT_RANK(word) == group->rank);
    }
    if (group->proxies && !proxy_stop(group->proxies))
        log_line(LOG_WARN, "rank %d: the network may still read memory of an operation that has failed", group->rank);
    __atomic_store_n(&group->gave_up, 1, __ATOMIC_RELEASE); /* pairs with the acquire in has_given_up() */
}

/* Not by a wait of the system: in simulation the holder pauses on this very thread. */
static void lock_giving_up(struct epx_group *group)
{
    while (pthread_mutex_trylock(&group->giving_up) != 0)
        pause_ns(PAUSE_NS);
}

uint64_t group_give_up(struct epx_group *group)
{
    uint64_t word = abort_word(group);

    if (!word || has_given_up(group))
        return word;
    lock_giving_up(group); /* behind a thread that does it, which the caller may rely on */
    word = abort_word(group);
    if (word && !has_given_up(group) && !group_recovers_elsewhere(group))
        give_up(group, word);
    pthread_mutex_unlock(&group->giving_up);
    return word;
}

int group_recovers_elsewhere(const struct epx_group *group)
{
    return group->recovering && !pthread_equal(group->recoverer, pthread_self());
}

void group_recovery_begins(struct epx_group *group)
{
    lock_giving_up(group);
    group->recovering = 1;
    group->recoverer = pthread_self();
    pthread_mutex_unlock(&group->giving_up);
}

void group_recovery_ends(struct epx_group *group)
{
    lock_giving_up(group);
    group->recovering = 0;
    pthread_mutex_unlock(&group->giving_up);
}

epx_status group_usable(struct epx_group *group)
{
    epx_error_info info;
    uint64_t word;

    /* Where the word is in GPU memory, the next kernel looks at it anyway: only what a kernel has told is looked at
     * here. */
    if (!(group->device->ops->caps & DEVICE_HOST_HEAP) && error_read(group, &info) == EPX_OK)
        return EPX_OK;
    word = group_give_up(group);
    if (!word)
        return EPX_OK;
    if (error_read(group, &info) == EPX_OK)
        error_of_abort(group, word, &info);
    return fail((epx_status)info.status, "the group has failed (epx_group_error_clear on all ranks recovers it): %s",
                info.message);
}
