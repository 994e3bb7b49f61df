/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Recovery: the group restarts after a failure, or with other members than before.
 *
 *   every remaining rank               its streams are idle
 *   membership                         without enable_mask: all ranks, through the bootstrap. With it: ranks that are
 *                                      neither masked nor ended, as boot/membership.h agrees without the others
 *   1st all-gather: epochs             no rank writes signals any more; closing endpoints drops what is in flight
 *   all have closed their networks     no rank sets abort words any more
 *   reset                              epochs, signals and counters to the greatest of all; the mask to the members;
 *                                      others take over as relays for ranks that are left out
 *   all have reset                     nobody erases abort words any more: one that is set from here on stays
 *   all have opened the network again  the last step: whoever is not told that ends what the others begin
 */
#include "group/recover.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/boot.h"
#include "group/abort.h"
#include "group/error.h"
#include "group/handshake.h"
#include "group/join.h"
#include "group/launch.h"
#include "group/mask.h"
#include "group/memory.h"
#include "group/net.h"
#include "group/region.h"
#include "group/signals.h"
#include "kernel/inject_bug.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum { MEETINGS = 3 /* of one call */ };

/* Between nodes: the counters of the proxies. Expected rows start again from zero with them. The proxies compute their
 * aggregates from the counters when they are opened again. */
static epx_status reset_counters(struct epx_group *group, const uint64_t *epochs)
{
    const size_t R = (size_t)group->nranks, slots = (size_t)group->set.sig_slots;
    const size_t words = (size_t)SIG_COUNT * slots * R;
    const size_t rings = (size_t)group->set.proxy_threads, all = rings * SIG_COUNT * slots;
    uint64_t *zero;
    epx_status status;

    if (group->nnodes == 1)
        return EPX_OK;
    for (size_t i = 0; i < words; i++)
        group->shadow.counters[i] = counter_after(group, epochs, (int)(i / (slots * R)), (int)(i / R % slots));
    memset(group->shadow.sent, 0, R * sizeof(uint64_t));
    memset(group->shadow.sent_all, 0, rings * sizeof(uint64_t));
    zero = calloc(words > all ? words : all, sizeof(*zero));
    if (!zero)
        return fail(EPX_ERR_MEMORY, "no memory to reset %zu counters", words);
    status = group->device->ops->copy(group->device, group->shadow.expected, zero, words * sizeof(*zero));
    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, group->shadow.pushed, zero, R * sizeof(*zero));
    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, group->shadow.expected_all, zero, all * sizeof(*zero));
    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, group->shadow.pushed_all, zero, rings * sizeof(*zero));
    free(zero);
    return status;
}

/* A launch that ended in the middle leaves sums behind. */
static epx_status reset_layout(struct epx_group *group)
{
    const size_t words = (size_t)group->set.experts + 2 * (size_t)group->nranks + 1;
    int32_t *zeros = calloc(words, sizeof(*zeros));
    epx_status status = zeros ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory to reset %zu counts", words);

    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, group->shadow.layout_counts, zeros, words * sizeof(*zeros));
    free(zeros);
    return status;
}

static epx_status reset_device(struct epx_group *group, const uint64_t *epochs)
{
    const struct device_ops *ops = group->device->ops;
    const size_t slots = (size_t)group->set.sig_slots, per_kind = slots * (size_t)group->nranks;
    const size_t words = (size_t)SIG_COUNT * per_kind;
    struct group_state state;
    struct signal *signals = calloc(words, sizeof(*signals));
    epx_status status = signals ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory to reset %zu signals", words);
    static const uint64_t no_abort[3]; /* abort_word, abort_told and gave_up */
    if (status != EPX_OK)
        goto out;
    memset(&state, 0, sizeof(state));
    memcpy(state.epoch, epochs, sizeof(state.epoch));
    for (size_t i = 0; i < words; i++)
        signals[i].value = signals[i].all =
            signal_after(group, epochs, (int)(i / per_kind), (int)(i % per_kind) / group->nranks);
    status = reset_counters(group, epochs);
    if (status == EPX_OK)
        status = ops->copy(group->device, group->shadow.state, &state, sizeof(state));
    if (status == EPX_OK)
        status =
            ops->copy(group->device, (char *)group->heap.base + group->plan.signals, signals, words * sizeof(*signals));
    if (status == EPX_OK)
        status = ops->copy(group->device, (char *)group->heap.base + offsetof(struct control, abort_word), no_abort,
                           sizeof(no_abort));
    if (status == EPX_OK)
        status = group_device_members(group);
    if (status == EPX_OK)
        status = reset_layout(group);

out:
    free(signals);
    return status;
}

