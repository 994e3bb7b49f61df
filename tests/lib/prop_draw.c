/* SPDX-License-Identifier: Apache-2.0 */
/* Property tests: drawing a case from a number. */
#include <string.h>

#include "prop.h"

int prop_draw(struct prop_rng *rng, int n)
{
    rng->state = workload_hash(rng->state, 0x70726f70);
    return n > 0 ? (int)((rng->state >> 33) % (uint64_t)n) : 0;
}

int prop_chance(struct prop_rng *rng, int percent)
{
    return prop_draw(rng, 100) < percent;
}

static int draw_ranks(struct prop_rng *rng, int most)
{
    int n = prop_chance(rng, 6) ? 9 + prop_draw(rng, 24) : prop_chance(rng, 2) ? 64 : 1 + prop_draw(rng, 8);

    return n < most ? n : most;
}

/* How many elements of the narrowest row, dispatched or returned, make 16 bytes. */
static int hidden_unit(const struct prop_handle *h)
{
    size_t out = tensor_element_size(h->out_dtype), back = tensor_element_size(h->result_dtype);

    return 16 / (int)(out < back ? out : back);
}

/* Rows of a multiple of 16 bytes; often not of 128 elements. */
static int draw_hidden(struct prop_rng *rng, int unit)
{
    switch (prop_draw(rng, 8)) {
    case 0:
        return unit;
    case 1:
        return 7168;
    case 2:
        return 128 * (1 + prop_draw(rng, 16));
    case 3:
        return unit * (1 + prop_draw(rng, 2048 / unit));
    default:
        return unit * (1 + prop_draw(rng, 512 / unit));
    }
}

static int draw_float_dtype(struct prop_rng *rng)
{
    static const int dtypes[] = {EPX_BF16, EPX_BF16, EPX_FP16, EPX_FP32};

    return dtypes[prop_draw(rng, 4)];
}

/* What travels: plain, cast to fp8 by EPX, or the caller's own fp8. */
static void draw_payload(struct prop_handle *h, struct prop_rng *rng)
{
    struct workload *w = &h->w;
    int kind = prop_draw(rng, 5);

    w->dtype = kind == 0 ? EPX_FP8_E4M3 : kind == 1 ? EPX_BF16 : draw_float_dtype(rng);
    h->out_dtype = kind <= 1 ? EPX_FP8_E4M3 : w->dtype;
    w->scale_dtype = h->out_scale_dtype = prop_chance(rng, 50) ? EPX_FP32 : EPX_INT32;
    h->round_scale = prop_chance(rng, 50);
    h->result_dtype = h->out_dtype == EPX_FP8_E4M3 || prop_chance(rng, 20) ? draw_float_dtype(rng) : w->dtype;
    w->hidden = draw_hidden(rng, hidden_unit(h));
    w->values = (enum workload_values)prop_draw(rng, 3);
}

static void draw_routing(struct prop_handle *h, struct prop_rng *rng, int nranks, int experts)
{
    static const int topks[] = {1, 2, 4, 8, 8, 32};
    struct workload *w = &h->w;

    w->nranks = nranks;
    w->experts = experts;
    w->topk = prop_chance(rng, 60) ? topks[prop_draw(rng, 6)] : 1 + prop_draw(rng, EPX_MAX_TOPK);
    w->routing = (enum workload_routing)prop_draw(rng, 3);
    w->hot_experts = prop_chance(rng, 50) ? 1 + prop_draw(rng, 2) : 0;
    w->uneven = prop_chance(rng, 60);
    w->hole_percent = prop_chance(rng, 40) ? 1 + prop_draw(rng, 100) : 0;
    w->max_tokens = prop_chance(rng, 10) ? 0 : 1 + prop_draw(rng, prop_chance(rng, 30) ? 100 : 12);
    w->duplicates = prop_chance(rng, 20);
}

static void draw_options(struct prop_handle *h, struct prop_rng *rng)
{
    int low_latency = h->mode == EPX_LOW_LATENCY;

    h->flags = prop_chance(rng, 50) && h->layout != EPX_EXPERT_MAJOR ? EPX_HANDLE_COMPACT_TOPK : 0;
    h->alignment = h->layout == EPX_EXPERT_MAJOR && !low_latency ? 1 << prop_draw(rng, 6) : 0;
    h->weights = prop_chance(rng, 60);
    h->idx_out = prop_chance(rng, 60) && h->layout != EPX_EXPERT_MAJOR;
    h->src_out = prop_chance(rng, 60);
    h->biases = prop_chance(rng, 30) ? 1 + prop_draw(rng, 2) : 0;
    h->logfmt = low_latency && h->result_dtype == EPX_BF16 && prop_chance(rng, 40);
    h->backward = !low_latency && prop_chance(rng, 30);
    h->staged_dispatch = low_latency && prop_chance(rng, 40);
    h->staged_combine = low_latency && prop_chance(rng, 40);
    h->async = prop_chance(rng, 30);
    h->streams = (enum prop_streams)prop_draw(rng, 3);
    h->in_epx_alloc = prop_chance(rng, 30) ? 100 : prop_chance(rng, 50) ? 50 : 0;
}

