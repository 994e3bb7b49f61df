/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory: what the size query announces keeps to the promised factors over many configurations, the parts add up, and
 * the pages that a working group really occupies are not more than announced.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/fixture.h"
#include "tests/lib/thread_boot.h"

/* "Plus a constant": tables that do not grow with the payload. */
enum { CONSTANT = 256 << 10 };

static epx_memory_info query(const epx_group_config *config, int nranks)
{
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    if (epx_group_memory(config, nranks, &info) != EPX_OK)
        fail_msg("epx_group_memory: %s", epx_last_error());
    return info;
}

static epx_group_config typical(int tokens, int hidden, int topk, int experts, uint32_t modes)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.num_experts = experts;
    config.max_tokens_per_rank = tokens;
    config.max_hidden_bytes = hidden * 2;
    config.max_topk = topk;
    config.modes = modes;
    config.alloc_bytes = 1 << 20;
    return config;
}

static void the_parts_add_up(void **state)
{
    (void)state;
    for (uint32_t modes = 1; modes <= 3; modes++) {
        epx_group_config config = typical(128, 7168, 8, 256, modes);
        epx_memory_info info = query(&config, 8);

        assert_int_equal(info.heap_bytes,
                         info.control_bytes + info.low_latency_bytes + info.high_throughput_bytes + info.alloc_bytes);
        assert_int_equal(info.low_latency_bytes != 0, (modes & EPX_LOW_LATENCY) != 0);
        assert_int_equal(info.high_throughput_bytes != 0, (modes & EPX_HIGH_THROUGHPUT) != 0);
        assert_true(info.alloc_bytes >= 1 << 20);
    }
}

struct size_case {
    int ranks, tokens, hidden, topk, experts;
};

static const struct size_case size_cases[] = {
    {1, 1, 8, 1, 1},          {1, 4096, 7168, 8, 256}, {2, 128, 2048, 4, 16},  {8, 128, 7168, 8, 256},
    {8, 512, 7168, 8, 256},   {8, 4096, 7168, 8, 256}, {8, 4096, 128, 32, 64}, {64, 128, 7168, 8, 256},
    {64, 4096, 7168, 8, 256}, {64, 16, 64, 32, 1024},  {7, 333, 1000, 5, 33},  {16, 1024, 4096, 2, 16},
};

static void high_throughput_keeps_to_its_factor(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(size_cases) / sizeof(*size_cases); i++) {
        const struct size_case *c = &size_cases[i];
        epx_group_config config = typical(c->tokens, c->hidden, c->topk, c->experts, EPX_HIGH_THROUGHPUT);
        epx_memory_info info = query(&config, c->ranks);
        /* Every token of every rank once: nobody may claim less as the worst case, nor much more. */
        uint64_t rows = (uint64_t)c->ranks * (uint64_t)c->tokens, row = (uint64_t)c->hidden * 2;

        assert_true(info.ht_receive_bytes >= rows * row);
        assert_true((double)info.ht_receive_bytes <=
                    (double)rows * ((double)row * 1.1 + 12.0 * c->topk + 8 + 64) + CONSTANT);
        if ((double)info.high_throughput_bytes > 1.1 * (double)info.ht_receive_bytes + CONSTANT)
            fail_msg("%d ranks, %d tokens, hidden %d: %" PRIu64 " bytes for %" PRIu64 " received", c->ranks, c->tokens,
                     c->hidden, info.high_throughput_bytes, info.ht_receive_bytes);
    }
}

static void low_latency_keeps_to_its_factor(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(size_cases) / sizeof(*size_cases); i++) {
        const struct size_case *c = &size_cases[i];
        epx_group_config config = typical(c->tokens, c->hidden, c->topk, c->experts, EPX_LOW_LATENCY);
        epx_memory_info info = query(&config, c->ranks);

        if ((double)info.low_latency_bytes > 2.0 * (double)info.ll_receive_bytes + CONSTANT)
            fail_msg("%d ranks, %d tokens, hidden %d: %" PRIu64 " bytes for %" PRIu64 " received", c->ranks, c->tokens,
                     c->hidden, info.low_latency_bytes, info.ll_receive_bytes);
    }
}

static void control_is_small(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(size_cases) / sizeof(*size_cases); i++) {
        const struct size_case *c = &size_cases[i];
        epx_group_config config = typical(c->tokens, c->hidden, c->topk, c->experts, 0);
        epx_memory_info info = query(&config, c->ranks);

        assert_true(info.control_bytes <= CONSTANT);
    }
}

static void a_bound_on_rows_saves_memory(void **state)
{
    epx_group_config config = typical(4096, 7168, 8, 256, EPX_HIGH_THROUGHPUT);
    epx_memory_info worst = query(&config, 8), bounded;

    (void)state;
    config.max_recv_tokens = 4096;
    bounded = query(&config, 8);
    assert_true(bounded.high_throughput_bytes * 7 < worst.high_throughput_bytes);
    assert_true((double)bounded.high_throughput_bytes <= 1.1 * (double)bounded.ht_receive_bytes + CONSTANT);
}

