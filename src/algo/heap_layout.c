/* SPDX-License-Identifier: Apache-2.0 */
#include "algo/heap_layout.h"

#include "device/cpu/math.h"

#include <string.h>

static uint64_t up(uint64_t n, uint64_t align)
{
    return (n + align - 1) / align * align;
}

/* Takes `bytes` at the next multiple of 64. */
static uint64_t take(uint64_t *at, uint64_t bytes)
{
    const uint64_t place = up(*at, 64);
    *at = place + bytes;
    return place;
}

/* Scales of the widest fp8 row: 4 bytes per 128 channels. */
static uint64_t scale_bytes(const struct settings *set)
{
    return up(((uint64_t)set->max_hidden_bytes + 127) / 128 * 4, 16);
}

static void plan_ll_dispatch(const struct settings *set, struct ll_layout *ll)
{
    const uint64_t R = (uint64_t)set->nranks, M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk;
    uint64_t at = sizeof(struct ll_post);

    ll->pitch = up((uint64_t)set->max_hidden_bytes, 16) + scale_bytes(set);
    ll->ecount = take(&at, (uint64_t)set->experts * 4);
    ll->rcount = take(&at, R * 4);
    ll->list = take(&at, R * M * 4);
    ll->ids = take(&at, M * K * 4);
    ll->eidx = take(&at, M * K * 4);
    ll->weights = take(&at, M * K * 4);
    ll->rows = take(&at, M * ll->pitch);
    ll->slot_stride = up(at, 4096);
}

static void plan_ll_combine(const struct settings *set, struct ll_layout *ll)
{
    const uint64_t M = (uint64_t)set->max_tokens, K = (uint64_t)set->max_topk;
    const uint64_t logfmt = math_logfmt_bound(set->max_hidden_bytes / 2);
    uint64_t at = sizeof(struct lc_post);

    ll->cpitch = up((uint64_t)set->max_hidden_bytes, 16);
    if (logfmt > ll->cpitch)
        ll->cpitch = logfmt;
    ll->begin = take(&at, (uint64_t)set->local_experts * (uint64_t)set->nranks * 4);
    ll->landing = take(&at, M * K * ll->cpitch);
    ll->cslot_stride = up(at, 4096);
}

static void plan_ll(const struct settings *set, struct heap_plan *plan, uint64_t *at)
{
    const uint64_t W = (uint64_t)set->inflight;
    const uint64_t start = up(*at, 4096);
    struct ll_layout *ll = &plan->ll;

    plan_ll_dispatch(set, ll);
    plan_ll_combine(set, ll);
    *at = start;
    ll->slots = take(at, W * ll->slot_stride);
    ll->cslots = take(at, W * ll->cslot_stride);
    plan->ll_bytes = *at - start;
    plan->ll_receive_bytes = (uint64_t)set->nranks * (uint64_t)set->max_tokens * ll->pitch +
                             (uint64_t)set->max_tokens * (uint64_t)set->max_topk * ll->cpitch;
}

static void plan_ht(const struct settings *set, struct heap_plan *plan, uint64_t *at)
{
    const uint64_t N = (uint64_t)set->max_recv_tokens, K = (uint64_t)set->max_topk;
    const uint64_t start = up(*at, 4096);
    struct ht_layout *ht = &plan->ht;

    *at = start;
    ht->counts_stride = up(64 + ((uint64_t)set->experts + (uint64_t)set->nranks) * 4, 64);
    ht->counts = take(at, 2 * ht->counts_stride);
    ht->dispatch_post = take(at, sizeof(struct hd_post));
    ht->combine_post = take(at, sizeof(struct hc_post));
    ht->rows = set->max_recv_tokens;
    ht->pitch = up((uint64_t)set->max_hidden_bytes, 16);
    ht->scale_pitch = scale_bytes(set);
    ht->scales = take(at, N * ht->scale_pitch);
    ht->weights = take(at, N * K * 4);
    ht->topk_idx = take(at, N * K * 8);
    ht->src_rank = take(at, N * 4);
    ht->src_token = take(at, N * 4);
    *at = up(*at, 4096);
    ht->tokens = take(at, N * ht->pitch);
    plan->ht_bytes = *at - start;
    plan->ht_receive_bytes = N * (ht->pitch + ht->scale_pitch + K * 12 + 8);
}

void heap_plan_make(const struct settings *set, struct heap_plan *plan)
{
    uint64_t at = sizeof(struct control);

    memset(plan, 0, sizeof(*plan));
    plan->signals =
        take(&at, (uint64_t)SIG_COUNT * (uint64_t)set->inflight * (uint64_t)set->nranks * sizeof(struct signal));
    plan->control_bytes = up(at, 4096);
    if (set->modes & EPX_LOW_LATENCY)
        plan_ll(set, plan, &at);
    if (set->modes & EPX_HIGH_THROUGHPUT)
        plan_ht(set, plan, &at);
    plan->alloc = up(at, 4096);
    plan->total = plan->alloc + up(set->alloc_bytes, 4096);
}
