/* SPDX-License-Identifier: Apache-2.0 */
#include "workload.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What a hash is for: different purposes never share values. */
enum purpose {
    FOR_TOKENS = 1,
    FOR_EXPERT,
    FOR_HOLE,
    FOR_WEIGHT,
    FOR_VALUES,
    FOR_SCALES,
    FOR_RESULT,
    FOR_RESULT_WEIGHT,
    FOR_BIAS,
    FOR_BASE,
    FOR_GROUPS
};

#define GOLDEN 0x9e3779b97f4a7c15ull

/* The finaliser of splitmix64: two multiplications that spread every bit over the whole word. */
static inline uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

uint64_t workload_hash(uint64_t a, uint64_t b)
{
    return mix(mix(a + GOLDEN) + b * GOLDEN + 1);
}

static uint64_t key_of(uint64_t seed, enum purpose purpose, int rank, int token)
{
    return workload_hash(workload_hash(seed, (uint64_t)purpose), (uint64_t)(uint32_t)rank << 32 | (uint32_t)token);
}

/* For numbers that change from round to round. */
static uint64_t round_key(const struct workload *w, enum purpose purpose, int rank, int token)
{
    return key_of(workload_hash(w->seed, w->round), purpose, rank, token);
}

/* 0 .. n-1 */
static int below(uint64_t hash, int n)
{
    return (int)((hash >> 32) * (uint64_t)n >> 32);
}

int workload_local_experts(const struct workload *w)
{
    return (w->experts + w->nranks - 1) / w->nranks;
}

int workload_tokens(const struct workload *w, int rank)
{
    uint64_t h = key_of(w->seed, FOR_TOKENS, rank, 0);

    if (!w->uneven)
        return w->max_tokens;
    switch (h & 7) {
    case 0:
        return 0;
    case 1:
        return w->max_tokens;
    default:
        return below(h, w->max_tokens + 1);
    }
}

/* ---- Routing ---------------------------------------------------------------------------------------------------- */

/* How many experts can be drawn at all. */
static int domain_size(const struct workload *w)
{
    int hot = w->hot_experts ? w->hot_experts : w->topk;

    return w->routing == WORKLOAD_HOT && hot < w->experts ? hot : w->experts;
}

static int draw(const struct workload *w, int domain, uint64_t hash)
{
    int x;

    if (w->routing != WORKLOAD_ZIPF)
        return below(hash, domain);
    /* P(X < x) = ln(x + 1) / ln(n + 1), which is Zipf's law with exponent 1 but for rounding. */
    x = (int)powf((float)domain + 1, (float)(hash >> 40) * 0x1p-24f) - 1;
    return x < 0 ? 0 : x < domain ? x : domain - 1;
}

static int is_taken(const int32_t *idx, int n, int value)
{
    for (int i = 0; i < n; i++)
        if (idx[i] == value)
            return 1;
    return 0;
}

/* Entry k of the domain, distinct from the earlier ones: some throws of the dice, then the next free one. */
static int draw_distinct(const struct workload *w, int domain, const int32_t *idx, int k, uint64_t hash)
{
    int x = draw(w, domain, hash);

    for (int attempt = 1; attempt < 16 && is_taken(idx, k, x); attempt++)
        x = draw(w, domain, workload_hash(hash, (uint64_t)attempt));
    while (is_taken(idx, k, x))
        x = (x + 1) % domain;
    return x;
}

enum { DEFAULT_GROUPS = 8, DEFAULT_TOPK_GROUPS = 4, MOST_TOPK_GROUPS = 32 };

/* The groups of one token: their experts, one group behind the other, are what it draws from. */
struct group_draw {
    int n, size;
    int32_t first[MOST_TOPK_GROUPS], end[MOST_TOPK_GROUPS];
};

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

static struct group_draw draw_groups(const struct workload *w, int rank, int token)
{
    const struct workload plain = {0}; /* uniform */
    const uint64_t key = key_of(w->seed, FOR_GROUPS, rank, token);
    const int64_t groups = smaller(w->groups ? w->groups : DEFAULT_GROUPS, w->experts);
    struct group_draw d = {.size = 0};
    int32_t chosen[MOST_TOPK_GROUPS];

