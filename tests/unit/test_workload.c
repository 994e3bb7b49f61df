/* SPDX-License-Identifier: Apache-2.0 */
/* The workload generator: the same numbers every time, of the promised kinds.
 * ctest: labels=notsan (one thread) */
#include <math.h>
#include <string.h>

#include "tests/lib/oracle.h"
#include "tests/lib/unit.h"
#include "tests/lib/workload.h"

static struct workload example(void)
{
    return (struct workload){.seed = 7,
                             .nranks = 4,
                             .experts = 19,
                             .topk = 6,
                             .hidden = 300,
                             .max_tokens = 50,
                             .dtype = EPX_BF16,
                             .scale_dtype = EPX_FP32,
                             .scale_count = 3};
}

static void same_arguments_give_the_same_bits(void **state)
{
    struct workload w = example();
    uint16_t a[300], b[300];

    (void)state;
    workload_token(&w, 1, 2, a);
    workload_token(&w, 1, 2, b);
    assert_memory_equal(a, b, sizeof(a));
    workload_token(&w, 2, 1, b);
    assert_memory_not_equal(a, b, sizeof(a));
}

static void round_changes_numbers_but_not_routing(void **state)
{
    struct workload w = example();
    int32_t before[6], after[6];
    float weights[2][6];
    uint16_t a[300], b[300];

    (void)state;
    workload_topk(&w, 1, 2, before);
    workload_weights(&w, 1, 2, weights[0]);
    workload_token(&w, 1, 2, a);
    w.round = 1;
    workload_topk(&w, 1, 2, after);
    workload_weights(&w, 1, 2, weights[1]);
    workload_token(&w, 1, 2, b);
    assert_memory_equal(before, after, sizeof(before));
    assert_memory_not_equal(weights[0], weights[1], sizeof(weights[0]));
    assert_memory_not_equal(a, b, sizeof(a));
}

static void a_row_is_a_prefix_of_a_longer_one(void **state)
{
    unsigned char odd[3 + 8], full[16];

    (void)state;
    memset(odd, 0xa5, sizeof(odd));
    workload_fill(odd, EPX_FP8_E4M3, 3, WORKLOAD_MILD, 9);
    workload_fill(full, EPX_FP8_E4M3, 16, WORKLOAD_MILD, 9);
    assert_memory_equal(odd, full, 3);
    for (int i = 3; i < 11; i++)
        assert_int_equal(odd[i], 0xa5);
}

/* Calls `fn` for every token of every rank, with its entries. */
static void for_each_token(const struct workload *w,
                           void (*fn)(const struct workload *w, const int32_t *idx, void *arg), void *arg)
{
    for (int r = 0; r < w->nranks; r++)
        for (int t = 0; t < w->max_tokens; t++) {
            int32_t idx[EPX_MAX_TOPK];
            workload_topk(w, r, t, idx);
            fn(w, idx, arg);
        }
}

static void check_token(const struct workload *w, const int32_t *idx, void *distinct)
{
    for (int k = 0; k < w->topk; k++) {
        assert_in_range(idx[k] + 1, 0, w->experts);
        for (int j = 0; *(int *)distinct && j < k; j++)
            assert_true(idx[k] < 0 || idx[j] != idx[k]);
    }
}

static void check_entries(const struct workload *w, int distinct)
{
    for_each_token(w, check_token, &distinct);
}

static void entries_are_in_range_and_distinct(void **state)
{
    (void)state;
    for (int routing = WORKLOAD_UNIFORM; routing <= WORKLOAD_GROUPS; routing++) {
        for (int experts = 1; experts <= 40; experts += 3) {
            struct workload w = example();
            w.routing = (enum workload_routing)routing;
            w.experts = experts;
            w.topk = 1 + experts * 7 % 32;
            w.hole_percent = experts % 2 * 20;
            check_entries(&w, 1);
            w.duplicates = 1;
            check_entries(&w, 0);
        }
    }
}

/* With as many entries as experts, each expert appears once: nobody is left out. */
static void all_experts_when_topk_is_their_number(void **state)
{
    struct workload w = example();
    int32_t idx[EPX_MAX_TOPK];
    uint32_t seen = 0;

    (void)state;
    w.experts = w.topk = 17;
    workload_topk(&w, 3, 4, idx);
    for (int k = 0; k < 17; k++)
        seen |= 1u << idx[k];
    assert_int_equal(seen, (1u << 17) - 1);
}

static void count_entries(const struct workload *w, const int32_t *idx, void *count)
{
    for (int k = 0; k < w->topk; k++)
        if (idx[k] >= 0)
            ((int *)count)[idx[k]]++;
}

/* Counts how often each expert is named. */
static void histogram(const struct workload *w, int *count)
{
    memset(count, 0, (size_t)w->experts * sizeof(*count));
    for_each_token(w, count_entries, count);
}

struct extremes {
    int least, most;
};

