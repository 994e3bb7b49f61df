/* SPDX-License-Identifier: Apache-2.0 */
#include "plan.h"

#include <string.h>

enum { MOST_BYTES = 4096, MOST_ROWS_BYTES = 1 << 18 };

/* ---- Formats ----------------------------------------------------------------------------------------------------- */

static int draw_float(struct draw *d)
{
    static const int dtypes[] = {EPX_BF16, EPX_BF16, EPX_FP16, EPX_FP32};

    return dtypes[draw(d, 4)];
}

static int element(int dtype)
{
    return dtype == EPX_FP32 ? 4 : dtype == EPX_FP8_E4M3 ? 1 : 2;
}

/* Elements of a row: the sender's has a multiple of 16 bytes, and what travels has at most max_hidden_bytes. */
static int draw_hidden(struct draw *d, int bytes, int in, int out)
{
    const int unit = 16 / element(in), most = bytes / element(out) / unit;

    switch (draw(d, 4)) {
    case 0:
        return unit;
    case 1:
        return unit * most;
    default:
        return unit * (1 + draw(d, most));
    }
}

static void draw_values(struct draw *d, struct format *f)
{
    f->values = (enum workload_values)draw(d, 3);
    f->special = chance(d, 15);
}

/* Of a row whose sender has them: as many as the group takes. */
static int draw_scales(struct draw *d, int bytes, int low, int H)
{
    const int channels = low ? 128 : 64, by_channels = (bytes + channels - 1) / channels, beside = (bytes - H) / 4,
              most = by_channels > beside ? by_channels : beside;

    return most < 1 ? 0 : chance(d, 30) ? most : 1 + draw(d, most);
}

/* Two codes a byte, and a word of four scales for 64 elements. */
static void draw_nvfp4(struct draw *d, int bytes, struct format *f)
{
    const int most = bytes / 2 / 64;

    f->nvfp4 = chance(d, 50) ? EPX_NVFP4_ROWS : EPX_NVFP4_TILES;
    f->dtype = EPX_BF16;
    f->out = EPX_UINT8;
    f->H = 64 * (chance(d, 30) ? most : 1 + draw(d, most));
    f->scale_dtype = EPX_INT32;
    f->scales = f->H / 64;
}

static void draw_dispatch_format(struct draw *d, const struct plan *p, int low, struct format *f)
{
    const int what = draw(d, 4);

    draw_values(d, f);
    if (low && p->bytes >= 128 && chance(d, 25)) {
        draw_nvfp4(d, p->bytes, f);
        return;
    }
    f->dtype = what == 0 ? EPX_FP8_E4M3 : draw_float(d);
    f->out = what <= 1 ? EPX_FP8_E4M3 : f->dtype;
    f->H = draw_hidden(d, p->bytes, f->dtype, f->out);
    f->scale_dtype = chance(d, 50) ? EPX_FP32 : EPX_INT32;
    f->round_scale = chance(d, 50);
    if (what == 0) {
        f->scales = draw_scales(d, p->bytes, low, f->H);
        if (f->scales)
            return;
        f->dtype = f->out = EPX_BF16;
        f->H = 8;
    } else if (what == 1) {
        f->scales = f->scale_dtype == EPX_FP32 ? (f->H + 127) / 128 : (f->H + 511) / 512;
    }
}

