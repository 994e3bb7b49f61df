/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=leaks */
/* Configurations of handles and groups that are refused, and ranks that disagree. */
#include <stdlib.h>

#include "group/config.h"
#include "tests/lib/unit_net.h"
#include "tests/unit/misuse.h"

/* ---- Configurations ---------------------------------------------------------------------------------------------- */

static int handle_configs(struct fixture *s)
{
    const epx_handle_config good = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    epx_handle_config c = good;
    epx_handle *h = NULL;

    c.mode = 3;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "mode", "3");
    c = good;
    c.layout = EPX_RANK_MAJOR;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "layout", "2");
    c.mode = EPX_LOW_LATENCY;
    c.layout = EPX_FLAT;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "layout", "3");
    c = good;
    c.topk = 0;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "topk", "0");
    c.topk = FIXTURE_TOPK + 1;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "topk", "3", "4");
    c = good;
    c.expert_alignment = (1 << 20) + 1;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "expert_alignment", "1048576", "1048577");
    c.expert_alignment = -1;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "expert_alignment", "-1");
    c = good;
    c.flags = 1u << 30;
    REFUSED(epx_handle_create(&h, s->group, &c), EPX_ERR_ARGUMENT, "flags");
    return h ? -1 : 0;
}

static int wide_zones(struct fixture *s)
{
    epx_handle_config c = {.size = sizeof(c),
                           .mode = EPX_HIGH_THROUGHPUT,
                           .layout = EPX_EXPERT_MAJOR,
                           .topk = FIXTURE_TOPK,
                           .expert_alignment = 1 << 20};
    size_t bytes;

    REFUSED(epx_handle_memory(s->group, &c, &bytes), EPX_ERR_ARGUMENT, "expert_alignment", "1048576", "4096");
    c.expert_alignment = 1 << 18;
    ACCEPTED(epx_handle_memory(s->group, &c, &bytes));
    return 0;
}

/* Rows are numbered with 32 bits: so many padded zones would begin again below zero. */
static void zones_beyond_all_rows_are_refused(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    config.num_experts = 4096;
    assert_int_equal(fixture_group_run(1, &config, wide_zones, NULL), 0);
}

struct group_mistake {
    const char *field, *given;
    size_t offset;
    int32_t value;
};

#define MISTAKE(field, value)                                    \
    {                                                            \
#field, #value, offsetof(epx_group_config, field), value \
    }

static const struct group_mistake group_mistakes[] = {
    MISTAKE(num_experts, 0),
    MISTAKE(num_experts, -4),
    MISTAKE(num_experts, 1048577),
    MISTAKE(max_tokens_per_rank, 0),
    MISTAKE(max_tokens_per_rank, -1),
    MISTAKE(max_hidden_bytes, 0),
    MISTAKE(max_hidden_bytes, 40),
    MISTAKE(max_topk, 33),
    MISTAKE(max_topk, -1),
    MISTAKE(max_inflight, -2),
    MISTAKE(num_agents, -1),
    MISTAKE(timeout_ms, -5),
    MISTAKE(enable_mask, 2),
    MISTAKE(device, 9),
    MISTAKE(modes, 8),
    MISTAKE(max_recv_tokens, -1),
};

static int group_mistake_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct group_mistake *mistake = arg;
    epx_group_config config = fixture_config(20000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    const char *const *words = WORDS(mistake->field, mistake->given);
    struct fixture s = {.rank = rank, .nranks = n};
    int rc;

    memcpy((char *)&config + mistake->offset, &mistake->value, sizeof(int32_t));
    rc = fixture_expect(&s, "epx_group_memory", epx_group_memory(&config, n, &info), EPX_ERR_ARGUMENT, words) ||
         fixture_refused(rank, n, boot, &config, EPX_ERR_ARGUMENT, words);
    if (rc)
        fprintf(stderr, "rank %d, %s = %s: %s\n", rank, mistake->field, mistake->given, s.why);
    return rc;
}

static void wrong_group_configurations_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(group_mistakes) / sizeof(*group_mistakes); i++)
        assert_int_equal(run_ranks(2, group_mistake_rank, (void *)(uintptr_t)&group_mistakes[i]), 0);
}

