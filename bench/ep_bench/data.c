/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is sent. Routing: low latency takes the TOPK largest of scores |normal| + 1 and then drops ten random entries;
 * high throughput takes the first of a shuffled list. Tokens say who they are:
 *
 *      columns 0 .. H-129 : rank - 128      H-128 : token / 256      the rest : token % 256
 *
 * With scales-forward a row is bytes: rank and token in the first eight, then a pattern of both.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep_bench.h"
#include "standin/include/cuda/epx_small_float.h"

enum { DROPPED = 10, MARK = 128, SCALE_GROUP = 128, MX_GROUP = 32 };

/* ---- Random numbers: MT19937, and the polar method --------------------------------------------------------------- */

struct random {
    uint32_t state[624];
    int next;
    double spare;
    int has_spare;
};

static void random_seed(struct random *r, uint32_t seed)
{
    memset(r, 0, sizeof(*r));
    r->state[0] = seed;
    for (uint32_t i = 1; i < 624; i++)
        r->state[i] = 1812433253u * (r->state[i - 1] ^ (r->state[i - 1] >> 30)) + i;
    r->next = 624;
}

static uint32_t random_next(struct random *r)
{
    uint32_t y;

    if (r->next == 624) {
        for (int i = 0; i < 624; i++) {
            y = (r->state[i] & 0x80000000u) | (r->state[(i + 1) % 624] & 0x7fffffffu);
            r->state[i] = r->state[(i + 397) % 624] ^ (y >> 1) ^ (y & 1 ? 0x9908b0dfu : 0);
        }
        r->next = 0;
    }
    y = r->state[r->next++];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    return y ^ y >> 18;
}

static int random_below(struct random *r, int limit)
{
    return (int)((uint64_t)random_next(r) * (uint64_t)limit >> 32);
}

static double random_normal(struct random *r)
{
    double x, y, square;

    if (r->has_spare) {
        r->has_spare = 0;
        return r->spare;
    }
    do {
        x = 2.0 * random_next(r) / 4294967296.0 - 1;
        y = 2.0 * random_next(r) / 4294967296.0 - 1;
        square = x * x + y * y;
    } while (square >= 1 || square == 0);
    square = sqrt(-2 * log(square) / square);
    r->spare = y * square;
    r->has_spare = 1;
    return x * square;
}

/* ---- Types ------------------------------------------------------------------------------------------------------- */

size_t dtype_size(enum dtype dtype)
{
    return dtype == FP32 ? 4 : dtype == BF16 || dtype == FP16 ? 2 : 1;
}

ncclDataType_t dtype_nccl(enum dtype dtype)
{
    static const ncclDataType_t types[DTYPES] = {
        [BF16] = ncclBfloat16,   [FP16] = ncclFloat16,         [FP32] = ncclFloat32, [E4M3] = ncclFloat8e4m3,
        [E5M2] = ncclFloat8e5m2, [FP4X2] = (ncclDataType_t)12, [U8] = ncclUint8};

    return types[dtype];
}

static const struct epx_small_float *small(enum dtype dtype)
{
    return dtype == BF16 ? &epx_small_bf16 : dtype == FP16 ? &epx_small_fp16 : &epx_small_e4m3;
}

void store_float(enum dtype dtype, unsigned char *at, float value)
{
    uint32_t code;

    if (dtype == FP32) {
        memcpy(at, &value, sizeof(value));
        return;
    }
    code = epx_small_encode(small(dtype), value, dtype == E4M3);
    at[0] = (unsigned char)code;
    if (dtype_size(dtype) == 2)
        at[1] = (unsigned char)(code >> 8);
}

float load_float(enum dtype dtype, const unsigned char *at)
{
    float value;

    if (dtype != FP32)
        return epx_small_decode(small(dtype), at[0] | (dtype_size(dtype) == 2 ? (uint32_t)at[1] << 8 : 0));
    memcpy(&value, at, sizeof(value));
    return value;
}

/* ---- Shapes ------------------------------------------------------------------------------------------------------ */

static size_t up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static void shape_rows(struct shape *s)
{
    const struct options *o = s->o;

    s->plain_bytes = (size_t)s->H * dtype_size((enum dtype)o->datatype);
    s->combine_payload = o->combine_quant ? up((size_t)s->H / 2 + (size_t)s->H / 16 + 4, 16) : s->plain_bytes;
    s->token = (enum dtype)o->datatype;
    s->token_bytes = s->payload = s->plain_bytes;
    if (o->dispatch_quant == NCCL_EP_DISP_QUANT_DS_FP8E3M4)
        s->payload = (size_t)s->H + 4 * (size_t)s->H / SCALE_GROUP;
    if (o->dispatch_quant != NCCL_EP_DISP_QUANT_FWD)
        return;
    s->token = (enum dtype)o->forward_token;
    s->scale = (enum dtype)o->forward_scale;
    s->token_bytes = s->token == FP4X2 ? (size_t)s->H / 2 : (size_t)s->H * dtype_size(s->token);
    s->S = (int)(up((size_t)(s->H / (o->mxfp8 ? MX_GROUP : SCALE_GROUP)) * dtype_size(s->scale), 16) /
                 dtype_size(s->scale));
    s->scale_bytes = (size_t)s->S * dtype_size(s->scale);
    s->payload = s->token_bytes + s->scale_bytes;
}

