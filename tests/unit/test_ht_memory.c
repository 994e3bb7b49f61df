/* SPDX-License-Identifier: Apache-2.0 */
/*
 * High throughput: EPX's own memory does not grow with the number of ranks. 4096 tokens, hidden 7168 BF16, top-8, 8 to
 * 1024 ranks: in nodes of 8 ranks and on one, with receive tensors in reach (max_recv_tokens says that none passes
 * through a buffer) and in any memory. And 16 and 32 ranks run with the least memory.
 */
#include <inttypes.h>

#include "group/config.h"
#include "kernel/command.h"
#include "modes/handle.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

enum { TOKENS = 4096, HIDDEN_BYTES = 14336, TOPK = 8, PER_NODE = 8 };

static const int sizes[] = {8, 16, 32, 64, 128, 256, 512, 1024};

static epx_group_config config_of(int ranks)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.modes = EPX_HIGH_THROUGHPUT;
    config.num_experts = ranks > 256 ? ranks : 256;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN_BYTES;
    config.max_topk = TOPK;
    config.ranks_per_node = PER_NODE;
    config.alloc_bytes = 4096;
    config.max_recv_tokens = 1;
    return config;
}

static void plan_of(const epx_group_config *config, int ranks, struct settings *set, struct heap_plan *plan)
{
    struct node_map map;

    assert_int_equal(settings_make(config, ranks, set), EPX_OK);
    assert_int_equal(node_map_slice(&map, ranks, set->ranks_per_node), EPX_OK);
    settings_nodes(set, &map);
    node_map_free(&map);
    heap_plan_make(set, plan);
    assert_int_equal(heap_plan_check(set, plan), EPX_OK);
}

/* Without max_recv_tokens: every entry of every token may name the one expert of a rank. */
static void the_worst_case_has_a_row_for_every_entry(void **state)
{
    epx_group_config config = config_of(8);
    struct settings set;

    (void)state;
    config.num_experts = 8;
    config.max_recv_tokens = 0;
    config.layouts = EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    assert_int_equal(settings_make(&config, 8, &set), EPX_OK);
    assert_int_equal(set.max_recv_tokens, 8 * TOKENS * TOPK + 127);
}

/* Of a group whose tensors are in ordinary memory; layout 0: the default ones. */
static struct heap_plan ordinary_plan(int ranks, int per_node, int layout, uint64_t node_bytes)
{
    epx_group_config config = config_of(ranks);
    struct settings set;
    struct heap_plan plan;

    config.ranks_per_node = per_node;
    config.max_recv_tokens = 0;
    config.layouts = layout ? EPX_LAYOUT_BIT(layout) : config.layouts;
    config.ht_node_bytes = node_bytes;
    plan_of(&config, ranks, &set, &plan);
    return plan;
}

/* Of so many ranks; *set, unless NULL: their settings. */
static struct heap_plan usual_plan(int ranks, struct settings *set)
{
    const epx_group_config config = config_of(ranks);
    struct settings unused;
    struct heap_plan plan;

    plan_of(&config, ranks, set ? set : &unused, &plan);
    return plan;
}

static void the_heap_is_below_a_gigabyte(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(sizes); i++) {
        const struct heap_plan plan = usual_plan(sizes[i], NULL);
        const double most = sizes[i] > PER_NODE ? 1e9 : 0.6e9;

        print_message("%4d ranks: heap %4" PRIu64 " MB, %d rows in a slot, at most %d rounds\n", sizes[i],
                      plan.total / 1000000, plan.ht.round_rows, plan.ht.rounds);
        assert_true((double)plan.total <= most);
        /* Without windows too: kernels divide by these before they know. */
        assert_true(plan.ht.take_tokens >= 1 && plan.ht.sum_tokens >= 1);
    }
}