/* The largest value of each field, and the next one. */
static const struct edge {
    const char *field;
    size_t offset;
    int32_t most, next;
} edges[] = {
    {"num_experts", offsetof(epx_group_config, num_experts), 1 << 20, (1 << 20) + 1},
    {"max_tokens_per_rank", offsetof(epx_group_config, max_tokens_per_rank), 1 << 20, (1 << 20) + 1},
    {"max_hidden_bytes", offsetof(epx_group_config, max_hidden_bytes), 1 << 24, (1 << 24) + 16},
    {"max_topk", offsetof(epx_group_config, max_topk), EPX_MAX_TOPK, EPX_MAX_TOPK + 1},
    {"max_inflight", offsetof(epx_group_config, max_inflight), 64, 65},
    {"num_agents", offsetof(epx_group_config, num_agents), 1024, 1025},
    {"ranks_per_node", offsetof(epx_group_config, ranks_per_node), 4096, 4097},
};

static epx_status memory_of(const struct edge *e, int32_t value)
{
    epx_group_config config = fixture_config(20000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    memcpy((char *)&config + e->offset, &value, sizeof(value));
    return epx_group_memory(&config, 2, &info);
}

static void each_limit_is_taken_and_the_next_value_refused(void **state)
{
    char next[16];

    (void)state;
    for (size_t i = 0; i < sizeof(edges) / sizeof(*edges); i++) {
        assert_int_equal(memory_of(&edges[i], edges[i].most), EPX_OK);
        assert_int_equal(memory_of(&edges[i], edges[i].next), EPX_ERR_ARGUMENT);
        snprintf(next, sizeof(next), "%d", edges[i].next);
        assert_non_null(strstr(epx_last_error(), edges[i].field));
        assert_non_null(strstr(epx_last_error(), next));
    }
}

static epx_status memory_of_ranks(int ranks, int per_node, int tokens)
{
    epx_group_config config = fixture_config_of(20000, ranks, tokens, 16, 1);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    config.ranks_per_node = per_node;
    return epx_group_memory(&config, ranks, &info);
}

/* Row numbers have 32 bits: no product of ranks and tokens comes nearer to 2^31 - 1 than the largest one here. */
static void ranks_and_rows_have_their_limits(void **state)
{
    (void)state;
    assert_int_equal(memory_of_ranks(4096, 0, 1), EPX_OK);
    assert_int_equal(memory_of_ranks(4096, 1, 1), EPX_OK);
    assert_int_equal(memory_of_ranks(4097, 0, 1), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "4097"));
    assert_int_equal(memory_of_ranks(2048, 0, (1 << 20) - 1), EPX_OK);
    assert_int_equal(memory_of_ranks(2048, 0, 1 << 20), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "2147483648"));
}

/* So much that the sum of all parts would begin again at zero, and nearly so much. */
static void an_endless_alloc_heap_is_refused(void **state)
{
    static const uint64_t bytes[] = {UINT64_MAX, UINT64_MAX - 8191, (uint64_t)INT64_MAX + 1};
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    (void)state;
    for (size_t i = 0; i < sizeof(bytes) / sizeof(*bytes); i++) {
        epx_group_config config = fixture_config(20000);

        config.alloc_bytes = bytes[i];
        assert_int_equal(epx_group_memory(&config, 2, &info), EPX_ERR_ARGUMENT);
        assert_non_null(strstr(epx_last_error(), "alloc_bytes"));
    }
}

/* Between nodes everything that belongs together is one message, whose size has an end. */
static void what_no_message_holds_is_refused_across_nodes(void **state)
{
    epx_group_config config = fixture_config(20000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    (void)state;
    config.max_hidden_bytes = 1 << 24;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
    config.ranks_per_node = 2;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "max_hidden_bytes"));
    config = fixture_config(20000);
    config.ranks_per_node = 2;
    config.max_tokens_per_rank = 1 << 20; /* what describes them travels with the rows, or in pieces */
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
}

/* Commands have 36 bits for a place in the heap, in units of 16 bytes. */
static void a_heap_between_nodes_ends_at_a_tebibyte(void **state)
{
    epx_group_config config = fixture_config(20000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    (void)state;
    config.ranks_per_node = 2;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
    config.alloc_bytes = ((uint64_t)1 << 40) - (info.heap_bytes - info.alloc_bytes);
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
    assert_int_equal(info.heap_bytes, (uint64_t)1 << 40);
    config.alloc_bytes += 4096;
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_ERR_ARGUMENT);
    assert_non_null(strstr(epx_last_error(), "1099511631872"));
    config.ranks_per_node = 0; /* in one node nobody counts in units */
    assert_int_equal(epx_group_memory(&config, 4, &info), EPX_OK);
}