/* How often the least and the most popular of 64 experts are named. */
static struct extremes extremes(enum workload_routing routing, int topk, int tokens)
{
    struct workload w = example();
    struct extremes found;
    int count[64];

    w.experts = 64;
    w.topk = topk;
    w.max_tokens = tokens;
    w.routing = routing;
    histogram(&w, count);
    found = (struct extremes){count[0], count[0]};
    for (int i = 1; i < 64; i++) {
        found.least = count[i] < found.least ? count[i] : found.least;
        found.most = count[i] > found.most ? count[i] : found.most;
    }
    return found;
}

static void uniform_routing_is_even(void **state)
{
    /* 24000 entries: 375 each, standard deviation below 20 */
    const struct extremes named = extremes(WORKLOAD_UNIFORM, example().topk, 1000);

    (void)state;
    assert_in_range(named.least, 275, 375);
    assert_in_range(named.most, 375, 475);
}

static void zipf_routing_has_a_favourite(void **state)
{
    /* 16000 draws: ln 2 / ln 65 = 17 % to the first, 0.4 % to the last */
    const struct extremes named = extremes(WORKLOAD_ZIPF, 1, 4000);

    (void)state;
    assert_in_range(named.most, 2400, 2900);
    assert_in_range(named.least, 20, 120);
}

static void hot_routing_names_only_the_hot(void **state)
{
    struct workload w = example();
    int count[64], used = 0;

    (void)state;
    w.experts = 64;
    w.routing = WORKLOAD_HOT;
    w.hot_experts = 2;
    histogram(&w, count);
    for (int e = 0; e < 64; e++)
        used += count[e] > 0;
    assert_int_equal(used, 2);
}

/* Which of `groups` groups of experts the token names, as bits. */
static unsigned groups_named(const struct workload *w, int rank, int token, int groups)
{
    int32_t idx[EPX_MAX_TOPK];
    unsigned named = 0;

    workload_topk(w, rank, token, idx);
    for (int k = 0; k < w->topk; k++) {
        int g = 0;
        while (idx[k] >= (g + 1) * w->experts / groups)
            g++;
        named |= 1u << g;
    }
    return named;
}

static void group_routing_stays_within_its_groups(void **state)
{
    struct workload w = example();
    int four = 0, all = 0;

    (void)state;
    w.routing = WORKLOAD_GROUPS;
    w.experts = 67; /* groups of 8 and 9 */
    w.topk = 12;
    for (int t = 0; t < 400; t++) {
        const unsigned named = groups_named(&w, 1, t, 8);
        assert_in_range(__builtin_popcount(named), 2, 4);
        four += __builtin_popcount(named) == 4;
        all |= (int)named;
    }
    assert_in_range(four, 200, 400);
    assert_int_equal(all, 255);
    w.groups = 3;
    w.topk_groups = 1;
    for (int t = 0; t < 100; t++)
        assert_int_equal(__builtin_popcount(groups_named(&w, 2, t, 3)), 1);
    check_entries(&w, 1);
}

static void uneven_counts_include_none_and_all(void **state)
{
    struct workload w = example();
    int none = 0, all = 0;

    (void)state;
    w.uneven = 1;
    for (int r = 0; r < 64; r++) {
        assert_in_range(workload_tokens(&w, r), 0, w.max_tokens);
        none += workload_tokens(&w, r) == 0;
        all += workload_tokens(&w, r) == w.max_tokens;
    }
    assert_in_range(none, 1, 32);
    assert_in_range(all, 1, 32);
}

static void values_are_finite_and_sized_as_promised(void **state)
{
    static const int dtypes[] = {EPX_BF16, EPX_FP16, EPX_FP32};
    char row[4 * 512];

    (void)state;
    for (int d = 0; d < 3; d++)
        for (int values = WORKLOAD_MILD; values <= WORKLOAD_EXTREME; values++)
            for (uint64_t key = 0; key < 50; key++) {
                workload_fill(row, dtypes[d], 512, (enum workload_values)values, key);
                for (int i = 0; i < 512; i++) {
                    float x = fabsf(oracle_to_float(dtypes[d], row + (size_t)i * tensor_element_size(dtypes[d])));
                    assert_true(isfinite(x));
                    assert_true(values != WORKLOAD_MILD || (x >= 0x1p-7f && x < 2));
                    assert_true(values != WORKLOAD_SMALL || (x >= 0x1p-9f && x < 1));
                    assert_true(x < 0x1p62f);
                }
            }
}

UNIT_TESTS(same_arguments_give_the_same_bits, round_changes_numbers_but_not_routing, a_row_is_a_prefix_of_a_longer_one,
           entries_are_in_range_and_distinct, all_experts_when_topk_is_their_number, uniform_routing_is_even,
           zipf_routing_has_a_favourite, hot_routing_names_only_the_hot, group_routing_stays_within_its_groups,
           uneven_counts_include_none_and_all, values_are_finite_and_sized_as_promised)
