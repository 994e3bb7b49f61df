/* SPDX-License-Identifier: Apache-2.0 */
/* Routing, places of rows, values. */
#include "model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/oracle.h"

/* ---- Routing ----------------------------------------------------------------------------------------------------- */

/* How the tokens of a routing choose. */
struct taste {
    int holes, repeats, hot;
};

static void draw_idx(struct draw *d, const struct plan *p, int K, const struct taste *taste, int32_t *idx)
{
    for (int k = 0; k < K; k++) {
        int again = 0;

        idx[k] = chance(d, taste->holes) ? -1 : draw(d, taste->hot && taste->hot < p->E ? taste->hot : p->E);
        for (int j = 0; j < k; j++)
            again |= idx[j] == idx[k];
        if (again && !taste->repeats)
            idx[k] = -1;
    }
}

static int draw_tokens(struct draw *d, const struct plan *p)
{
    const int few = chance(d, 30) ? draw(d, 3) : draw(d, p->M + 1);

    return chance(d, 30) ? p->M : few < p->M ? few : p->M;
}

int model_drop(const struct plan *p, const struct handle_plan *h, int rank)
{
    struct draw d = {h->drop + (uint64_t)rank};

    return h->drop ? 1 + draw(&d, p->M * h->K + 9) : 0;
}

static int names(const struct routing *r, const int32_t *idx, int rank)
{
    for (int k = 0; k < r->h->K; k++)
        if (idx[k] >= 0 && idx[k] / r->p->L == rank)
            return 1;
    return 0;
}

static void forget(struct routing *r, int rank, int src, int t, int k)
{
    const int at = (src * MOST_TOKENS + t) * r->h->K + k;

    if (r->idx[at] >= 0 && r->idx[at] / r->p->L == rank)
        r->left[at] = -1;
}

/* Tokens whose number among those that come to the rank is drop_rows or more. */
static void drop_tokens(struct routing *r, int rank)
{
    int n = 0;

    for (int src = 0; src < r->p->R; src++)
        for (int t = 0; t < r->tokens[src]; t++)
            if (names(r, routing_idx(r, src, t), rank) && n++ >= r->drop[rank])
                for (int k = 0; k < r->h->K; k++)
                    forget(r, rank, src, t, k);
}

/* Rows have their places as if all were kept; those from drop_rows on are left out. */
static void drop_zones(struct routing *r, int rank)
{
    const int align = r->h->alignment ? r->h->alignment : 1;
    int64_t row = 0;

    for (int l = 0; l < r->p->L; l++, row = (row + align - 1) / align * align)
        for (int src = 0; src < r->p->R; src++)
            for (int t = 0; t < r->tokens[src]; t++)
                for (int k = 0; k < r->h->K; k++)
                    if (routing_idx(r, src, t)[k] == rank * r->p->L + l && row++ >= r->drop[rank])
                        forget(r, rank, src, t, k);
}

static void drop_rows(struct routing *r, int rank)
{
    if (!is_major(r->h) || r->h->flags & EPX_HANDLE_DROP_TOKENS)
        drop_tokens(r, rank);
    if (is_major(r->h))
        drop_zones(r, rank);
}

/* Entry number i, of those that were drawn, names an expert of a masked rank. */
static int belongs_to_masked(const struct routing *r, size_t i, const int *active)
{
    const int token = (int)(i / (size_t)r->h->K), rank = token / MOST_TOKENS;

    return token % MOST_TOKENS < r->tokens[rank] && r->asked[i] >= 0 && !active[r->asked[i] / r->p->L];
}

int routing_draw(struct routing *r, const struct plan *p, const struct handle_plan *h, uint64_t seed, const int *active)
{
    struct draw d = {seed};
    struct taste taste = {.holes = chance(&d, 50) ? 0 : draw(&d, 101),
                          .repeats = chance(&d, 25),
                          .hot = chance(&d, 40) ? 1 + draw(&d, p->E) : 0};

    const size_t bytes = (size_t)p->R * MOST_TOKENS * (size_t)h->K * sizeof(*r->idx);

    *r = (struct routing){.p = p, .h = h};
    r->asked = calloc(1, bytes);
    r->idx = malloc(bytes);
    r->left = malloc(bytes);
    if (!r->asked || !r->idx || !r->left)
        return -1;
    for (int rank = 0; rank < p->R; rank++) {
        r->tokens[rank] = draw_tokens(&d, p);
        for (int t = 0; t < r->tokens[rank]; t++)
            draw_idx(&d, p, h->K, &taste, r->asked + (rank * MOST_TOKENS + t) * h->K);
        if (!active[rank])
            r->tokens[rank] = 0;
    }
    memcpy(r->idx, r->asked, bytes);
    for (size_t i = 0; i < bytes / sizeof(*r->idx); i++)
        if (belongs_to_masked(r, i, active))
            r->idx[i] = -1;
    memcpy(r->left, r->idx, bytes);
    for (int rank = 0; rank < p->R && h->drop; rank++) {
        r->given[rank] = chance(&d, 30) ? 1 + draw(&d, p->M * h->K + 9) : 0;
        r->drop[rank] = r->given[rank] ? r->given[rank] : model_drop(p, h, rank);
        drop_rows(r, rank);
    }
    return 0;
}

