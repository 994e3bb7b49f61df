/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous errors: what kernels recorded, as a sentence; and starting over after a failure. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/group.h"
#include "api/registry.h"
#include "api/structs.h"
#include "util/status.h"

static const char *const phase_names[PHASE_COUNT] = {
    [PHASE_NONE] = "none",
    [PHASE_LL_SLOT] = "ll dispatch: wait for free slot",
    [PHASE_LL_DATA] = "ll dispatch: wait for data",
    [PHASE_LL_DONE] = "ll dispatch: wait for readers",
    [PHASE_LC_SLOT] = "ll combine: wait for free slot",
    [PHASE_LC_DATA] = "ll combine: wait for data",
    [PHASE_LC_DONE] = "ll combine: wait for readers",
    [PHASE_HN_SLOT] = "ht update: wait for free slot",
    [PHASE_HN_DATA] = "ht update: wait for counts",
    [PHASE_HD_READY] = "ht dispatch: wait for receiver",
    [PHASE_HD_DATA] = "ht dispatch: wait for data",
    [PHASE_HC_DATA] = "ht combine: wait for data",
    [PHASE_HC_DONE] = "ht combine: wait for readers",
    [PHASE_AGENTS] = "wait for own agents",
    [PHASE_ROUTING] = "routing",
};

static const char *const agreement_fields[] = {"bytes per row", "dtype",  "scale bytes per row",
                                               "top-k",         "layout", "weights and direction"};

static const char *phase_name(int phase)
{
    return phase >= 0 && phase < PHASE_COUNT ? phase_names[phase] : "unknown";
}

