/* SPDX-License-Identifier: Apache-2.0 */
/* epx_dispatch_layout: counts per rank, node and expert, and which ranks each token goes to. */
#include <stdlib.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

enum { RANKS = 3, MOST_TOKENS = 200, MOST_TOPK = 9 };

struct counts {
    int32_t per_rank[RANKS], per_node[RANKS], per_expert[FIXTURE_EXPERTS];
    uint8_t in_rank[MOST_TOKENS][RANKS];
};

/* Plainly: a token counts once for a rank, and once for a node. */
static void count_plainly(const int64_t *ids, int tokens, int topk, int nodes, struct counts *out)
{
    const int local = FIXTURE_EXPERTS / RANKS;

    memset(out, 0, sizeof(*out));
    for (int t = 0; t < tokens; t++) {
        int node[RANKS] = {0};
        for (int k = 0; k < topk; k++) {
            const int64_t id = ids[t * topk + k];
            if (id < 0)
                continue;
            out->per_expert[id]++;
            out->in_rank[t][id / local] = 1;
        }
        for (int r = 0; r < RANKS; r++) {
            out->per_rank[r] += out->in_rank[t][r];
            node[nodes == 1 ? 0 : r] |= out->in_rank[t][r];
        }
        for (int n = 0; n < nodes; n++)
            out->per_node[n] += node[n];
    }
}

static epx_status ask(struct fixture *s, const epx_tensor *idx, int tokens, int nodes, struct counts *got)
{
    epx_tensor rank = epx_tensor_make(got->per_rank, EPX_INT32, 1, RANKS, 0, 0, 0);
    epx_tensor node = epx_tensor_make(got->per_node, EPX_INT32, 1, nodes, 0, 0, 0);
    epx_tensor expert = epx_tensor_make(got->per_expert, EPX_INT32, 1, FIXTURE_EXPERTS, 0, 0, 0);
    epx_tensor marks = epx_tensor_make(got->in_rank, EPX_UINT8, 2, tokens, RANKS, 0, 0);
    epx_dispatch_layout_outputs out = EPX_DISPATCH_LAYOUT_OUTPUTS_INIT;

    out.tokens_per_rank = &rank;
    out.tokens_per_node = &node;
    out.tokens_per_expert = &expert;
    out.token_in_rank = &marks;
    return fixture_sync(s, epx_dispatch_layout(s->group, idx, &out, NULL));
}

static int random_case(struct fixture *s, unsigned *seed, int nodes)
{
    static _Thread_local int64_t ids[MOST_TOKENS * MOST_TOPK];
    static _Thread_local struct counts expected, got;
    const int tokens = rand_r(seed) % (MOST_TOKENS + 1), topk = 1 + rand_r(seed) % MOST_TOPK;
    epx_tensor idx = epx_tensor_make(ids, EPX_INT64, 2, tokens, topk, 0, 0);

    for (int i = 0; i < tokens * topk; i++)
        ids[i] = rand_r(seed) % (FIXTURE_EXPERTS + 1) - 1;
    count_plainly(ids, tokens, topk, nodes, &expected);
    memset(&got, 0x55, sizeof(got));
    if (ask(s, &idx, tokens, nodes, &got) != EPX_OK)
        return fixture_fail(s, "epx_dispatch_layout");
    if (memcmp(got.per_rank, expected.per_rank, sizeof(got.per_rank)) ||
        memcmp(got.per_node, expected.per_node, sizeof(int32_t) * (size_t)nodes) ||
        memcmp(got.per_expert, expected.per_expert, sizeof(got.per_expert)) ||
        memcmp(got.in_rank, expected.in_rank, (size_t)tokens * RANKS))
        return fixture_fail(s, "the counts differ");
    return 0;
}

static int many_cases(struct fixture *s)
{
    const int nodes = *(const int *)s->arg;
    unsigned seed = 17u + (unsigned)s->rank;

    for (int i = 0; i < 60; i++)
        if (random_case(s, &seed, nodes))
            return -1;
    return fixture_ht(s); /* and the group goes on */
}

static void run_nodes(int nodes)
{
    epx_group_config config = fixture_config(20000);

    config.num_agents = 3;
    config.ranks_per_node = nodes == 1 ? 0 : 1;
    assert_int_equal(fixture_run(RANKS, &config, many_cases, &nodes), 0);
}

static void test_one_node(void **state)
{
    (void)state;
    run_nodes(1);
}

static void test_three_nodes(void **state)
{
    (void)state;
    run_nodes(RANKS);
}

/* An index one too large is reported with its place, and counts as dropped. */
static int bad_index(struct fixture *s)
{
    static const char *const words[] = {"topk_idx[1][1]", "-1 to 5", "got 6", NULL};
    int64_t ids[2][2] = {{0, 1}, {5, FIXTURE_EXPERTS}};
    epx_tensor idx = epx_tensor_make(ids, EPX_INT64, 2, 2, 2, 0, 0);
    struct counts got;

    return fixture_expect(s, "epx_dispatch_layout", ask(s, &idx, 2, 1, &got), EPX_ERR_ARGUMENT, words);
}

static void test_bad_index(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(RANKS, NULL, bad_index, NULL), 0);
}

static int bad_arguments(struct fixture *s)
{
    static const char *const null[] = {"topk_idx", "NULL", NULL}, *const shape[] = {"tokens_per_expert", NULL},
                             *const outputs[] = {"outputs", "NULL", NULL}, *const many[] = {"topk_idx", "32", NULL};
    static int64_t ids[33];
    int32_t few[FIXTURE_EXPERTS];
    epx_tensor idx = epx_tensor_make(ids, EPX_INT64, 2, 1, 2, 0, 0);
    epx_tensor wide = epx_tensor_make(ids, EPX_INT64, 2, 1, 33, 0, 0);
    epx_tensor expert = epx_tensor_make(few, EPX_INT32, 1, FIXTURE_EXPERTS - 1, 0, 0, 0);
    epx_dispatch_layout_outputs out = EPX_DISPATCH_LAYOUT_OUTPUTS_INIT;

    if (fixture_expect(s, "NULL", epx_dispatch_layout(s->group, NULL, &out, NULL), EPX_ERR_ARGUMENT, null) ||
        fixture_expect(s, "wide", epx_dispatch_layout(s->group, &wide, &out, NULL), EPX_ERR_ARGUMENT, many) ||
        fixture_expect(s, "no outputs", epx_dispatch_layout(s->group, &idx, NULL, NULL), EPX_ERR_ARGUMENT, outputs))
        return -1;
    out.tokens_per_expert = &expert;
    return fixture_expect(s, "shape", epx_dispatch_layout(s->group, &idx, &out, NULL), EPX_ERR_ARGUMENT, shape);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(1, NULL, bad_arguments, NULL), 0);
}

UNIT_TESTS(test_one_node, test_three_nodes, test_bad_index, test_bad_arguments)