/* The greatest epoch of each operation over the ranks that take part. */
static epx_status gather_epochs(struct epx_group *group, uint64_t *epochs)
{
    struct group_state state;
    uint64_t *all = handshake_room(group);
    epx_status status = group->device->ops->copy(group->device, &state, group->shadow.state, sizeof(state));

    static_assert(sizeof(state.epoch) <= HANDSHAKE_ROOM, "of one rank");
    if (status == EPX_OK)
        status = handshake_allgather(group, state.epoch, all, sizeof(state.epoch));
    for (int i = 0; status == EPX_OK && i < OP_COUNT; i++) {
        epochs[i] = 0;
        for (int r = 0; r < group->nranks; r++)
            if (all[r * OP_COUNT + i] > epochs[i])
                epochs[i] = all[r * OP_COUNT + i];
    }
    return status;
}

/* `out`: the ranks that are left out, as membership_agree() returned them, or none. High throughput needs relays for
 * all that remain. */
static epx_status set_members(struct epx_group *group, const uint8_t *out)
{
    int most;

    for (int r = 0; r < group->nranks; r++)
        if (out[r])
            group_abort_left_out(group, r);
    node_map_leave_out(&group->map, out);
    regions_update_members(group);
    if (group->nnodes == 1 || !(group->set.modes & EPX_HIGH_THROUGHPUT))
        return EPX_OK;
    most = node_most_sources(&group->map);
    if (most > group->set.relay_max)
        return fail(
            EPX_ERR_UNSUPPORTED,
            "rank %d: so many ranks of a node are left out that one would relay for %d others; there is room for "
            "%d (a group without high throughput has no such limit)",
            group->rank, most, group->set.relay_max);
    return EPX_OK;
}

static epx_status forget_operations(struct epx_group *group)
{
    for (struct epx_handle *h = group->handles; h; h = h->next) {
        h->staged = STAGED_NONE;
        h->dispatched = 0;
        /* Updates that have not run never will; a number is not given twice, for graphs keep theirs. */
        __atomic_store_n(&h->ntokens, -1, __ATOMIC_RELAXED); /* first: a wait that ends by the number looks at it */
        __atomic_store_n(&h->info->epoch, h->updates, __ATOMIC_RELEASE); /* pairs with handle_poll_update() */
    }
    mask_forget_updates(group);
    return errors_clear(group);
}

/*
 * This rank is not told the result of the last step. Ranks to which the leader told it before it ended, or stopped,
 * have recovered, and count on this rank, which has not: their next operation ends at once, and all meet again. So does
 * that of the leader, should it wake up and find that all had come to this step. Without that, low latency would mask
 * the ranks that were not told, though they are well. All have reset their state: nobody erases the word. A rank that
 * has failed too has its word already. Where nobody was told yet, because one is late for the step, all recover once
 * more.
 */
static void end_operations(void *arg)
{
    struct epx_group *group = arg;

    if (INJECT_BUG(BUG_UNTOLD, 0, 1))
        group_abort(group, EPX_ERR_TIMEOUT, membership_coordinator(group->membership));
}

static void fail_restart(struct epx_group *group, epx_status status, int all_reset)
{
    if (group->membership && all_reset && status == EPX_ERR_PEER)
        end_operations(group);
    group_abort_alone(group, status);
}

/* The last step. Others may be in an operation that waits for this rank, a deadline long: the leader is given half of
 * that. */
static epx_status last_step(struct epx_group *group, epx_status status)
{
    if (group->membership)
        membership_on_silence(group->membership, group->set.timeout_ms / 2, end_operations, group);
    status = handshake_ready(group, status);
    if (group->membership)
        membership_on_silence(group->membership, 0, NULL, NULL);
    return status;
}

/* The members' own state, which starts again from `epochs`. */
static epx_status reset(struct epx_group *group, const uint8_t *out, const uint64_t *epochs)
{
    epx_status status = set_members(group, out);

    if (status == EPX_OK)
        status = group_await_writers(group, out);
    return status == EPX_OK ? reset_device(group, epochs) : status;
}