int shape_make(struct shape *s, const struct options *o)
{
    *s = (struct shape){.o = o, .R = world.nranks, .M = o->tokens, .K = o->topk, .E = o->experts, .H = o->hidden};
    s->L = s->E / s->R;
    s->T = (int64_t)s->R * s->M * (o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? s->K : 1);
    if (o->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR)
        s->T += (int64_t)s->L * (o->alignment - 1);
    shape_rows(s);
    if (s->E % s->R || (o->validate && s->H <= MARK)) {
        fprintf(stderr,
                "epx ep-bench: expected experts in multiples of %d ranks, and with --validate a hidden above %d\n",
                s->R, MARK);
        return EXIT_BAD;
    }
    return EXIT_GOOD;
}

int expert_rank(const struct shape *s, int64_t expert)
{
    return expert < 0 ? -1 : (int)(expert / s->L);
}

/* ---- Routing ----------------------------------------------------------------------------------------------------- */

static void route_by_scores(const struct shape *s, struct random *random, double *scores, int64_t *idx)
{
    for (int e = 0; e < s->E; e++)
        scores[e] = fabs(random_normal(random)) + 1;
    for (int k = 0; k < s->K; k++) {
        int best = 0;

        for (int e = 1; e < s->E; e++)
            best = scores[e] > scores[best] ? e : best;
        idx[k] = best;
        scores[best] = 0;
    }
}

static void route_by_shuffle(const struct shape *s, struct random *random, double *list, int64_t *idx)
{
    for (int e = 0; e < s->E; e++)
        list[e] = e;
    for (int k = 0; k < s->K; k++) {
        const int other = k + random_below(random, s->E - k);
        const double chosen = list[other];

        list[other] = list[k];
        list[k] = chosen;
        idx[k] = (int64_t)chosen;
    }
}

static int tokens_of(const struct shape *s, int rank)
{
    if (!s->o->non_uniform || s->R == 1)
        return s->M;
    return (int)((int64_t)s->M * (s->R - 1 - rank) / (s->R - 1));
}

struct routing routing_make(const struct shape *s, int rank)
{
    const int ll = s->o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    struct routing r = {.tokens = tokens_of(s, rank)};
    double *work = malloc((size_t)s->E * sizeof(*work));
    struct random random;

    r.idx = malloc((size_t)s->M * (size_t)s->K * sizeof(*r.idx));
    r.weights = malloc((size_t)s->M * (size_t)s->K * sizeof(*r.weights));
    if (!work || !r.idx || !r.weights)
        failed("malloc", 0, "no memory");
    random_seed(&random, (uint32_t)(ll ? 1 + rank : 42 + rank));
    for (int t = 0; t < r.tokens; t++)
        (ll ? route_by_scores : route_by_shuffle)(s, &random, work, r.idx + (size_t)t * (size_t)s->K);
    for (int i = 0; ll && !s->o->keep_all && i < DROPPED && r.tokens; i++)
        r.idx[random_below(&random, r.tokens) * s->K + random_below(&random, s->K)] = -1;
    random_seed(&random, (uint32_t)(42 + rank));
    for (int i = 0; i < s->M * s->K; i++)
        r.weights[i] = (float)fabs(random_normal(&random));
    free(work);
    return r;
}

void routing_free(struct routing *r)
{
    free(r->idx);
    free(r->weights);
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

static void byte_row(size_t bytes, int rank, int token, int kind, unsigned char *row)
{
    const uint32_t who[2] = {(uint32_t)rank, (uint32_t)token};

    for (size_t i = 0; i < bytes; i++)
        row[i] = (unsigned char)(rank * 131 + token * 17 + (int)(i % 251) + 77 * kind);
    memcpy(row, who, bytes < sizeof(who) ? bytes : sizeof(who));
}

void token_row(const struct shape *s, int rank, int token, unsigned char *row)
{
    const size_t element = dtype_size(s->token);

    if (s->S) {
        byte_row(s->token_bytes, rank, token, 0, row);
        return;
    }
    for (int h = 0; h < s->H; h++)
        store_float(s->token, row + (size_t)h * element,
                    (float)(h < s->H - MARK    ? rank - MARK
                            : h == s->H - MARK ? token / 256
                                               : token % 256));
}

void scale_row(const struct shape *s, int rank, int token, unsigned char *row)
{
    byte_row(s->scale_bytes, rank, token, 1, row);
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------- */

struct traffic traffic_sent(const struct shape *s, const struct routing *r, int rank)
{
    struct traffic sum = {0, 0, 0};

    for (int t = 0; t < r->tokens; t++)
        for (int k = 0; k < s->K; k++) {
            const int64_t *idx = r->idx + (size_t)t * (size_t)s->K;
            const int to = expert_rank(s, idx[k]);
            int first = to >= 0;

            sum.valid += to >= 0;
            for (int j = 0; j < k; j++)
                first &= expert_rank(s, idx[j]) != to;
            sum.pairs += first;
            sum.remote += first && to / world.lsa_ranks != rank / world.lsa_ranks;
        }
    return sum;
}

struct traffic traffic_received(const struct shape *s, int rank)
{
    struct traffic sum = {0, 0, 0};

    for (int from = 0; from < s->R; from++) {
        struct routing r = routing_make(s, from);

        for (int t = 0; t < r.tokens; t++) {
            int here = 0;

            for (int k = 0; k < s->K; k++)
                here += expert_rank(s, r.idx[(size_t)t * (size_t)s->K + (size_t)k]) == rank;
            sum.valid += here;
            sum.pairs += here > 0;
            sum.remote += here > 0 && from / world.lsa_ranks != rank / world.lsa_ranks;
        }
        routing_free(&r);
    }
    return sum;
}
