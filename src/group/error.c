/* SPDX-License-Identifier: Apache-2.0 */
/* Error records: what kernels and proxies write when they fail, and the sentence made of it. */
#include "group/error.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "group/signals.h"
#include "util/status.h"

/* The fields of struct signature in their order; the last one, `extra`, holds several things. */
static const char *const signature_names[] = {"bytes per row", "dtype", "scale bytes per row", "top-k", "layout"};
enum { SIGNATURE_NAMES = (int)(sizeof(signature_names) / sizeof(signature_names[0])) };
EPX_STATIC_ASSERT(SIGNATURE_NAMES == offsetof(struct signature, extra) / sizeof(int32_t), "a name per field");

/* One of the things in `extra`: bits of it from `at` on. */
struct extra_part {
    int at, bits;
    const char *name;
};

static const struct extra_part update_parts[] = {
    {0, 24, "expert_alignment"}, {24, 1, "source map"}, {25, 1, "drop_rows"}};
static const struct extra_part low_dispatch_parts[] = {{0, 1, "topk_weights"}, {3, 1, "int32 scales"}};
static const struct extra_part low_combine_parts[] = {{0, 1, "logfmt"}, {1, 1, "nvfp4"}};
static const struct extra_part dispatch_parts[] = {
    {0, 1, "topk_weights"}, {1, 1, "backward"}, {2, 1, "compact top-k"}, {3, 1, "int32 scales"}, {24, 1, "source map"}};
static const struct extra_part combine_parts[] = {
    {0, 1, "topk_weights"}, {1, 1, "backward"}, {2, 1, "compact top-k"}, {3, 28, "sum (EPX_SUM_* bits)"}};
EPX_STATIC_ASSERT(SIGNATURE_WEIGHTS == 1 && SIGNATURE_BACKWARD == 2 && SIGNATURE_COMPACT == 4 && SIGNATURE_UE8M0 == 8 &&
                      SIGNATURE_SUM_AT == 3 && SIGNATURE_MAP == 1 << 24 && SIGNATURE_DROP == 1 << 25 &&
                      SIGNATURE_LOGFMT == 1 && SIGNATURE_NVFP4 == 2,
                  "as the tables say");

static const struct extra_part *extra_parts(int phase, int *n)
{
#define PARTS(table) (*n = (int)(sizeof(table) / sizeof((table)[0])), (table))
    if (phase == PHASE_HN_DATA)
        return PARTS(update_parts);
    if (phase == PHASE_LL_DATA)
        return PARTS(low_dispatch_parts);
    if (phase == PHASE_LC_DATA)
        return PARTS(low_combine_parts);
    return phase == PHASE_HC_DATA || phase == PHASE_HC_BLOCK ? PARTS(combine_parts) : PARTS(dispatch_parts);
#undef PARTS
}

/* What a peer's signature has, and this rank's: of `extra` the first part that differs. */
static void write_difference(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const int64_t field = e->detail[0];
    const char *name = field < SIGNATURE_NAMES ? signature_names[field] : "arguments";
    int64_t theirs = e->seen, own = e->expected;
    int n = 0, flag = 0;
    const struct extra_part *parts = field < SIGNATURE_NAMES ? NULL : extra_parts(e->phase, &n);

    for (int i = 0; i < n; i++) {
        const int64_t mask = ((int64_t)1 << parts[i].bits) - 1;
        if (((e->seen ^ e->expected) >> parts[i].at & mask) == 0)
            continue;
        name = parts[i].name;
        theirs = e->seen >> parts[i].at & mask;
        own = e->expected >> parts[i].at & mask;
        flag = parts[i].bits == 1;
        break;
    }
    snprintf(text, bytes, "rank %d, %s: rank %d has %s = %" PRId64 ", this rank has %" PRId64 "%s", group->rank,
             phase_name(e->phase), e->peer, name, theirs, own, flag ? " (1 = with, 0 = without)" : "");
}

/* Where a rank of another node does not respond, its network may be the reason. */
static const char *or_network(const struct epx_group *group, int rank)
{
    return group->remote && group->remote[rank] ? ", or its node's network may be down" : "";
}

/* This rank's own wait has expired. `waited`: for whom it waited; `culprit` keeps that rank from answering. */
static void write_timeout(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const int culprit = e->peer, waited = (int)e->detail[1], masked = e->detail[0] != 0;
    const int n = snprintf(
        text, bytes, "rank %d, %s: no response from rank %d within %d ms (expected %" PRId64 ", seen %" PRId64 ")",
        group->rank, phase_name(e->phase), culprit, group->set.timeout_ms, e->expected, e->seen);

    if (n < 0 || (size_t)n >= bytes)
        return;
    if (masked)
        snprintf(text + n, bytes - (size_t)n, "; it is masked now");
    else if (waited != culprit)
        snprintf(text + n, bytes - (size_t)n,
                 "; rank %d, for which this rank waits, waits for it. It may have ended, be stopped or late%s", waited,
                 or_network(group, culprit));
    else
        snprintf(text + n, bytes - (size_t)n, "; it may have ended, be stopped or late%s", or_network(group, culprit));
}

