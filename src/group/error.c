/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous errors: what kernels recorded, as a sentence, and clearing it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/group.h"
#include "group/registry.h"
#include "group/signals.h"
#include "util/structs.h"
#include "device/cpu/agent.h"
#include "util/pause.h"
#include "util/status.h"

/* As in struct signature; what `extra` is depends on the operation. */
static const char *signature_field(int phase, int64_t field)
{
    static const char *const names[] = {"bytes per row", "dtype", "scale bytes per row", "top-k", "layout"};

    if (field >= 0 && field < 5)
        return names[field];
    if (phase == PHASE_HN_DATA)
        return "expert_alignment";
    if (phase == PHASE_LL_DATA)
        return "weights asked for";
    return phase == PHASE_LC_DATA ? "logfmt" : "weights (1) + backward (2) + compact top-k (4)";
}

static void write_message(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const char *phase = phase_name(e->phase);

    switch (e->status) {
    case EPX_ERR_TIMEOUT:
        if (e->peer < 0) { /* about no other rank */
            snprintf(text, bytes,
                     "rank %d, %s: not within its deadline (timeout %d ms; expected %" PRId64 ", seen %" PRId64 ")",
                     group->rank, phase, group->set.timeout_ms, e->expected, e->seen);
            break;
        }
        snprintf(text, bytes,
                 "rank %d, %s: rank %d did not come within %d ms (expected %" PRId64 ", seen %" PRId64 ")%s",
                 group->rank, phase, e->peer, group->set.timeout_ms, e->expected, e->seen,
                 e->detail[0] ? "; it is masked now" : "");
        break;
    case EPX_ERR_PEER:
        snprintf(text, bytes, "rank %d, %s: ended because rank %d failed (%s)", group->rank, phase, e->peer,
                 epx_strerror((epx_status)e->detail[0]));
        break;
    case EPX_ERR_MISMATCH:
        if (e->detail[0] < 0) {
            snprintf(text, bytes, "rank %d, %s: what rank %d sent cannot be (expected %" PRId64 ", got %" PRId64 ")",
                     group->rank, phase, e->peer, e->expected, e->seen);
            break;
        }
        snprintf(text, bytes, "rank %d, %s: rank %d has %s = %" PRId64 " where this rank has %" PRId64, group->rank,
                 phase, e->peer, signature_field(e->phase, e->detail[0]), e->seen, e->expected);
        break;
    case EPX_ERR_OVERFLOW:
        snprintf(text, bytes,
                 "rank %d, %s: the tensors hold %" PRId64 " rows, %" PRId64
                 " are needed (tensors in ordinary memory also need max_recv_tokens)",
                 group->rank, phase, e->seen, e->expected);
        break;
    case EPX_ERR_USAGE:
        snprintf(
            text, bytes,
            "rank %d: rank %d is masked here, but not by agreement: high throughput needs epx_group_error_clear on all "
            "ranks that go on",
            group->rank, e->peer);
        break;
    case EPX_ERR_ARGUMENT:
        snprintf(text, bytes,
                 "rank %d: topk_idx[%" PRId64 "][%" PRId64 "]: expected -1 to %" PRId64 ", got %" PRId64
                 "; it was dropped",
                 group->rank, e->detail[0], e->detail[1], e->expected - 1, e->seen);
        break;
    default:
        snprintf(text, bytes, "rank %d, %s: %s", group->rank, phase, epx_strerror((epx_status)e->status));
    }
}