/* On one node also where tensors are in ordinary memory, of either layout. */
static void one_node_is_below_its_bar_with_ordinary_memory(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(sizes); i++) {
        for (int layout = EPX_EXPERT_MAJOR; layout <= EPX_FLAT; layout += EPX_FLAT - EPX_EXPERT_MAJOR) {
            const struct heap_plan plan = ordinary_plan(sizes[i], sizes[i], layout, 0);

            print_message("%4d ranks on one node, %s: heap %4" PRIu64 " MB, %" PRId64
                          " rows at once, windows of %d and %d tokens\n",
                          sizes[i], layout == EPX_FLAT ? "FLAT" : "EXPERT_MAJOR", plan.total / 1000000, plan.ht.rows,
                          plan.ht.take_tokens, plan.ht.sum_tokens);
            assert_true((double)plan.total <= 0.6e9);
        }
    }
}

/* The same in nodes of 8. */
static void several_nodes_are_below_their_bar_with_ordinary_memory(void **state)
{
    (void)state;
    for (size_t i = 1; i < UNIT_COUNT(sizes); i++) {
        for (int layout = EPX_EXPERT_MAJOR; layout <= EPX_FLAT; layout += EPX_FLAT - EPX_EXPERT_MAJOR) {
            const struct heap_plan plan = ordinary_plan(sizes[i], PER_NODE, layout, 0);

            print_message("%4d ranks, %s: heap %4" PRIu64 " MB, %" PRId64
                          " rows at once, %d rows in a slot, at most %d rounds of %d tokens\n",
                          sizes[i], layout == EPX_FLAT ? "FLAT" : "EXPERT_MAJOR", plan.total / 1000000, plan.ht.rows,
                          plan.ht.round_rows, plan.ht.rounds, plan.ht.sum_tokens);
            assert_true((double)plan.total <= 1e9);
        }
    }
}

/* The heap of 64 ranks takes at most `bytes` beside `others`. */
static void keeps_to(uint64_t bytes, int per_node, uint64_t others)
{
    const struct heap_plan plan = ordinary_plan(64, per_node, 0, bytes);

    assert_true(plan.ht.take_tokens >= 1 && plan.ht.sum_tokens >= 1 && plan.ht.rows >= 1);
    assert_true(plan.total <= others + bytes + 4000000);
}

/* ht_node_bytes, beside what groups without ordinary memory have. */
static void what_the_caller_gives_for_several_nodes_is_kept(void **state)
{
    (void)state;
    for (uint64_t bytes = 1; bytes <= (uint64_t)1 << 30; bytes = bytes * 4 + (1 << 20)) {
        const epx_group_config config = config_of(64);
        struct settings set;
        struct heap_plan without;

        plan_of(&config, 64, &set, &without);
        keeps_to(bytes, PER_NODE, without.total);
    }
}

static int exchanges(struct fixture *s)
{
    for (int i = 0; i < 3; i++)
        if (fixture_ht(s))
            return -1;
    /* The experts are on the first ranks: other nodes have no rows, and no windows. */
    if (s->rank == 0 && *s->group->shadow.windows == 0)
        return fixture_fail(s, "no rows passed through windows");
    return 0;
}

static void exchange_in_the_least_memory(int ranks)
{
    epx_group_config config = fixture_config(60000);

    config.num_agents = 2;
    config.ranks_per_node = 8;
    config.ht_node_bytes = config.ht_buffer_bytes = 1;
    assert_int_equal(fixture_run(ranks, &config, exchanges, NULL), 0);
}

static void ranks_of_nodes_exchange_rows_in_the_least_memory(void **state)
{
    (void)state;
    exchange_in_the_least_memory(16);
    exchange_in_the_least_memory(32);
    setenv("EPX_GPU_HEAP", "split", 1);
    exchange_in_the_least_memory(16);
    unsetenv("EPX_GPU_HEAP");
}