/* The rings go with the proxies. Kernels are told: should the recovery fail, those that follow end at once, and would
 * stop the proxies through rings that are freed. */
static epx_status close_net(struct epx_group *group)
{
    const epx_status status = group_net_close(group);

    return status == EPX_OK && group->nnodes > 1 ? group_device_rings(group) : status;
}

static epx_status open_net(struct epx_group *group)
{
    epx_status status;

    if (group->nnodes == 1)
        return EPX_OK;
    status = group_net_open(group);
    return status == EPX_OK ? group_device_rings(group) : status;
}

/* Collective over the ranks that handshake_allgather() reaches. *all_reset: what failed came later, and others may have
 * recovered. */
static epx_status restart(struct epx_group *group, const uint8_t *out, int replaced, int *all_reset)
{
    uint64_t epochs[OP_COUNT];
    epx_status status = gather_epochs(group, epochs);

    *all_reset = 0;
    if (status == EPX_OK) {
        /* Until all have closed theirs, a proxy of this node may set abort words. */
        status = handshake_ready(group, close_net(group));
        if (status == EPX_OK && replaced)
            status = handshake_ready(group, handshake_heaps_again(group));
        if (status == EPX_OK)
            status = reset(group, out, epochs);
        if (INJECT_BUG(BUG_EARLY_STEP, group->nnodes > 1, 1))
            status = handshake_ready(group, status);
    }
    if (status == EPX_OK) {
        *all_reset = 1;
        status = last_step(group, open_net(group));
    }
    if (status == EPX_OK) {
        memcpy(group->restarted, epochs, sizeof(epochs));
        status = forget_operations(group);
    }
    if (status == EPX_OK && replaced)
        join_done(group, out);
    if (status != EPX_OK)
        fail_restart(group, status, *all_reset);
    return status;
}

/* The ranks that this rank alone leaves out. */
static epx_status own_mask(struct epx_group *group, int unmask, uint8_t *out)
{
    int32_t *mask = group->recovery_mask;
    epx_status status =
        group->device->ops->copy(group->device, mask, group->shadow.mask, (size_t)group->nranks * sizeof(*mask));

    for (int r = 0; status == EPX_OK && r < group->nranks; r++)
        out[r] = group->stale[r] || (!unmask && !mask[r]);
    return status;
}

static void log_members(const struct epx_group *group, const uint8_t *out)
{
    int left = 0;

    for (int r = 0; r < group->nranks; r++)
        left += !out[r];
    log_line(LOG_INFO, "rank %d continues with %d of %d ranks", group->rank, left, group->nranks);
}

/* A rank that was told how the last attempt ended comes when its next operation has ended, and that may be later. */
static epx_status add_doubt(void)
{
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    return fail(EPX_ERR_TIMEOUT,
                "%s; it may be well: before the leader ended it may have heard that all have recovered, and it has "
                "begun no operation since",
                text);
}

/* Those that gave up because of this rank may have recovered without it, and ended: their words are all that is left of
 * them, and say one name. Whoever was a member may be with that one. */
static void remember_late(struct epx_group *group)
{
    const int by = group_late_for(group);

    if (by >= 0)
        membership_was_late(group->membership, by, group->map.out);
}

/* One attempt. *again: the members have changed, or may have. */
static epx_status attempt(struct epx_group *group, struct join_round *join, uint8_t *out, int *again)
{
    epx_status status = own_mask(group, join->unmask, out);
    int all_reset = 0;

    *again = 0;
    if (status != EPX_OK)
        return status;
    join_mark(group, join, out);
    if (INJECT_BUG(BUG_OWN_WORD, 0, 1))
        remember_late(group);
    if (INJECT_BUG(BUG_SECOND_SET, 1, 0))
        membership_taken_back(group->membership);
    /* A rank that arrives later may have just begun a wait of its own: hence twice the timeout. */
    status = membership_agree(group->membership, group->joining || join->untold ? MEMBERSHIP_ANY_PURPOSE : join->unmask,
                              out, 2 * group->set.timeout_ms);
    if (status == EPX_ERR_TIMEOUT && join->untold)
        status = add_doubt();
    if (status != EPX_OK) {
        *again = status == EPX_ERR_MEMORY || (status == EPX_ERR_TIMEOUT && join_give_up(group, join));
        return status;
    }
    group->use_membership = 1;
    status = join_roll_call(group, join, out);
    if (status == EPX_OK && !join->admitted)
        status = restart(group, out, join->replaced, &all_reset);
    join->untold |= all_reset && status == EPX_ERR_PEER;
    group->use_membership = 0;
    /* Without memory this rank is like one that has gone for the others: they meet it again. */
    *again = status == EPX_ERR_PEER || status == EPX_ERR_MEMORY || (status == EPX_OK && join->admitted);
    if (!*again && status == EPX_OK) {
        membership_taken_back(group->membership);
        log_members(group, out);
    }
    membership_end(group->membership);
    return status;
}