    d.n = smaller(smaller(w->topk_groups ? w->topk_groups : DEFAULT_TOPK_GROUPS, (int)groups), MOST_TOPK_GROUPS);
    for (int i = 0; i < d.n; i++) {
        chosen[i] = draw_distinct(&plain, (int)groups, chosen, i, mix(key + (uint64_t)i * GOLDEN));
        d.first[i] = (int32_t)(chosen[i] * w->experts / groups);
        d.end[i] = (int32_t)((chosen[i] + 1) * (int64_t)w->experts / groups);
        d.size += d.end[i] - d.first[i];
    }
    return d;
}

/* Number x of what the token draws from. */
static int group_expert(const struct group_draw *d, int x)
{
    int i = 0;

    while (x >= d->end[i] - d->first[i]) {
        x -= d->end[i] - d->first[i];
        i++;
    }
    return d->first[i] + x;
}

void workload_topk(const struct workload *w, int rank, int token, int32_t *idx)
{
    uint64_t key = key_of(w->seed, FOR_EXPERT, rank, token);
    uint64_t holes = key_of(w->seed, FOR_HOLE, rank, token);
    const int grouped = w->routing == WORKLOAD_GROUPS;
    const struct group_draw groups = grouped ? draw_groups(w, rank, token) : (struct group_draw){0};
    int domain = grouped ? groups.size : domain_size(w);
    /* The popular experts are not always those of rank 0. */
    int base = below(key_of(w->seed, FOR_BASE, 0, 0), w->experts);

    for (int k = 0; k < w->topk; k++) {
        uint64_t hash = mix(key + (uint64_t)k * GOLDEN);

        if (w->duplicates)
            idx[k] = draw(w, domain, hash);
        else
            idx[k] = k < domain ? draw_distinct(w, domain, idx, k, hash) : -1;
    }
    for (int k = 0; k < w->topk; k++) {
        if (idx[k] >= 0)
            idx[k] = grouped ? group_expert(&groups, idx[k]) : (idx[k] + base) % w->experts;
        if (w->hole_percent && below(mix(holes + (uint64_t)k * GOLDEN), 100) < w->hole_percent)
            idx[k] = -1;
    }
}

static float unit_float(uint64_t hash)
{
    return ((float)(hash >> 41) + 0.5f) * 0x1p-23f;
}

void workload_weights(const struct workload *w, int rank, int token, float *weights)
{
    uint64_t key = round_key(w, FOR_WEIGHT, rank, token);

    for (int k = 0; k < w->topk; k++)
        weights[k] = unit_float(mix(key + (uint64_t)k * GOLDEN));
}