/* What an abort word says, after "rank 1, phase: ". Only what `rank` knows of itself is certain. */
static void write_abort(const struct epx_group *group, uint64_t word, char *text, size_t bytes)
{
    const int rank = ABORT_RANK(word), culprit = ABORT_CULPRIT(word), status = ABORT_STATUS(word);

    if (culprit == group->rank && rank == group->rank)
        snprintf(text, bytes, "this rank failed (%s)", epx_strerror((epx_status)status));
    else if (culprit == group->rank && status == EPX_ERR_PEER)
        snprintf(
            text, bytes,
            "aborted because the network of rank %d, or of a rank that told it, has lost this rank: the connection "
            "was cut, or this rank was stopped or late",
            rank);
    else if (culprit == group->rank && status == EPX_ERR_MISMATCH)
        snprintf(text, bytes, "aborted because rank %d and this rank do not agree", rank);
    else if (culprit == group->rank)
        snprintf(text, bytes, "this rank was too late: rank %d has waited for it (%s)", rank,
                 phase_name(ABORT_PHASE(word)));
    else if (culprit == rank && status == EPX_ERR_TIMEOUT)
        snprintf(text, bytes, "aborted because rank %d has waited in vain (%s): it may be late, or its network stuck",
                 rank, phase_name(ABORT_PHASE(word)));
    else if (status == EPX_ERR_TIMEOUT)
        snprintf(text, bytes,
                 "aborted because rank %d does not respond: it may have ended, be stopped or late%s (found by rank %d, "
                 "%s)",
                 culprit, or_network(group, culprit), rank, phase_name(ABORT_PHASE(word)));
    else if (status == EPX_ERR_PEER)
        snprintf(text, bytes, "aborted because the network has lost rank %d: it may have ended%s (found by rank %d)",
                 culprit, or_network(group, culprit), rank);
    else if (status == EPX_ERR_MISMATCH && culprit != rank)
        snprintf(text, bytes, "aborted because rank %d and rank %d do not agree", rank, culprit);
    else /* what a rank says of itself, although another one may have passed it on */
        snprintf(text, bytes, "aborted because rank %d failed (%s)", culprit, epx_strerror((epx_status)status));
}

static void write_peer(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const uint64_t word = (uint64_t)e->detail[1];
    const int n = e->phase == PHASE_NONE /* no operation was in a wait */
                      ? snprintf(text, bytes, "rank %d: ", group->rank)
                      : snprintf(text, bytes, "rank %d, %s: ", group->rank, phase_name(e->phase));

    if (n < 0 || (size_t)n >= bytes)
        return;
    if (word)
        write_abort(group, word, text + n, bytes - (size_t)n);
    else if (e->phase == PHASE_NET && e->peer >= 0)
        snprintf(text + n, bytes - (size_t)n, "the network has lost rank %d: it may have ended%s", e->peer,
                 or_network(group, e->peer));
    else
        snprintf(text + n, bytes - (size_t)n, "aborted because rank %d failed (%s)", e->peer,
                 epx_strerror((epx_status)e->detail[0]));
}