static void draw_handle(struct prop_handle *h, struct prop_rng *rng, const struct prop_case *c, int mode, int experts)
{
    memset(h, 0, sizeof(*h));
    h->mode = mode;
    if (mode == EPX_LOW_LATENCY)
        h->layout = prop_chance(rng, 60) ? EPX_EXPERT_MAJOR : EPX_RANK_MAJOR;
    else
        h->layout = prop_chance(rng, 50) ? EPX_EXPERT_MAJOR : EPX_FLAT;
    draw_payload(h, rng);
    draw_routing(h, rng, c->nranks, experts);
    draw_options(h, rng);
    h->recv_tensor = mode == EPX_HIGH_THROUGHPUT && c->nhandles == 1 && prop_chance(rng, 30);
    h->w.seed = rng->state;
    /* By the seed: a draw more would make other cases of all seeds. */
    h->round_ranks = mode == EPX_HIGH_THROUGHPUT && h->layout == EPX_EXPERT_MAJOR && h->w.seed & 1;
}

static void draw_case(struct prop_case *c, uint64_t seed, int modes, int ranks, int max_ranks)
{
    struct prop_rng rng = {workload_hash(seed, 0xca5e)};
    int experts;

    memset(c, 0, sizeof(*c));
    c->seed = seed;
    c->nranks = ranks ? ranks : draw_ranks(&rng, max_ranks);
    c->nhandles = prop_chance(&rng, 70) ? 1 : 2 + prop_draw(&rng, PROP_MAX_HANDLES - 1);
    c->ngroups = c->nhandles > 1 && prop_chance(&rng, 30) ? 2 : 1;
    c->updates = 1 + prop_draw(&rng, PROP_MAX_UPDATES);
    c->pairs = 1 + prop_draw(&rng, 3);
    c->num_agents = 1 + prop_draw(&rng, 4);
    c->max_inflight = prop_chance(&rng, 50) ? 0 : 1 + prop_draw(&rng, 4);
    c->spare_tokens = prop_chance(&rng, 40) ? 1 + prop_draw(&rng, 5) : 0;
    c->bounded = prop_chance(&rng, 40);
    c->enable_mask = prop_chance(&rng, 20);
    c->registered = (int)(workload_hash(seed, 0x1e4d) & 1); /* not of rng: seeds mean what they meant before */
    /* Often the least, now and then some more; of numbers of their own, as above. */
    const uint64_t least = workload_hash(seed, 0xb0f) % 8;
    c->ht_buffer_bytes = least < 3 ? 1 : least < 6 ? (uint64_t)1 << (12 + workload_hash(seed, 0xb0e) % 10) : 0;
    const uint64_t node = workload_hash(seed, 0xb0d) % 8;
    c->ht_node_bytes = node < 3 ? 1 : node < 6 ? (uint64_t)1 << (12 + workload_hash(seed, 0xb0c) % 8) : 0;
    c->modes = prop_chance(&rng, 50) ? (uint32_t)modes : 0;
    experts = prop_chance(&rng, 50) ? c->nranks * (1 + prop_draw(&rng, 8)) : 1 + prop_draw(&rng, 8 * c->nranks);
    for (int i = 0; i < c->nhandles; i++) {
        int mode = modes == (EPX_LOW_LATENCY | EPX_HIGH_THROUGHPUT) ? 1 << prop_draw(&rng, 2) : modes;
        draw_handle(&c->handle[i], &rng, c, mode, experts);
    }
    prop_shrink(c);
}

void prop_draw_case(struct prop_case *c, uint64_t seed, int modes, int max_ranks)
{
    draw_case(c, seed, modes, 0, max_ranks);
}

void prop_draw_case_of(struct prop_case *c, uint64_t seed, int modes, int ranks)
{
    draw_case(c, seed, modes, ranks, ranks);
}

void prop_widen(struct prop_case *c)
{
    c->apart = 1;
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        if (h->alignment && h->w.seed & 2)
            h->alignment += (int)(h->w.seed >> 2 & 7);
    }
}

/* Bytes of the largest tensor of one rank, roughly, with `extra` more tokens per rank than the workload has. */
static double tensor_bytes(const struct prop_handle *h, int extra)
{
    const struct workload *w = &h->w;
    double tokens = (double)w->nranks * (w->max_tokens + extra);
    double copies = h->layout != EPX_EXPERT_MAJOR ? 1
                    : h->mode == EPX_LOW_LATENCY
                        ? workload_local_experts(w)
                        : (w->topk < workload_local_experts(w) || w->duplicates ? w->topk : workload_local_experts(w));

    return tokens * copies * w->hidden * (double)tensor_element_size(h->result_dtype);
}

/* Staged operations of all handles are in flight at once: the group must allow as many. */
static void allow_staging(struct prop_case *c)
{
    int staged = 0;

    for (int i = 0; i < c->nhandles; i++)
        staged |= c->handle[i].staged_dispatch || c->handle[i].staged_combine;
    if (staged && (c->max_inflight ? c->max_inflight : 2) < c->nhandles)
        c->max_inflight = c->nhandles;
}