/* ---- The pages themselves ---------------------------------------------------------------------------------------------- */

/* Rss, in bytes, of the mapping that holds `address`; -1 if there is none. */
static int64_t resident_at(const void *address, int64_t *mapped)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    int inside = 0;
    int64_t kib = -1;

    *mapped = 0;
    while (file && fgets(line, sizeof(line), file)) {
        unsigned long from, to;

        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && strchr(line, '-') < strchr(line, ' ')) {
            inside = (uintptr_t)address >= from && (uintptr_t)address < to;
            if (inside)
                *mapped = (int64_t)(to - from);
        } else if (inside && sscanf(line, "Rss: %" SCNd64, &kib) == 1) {
            break;
        }
    }
    if (file)
        fclose(file);
    return kib < 0 ? -1 : kib * 1024;
}

static int resident_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    struct fixture *s = malloc(sizeof(*s));
    int64_t rss, mapped;
    void *own = NULL;
    int rc;

    (void)arg;
    config.alloc_bytes = 1ull << 30; /* address space that nobody touches */
    if (!s)
        return -1;
    rc = fixture_open(s, rank, n, boot, &config);
    for (int i = 0; !rc && i < 4; i++)
        rc = fixture_ll(s) || fixture_ht(s);
    if (!rc && epx_alloc(s->group, 4096, &own) == EPX_OK && epx_group_memory(&config, n, &info) == EPX_OK) {
        rss = resident_at(own, &mapped);
        /* One allocation of a page was made; whether it was touched is EPX's business. */
        if (rss < 0 || mapped > (int64_t)info.heap_bytes ||
            rss > (int64_t)(info.heap_bytes - info.alloc_bytes + 2 * 65536)) {
            snprintf(s->why, sizeof(s->why),
                     "resident %lld of %lld mapped; announced %llu, of which %llu for epx_alloc", (long long)rss,
                     (long long)mapped, (unsigned long long)info.heap_bytes, (unsigned long long)info.alloc_bytes);
            rc = -1;
        }
    } else if (!rc) {
        snprintf(s->why, sizeof(s->why), "%s", epx_last_error());
        rc = -1;
    }
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc;
}

static void resident_memory_is_not_above_what_was_announced(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(3, resident_rank, NULL), 0);
}

/* ---- epx_alloc ---------------------------------------------------------------------------------------------------------- */

static int alloc_rank(int rank, int n, epx_bootstrap *boot, void *arg)
{
    epx_group_config config = fixture_config(20000);
    struct fixture *s = malloc(sizeof(*s));
    void *p[64] = {NULL};
    uint64_t random = (uint64_t)rank + 1;
    int rc;

    (void)arg;
    if (!s)
        return -1;
    rc = fixture_open(s, rank, n, boot, &config);
    for (int i = 0; !rc && i < 2000; i++) {
        random = workload_hash(random, 1);
        int at = (int)(random % 64);
        size_t bytes = (size_t)(random >> 20) % 8000;

        if (p[at]) {
            rc = *(unsigned char *)p[at] != (unsigned char)at || epx_free(s->group, p[at]) != EPX_OK;
            p[at] = NULL;
        } else {
            rc = epx_alloc(s->group, bytes + 1, &p[at]) != EPX_OK || (uintptr_t)p[at] % 256;
            if (!rc)
                memset(p[at], at, bytes + 1);
        }
    }
    /* All back: the whole is there again in one piece. */
    for (int i = 0; !rc && i < 64; i++)
        rc = p[i] && epx_free(s->group, p[i]) != EPX_OK;
    rc = rc || epx_alloc(s->group, 1 << 20, &p[0]) != EPX_OK;
    if (rc)
        fprintf(stderr, "rank %d: %s %s\n", rank, s->why, epx_last_error());
    fixture_close(s);
    free(s);
    return rc;
}

static void allocations_do_not_overlap_and_come_back(void **state)
{
    (void)state;
    assert_int_equal(run_ranks(2, alloc_rank, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_parts_add_up),
        cmocka_unit_test(high_throughput_keeps_to_its_factor),
        cmocka_unit_test(low_latency_keeps_to_its_factor),
        cmocka_unit_test(control_is_small),
        cmocka_unit_test(a_bound_on_rows_saves_memory),
        cmocka_unit_test(resident_memory_is_not_above_what_was_announced),
        cmocka_unit_test(allocations_do_not_overlap_and_come_back),
    };

    if (getenv("EPX_TEST_ONLY"))
        cmocka_set_test_filter(getenv("EPX_TEST_ONLY"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