float workload_result_weight(const struct workload *w, int rank, int token, int k)
{
    return unit_float(mix(round_key(w, FOR_RESULT_WEIGHT, rank, token) + (uint64_t)k * GOLDEN));
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

/* Random bits become an element by (bits & keep) + add, 8 bytes at a time: sign and mantissa are kept, and the low
 * bits of the exponent on top of a smallest one. */
struct shape {
    uint64_t keep, add;
};

/* Per dtype: mantissa bits, and the exponent (biased) of 1.0. */
struct format {
    int bytes, mantissa, one;
};

static struct format format_of(int dtype)
{
    switch (dtype) {
    case EPX_BF16:
        return (struct format){2, 7, 127};
    case EPX_FP16:
        return (struct format){2, 10, 15};
    case EPX_FP32:
        return (struct format){4, 23, 127};
    case EPX_INT32:
        return (struct format){4, 31, 0};
    default:
        return (struct format){1, 3, 7};
    }
}

static uint64_t repeat(uint64_t element, int bytes)
{
    uint64_t word = element;

    for (int have = bytes; have < 8; have *= 2)
        word |= word << (8 * have);
    return word;
}

/* Magnitudes 2^lowest .. 2^(lowest + 2^spread_bits); spread_bits < 0: only subnormals and zeros. */
static struct shape shape_of(struct format f, int lowest, int spread_bits)
{
    uint64_t sign = 1ull << (8 * f.bytes - 1);
    uint64_t free_bits = (1ull << (f.mantissa + (spread_bits > 0 ? spread_bits : 0))) - 1;
    uint64_t exponent = spread_bits < 0 ? 0 : (uint64_t)(f.one + lowest) << f.mantissa;

    return (struct shape){repeat(sign | free_bits, f.bytes), repeat(exponent, f.bytes)};
}

/* A block of EXTREME values: all zero, subnormal, or somewhere in the format's range. */
static struct shape extreme_shape(struct format f, uint64_t hash)
{
    int range = f.one == 127 ? 180 : f.one == 15 ? 22 : 8;

    switch (hash & 15) {
    case 0:
        return (struct shape){0, 0};
    case 1:
        return shape_of(f, 0, -1);
    case 2:
        return (struct shape){repeat(1ull << (8 * f.bytes - 1), f.bytes), 0}; /* +0 and -0 */
    case 3:
    case 4:
    case 5:
        return shape_of(f, f.one == 7 ? -6 : -9, 3);
    default:
        return shape_of(f, 1 - f.one + below(hash, range), f.one == 7 ? 2 : 3);
    }
}

static struct shape block_shape(int dtype, enum workload_values values, uint64_t key, int block)
{
    struct format f = format_of(dtype);

    if (dtype == EPX_INT32)
        return (struct shape){~0ull, 0};
    if (values == WORKLOAD_EXTREME)
        return extreme_shape(f, workload_hash(key, 0xb10cull + (uint64_t)block));
    if (dtype == EPX_FP8_E4M3)
        return shape_of(f, -6, 3);
    return values == WORKLOAD_SMALL ? shape_of(f, -9, 3) : shape_of(f, -7, 3);
}

static void fill_words(unsigned char *to, size_t bytes, struct shape shape, uint64_t key, uint64_t first)
{
    size_t words = bytes / 8;

    for (size_t i = 0; i < words; i++) {
        uint64_t word = (mix(key + (first + i) * GOLDEN) & shape.keep) + shape.add;
        memcpy(to + 8 * i, &word, 8);
    }
    if (bytes % 8) {
        uint64_t word = (mix(key + (first + words) * GOLDEN) & shape.keep) + shape.add;
        memcpy(to + 8 * words, &word, bytes % 8);
    }
}

void workload_fill(void *row, int dtype, int count, enum workload_values values, uint64_t key)
{
    size_t block_bytes = 128 * (size_t)format_of(dtype).bytes;
    size_t bytes = (size_t)count * (size_t)format_of(dtype).bytes;

    for (size_t at = 0; at < bytes; at += block_bytes) {
        size_t n = bytes - at < block_bytes ? bytes - at : block_bytes;
        struct shape shape = block_shape(dtype, values, key, (int)(at / block_bytes));
        fill_words((unsigned char *)row + at, n, shape, key, at / 8);
    }
}

void workload_token(const struct workload *w, int rank, int token, void *row)
{
    workload_fill(row, w->dtype, w->hidden, w->values, round_key(w, FOR_VALUES, rank, token));
}

void workload_scales(const struct workload *w, int rank, int token, void *scales)
{
    workload_fill(scales, w->scale_dtype, w->scale_count, WORKLOAD_MILD, round_key(w, FOR_SCALES, rank, token));
}

void workload_result(const struct workload *w, int dtype, int owner, int expert, int rank, int token, int k, void *row)
{
    uint64_t key = round_key(w, FOR_RESULT, rank, token);

    key = workload_hash(key, (uint64_t)(uint32_t)owner << 32 | (uint32_t)expert);
    workload_fill(row, dtype, w->hidden, w->values, workload_hash(key, (uint64_t)(uint32_t)k));
}

void workload_bias(const struct workload *w, int dtype, int which, int rank, int token, void *row)
{
    uint64_t key = workload_hash(round_key(w, FOR_BIAS, rank, token), (uint64_t)which);

    workload_fill(row, dtype, w->hidden, w->values, key);
}

const char *workload_describe(const struct workload *w, char *buf, size_t bytes)
{
    static const char *const routing[] = {"uniform", "zipf", "hot", "groups"};

    snprintf(buf, bytes,
             "seed %llu round %llu ranks %d experts %d topk %d hidden %d tokens %s%d dtype %d routing %s(%d) "
             "duplicates %d holes %d%% values %d",
             (unsigned long long)w->seed, (unsigned long long)w->round, w->nranks, w->experts, w->topk, w->hidden,
             w->uneven ? "<=" : "", w->max_tokens, w->dtype, routing[w->routing], w->hot_experts, w->duplicates,
             w->hole_percent, (int)w->values);
    return buf;
}