/* A rank whose process ends during an attempt is left out of the next one. A process that takes the place of a rank
 * takes part in the next one. */
static epx_status recover_survivors(struct epx_group *group, int unmask, uint8_t *out)
{
    struct join_round join = {.unmask = unmask};
    epx_status status = EPX_OK;
    int again = 1;

    for (int failures = 0, rounds = 0; again && failures < 4 && rounds < JOIN_ROUNDS; rounds++) {
        status = attempt(group, &join, out, &again);
        failures += status != EPX_OK;
    }
    membership_end(group->membership);
    /* Others may have come further than this rank, in epx_mask_clean too, where nothing had failed before: it recovers
     * with them next time, not alone. Ranks that have masked it work on, which a word would end: it asks again. */
    if (status != EPX_OK && !membership_left_out(group->membership) && !abort_word(group))
        group_abort_alone(group, status);
    return status;
}

/* All ranks, through the bootstrap. Where its connections are lost, some ranks see that before others, or only when
 * they use them: all meet again. */
static epx_status recover_all(struct epx_group *group, const uint8_t *out)
{
    epx_status status = EPX_ERR_PEER;
    int all_reset;

    for (int i = 0; i < MEETINGS && status == EPX_ERR_PEER && (!i || boot_is_lost(group->boot)); i++) {
        status = boot_begin(group->boot);
        if (status == EPX_OK)
            status = restart(group, out, 0, &all_reset);
        else
            group_abort_alone(group, status);
    }
    return status;
}

static epx_status recover(struct epx_group *group, int unmask)
{
    uint8_t *out = group->recovery_out;
    epx_status status = launch_await(group, group->default_stream, group->call);

    memset(out, 0, (size_t)group->nranks);
    if (status == EPX_OK)
        status = launch_await(group, group->last_stream, group->call);
    /* A blocked proxy may return at any time and write arrivals into the heap: this rank cannot recover. */
    if (status == EPX_OK)
        status = group_net_responsive(group);
    if (status == EPX_OK)
        status = group->membership ? recover_survivors(group, unmask, out) : recover_all(group, out);
    return status;
}

epx_status group_recover(struct epx_group *group, const char *call, int unmask)
{
    epx_status status;

    group->call = call;
    group_recovery_begins(group);
    status = recover(group, unmask);
    group_recovery_ends(group);
    return status;
}

/*
 * A rank that clears without an error of its own does so because another rank failed. If that rank is on another
 * node, its abort word may still be on the way: a rank that continued alone would leave the others waiting in
 * group_recover().
 */
static void await_abort_word(struct epx_group *group)
{
    const uint64_t most = 1000, ms = (uint64_t)group->set.timeout_ms < most ? (uint64_t)group->set.timeout_ms : most;
    const uint64_t deadline = host_now_ns() + ms * 1000000u;
    epx_error_info info;

    if (group->nnodes == 1 || error_read(group, &info) != EPX_OK)
        return;
    while (!abort_word(group) && host_now_ns() < deadline)
        pause_ns(100000);
}

/*
 * A rank that failed, or masked another, and now recovers does not answer any more: ranks that are in an operation
 * would wait for it, and name it. So it ends their operations first, and says whose fault it is. A rank without an
 * error of its own recovers because its caller wants so, and lets the others end what they do.
 */
static void tell_culprit(struct epx_group *group)
{
    epx_error_info info;
    const epx_status status = error_read(group, &info);

    if (!abort_word(group) && group->mask_updated && (status == EPX_ERR_TIMEOUT || status == EPX_ERR_PEER))
        group_abort(group, EPX_ERR_TIMEOUT, info.peer);
}

epx_status group_clear_error(struct epx_group *group)
{
    await_abort_word(group);
    tell_culprit(group);
    if (abort_word(group) || group->mask_updated)
        return group_recover(group, "epx_group_error_clear", 0);
    return errors_clear(group);
}