/* What the node reads is in the heap, what crosses between nodes in memory of its own. */
static void split_memory_keeps_to_the_same_bar(void **state)
{
    (void)state;
    for (size_t i = 1; i < UNIT_COUNT(sizes); i++) {
        epx_group_config config = config_of(sizes[i]);
        struct settings set;
        struct heap_plan whole, split;

        config.max_recv_tokens = 0;
        config.ht_node_bytes = (uint64_t)512 << 20;
        plan_of(&config, sizes[i], &set, &whole);
        set.split = 1;
        heap_plan_make(&set, &split);
        assert_int_equal(heap_plan_check(&set, &split), EPX_OK);
        print_message("%4d ranks: heap %4" PRIu64 " MB, for the network %4" PRIu64 " MB\n", sizes[i],
                      split.total / 1000000, split.net_bytes / 1000000);
        /* A quarter of the slots of relays is there twice. */
        assert_true(split.total + split.net_bytes <=
                    whole.total + 2 * (uint64_t)set.relay_max * split.ht.relay_stride + split.net_bytes / 16);
        assert_true((double)split.net_bytes <= 0.6e9);
    }
}

/* ht_node_bytes: rows and windows, and beside them tables of the own tokens and of ranks. */
static void what_the_caller_gives_for_one_node_is_kept(void **state)
{
    (void)state;
    for (uint64_t bytes = 1; bytes <= (uint64_t)1 << 30; bytes = bytes * 4 + (1 << 20))
        keeps_to(bytes, 64, 0);
}

static void handles_are_below_8_megabytes(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(sizes); i++) {
        epx_handle_config handle = EPX_HANDLE_CONFIG_INIT;
        struct settings set;
        const struct heap_plan plan = usual_plan(sizes[i], &set);

        handle.mode = EPX_HIGH_THROUGHPUT;
        handle.layout = EPX_FLAT;
        handle.topk = TOPK;
        handle.expert_alignment = 1;
        print_message("%4d ranks: handle %zu bytes\n", sizes[i], handle_table_bytes(&set, &plan.ht, &handle));
        assert_true(handle_table_bytes(&set, &plan.ht, &handle) <= 8000000);
    }
}

static void what_the_caller_gives_is_kept(void **state)
{
    (void)state;
    for (uint64_t bytes = (uint64_t)1 << 26; bytes <= (uint64_t)1 << 30; bytes *= 2) {
        epx_group_config config = config_of(256);
        struct settings set;
        struct heap_plan plan;
        uint64_t slots;

        config.ht_buffer_bytes = bytes;
        plan_of(&config, 256, &set, &plan);
        slots = (uint64_t)set.relay_max * HT_SLOTS * plan.ht.relay_stride +
                (uint64_t)(set.nnodes - 1) * HT_SLOTS * plan.ht.back_stride;
        assert_true(slots <= bytes + bytes / 64); /* and what alignment adds */
        assert_true(slots >= bytes / 2);
    }
}

/* One row in a slot is the least; every token may then be a round of its own. */
static void the_least_has_one_row_in_a_slot(void **state)
{
    epx_group_config config = config_of(1024);
    struct settings set;
    struct heap_plan plan;

    (void)state;
    config.ht_buffer_bytes = 1;
    plan_of(&config, 1024, &set, &plan);
    assert_int_equal(plan.ht.round_rows, 1);
    assert_int_equal(plan.ht.rounds, TOKENS);
}

UNIT_TESTS(the_heap_is_below_a_gigabyte, one_node_is_below_its_bar_with_ordinary_memory,
           several_nodes_are_below_their_bar_with_ordinary_memory, what_the_caller_gives_for_one_node_is_kept,
           what_the_caller_gives_for_several_nodes_is_kept, handles_are_below_8_megabytes,
           what_the_caller_gives_is_kept, the_least_has_one_row_in_a_slot,
           ranks_of_nodes_exchange_rows_in_the_least_memory, split_memory_keeps_to_the_same_bar,
           the_worst_case_has_a_row_for_every_entry)