/* Of the caller's own fp8. A row of so many scales fits in every group. */
static int scale_count(const struct prop_handle *h)
{
    const int most = (h->w.hidden + 127) / 128;

    if (h->own_scales)
        return h->own_scales < most ? h->own_scales : most;
    return h->w.scale_dtype == EPX_FP32 ? most : (h->w.hidden + 511) / 512;
}

/* All ranks' tensors of one handle stay below some 24 MiB: fewer tokens first, then less hidden. */
void prop_shrink(struct prop_case *c)
{
    double most = 24e6 / c->nhandles / c->nranks;
    int tokens = 0;

    allow_staging(c);
    /* A token that names an expert twice can exceed the default worst case of high throughput's expert-major layout. */
    for (int i = 0; i < c->nhandles; i++)
        c->bounded |= c->handle[i].w.duplicates && c->handle[i].layout == EPX_EXPERT_MAJOR &&
                      c->handle[i].mode == EPX_HIGH_THROUGHPUT;
    /* The group has one M, the largest of its handles: shrink to that. */
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];

        while (tensor_bytes(h, c->spare_tokens) > most && h->w.max_tokens > 4)
            h->w.max_tokens = h->w.max_tokens * 3 / 4;
        tokens = h->w.max_tokens > tokens ? h->w.max_tokens : tokens;
    }
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        int unit = hidden_unit(h);

        if (h->w.max_tokens == 0 && tokens == 0)
            h->w.uneven = 0;
        while (tensor_bytes(h, c->spare_tokens + tokens - h->w.max_tokens) > most && h->w.hidden > unit)
            h->w.hidden = (h->w.hidden / 2 + unit - 1) / unit * unit;
        h->w.scale_count = scale_count(h);
    }
}

/* ---- Changes -------------------------------------------------------------------------------------------------- */

void prop_force_plain(struct prop_case *c, struct prop_rng *rng)
{
    struct prop_handle *h = &c->handle[0];

    (void)rng;
    c->nhandles = c->ngroups = 1;
    h->async = 0;
    h->streams = PROP_DEFAULT_STREAM;
    h->w.dtype = h->out_dtype = h->result_dtype = EPX_BF16;
    h->w.hidden = (h->w.hidden + 7) / 8 * 8;
}

/* Scales of any number, not one for so many channels. */
void prop_force_own_fp8(struct prop_case *c, struct prop_rng *rng)
{
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->w.dtype = h->out_dtype = EPX_FP8_E4M3;
        h->w.hidden = (h->w.hidden + 15) / 16 * 16;
        h->own_scales = 1 + prop_draw(rng, prop_chance(rng, 50) ? 3 : 60);
    }
}

/* Rows of a cast have a multiple of 16 channels. */
void prop_force_cast(struct prop_case *c, struct prop_rng *rng)
{
    static const int dtypes[] = {EPX_BF16, EPX_BF16, EPX_FP16, EPX_FP32};

    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->w.dtype = dtypes[prop_draw(rng, 4)];
        h->out_dtype = EPX_FP8_E4M3;
        h->w.hidden = (h->w.hidden + 15) / 16 * 16;
    }
}

/* Nobody has room for all rows that can come, and no token has two rows in one place, for that would need it. */
void prop_force_in_reach(struct prop_case *c, struct prop_rng *rng)
{
    c->bounded = 0;
    c->registered = prop_chance(rng, 50);
    c->ht_node_bytes = prop_chance(rng, 60) ? 1 : (uint64_t)1 << (10 + prop_draw(rng, 8));
    c->pairs += c->pairs < 3;
    for (int i = 0; i < c->nhandles; i++) {
        struct prop_handle *h = &c->handle[i];
        h->recv_tensor = 0;
        h->in_reach = 20 * (2 + prop_draw(rng, 4));
        h->in_epx_alloc = prop_chance(rng, 60) ? 0 : 10 + prop_draw(rng, 40);
        if (h->layout == EPX_EXPERT_MAJOR)
            h->w.duplicates = 0;
        if (h->w.dtype != EPX_FP8_E4M3 && !prop_chance(rng, 20))
            h->out_dtype = h->w.dtype; /* a cast is made in windows */
    }
    prop_shrink(c);
}

void prop_force_many_ranks(struct prop_case *c, struct prop_rng *rng, int max_tokens)
{
    const int ranks = prop_chance(rng, 30) ? 64 : 9 + prop_draw(rng, 56);
    struct workload *w = &c->handle[0].w;

    c->nranks = ranks;
    c->nhandles = c->ngroups = 1;
    c->updates = 1;
    c->num_agents = 1 + prop_draw(rng, 2);
    w->nranks = ranks;
    w->experts = prop_chance(rng, 50) ? ranks : 1 + prop_draw(rng, 3 * ranks);
    w->max_tokens = 1 + prop_draw(rng, max_tokens);
}