static void write_message(const struct epx_group *group, const struct error_record *e, char *text, size_t bytes)
{
    const char *phase = phase_name(e->phase);

    switch (e->status) {
    case EPX_ERR_TIMEOUT:
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
        snprintf(text, bytes, "rank %d, %s: rank %d has %s = %" PRId64 " where this rank has %" PRId64, group->rank,
                 phase, e->peer, agreement_fields[e->detail[0] >= 0 && e->detail[0] < 6 ? e->detail[0] : 5], e->seen,
                 e->expected);
        break;
    case EPX_ERR_OVERFLOW:
        snprintf(text, bytes,
                 "rank %d, %s: the receive tensors hold %" PRId64 " rows, %" PRId64
                 " are needed (tensors in ordinary memory also need max_recv_tokens)",
                 group->rank, phase, e->seen, e->expected);
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

/* EPX_OK when kernels have recorded nothing. */
static epx_status read_error(const struct epx_group *group, epx_error_info *info)
{
    const struct error_record *e = group->error;
    epx_error_info out = EPX_ERROR_INFO_INIT;

    out.rank = group->rank;
    out.peer = -1;
    /* Pairs with the release in report(). */
    if (__atomic_load_n(&e->state, __ATOMIC_ACQUIRE) == ERROR_SET) {
        out.status = e->status;
        out.peer = e->peer;
        out.expected = e->expected;
        out.seen = e->seen;
        snprintf(out.phase, sizeof(out.phase), "%s", phase_name(e->phase));
        write_message(group, e, out.message, sizeof(out.message));
    }
    *info = out;
    return (epx_status)out.status;
}

epx_status epx_group_error(epx_group *group, epx_error_info *out)
{
    epx_error_info info;
    epx_status status = group_check(group, "epx_group_error");

    if (status != EPX_OK)
        return status;
    status = read_error(group, &info);
    if (out) {
        epx_status copied = struct_out(out, &info, sizeof(info), "epx_error_info");
        if (copied != EPX_OK)
            return copied;
    }
    return status == EPX_OK ? EPX_OK : fail(status, "%s", info.message);
}

/* The own abort word: set exactly when an operation was ended. */
static uint64_t abort_word(struct epx_group *group)
{
    uint64_t word = 0;
    char *at = (char *)group->heap.base + offsetof(struct control, abort_word);

    if (group->device->ops->caps & DEVICE_HOST_ACCESS)
        return __atomic_load_n((uint64_t *)at, __ATOMIC_ACQUIRE);
    group->device->ops->copy(group->device, &word, at, sizeof(word));
    return word;
}

epx_status group_usable(struct epx_group *group)
{
    epx_error_info info;
    const uint64_t word = abort_word(group);

    if (!word)
        return EPX_OK;
    if (read_error(group, &info) != EPX_OK)
        return fail((epx_status)info.status, "the group has failed (epx_group_error_clear starts over): %s",
                    info.message);
    return fail(EPX_ERR_PEER, "the group has failed (epx_group_error_clear starts over): rank %d reported: %s",
                ABORT_RANK(word), epx_strerror((epx_status)ABORT_STATUS(word)));
}

static epx_status reset_device(struct epx_group *group, const uint64_t *epochs, int unmask)
{
    const struct device_ops *ops = group->device->ops;
    const size_t per_kind = (size_t)group->set.inflight * (size_t)group->nranks;
    const size_t words = (size_t)SIG_COUNT * per_kind;
    struct group_state state;
    struct signal *signals = calloc(words, sizeof(*signals));
    int32_t *ones = malloc((size_t)group->nranks * sizeof(*ones));
    epx_status status = signals && ones ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory to reset %zu signals", words);
    static const uint64_t no_abort = 0;
    /* Every signal stands at the epoch of its operation: nothing is outstanding. */
    static const int op_of[SIG_COUNT] = {OP_LL_DISPATCH, OP_LL_DISPATCH, OP_LL_COMBINE,  OP_LL_COMBINE, OP_HT_NOTIFY,
                                         OP_HT_NOTIFY,   OP_HT_DISPATCH, OP_HT_DISPATCH, OP_HT_COMBINE, OP_HT_COMBINE};

    if (status != EPX_OK)
        goto out;
    memset(&state, 0, sizeof(state));
    memcpy(state.epoch, epochs, sizeof(state.epoch));
    for (int r = 0; r < group->nranks; r++)
        ones[r] = 1;
    for (size_t i = 0; i < words; i++)
        signals[i].value = epochs[op_of[i / per_kind]];
    status = ops->copy(group->device, group->shadow.state, &state, sizeof(state));
    if (status == EPX_OK)
        status =
            ops->copy(group->device, (char *)group->heap.base + group->plan.signals, signals, words * sizeof(*signals));
    if (status == EPX_OK)
        status = ops->copy(group->device, (char *)group->heap.base + offsetof(struct control, abort_word), &no_abort,
                           sizeof(no_abort));
    if (status == EPX_OK && unmask)
        status = ops->copy(group->device, group->shadow.mask, ones, (size_t)group->nranks * sizeof(*ones));

out:
    free(ones);
    free(signals);
    return status;
}

/* The greatest epoch of each operation over all ranks. */
static epx_status gather_epochs(struct epx_group *group, uint64_t *epochs)
{
    struct group_state state;
    uint64_t *all = calloc((size_t)group->nranks, sizeof(state.epoch));
    epx_status status = all ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory for the epochs of %d ranks", group->nranks);

    if (status == EPX_OK)
        status = group->device->ops->copy(group->device, &state, group->shadow.state, sizeof(state));
    if (status == EPX_OK)
        status = boot_allgather(group->boot, state.epoch, all, sizeof(state.epoch));
    for (int i = 0; status == EPX_OK && i < OP_COUNT; i++) {
        epochs[i] = 0;
        for (int r = 0; r < group->nranks; r++)
            if (all[r * OP_COUNT + i] > epochs[i])
                epochs[i] = all[r * OP_COUNT + i];
    }
    free(all);
    return status;
}

epx_status group_resync(struct epx_group *group, int unmask)
{
    uint64_t epochs[OP_COUNT];
    char token = 0, *tokens = malloc((size_t)group->nranks);
    epx_status status = tokens ? EPX_OK : fail(EPX_ERR_MEMORY, "no memory for %d ranks", group->nranks);

    if (status == EPX_OK)
        status = group->device->ops->stream_sync(group->device, group->default_stream);
    if (status == EPX_OK && group->last_stream)
        status = group->device->ops->stream_sync(group->device, group->last_stream);
    /* First meeting: all are idle, nobody writes signals any more. Second: all have reset. */
    if (status == EPX_OK)
        status = gather_epochs(group, epochs);
    if (status == EPX_OK)
        status = reset_device(group, epochs, unmask);
    if (status == EPX_OK)
        status = boot_allgather(group->boot, &token, tokens, 1);
    free(tokens);
    if (status != EPX_OK)
        return status;
    for (struct epx_handle *h = group->handles; h; h = h->next) {
        h->staged = STAGED_NONE;
        h->dispatched = 0;
        h->updates = __atomic_load_n(&h->info->epoch, __ATOMIC_ACQUIRE);
        h->ntokens = -1;
    }
    memset(group->error, 0, sizeof(*group->error));
    return EPX_OK;
}

epx_status epx_group_error_clear(epx_group *group)
{
    epx_status status = group_check(group, "epx_group_error_clear");

    if (status != EPX_OK)
        return status;
    if (abort_word(group))
        return group_resync(group, 0);
    __atomic_store_n(&group->error->state, ERROR_NONE, __ATOMIC_RELEASE);
    return EPX_OK;
}