static int bootstrap_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);
    epx_bootstrap far = *boot, empty = *boot, tiny = *boot;
    struct fixture fixture = {.rank = rank}, *s = &fixture;

    (void)arg;
    REFUSED(epx_group_create(NULL, boot, &config), EPX_ERR_ARGUMENT, "NULL");
    far.rank = 9;
    empty.nranks = 0;
    tiny.size = 1;
    return fixture_refused(rank, n, &far, &config, EPX_ERR_ARGUMENT, WORDS("rank", "9")) ||
           fixture_refused(rank, n, &empty, &config, EPX_ERR_ARGUMENT, WORDS("nranks", "0")) ||
           fixture_refused(rank, n, &tiny, &config, EPX_ERR_ARGUMENT, WORDS("size"));
}

static int bootstrap_rank_told(int rank, int n, epx_bootstrap *boot, void *arg)
{
    int rc = bootstrap_rank(rank, n, boot, arg);

    if (rc)
        fprintf(stderr, "rank %d: last error: %s\n", rank, epx_last_error());
    return rc;
}

static void wrong_bootstraps_are_refused(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(1, bootstrap_rank_told, NULL), 0);
}

/* Rank 2 of 3 differs in one field: all three say so. */
static int mismatch_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct group_mistake *mistake = arg;
    epx_group_config config = fixture_config(20000);

    if (rank == 2)
        memcpy((char *)&config + mistake->offset, &mistake->value, sizeof(int32_t));
    return fixture_refused(rank, n, boot, &config, EPX_ERR_MISMATCH, WORDS("rank 2", mistake->field, mistake->given));
}

static void ranks_that_disagree_name_rank_and_field(void **state)
{
    static const struct group_mistake differences[] = {
        MISTAKE(num_experts, 12),  MISTAKE(max_tokens_per_rank, 77), MISTAKE(max_hidden_bytes, 176),
        MISTAKE(max_topk, 5),      MISTAKE(max_inflight, 4),         MISTAKE(enable_mask, 1),
        MISTAKE(timeout_ms, 2001), MISTAKE(max_recv_tokens, 99),     MISTAKE(modes, 1)};

    (void)state;
    for (size_t i = 0; i < sizeof(differences) / sizeof(*differences); i++)
        assert_int_equal(run_ranks(3, mismatch_rank, (void *)(uintptr_t)&differences[i]), 0);
}

/* Each rank a node; rank 2 has another network than the others. */
static int other_net_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);

    (void)arg;
    config.ranks_per_node = 1;
    snprintf(config.net, sizeof(config.net), "%s", rank == 2 ? "null" : "ofi");
    return fixture_refused(rank, n, boot, &config, EPX_ERR_MISMATCH, WORDS("rank 2", "net = null", "ofi"));
}

static void ranks_of_different_networks_name_them(void **state)
{
    (void)state;
    unit_need_ofi("");
    assert_int_equal(run_ranks(3, other_net_rank, NULL), 0);
}

/* What one rank names and another leaves open may be the same. */
static int open_device_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);

    (void)arg;
    config.device = rank ? EPX_DEVICE_AUTO : EPX_DEVICE_CPU;
    return fixture_group(rank, n, boot, &config, NULL, NULL);
}

static void a_device_left_open_is_the_one_it_stands_for(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, open_device_rank, NULL), 0);
}

/* One rank's configuration is wrong in itself: it says why, the others say who. */
static int one_wrong_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);

    (void)arg;
    if (rank == 1)
        config.num_experts = -1;
    return fixture_refused(rank, n, boot, &config, rank == 1 ? EPX_ERR_ARGUMENT : EPX_ERR_PEER,
                           WORDS(rank == 1 ? "-1" : "rank 1", "num_experts"));
}

static void one_wrong_configuration_ends_all(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(3, one_wrong_rank, NULL), 0);
}

enum { MOST_EXPERTS = 1 << 20, EDGE_HIDDEN = 16 };