/* Who waited in vain may have waited for its own proxy: looked at once per failure, by the first who asks. */
static void look_at_proxies(struct epx_group *group)
{
    int state = STUCK_UNKNOWN;

    if (!group->proxies ||
        !__atomic_compare_exchange_n(&group->stuck_state, &state, STUCK_ASKING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    state = group_net_answers(group) == EPX_OK ? STUCK_NO : STUCK_YES;
    if (state == STUCK_YES)
        snprintf(group->stuck_text, sizeof(group->stuck_text), "; %.120s", epx_last_error());
    __atomic_store_n(&group->stuck_state, state, __ATOMIC_RELEASE); /* pairs with the acquire in add_stuck() */
}

static void add_stuck(const struct epx_group *group, char *text, size_t bytes)
{
    const size_t used = strlen(text);

    if (__atomic_load_n(&group->stuck_state, __ATOMIC_ACQUIRE) == STUCK_YES)
        snprintf(text + used, bytes - used, "%s", group->stuck_text);
}

/* EPX_OK when kernels have recorded nothing. */
static epx_status read_error(const struct epx_group *group, epx_error_info *info)
{
    const struct error_record *e = &group->net_error;
    epx_error_info out = EPX_ERROR_INFO_INIT;

    out.rank = group->rank;
    out.peer = -1;
    /* What the network says comes first: kernels then only tell that they ended. Pairs with the release in on_error(). */
    if (__atomic_load_n(&e->state, __ATOMIC_ACQUIRE) != ERROR_SET)
        e = group->error;
    /* Pairs with the release in report(), or in on_error(). */
    if (__atomic_load_n(&e->state, __ATOMIC_ACQUIRE) == ERROR_SET) {
        out.status = e->status;
        out.peer = e->peer;
        out.expected = e->expected;
        out.seen = e->seen;
        snprintf(out.phase, sizeof(out.phase), "%s", phase_name(e->phase));
        write_message(group, e, out.message, sizeof(out.message));
        if (out.status == EPX_ERR_TIMEOUT || out.status == EPX_ERR_PEER)
            add_stuck(group, out.message, sizeof(out.message));
    }
    *info = out;
    return (epx_status)out.status;
}

/* The own abort word: set exactly when an operation was ended. */
static uint64_t abort_word(struct epx_group *group)
{
    uint64_t word = 0;
    char *at = (char *)group->heap.base + offsetof(struct control, abort_word);

    if (group->device->ops->caps & DEVICE_HOST_HEAP)
        return __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE);
    group->device->ops->copy(group->device, &word, at, sizeof(word));
    return word;
}

epx_status epx_group_error(epx_group *group, epx_error_info *out)
{
    epx_error_info info;
    epx_status status = group_check(group, "epx_group_error");

    if (status != EPX_OK)
        return status;
    status = read_error(group, &info);
    if (status == EPX_ERR_TIMEOUT || status == EPX_ERR_PEER) {
        look_at_proxies(group);
        status = read_error(group, &info);
    }
    if (status == EPX_OK && abort_word(group)) {
        /* Told by another rank, before a kernel of this one has noticed. */
        info.status = EPX_ERR_PEER;
        info.peer = ABORT_RANK(abort_word(group));
        status = EPX_ERR_PEER;
        snprintf(info.message, sizeof(info.message), "rank %d: rank %d failed (%s)", group->rank, info.peer,
                 epx_strerror((epx_status)ABORT_STATUS(abort_word(group))));
    }
    if (out) {
        epx_status copied = struct_out(out, &info, sizeof(info), "epx_error_info");
        if (copied != EPX_OK)
            return copied;
    }
    return status == EPX_OK ? EPX_OK : fail(status, "%s", info.message);
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
    cpu_env_ring(ops->env ? ops->env : &cpu_thread_env, &c->bell);
}

void group_abort(struct epx_group *group, int status)
{
    for (int r = 0; r < group->nranks; r++)
        if (group->bases[r])
            store_abort_word(group, group->bases[r], ABORT_WORD(status, group->rank));
}

void group_aborted_by(struct epx_group *group, int rank, int status)
{
    store_abort_word(group, group->heap.base, ABORT_WORD(status, rank));
}

void group_tell_left_out(struct epx_group *group, int rank)
{
    if (group->bases[rank])
        store_abort_word(group, group->bases[rank], ABORT_WORD(EPX_ERR_TIMEOUT, group->rank));
}

epx_status group_usable(struct epx_group *group)
{
    epx_error_info info;
    uint64_t word;

    /* Where the word is in GPU memory, the next kernel looks at it anyway: only what a kernel has told is looked at here. */
    if (!(group->device->ops->caps & DEVICE_HOST_HEAP) && read_error(group, &info) == EPX_OK)
        return EPX_OK;
    word = abort_word(group);
    if (!word)
        return EPX_OK;
    if (read_error(group, &info) != EPX_OK)
        return fail((epx_status)info.status, "the group has failed (epx_group_error_clear starts over): %s",
                    info.message);
    return fail(EPX_ERR_PEER, "the group has failed (epx_group_error_clear starts over): rank %d reported: %s",
                ABORT_RANK(word), epx_strerror((epx_status)ABORT_STATUS(word)));
}

/* The records first: who claims one afterwards finds it empty. */
epx_status errors_forget(struct epx_group *group)
{
    static const uint32_t none;
    uint32_t *reported = &group->shadow.state->reported;

    __atomic_store_n(&group->stuck_state, STUCK_UNKNOWN, __ATOMIC_RELAXED);
    __atomic_store_n(&group->net_error.state, ERROR_NONE, __ATOMIC_RELEASE); /* pairs with the claim in on_error() */
    __atomic_store_n(&group->error->state, ERROR_NONE, __ATOMIC_RELEASE);    /* likewise in report(), after this: */
    if (!(group->device->ops->caps & DEVICE_HOST_ACCESS))
        return group->device->ops->copy(group->device, reported, &none, sizeof(none));
    __atomic_store_n(reported, none, __ATOMIC_RELEASE); /* pairs with the claim in report() */
    return EPX_OK;
}

/*
 * Whoever clears without an error of its own does so because another rank failed. From a rank of another node the word
 * of that may still be on its way: one that went on alone would leave the others waiting in group_rejoin().
 */
static void await_abort_word(struct epx_group *group)
{
    const uint64_t most = 1000, ms = (uint64_t)group->set.timeout_ms < most ? (uint64_t)group->set.timeout_ms : most;
    const uint64_t deadline = host_now_ns() + ms * 1000000u;
    epx_error_info info;

    if (group->nnodes == 1 || read_error(group, &info) != EPX_OK)
        return;
    while (!abort_word(group) && host_now_ns() < deadline)
        pause_ns(100000);
}

epx_status epx_group_error_clear(epx_group *group)
{
    epx_status status = group_check(group, "epx_group_error_clear");

    if (status != EPX_OK)
        return status;
    await_abort_word(group);
    if (abort_word(group) || group->mask_updated)
        return group_rejoin(group, 0);
    return errors_forget(group);
}