static void draw_combine_format(struct draw *d, const struct plan *p, int low, struct format *f)
{
    const int what = low ? draw(d, 4) : 3;

    draw_values(d, f);
    f->dtype = f->out = what < 2 ? EPX_BF16 : draw_float(d);
    f->H = draw_hidden(d, p->bytes, f->dtype, f->out);
    f->logfmt = what == 0;
    if (what == 1 && f->H >= 16) {
        f->nvfp4 = 1;
        f->H = f->H / 16 * 16;
    }
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* What has been issued before a step. Operations are counted by group and kind (0: dispatch, 1: combine). */
struct state {
    int routed[MOST_HANDLES], dispatched[MOST_HANDLES];
    int staged[MOST_HANDLES], kind[MOST_HANDLES], number[MOST_HANDLES];
    int issued[MOST_GROUPS][2];
    int masked[MOST_GROUPS], cleared[MOST_GROUPS];
};

static struct step *next_step(struct plan *p, struct draw *d, enum kind kind, int handle)
{
    struct step *s = &p->step[p->nsteps++];

    memset(s, 0, sizeof(*s));
    s->kind = kind;
    s->handle = handle;
    s->seed = workload_hash(d->state, (uint64_t)p->nsteps);
    s->stream = draw(d, 3);
    return s;
}

/* A low-latency operation takes the slot of the one max_inflight before it, of its kind, which must not be staged. */
static int is_blocked(const struct plan *p, const struct state *at, int group, int kind)
{
    for (int h = 0; h < p->nhandles; h++)
        if (at->staged[h] && p->handle[h].group == group && at->kind[h] == kind &&
            at->issued[group][kind] + 1 - at->number[h] >= (p->inflight ? p->inflight : 2))
            return 1;
    return 0;
}

/* Half of the operations that may be staged are. */
static void issue(const struct plan *p, struct draw *d, struct state *at, struct step *s)
{
    const int group = p->handle[s->handle].group, kind = s->kind == COMBINE;

    s->staged = is_low(&p->handle[s->handle]) && chance(d, 40);
    s->busy = is_low(&p->handle[s->handle]) && is_blocked(p, at, group, kind);
    if (s->busy || !is_low(&p->handle[s->handle]))
        return;
    at->number[s->handle] = ++at->issued[group][kind];
    at->kind[s->handle] = kind;
    at->staged[s->handle] = s->staged;
}

static struct step *add_dispatch(struct plan *p, struct draw *d, struct state *at, int handle)
{
    const struct handle_plan *h = &p->handle[handle];
    struct step *s = next_step(p, d, DISPATCH, handle);

    draw_dispatch_format(d, p, is_low(h), &s->f);
    s->backward = !is_low(h) && chance(d, 15);
    s->weights = !s->backward && !(is_low(h) && is_major(h)) && chance(d, 60);
    s->idx = !s->backward && !is_major(h) && chance(d, 60);
    s->src = draw(d, 4);
    s->global_ids = chance(d, 30);
    s->recv = !is_low(h) && chance(d, 20);
    s->map = !is_low(h) && (!is_major(h) || h->flags & EPX_HANDLE_SOURCE_MAP) && chance(d, 50);
    issue(p, d, at, s);
    if (!s->busy)
        at->dispatched[handle] = 1;
    return s;
}

static void add_update(struct plan *p, struct draw *d, struct state *at, int handle)
{
    struct step *s = next_step(p, d, UPDATE, handle);

    s->counts = !is_low(&p->handle[handle]) && chance(d, 60);
    s->expect = !is_low(&p->handle[handle]) && chance(d, 25) ? 1 + draw(d, 2) : 0;
    at->routed[handle] = 1;
    at->dispatched[handle] = 0;
    if (s->expect)
        add_dispatch(p, d, at, handle)->if_expected = 1;
}

static uint32_t draw_sum(struct draw *d)
{
    static const uint32_t sums[] = {0,
                                    0,
                                    EPX_SUM_ROUND_RANKS,
                                    EPX_SUM_TOPK_ORDER,
                                    EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_RANKS,
                                    EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_NODES,
                                    EPX_SUM_TOPK_ORDER | EPX_SUM_ROUND_RANKS | EPX_SUM_ROUND_NODES};

    return sums[draw(d, 7)];
}

static void add_combine(struct plan *p, struct draw *d, struct state *at, int handle)
{
    const struct handle_plan *h = &p->handle[handle];
    struct step *s = next_step(p, d, COMBINE, handle);

    draw_combine_format(d, p, is_low(h), &s->f);
    s->backward = !is_low(h) && chance(d, 15);
    s->weights = !is_low(h) && (s->backward || chance(d, 50));
    s->biases = chance(d, 30) ? 1 + draw(d, 2) : 0;
    s->skips = is_low(h) && is_major(h) && chance(d, 25);
    s->signals = is_low(h) && is_major(h) && !s->f.logfmt && chance(d, 25);
    s->recv = !is_low(h) && chance(d, 20);
    s->sum = is_low(h) ? 0 : draw_sum(d);
    issue(p, d, at, s);
}

static void add_complete(struct plan *p, struct draw *d, struct state *at, int handle)
{
    next_step(p, d, COMPLETE, handle);
    at->staged[handle] = 0;
}

/* A step of all handles of a group, none of which has a staged operation. All need an update then. */
static struct step *add_membership(struct plan *p, struct draw *d, struct state *at, enum kind kind, int handle)
{
    const int group = p->handle[handle].group;

    for (int h = 0; h < p->nhandles; h++) {
        if (p->handle[h].group != group)
            continue;
        if (at->staged[h])
            add_complete(p, d, at, h);
        at->routed[h] = at->dispatched[h] = 0;
    }
    at->masked[group] = kind == MASK || kind == CLEAR;
    at->cleared[group] = kind == CLEAR;
    return next_step(p, d, kind, handle);
}

/* 0: this handle goes on as usual. */
static int draw_membership(struct plan *p, struct draw *d, struct state *at, int handle)
{
    const int group = p->handle[handle].group;
    struct step *s;

    if (!p->mask || p->R < 2 || p->nsteps > MOST_STEPS / 2)
        return at->masked[group] && !at->cleared[group] && !is_low(&p->handle[handle]);
    if (!at->masked[group] && chance(d, 15)) {
        s = add_membership(p, d, at, MASK, handle);
        s->rank = draw(d, p->R);
        s->again = chance(d, 25);
        at->masked[group] = !s->again;
        return 1;
    }
    if (!at->masked[group] && chance(d, 10)) {
        for (int h = 0; h < p->nhandles; h++)
            if (at->staged[h])
                add_complete(p, d, at, h);
        s = add_membership(p, d, at, JOIN, handle);
        s->rank = draw(d, p->R);
        return 1;
    }
    if (at->masked[group] && chance(d, 20)) {
        const int cleared = at->cleared[group];

        s = add_membership(p, d, at, cleared || chance(d, 40) ? CLEAN : CLEAR, handle);
        s->again = (s->kind == CLEAN && cleared) || chance(d, 40);
        s->counts = chance(d, 50);
        return 1;
    }
    return at->masked[group] && !at->cleared[group] && !is_low(&p->handle[handle]);
}

static void add_step(struct plan *p, struct draw *d, struct state *at)
{
    const int handle = draw(d, p->nhandles), what = draw(d, 100);

    if (draw_membership(p, d, at, handle))
        return;
    if (what < 12)
        next_step(p, d, SYNC, handle);
    else if (at->staged[handle])
        add_complete(p, d, at, handle);
    else if (!at->routed[handle] || what < 25)
        add_update(p, d, at, handle);
    else if (what < 60 || (is_low(&p->handle[handle]) && !at->dispatched[handle]))
        add_dispatch(p, d, at, handle);
    else
        add_combine(p, d, at, handle);
}

static void draw_steps(struct plan *p, struct draw *d)
{
    const int steps = 3 + draw(d, 20);
    struct state at;

    memset(&at, 0, sizeof(at));
    for (int i = 0; i < 2 * steps && p->nsteps < steps; i++)
        add_step(p, d, &at);
    for (int h = 0; h < p->nhandles; h++)
        if (at.staged[h])
            add_complete(p, d, &at, h);
    next_step(p, d, SYNC, 0);
}

/* ---- Groups and handles ------------------------------------------------------------------------------------------ */

static void draw_handle(struct plan *p, struct draw *d, struct handle_plan *h)
{
    h->group = draw(d, p->ngroups);
    h->mode = p->modes == EPX_LOW_LATENCY || (p->modes != EPX_HIGH_THROUGHPUT && chance(d, 50)) ? EPX_LOW_LATENCY
                                                                                                : EPX_HIGH_THROUGHPUT;
    h->layout = chance(d, 50) ? EPX_EXPERT_MAJOR : is_low(h) ? EPX_RANK_MAJOR : EPX_FLAT;
    h->K = chance(d, 50) ? p->K : 1 + draw(d, p->K);
    h->alignment = is_low(h) || chance(d, 40) ? 0 : 1 + draw(d, 9);
    if (!is_major(h))
        h->flags |= chance(d, 40) ? EPX_HANDLE_COMPACT_TOPK : 0;
    if (h->layout == EPX_RANK_MAJOR && !h->flags && chance(d, 40))
        h->flags |= EPX_HANDLE_ALL_WEIGHTS;
    if (!is_low(h) && is_major(h) && chance(d, 40))
        h->flags |= EPX_HANDLE_SOURCE_MAP;
    if (!is_low(h) && chance(d, 25))
        h->drop = 1 + d->state / 2;
    if (h->drop && is_major(h) && !h->flags && chance(d, 40))
        h->flags |= EPX_HANDLE_DROP_TOKENS;
}

/* Receive tensors stay small: fewer tokens, then shorter rows. */
static void shrink(struct plan *p)
{
    while (p->M > 1 && (int64_t)p->L * p->R * p->M * p->bytes > MOST_ROWS_BYTES)
        p->M = p->M * 2 / 3;
    while (p->bytes > 16 && (int64_t)p->L * p->R * p->M * p->bytes > MOST_ROWS_BYTES)
        p->bytes = p->bytes / 32 * 16;
}

static void draw_sizes(struct plan *p, struct draw *d)
{
    p->L = chance(d, 30) ? 1 : 1 + draw(d, MOST_LOCAL);
    p->E = p->R * p->L - (chance(d, 50) ? 0 : draw(d, p->R));
    p->K = chance(d, 10) ? EPX_MAX_TOPK : 1 + draw(d, 9);
    p->M = chance(d, 20) ? 1 + draw(d, 2) : 1 + draw(d, MOST_TOKENS);
    p->bytes = chance(d, 15) ? 16 : 16 * (1 + draw(d, chance(d, 20) ? MOST_BYTES / 16 : 60));
    shrink(p);
}

void plan_draw(struct plan *p, uint64_t seed, int ranks, const char *net)
{
    struct draw d = {workload_hash(seed, 0x65707864)};

    memset(p, 0, sizeof(*p));
    p->seed = seed;
    p->R = ranks ? ranks : 1 + draw(&d, MOST_RANKS);
    if (p->R > 1 && chance(&d, 50)) {
        p->per_node = 1 + draw(&d, p->R - 1);
        snprintf(p->net, sizeof(p->net), "%s", net);
    }
    draw_sizes(p, &d);
    p->modes = (uint32_t)draw(&d, 4);
    p->ngroups = chance(&d, 20) ? 2 : 1;
    p->inflight = chance(&d, 50) ? 0 : 1 + draw(&d, 3);
    p->agents = 1 + draw(&d, 4);
    p->mask = chance(&d, 20);
    p->bounded = chance(&d, 40);
    p->ht_buffer = chance(&d, 40) ? 1 : 0;
    p->ht_node = chance(&d, 40) ? 1u << draw(&d, 18) : 0;
    p->registered = (int)(workload_hash(seed, 0x1e4d) & 1); /* not of d: seeds mean what they meant before */
    p->nhandles = 1 + draw(&d, MOST_HANDLES);
    for (int h = 0; h < p->nhandles; h++)
        draw_handle(p, &d, &p->handle[h]);
    draw_steps(p, &d);
}

void plan_print(const struct plan *p, FILE *to)
{
    static const char *const kinds[] = {"update", "dispatch", "combine", "complete", "sync",
                                        "mask",   "clear",    "clean",   "join"};

    fprintf(to, "  R %d per_node %d net '%s' E %d L %d M %d K %d bytes %d groups %d modes %u inflight %d agents %d ",
            p->R, p->per_node, p->net, p->E, p->L, p->M, p->K, p->bytes, p->ngroups, p->modes, p->inflight, p->agents);
    fprintf(to, "mask %d bounded %d registered %d ht_buffer %llu ht_node %llu\n", p->mask, p->bounded, p->registered,
            (unsigned long long)p->ht_buffer, (unsigned long long)p->ht_node);
    for (int i = 0; i < p->nhandles; i++) {
        const struct handle_plan *h = &p->handle[i];
        fprintf(to, "  handle %d: group %d mode %d layout %d K %d align %d flags %u drop %d\n", i, h->group, h->mode,
                h->layout, h->K, h->alignment, h->flags, h->drop != 0);
    }
    for (int i = 0; i < p->nsteps; i++) {
        const struct step *s = &p->step[i];
        const struct format *f = &s->f;
        fprintf(to, "  %2d %s handle %d stream %d", i, kinds[s->kind], s->handle, s->stream);
        if (s->kind == DISPATCH || s->kind == COMBINE)
            fprintf(to,
                    " %d->%d H %d scales %d x %d round %d nvfp4 %d logfmt %d values %d%s staged %d back %d weights %d "
                    "idx %d "
                    "src %d map %d biases %d skips %d signals %d recv %d sum %u",
                    f->dtype, f->out, f->H, f->scale_dtype, f->scales, f->round_scale, f->nvfp4, f->logfmt,
                    (int)f->values,
                    f->special ? " special"
                    : s->busy  ? " busy"
                               : "",
                    s->staged, s->backward, s->weights, s->idx, s->src, s->map, s->biases, s->skips, s->signals,
                    s->recv, s->sum);
        fprintf(to, " expect %d if %d rank %d again %d\n", s->expect, s->if_expected, s->rank, s->again);
    }
}