void routing_free(struct routing *r)
{
    free(r->asked);
    free(r->idx);
    free(r->left);
    r->asked = r->idx = r->left = NULL;
}

const int32_t *routing_left(const struct routing *r, int rank, int token)
{
    return r->left + (rank * MOST_TOKENS + token) * r->h->K;
}

const int32_t *routing_idx(const struct routing *r, int rank, int token)
{
    return r->idx + (rank * MOST_TOKENS + token) * r->h->K;
}

int goes_to(const struct routing *r, int rank, int token, int to)
{
    return names(r, is_major(r->h) ? routing_idx(r, rank, token) : routing_left(r, rank, token), to);
}

/* ---- Places ------------------------------------------------------------------------------------------------------ */

/* Entries of a low-latency token that name the same expert share a row: that of the first. */
static int has_row(const struct routing *r, const int32_t *idx, int k, int expert)
{
    if (idx[k] != expert)
        return 0;
    for (int j = 0; is_low(r->h) && j < k; j++)
        if (idx[j] == expert)
            return 0;
    return 1;
}

static int64_t kept(const struct routing *r, int rank, int64_t row)
{
    return r->drop[rank] && row > r->drop[rank] ? r->drop[rank] : row;
}

static void place_experts(struct received *v, const struct routing *r, int rank)
{
    const struct plan *p = r->p;
    const int low = is_low(r->h), align = r->h->alignment ? r->h->alignment : 1;
    int64_t zone = 0;

    for (int l = 0; l < p->L; l++) {
        int64_t n = 0;

        v->offsets[l] = zone;
        for (int src = 0; src < p->R; src++) {
            const int64_t first = n;
            for (int t = 0; t < r->tokens[src]; t++)
                for (int k = 0; k < r->h->K; k++)
                    if (has_row(r, routing_idx(r, src, t), k, rank * p->L + l)) {
                        if (routing_left(r, src, t)[k] >= 0)
                            v->place[v->n++] = (struct place){zone + n, src, t, l, k};
                        n++;
                    }
            v->range[l * p->R + src] = first << 32 | (n - first);
            v->from[src] += n - first;
        }
        v->exact[l] = n;
        v->counts[l] = low ? n : (n + align - 1) / align * align;
        v->total += v->counts[l];
        zone += low ? (int64_t)p->R * p->M : v->counts[l];
    }
    v->rows = zone;
    for (int l = 0; l < p->L && r->drop[rank]; l++) {
        const int64_t end = kept(r, rank, v->offsets[l] + v->counts[l]);

        v->offsets[l] = kept(r, rank, v->offsets[l]);
        v->counts[l] = end - v->offsets[l];
    }
    v->rows = kept(r, rank, v->rows);
}

static void place_tokens(struct received *v, const struct routing *r, int rank)
{
    const struct plan *p = r->p;

    for (int src = 0; src < p->R; src++)
        for (int t = 0; t < r->tokens[src]; t++) {
            const int64_t row = is_low(r->h) ? (int64_t)src * p->M + v->from[src] : v->total;

            v->total += names(r, routing_idx(r, src, t), rank);
            if (!goes_to(r, src, t, rank))
                continue;
            v->place[v->n++] = (struct place){row, src, t, -1, -1};
            v->from[src]++;
            for (int k = 0; k < r->h->K; k++)
                if (routing_idx(r, src, t)[k] >= 0 && routing_idx(r, src, t)[k] / p->L == rank)
                    v->exact[routing_idx(r, src, t)[k] % p->L]++;
        }
    memcpy(v->counts, v->exact, sizeof(v->counts));
    v->rows = is_low(r->h) ? (int64_t)p->R * p->M : v->n;
}

int received_make(struct received *v, const struct routing *r, int rank)
{
    memset(v, 0, sizeof(*v));
    v->place = malloc(((size_t)r->p->R * MOST_TOKENS * (size_t)r->h->K + 1) * sizeof(*v->place));
    if (!v->place)
        return -1;
    if (is_major(r->h))
        place_experts(v, r, rank);
    else
        place_tokens(v, r, rank);
    return 0;
}