static void write_message(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const char *phase = phase_name(e->phase);

    switch (e->status) {
    case EPX_ERR_TIMEOUT:
        if (e->peer < 0) { /* about no other rank */
            snprintf(text, bytes,
                     "rank %d, %s: deadline exceeded (timeout %d ms; expected %" PRId64 ", seen %" PRId64 ")",
                     group->rank, phase, group->set.timeout_ms, e->expected, e->seen);
            break;
        }
        write_timeout(group, e, text, bytes);
        break;
    case EPX_ERR_PEER:
        write_peer(group, e, text, bytes);
        break;
    case EPX_ERR_MISMATCH:
        if (e->detail[0] < 0) {
            snprintf(text, bytes, "rank %d, %s: invalid data from rank %d (expected %" PRId64 ", got %" PRId64 ")",
                     group->rank, phase, e->peer, e->expected, e->seen);
            break;
        }
        write_difference(group, e, text, bytes);
        break;
    case EPX_ERR_OVERFLOW:
        if (e->phase == PHASE_HN_DATA) {
            snprintf(text, bytes, "rank %d: a rank has %" PRId64 " tokens, more than max_tokens_per_rank = %" PRId64,
                     group->rank, e->expected, e->seen);
            break;
        }
        snprintf(text, bytes,
                 "rank %d, %s: the tensors hold %" PRId64 " rows, %" PRId64
                 " are needed (tensors in ordinary memory also need max_recv_tokens)",
                 group->rank, phase, e->seen, e->expected);
        break;
    case EPX_ERR_USAGE:
        snprintf(text, bytes,
                 "rank %d: rank %d is masked on this rank only: high throughput needs epx_group_error_clear on all "
                 "remaining ranks first",
                 group->rank, e->peer);
        break;
    case EPX_ERR_ARGUMENT:
        snprintf(text, bytes,
                 "rank %d: topk_idx[%" PRId64 "][%" PRId64 "]: expected -1 to %" PRId64 ", got %" PRId64
                 "; it was dropped",
                 group->rank, e->detail[0], e->detail[1], e->expected - 1, e->seen);
        break;
    default:
        snprintf(text, bytes, "rank %d, %s: %s", group->rank, phase,
                 e == &group->net_error ? group->net_text : epx_strerror((epx_status)e->status));
    }
}

/* What this rank knows of itself comes first: the message may be cut at its end. */
static void add_stuck(const struct epx_group *group, char *text, size_t bytes)
{
    char found[sizeof(((epx_error_info *)NULL)->message)];

    /* Pairs with the release in group_net_find_stuck(). */
    if (__atomic_load_n(&group->stuck_state, __ATOMIC_ACQUIRE) != STUCK_YES)
        return;
    snprintf(found, sizeof(found), "%s", text);
    if (snprintf(text, bytes, "%s; ", group->stuck_text) < (int)bytes)
        snprintf(text + strlen(text), bytes - strlen(text), "%s", found);
}

epx_status error_read(const struct epx_group *group, epx_error_info *info)
{
    const struct error_record *e = &group->net_error;
    epx_error_info out = EPX_ERROR_INFO_INIT;

    out.rank = group->rank;
    out.peer = -1;
    /* An error of the network comes first: kernels then report only that they were aborted. Pairs with the release in
     * error_record_net(). */
    if (__atomic_load_n(&e->state, __ATOMIC_ACQUIRE) != ERROR_SET)
        e = group->error;
    /* Pairs with the release in report(), or in error_record_net(). */
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

epx_status error_of_abort(const struct epx_group *group, uint64_t word, epx_error_info *info)
{
    const struct error_record e = {.status = EPX_ERR_PEER,
                                   .phase = PHASE_NONE,
                                   .peer = ABORT_CULPRIT(word) == group->rank ? -1 : ABORT_CULPRIT(word),
                                   .detail = {ABORT_STATUS(word), (int64_t)word}};

    info->status = e.status;
    info->peer = e.peer;
    write_message(group, &e, info->message, sizeof(info->message));
    return EPX_ERR_PEER;
}

void error_record_net(struct epx_group *group, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct error_record *e = &group->net_error;
    uint32_t none = ERROR_NONE;

    /* Acquire: pairs with the release in errors_clear(). */
    if (!__atomic_compare_exchange_n(&e->state, &none, ERROR_WRITING, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return;
    e->status = status;
    e->phase = PHASE_NET;
    e->peer = peer;
    e->expected = expected;
    e->seen = seen;
    e->detail[0] = status;
    e->detail[1] = 0;
    snprintf(group->net_text, sizeof(group->net_text), "%s", text);
    __atomic_store_n(&e->state, ERROR_SET, __ATOMIC_RELEASE); /* pairs with the acquire in error_read() */
}

/* The records first: whoever claims one afterwards finds it empty. */
epx_status errors_clear(struct epx_group *group)
{
    static const uint32_t none;
    uint32_t *reported = &group->shadow.state->reported;

    __atomic_store_n(&group->stuck_state, STUCK_UNKNOWN, __ATOMIC_RELAXED);
    __atomic_store_n(&group->gave_up, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&group->net_error.state, ERROR_NONE,
                     __ATOMIC_RELEASE); /* pairs with the claim in error_record_net() */
    __atomic_store_n(&group->error->state, ERROR_NONE, __ATOMIC_RELEASE); /* pairs with report(), which claims after: */
    if (!(group->device->ops->caps & DEVICE_HOST_ACCESS))
        return group->device->ops->copy(group->device, reported, &none, sizeof(none));
    __atomic_store_n(reported, none, __ATOMIC_RELEASE); /* pairs with the claim in report() */
    return EPX_OK;
}
