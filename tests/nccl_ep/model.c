/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Chance ------------------------------------------------------------------------------------------------------ */

static uint64_t mixed(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t draw(uint64_t *state)
{
    *state = mixed(*state);
    return *state >> 8;
}

static int from_to(uint64_t *state, int low, int high)
{
    return low + (int)(draw(state) % (uint64_t)(high - low + 1));
}

static int one_in(uint64_t *state, int n)
{
    return draw(state) % (uint64_t)n == 0;
}

/* ---- Plans ------------------------------------------------------------------------------------------------------- */

size_t type_bytes(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclFloat16 || type == ncclBfloat16 ? 2 : 1;
}

size_t row_bytes(const struct plan *p)
{
    return (size_t)p->H * type_bytes(p->type);
}

size_t scale_bytes(const struct plan *p)
{
    return (size_t)p->scales * type_bytes(p->scale_type);
}

static void draw_recipe(struct plan *p, uint64_t *s)
{
    static const ncclDataType_t plain[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    static const ncclDataType_t sent[] = {ncclFloat32,    ncclFloat16,    ncclBfloat16,
                                          ncclFloat8e4m3, ncclFloat8e5m2, (ncclDataType_t)12};
    static const ncclDataType_t scale[] = {ncclFloat32,    ncclFloat16,    ncclBfloat16,
                                           ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8};

    p->recipe = one_in(s, 3) ? NCCL_EP_DISP_QUANT_FWD : NCCL_EP_DISP_QUANT_NONE;
    p->type = plain[from_to(s, 0, 2)];
    p->H = 16 * from_to(s, 1, 6);
    if (p->low && one_in(s, 4)) {
        p->recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        p->type = ncclBfloat16;
        p->H = 512;
        p->round_scales = one_in(s, 2);
    }
    if (p->recipe == NCCL_EP_DISP_QUANT_FWD) {
        p->type = sent[from_to(s, 0, 5)];
        p->scale_type = scale[from_to(s, 0, 5)];
        p->scales = 16 * from_to(s, 1, 3) / (int)type_bytes(p->scale_type);
    }
}

/* Rows of the worst case. */
static int most_rows(const struct plan *p)
{
    const int copies = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? (p->K < p->L ? p->K : p->L) : 1;

    return p->R * p->M * copies + p->L * (p->alignment - 1);
}

static void draw_rows(struct plan *p, uint64_t *s)
{
    const int roll = from_to(s, 0, 3);

    p->room = roll == 0 ? EAGER : roll == 1 ? DROPS : ENOUGH;
    p->alignment = p->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 1 << from_to(s, 0, 3) : 1;
    p->T = p->room == EAGER ? 0 : p->room == DROPS ? from_to(s, p->M, most_rows(p)) : most_rows(p) + from_to(s, 0, 3);
    if (p->T && p->T < p->M)
        p->T = p->M;
}

struct plan plan_draw(uint64_t seed, int R, int per_node)
{
    struct plan p = {.seed = seed, .R = R, .per_node = per_node, .masked = -1};
    uint64_t state = mixed(seed), *s = &state;

    p.low = one_in(s, 2);
    p.layout = one_in(s, 2) ? NCCL_EP_LAYOUT_EXPERT_MAJOR : p.low ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT;
    p.L = from_to(s, 1, 4);
    p.M = from_to(s, 1, 9);
    p.K = from_to(s, 1, p.L * R < 8 ? p.L * R : one_in(s, 4) ? p.L * R : 8); /* up to 32 */
    draw_recipe(&p, s);
    p.index32 = one_in(s, 3);
    p.counter64 = one_in(s, 3);
    p.global_ids = one_in(s, 3);
    p.rounds = from_to(s, 1, 3);
    p.zero_copy = (ncclEpZeroCopyMode_t)from_to(s, 0, 2);
    p.windows = p.zero_copy == NCCL_EP_ZERO_COPY_ON || one_in(s, 3);
    if (p.low) {
        const int nodes = per_node && per_node < R;
        if (p.layout != NCCL_EP_LAYOUT_RANK_MAJOR || nodes || p.recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
            p.zero_copy = NCCL_EP_ZERO_COPY_AUTO; /* low latency does not have it there */
        p.staged = one_in(s, 3);
        p.masked = R > 1 && one_in(s, 4) ? from_to(s, 0, R - 1) : -1;
    } else {
        draw_rows(&p, s);
        p.twin = !p.index32 && one_in(s, 2) ? from_to(s, 1, 2) : 0;
        p.backward = one_in(s, 2);
    }
    p.graph = p.room != EAGER && p.masked < 0 && one_in(s, 3);
    p.tight = !p.low && !p.graph && one_in(s, 2);
    p.default_stream = !p.graph && one_in(s, 4);
    return p;
}

void plan_print(const struct plan *p)
{
    fprintf(stderr,
            "plan %llu: R %d (%d a node) %s layout %d L %d K %d M %d H %d type %d scales %d of %d recipe %d round %d "
            "index32 %d counter64 %d alignment %d global %d room %d T %d zero_copy %d windows %d rounds %d staged %d "
            "graph %d twin %d backward %d tight %d default %d masked %d\n",
            (unsigned long long)p->seed, p->R, p->per_node, p->low ? "ll" : "ht", p->layout, p->L, p->K, p->M, p->H,
            (int)p->type, p->scales, (int)p->scale_type, (int)p->recipe, p->round_scales, p->index32, p->counter64,
            p->alignment, p->global_ids, (int)p->room, p->T, (int)p->zero_copy, p->windows, p->rounds, p->staged,
            p->graph, p->twin, p->backward, p->tight, p->default_stream, p->masked);
}

/* ---- Inputs ------------------------------------------------------------------------------------------------------ */

static void draw_route(struct inputs *in, int token, uint64_t *s)
{
    const struct plan *p = in->p;
    const int E = p->L * p->R;

    for (int k = 0; k < p->K; k++) {
        int *own = in->idx + (int64_t)token * p->K, id, seen;

        do { /* no expert twice */
            id = from_to(s, 0, E - 1);
            seen = 0;
            for (int j = 0; j < k; j++)
                seen |= own[j] == id;
        } while (seen);
        own[k] = one_in(s, 6) ? -1 : id;
        in->weight[(int64_t)token * p->K + k] = (float)from_to(s, 1, 1000) / 777.0f;
    }
}

static void draw_row(struct inputs *in, int token, uint64_t *s)
{
    const struct plan *p = in->p;
    unsigned char *row = in->rows + (size_t)token * row_bytes(p);

    for (size_t i = 0; i < scale_bytes(p); i++)
        in->scales[(size_t)token * scale_bytes(p) + i] = (unsigned char)draw(s);
    for (int h = 0; h < p->H; h++) {
        if (p->recipe == NCCL_EP_DISP_QUANT_FWD) /* any bytes */
            for (size_t i = 0; i < type_bytes(p->type); i++)
                row[(size_t)h * type_bytes(p->type) + i] = (unsigned char)draw(s);
        else
            store_value(p->type, (float)from_to(s, -30000, 30000) / 9001.0f, row + (size_t)h * type_bytes(p->type));
    }
}

int inputs_draw(struct inputs *in, const struct plan *p, int round)
{
    const size_t all = (size_t)p->R * (size_t)p->M;

    in->p = p;
    in->masked = round == 0 ? p->masked : -1;
    in->tokens = calloc((size_t)p->R, sizeof(*in->tokens));
    in->idx = calloc(all * (size_t)p->K, sizeof(*in->idx));
    in->weight = calloc(all * (size_t)p->K, sizeof(*in->weight));
    in->rows = calloc(all, row_bytes(p));
    in->scales = calloc(all, scale_bytes(p) + 1);
    if (!in->tokens || !in->idx || !in->weight || !in->rows || !in->scales)
        return -1;
    for (int r = 0; r < p->R; r++) {
        uint64_t s = mixed(p->seed ^ (uint64_t)r << 32 ^ (uint64_t)(p->graph ? 0 : round) << 48), full;

        in->tokens[r] = one_in(&s, 5) ? 0 : from_to(&s, 0, p->M); /* a graph's stay what they were */
        full = mixed(s ^ (uint64_t)round);
        for (int t = 0; t < in->tokens[r]; t++) {
            draw_route(in, r * p->M + t, &full);
            draw_row(in, r * p->M + t, &full);
        }
        if (r == in->masked)
            in->tokens[r] = 0;
    }
    return 0;
}

void inputs_free(struct inputs *in)
{
    free(in->tokens);
    free(in->idx);
    free(in->weight);
    free(in->rows);
    free(in->scales);
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

/* Small floats: sign, `exponent` and `mantissa` bits. Decoded by their definition. */
static float decode(uint32_t code, int exponent, int mantissa)
{
    const int bias = (1 << (exponent - 1)) - 1, e = (int)(code >> mantissa & ((1u << exponent) - 1));
    const float m = (float)(code & ((1u << mantissa) - 1)) / (float)(1 << mantissa);
    const float value = e ? ldexpf(1 + m, e - bias) : ldexpf(m, 1 - bias);

    return code >> (exponent + mantissa) & 1 ? -value : value;
}

/* The nearest code, of two equally near the even one; `largest` is the last finite one. By halving. */
static uint32_t encode(float x, int exponent, int mantissa, uint32_t largest)
{
    const uint32_t sign = signbit(x) ? 1u << (exponent + mantissa) : 0;
    const double a = fabs((double)x);
    uint32_t low = 0, high = largest;

    if (a >= (double)decode(largest, exponent, mantissa))
        return sign | largest;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;

        if ((double)decode(middle, exponent, mantissa) <= a)
            low = middle;
        else
            high = middle;
    }
    const double below = a - (double)decode(low, exponent, mantissa),
                 above = (double)decode(high, exponent, mantissa) - a;
    return sign | (below < above || (below == above && !(low & 1)) ? low : high);
}

float load_value(ncclDataType_t type, const void *at)
{
    uint16_t half;
    float value;

    if (type == ncclFloat32) {
        memcpy(&value, at, sizeof(value));
        return value;
    }
    memcpy(&half, at, sizeof(half));
    return type == ncclBfloat16 ? decode(half, 8, 7) : decode(half, 5, 10);
}

void store_value(ncclDataType_t type, float value, void *at)
{
    const uint16_t half = (uint16_t)(type == ncclBfloat16 ? encode(value, 8, 7, 0x7f7f) : encode(value, 5, 10, 0x7bff));

    if (type == ncclFloat32)
        memcpy(at, &value, sizeof(value));
    else
        memcpy(at, &half, sizeof(half));
}

float expert_value(int expert, float x)
{
    return x * (1.0f + 0.375f * (float)(expert % 5));
}

void model_cast(const struct plan *p, const unsigned char *row, unsigned char *codes, float *scales)
{
    for (int b = 0; b < p->H / 128; b++) {
        float largest = 1e-4f, factor;

        for (int h = 128 * b; h < 128 * b + 128; h++)
            largest = fmaxf(largest, fabsf(load_value(ncclBfloat16, row + 2 * h)));
        scales[b] = largest * (1.0f / 448);
        factor = 448 / largest;
        if (p->round_scales) {
            int e;

            if (frexpf(scales[b], &e) == 0.5f)
                e--; /* a power of two itself */
            scales[b] = ldexpf(1, e);
            factor = ldexpf(1, -e);
        }
        for (int h = 128 * b; h < 128 * b + 128; h++)
            codes[h] = (unsigned char)encode(load_value(ncclBfloat16, row + 2 * h) * factor, 4, 3, 0x7e);
    }
}

/* ---- Where rows go ----------------------------------------------------------------------------------------------- */

static int has_expert(const struct inputs *in, int token, int expert)
{
    for (int k = 0; k < in->p->K; k++)
        if (in->idx[(int64_t)token * in->p->K + k] == expert)
            return 1;
    return 0;
}

int goes_to(const struct inputs *in, int token, int rank)
{
    int found = 0;

    if (rank == in->masked || token % in->p->M >= in->tokens[token / in->p->M])
        return 0;
    for (int e = rank * in->p->L; e < (rank + 1) * in->p->L; e++)
        found |= has_expert(in, token, e);
    return found;
}

/* FLAT: (source rank, token); DROP keeps the first T. */
static void place_flat(struct received *v, const struct inputs *in, int rank)
{
    const struct plan *p = in->p;

    for (int token = 0; token < p->R * p->M; token++) {
        v->row_of[token] = -1;
        if (!goes_to(in, token, rank))
            continue;
        if (p->room != DROPS || v->total < p->T) {
            v->row_of[token] = v->rows;
            v->token[v->rows++] = token;
            for (int e = 0; e < p->L; e++)
                v->counts[e] += has_expert(in, token, rank * p->L + e);
        }
        v->total++;
    }
}

/* EXPERT_MAJOR: zones for all requests, padded. DROP: whole tokens beyond FLAT's first T (not with ON), then slots from
 * T on. */
static void place_zones(struct received *v, const struct inputs *in, int rank)
{
    const struct plan *p = in->p;
    int base = 0;

    for (int e = 0; e < p->L; e++) {
        int count = 0, flat = 0, padded;

        for (int token = 0; token < p->R * p->M; token++) {
            int *row = &v->row_of[token * p->L + e], late;

            *row = -1;
            if (!goes_to(in, token, rank))
                continue;
            late = p->room == DROPS && p->zero_copy != NCCL_EP_ZERO_COPY_ON && flat >= p->T;
            flat++;
            if (!has_expert(in, token, rank * p->L + e))
                continue;
            if (!late && (p->room != DROPS || base + count < p->T))
                *row = base + count;
            count++;
        }
        padded = (count + p->alignment - 1) / p->alignment * p->alignment;
        v->counts[e] = padded;
        v->offsets[e] = base;
        base += padded;
    }
    v->total = base;
}

static void fill_zones(struct received *v, const struct inputs *in)
{
    const struct plan *p = in->p;

    v->rows = p->room == DROPS && v->total > p->T ? p->T : v->total;
    for (int i = 0; i < v->rows; i++)
        v->token[i] = -1;
    for (int token = 0; token < p->R * p->M; token++)
        for (int e = 0; e < p->L; e++) {
            const int row = v->row_of[token * p->L + e];
            if (row >= 0) {
                v->token[row] = token;
                v->expert[row] = e;
            }
        }
    for (int e = 0; p->room == DROPS && e < p->L; e++) {
        const int left = p->T - v->offsets[e];
        v->counts[e] = left < 0 ? 0 : v->counts[e] < left ? v->counts[e] : left;
        v->offsets[e] = v->offsets[e] < p->T ? v->offsets[e] : p->T;
    }
}

int received_make(struct received *v, const struct inputs *in, int rank)
{
    const struct plan *p = in->p;
    const size_t all = (size_t)p->R * (size_t)p->M, most = all * (size_t)p->L + (size_t)p->L * (size_t)p->alignment;

    memset(v, 0, sizeof(*v));
    v->counts = calloc((size_t)p->L, sizeof(int));
    v->offsets = calloc((size_t)p->L, sizeof(int));
    v->token = calloc(most, sizeof(int));
    v->expert = calloc(most, sizeof(int));
    v->row_of = calloc(all * (size_t)p->L, sizeof(int));
    if (!v->counts || !v->offsets || !v->token || !v->expert || !v->row_of)
        return -1;
    if (p->layout == NCCL_EP_LAYOUT_FLAT) {
        place_flat(v, in, rank);
    } else {
        place_zones(v, in, rank);
        fill_zones(v, in);
    }
    return 0;
}

void received_free(struct received *v)
{
    free(v->counts);
    free(v->offsets);
    free(v->token);
    free(v->expert);
    free(v->row_of);
}

/* ---- Sums -------------------------------------------------------------------------------------------------------- */

static float rounded(const struct plan *p, float x)
{
    unsigned char at[4];

    store_value(p->type, x, at);
    return load_value(p->type, at);
}

static float token_value(const struct inputs *in, int token, int h)
{
    return load_value(in->p->type, in->rows + (size_t)token * row_bytes(in->p) + (size_t)h * type_bytes(in->p->type));
}

/* The caller sums weight * expert(x), and rounds once. */
void model_reduce(const struct inputs *in, int token, int rank, float *out)
{
    const struct plan *p = in->p;
    const int first = rank * p->L;

    for (int h = 0; h < p->H; h++) {
        const float x = token_value(in, token, h);
        float sum = 0;

        for (int i = 0; i < (p->low ? p->K : p->L); i++)
            for (int k = 0; k < p->K; k++) {
                const int id = in->idx[(int64_t)token * p->K + k];
                if (id < first || id >= first + p->L || (p->low ? k != i : id != first + i))
                    continue;
                sum += in->weight[(int64_t)token * p->K + k] * expert_value(id, x);
            }
        out[h] = rounded(p, sum);
    }
}

/* Low latency: EXPERT_MAJOR weighs by fmaf in the order of k; RANK_MAJOR adds ranks in the order of their first k. */
static void combine_low(const struct inputs *in, int token, float *out)
{
    const struct plan *p = in->p;
    float part[1024];
    unsigned int seen = 0;

    for (int k = 0; k < p->K; k++) {
        const int id = in->idx[(int64_t)token * p->K + k], rank = id / p->L;

        if (id < 0 || rank == in->masked || (p->layout == NCCL_EP_LAYOUT_RANK_MAJOR && seen >> rank & 1))
            continue;
        seen |= 1u << rank;
        if (p->layout == NCCL_EP_LAYOUT_RANK_MAJOR)
            model_reduce(in, token, rank, part);
        for (int h = 0; h < p->H; h++)
            out[h] = p->layout == NCCL_EP_LAYOUT_RANK_MAJOR
                         ? out[h] + part[h]
                         : fmaf(rounded(p, expert_value(id, token_value(in, token, h))),
                                in->weight[(int64_t)token * p->K + k], out[h]);
    }
}

/* What one rank returns in high throughput; 0: nothing. */
static int returned(const struct inputs *in, const struct received *v, int token, int rank, int backward, float *out)
{
    const struct plan *p = in->p;
    int found = 0;

    for (int h = 0; h < p->H; h++)
        out[h] = 0;
    if (p->layout == NCCL_EP_LAYOUT_FLAT) {
        if (v[rank].row_of[token] < 0)
            return 0;
        if (!backward)
            model_reduce(in, token, rank, out);
        for (int h = 0; backward && h < p->H; h++)
            out[h] = token_value(in, token, h);
        return 1;
    }
    for (int k = 0; k < p->K; k++) {
        const int id = in->idx[(int64_t)token * p->K + k];

        if (id < 0 || id / p->L != rank || v[rank].row_of[token * p->L + id % p->L] < 0)
            continue;
        found = 1;
        for (int h = 0; h < p->H; h++)
            out[h] += backward ? token_value(in, token, h) : rounded(p, expert_value(id, token_value(in, token, h)));
    }
    for (int h = 0; h < p->H; h++)
        out[h] = rounded(p, out[h]);
    return found;
}

/* High throughput: ranks ascending; those of another node are summed there and rounded. */
static void combine_high(const struct inputs *in, const struct received *v, int token, int backward, float *out)
{
    const struct plan *p = in->p;
    const int each = p->per_node ? p->per_node : p->R, own = token / p->M / each;
    float part[1024], node[1024];

    for (int n = 0; n * each < p->R; n++) {
        int found = 0;

        memset(node, 0, sizeof(node));
        for (int rank = n * each; rank < (n + 1) * each && rank < p->R; rank++) {
            if (!returned(in, v, token, rank, backward, part))
                continue;
            found = 1;
            for (int h = 0; h < p->H; h++)
                *(n == own ? &out[h] : &node[h]) += part[h];
        }
        for (int h = 0; found && n != own && h < p->H; h++)
            out[h] += rounded(p, node[h]);
    }
}

void model_combine(const struct inputs *in, const struct received *v, int token, int backward, float *out)
{
    for (int h = 0; h < in->p->H; h++)
        out[h] = 0;
    if (in->p->low)
        combine_low(in, token, out);
    else
        combine_high(in, v, token, backward, out);
    for (int h = 0; h < in->p->H; h++)
        out[h] = rounded(in->p, out[h]);
}