void received_free(struct received *v)
{
    free(v->place);
    v->place = NULL;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

uint64_t key(uint64_t seed, int what, int a, int b, int c, int d)
{
    const int parts[] = {what, a, b, c, d};

    for (int i = 0; i < 5; i++)
        seed = workload_hash(seed, (uint64_t)parts[i] + 1);
    return seed;
}

size_t dtype_bytes(int dtype)
{
    static const size_t bytes[] = {0, 2, 2, 4, 1, 4, 8, 1};

    return bytes[dtype];
}

float load_value(int dtype, const void *at)
{
    return oracle_to_float(dtype, at);
}

/* Any NaN comes out as the positive quiet NaN. */
void store_value(int dtype, float value, void *at)
{
    oracle_from_float(dtype, isnan(value) ? fabsf(NAN) : value, at);
}

void model_fill(void *row, const struct format *f, int dtype, int n, uint64_t k)
{
    struct draw d = {k};

    workload_fill(row, dtype, n, f->values, k);
    for (int i = 0; f->special && i < n; i++)
        if (draw(&d, 16) == 0) {
            const float values[] = {INFINITY, -INFINITY, NAN, -0.0f, 0};
            oracle_from_float(dtype, values[draw(&d, 5)], (char *)row + (size_t)i * dtype_bytes(dtype));
        }
}

void model_token(const struct step *s, int rank, int token, void *row)
{
    model_fill(row, &s->f, s->f.dtype, s->f.H, key(s->seed, 't', rank, token, 0, 0));
}

/* Any bits: they are forwarded as they are. */
void model_scales(const struct step *s, int rank, int token, void *row)
{
    for (int i = 0; i < s->f.scales; i++) {
        const uint32_t bits = (uint32_t)key(s->seed, 's', rank, token, i, 0);
        memcpy((char *)row + 4 * i, &bits, 4);
    }
}

static float weight_of(uint64_t k)
{
    return (float)((int)(k >> 40 & 0xffff) - 20000) / 32768.0f;
}

float model_weight(const struct step *s, int rank, int token, int k)
{
    return weight_of(key(s->seed, 'w', rank, token, k, 0));
}

float model_back_weight(const struct step *s, int src, int token, int k)
{
    return weight_of(key(s->seed, 'g', src, token, k, 0));
}

void model_result(const struct step *s, int owner, int expert, int src, int token, int k, void *row)
{
    const uint64_t place = key(s->seed, 'o', owner, expert, 0, 0);

    model_fill(row, &s->f, s->f.dtype, s->f.H, key(place, 'r', src, token, k, 0));
}

void model_bias(const struct step *s, int which, int rank, int token, void *row)
{
    model_fill(row, &s->f, s->f.dtype, s->f.H, key(s->seed, 'b', which, rank, token, 0));
}

int model_skips(const struct step *s, int rank, int token, int k)
{
    return s->skips && key(s->seed, 'x', rank, token, k, 0) % 4 == 0;
}

/* docs/formats.md, "FP8 rows". */
void model_cast(const struct format *f, const void *row, uint8_t *codes, void *scales)
{
    const int ue8m0 = f->scale_dtype == EPX_INT32;

    memset(scales, 0, (size_t)f->scales * 4);
    for (int b = 0; b * 128 < f->H; b++) {
        const int to = b * 128 + 128 < f->H ? b * 128 + 128 : f->H;
        float most = 1e-4f, inverse, scale;

        for (int i = b * 128; i < to; i++) {
            const float x = fabsf(load_value(f->dtype, (const char *)row + (size_t)i * dtype_bytes(f->dtype)));
            most = isnan(x) ? most : fmaxf(most, isinf(x) ? 0x1.fffffep127f : x);
        }
        inverse = most * (1.0f / 448.0f);
        scale = 448.0f / most;
        if (f->round_scale || ue8m0) {
            int e;
            const float part = frexpf(inverse, &e);
            inverse = ldexpf(1, part == 0.5f ? e - 1 : e);
            scale = 1 / inverse;
        }
        if (ue8m0)
            ((uint8_t *)scales)[b] = (uint8_t)(ilogbf(inverse) + 127);
        else
            memcpy((char *)scales + 4 * b, &inverse, 4);
        for (int i = b * 128; i < to; i++)
            codes[i] = oracle_float_to_e4m3(
                load_value(f->dtype, (const char *)row + (size_t)i * dtype_bytes(f->dtype)) * scale);
    }
}

void model_topk(const struct routing *r, const struct step *s, int rank, const struct place *at, int32_t *ids,
                float *weights)
{
    const int32_t *idx = routing_idx(r, at->src, at->token);
    const int compact = (r->h->flags & EPX_HANDLE_COMPACT_TOPK) != 0, first = s->global_ids ? rank * r->p->L : 0;
    int n = 0;

    for (int k = 0; k < r->h->K; k++) {
        ids[k] = -1;
        weights[k] = r->h->flags & EPX_HANDLE_ALL_WEIGHTS ? model_weight(s, at->src, at->token, k) : 0;
    }
    for (int l = 0; l < r->p->L; l++)
        for (int k = 0; k < r->h->K; k++)
            if (idx[k] == rank * r->p->L + l) {
                ids[compact ? n : k] = first + l;
                weights[compact ? n : k] = model_weight(s, at->src, at->token, k);
                n++;
            }
}