/* Each rank sends a token to the first and the last expert of all; the last rank has rows of its last one only. */
static int edge_rows(struct fixture *s)
{
    const int rank = s->rank, n = s->nranks;
    const int L = MOST_EXPERTS / n;
    int32_t idx[2] = {0, MOST_EXPERTS - 1}, *counts = calloc((size_t)L, sizeof(*counts));
    uint16_t x[EDGE_HIDDEN], y[EDGE_HIDDEN] = {0}, *rows = calloc((size_t)L * (size_t)n * EDGE_HIDDEN, sizeof(*rows));
    float weights[2] = {0.5f, 0.5f};
    epx_tensor ti = epx_tensor_make(idx, EPX_INT32, 2, 1, 2, 0, 0),
               tx = epx_tensor_make(x, EPX_BF16, 2, 1, EDGE_HIDDEN, 0, 0),
               tw = epx_tensor_make(weights, EPX_FP32, 2, 1, 2, 0, 0),
               tr = epx_tensor_make(rows, EPX_BF16, 3, L, n, EDGE_HIDDEN, 0),
               tc = epx_tensor_make(counts, EPX_INT32, 1, L, 0, 0, 0),
               ty = epx_tensor_make(y, EPX_BF16, 2, 1, EDGE_HIDDEN, 0, 0);
    epx_handle_config hc = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 2);
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_combine_inputs cin = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs cout = EPX_COMBINE_OUTPUTS_INIT;
    epx_handle *h = NULL;
    const int own = rank ? L - 1 : 0;

    for (int i = 0; i < EDGE_HIDDEN; i++)
        x[i] = (uint16_t)(0x3f80 + rank + i);
    in.tokens = &tx;
    out.tokens = &tr;
    info.expert_counts = &tc;
    cin.tokens = &tr;
    cin.topk_weights = &tw;
    cout.tokens = &ty;
    ACCEPTED(epx_handle_create(&h, s->group, &hc));
    ACCEPTED(epx_handle_update(h, &ti, NULL, NULL));
    ACCEPTED(epx_dispatch(h, &in, &out, &info, NULL, NULL));
    ACCEPTED(epx_combine(h, &cin, &cout, NULL, NULL));
    ACCEPTED(epx_stream_sync(s->group, NULL));
    for (int e = 0; e < L; e++)
        if (counts[e] != (e == own ? n : 0))
            return fixture_fail(s, "counts of experts");
    if (memcmp(x, y, sizeof(x)) != 0)
        return fixture_fail(s, "the sum of both experts' halves");
    free(rows);
    free(counts);
    return epx_handle_destroy(h);
}

static void a_million_experts_have_their_rows(void **state)
{
    epx_group_config config = fixture_config_of(20000, MOST_EXPERTS, 1, 2 * EDGE_HIDDEN, 2);

    (void)state;
    config.num_agents = 1;
    config.modes = EPX_LOW_LATENCY;
    assert_int_equal(fixture_group_run(2, &config, edge_rows, NULL), 0);
}

/* Malformed or out of range: the default, with a warning. */
static void a_wide_wait_has_its_limits(void **state)
{
    static const struct {
        const char *text;
        int us;
    } cases[] = {{"0", 0},       {"1", 1},      {"100000", 100000}, {"100001", 100},     {"98K", 100},
                 {"97K", 99328}, {"-1", 100},   {"-0", 0},          {"2147483648", 100}, {"9223372036854775808", 100},
                 {"1e3", 100},   {"10us", 100}, {"0x10", 100},      {"1.5", 100},        {" ", 100},
                 {"", 100},      {"soon", 100}};
    const epx_group_config config = fixture_config(20000);
    struct settings set;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        setenv("EPX_LL_WIDE_WAIT_US", cases[i].text, 1);
        assert_int_equal(settings_make(&config, 2, &set), EPX_OK);
        if (set.ll_wide_wait_us != cases[i].us)
            fail_msg("EPX_LL_WIDE_WAIT_US=%s: expected %d, got %d", cases[i].text, cases[i].us, set.ll_wide_wait_us);
    }
    unsetenv("EPX_LL_WIDE_WAIT_US");
    assert_int_equal(settings_make(&config, 2, &set), EPX_OK);
    assert_int_equal(set.ll_wide_wait_us, 100);
}

UNIT_MAIN(MISUSE("wrong_handle_configurations_are_refused", 2, handle_configs),
          cmocka_unit_test(zones_beyond_all_rows_are_refused), cmocka_unit_test(wrong_group_configurations_are_refused),
          cmocka_unit_test(each_limit_is_taken_and_the_next_value_refused),
          cmocka_unit_test(ranks_and_rows_have_their_limits), cmocka_unit_test(an_endless_alloc_heap_is_refused),
          cmocka_unit_test(what_no_message_holds_is_refused_across_nodes),
          cmocka_unit_test(a_heap_between_nodes_ends_at_a_tebibyte), cmocka_unit_test(wrong_bootstraps_are_refused),
          cmocka_unit_test(ranks_that_disagree_name_rank_and_field),
          cmocka_unit_test(ranks_of_different_networks_name_them),
          cmocka_unit_test(a_device_left_open_is_the_one_it_stands_for),
          cmocka_unit_test(one_wrong_configuration_ends_all), cmocka_unit_test(a_wide_wait_has_its_limits),
          cmocka_unit_test(a_million_experts_have_their_rows))
