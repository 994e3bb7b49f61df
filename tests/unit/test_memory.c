/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=leaks */
/*
 * Memory: what the size query announces keeps to the promised factors over many configurations, the parts add up, and
 * the pages that a working group really occupies are not more than announced.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

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

static epx_memory_info query_case(const struct size_case *c, uint32_t modes)
{
    const epx_group_config config = typical(c->tokens, c->hidden, c->topk, c->experts, modes);

    return query(&config, c->ranks);
}

static void high_throughput_keeps_to_its_factor(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(size_cases); i++) {
        const struct size_case *c = &size_cases[i];
        const epx_memory_info info = query_case(c, EPX_HIGH_THROUGHPUT);
        /* Every token of every rank once: nobody may claim less as the worst case, nor much more. */
        uint64_t rows = (uint64_t)c->ranks * (uint64_t)c->tokens, row = (uint64_t)c->hidden * 2;

        assert_true(info.ht_receive_bytes >= rows * row);
        assert_true((double)info.ht_receive_bytes <=
                    (double)rows * ((double)row * 1.1 + 16.0 * c->topk + 16 + 64) + CONSTANT);
        if ((double)info.high_throughput_bytes > 1.1 * (double)info.ht_receive_bytes + CONSTANT)
            fail_msg("%d ranks, %d tokens, hidden %d: %" PRIu64 " bytes for %" PRIu64 " received", c->ranks, c->tokens,
                     c->hidden, info.high_throughput_bytes, info.ht_receive_bytes);
    }
}

static void low_latency_keeps_to_its_factor(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(size_cases); i++) {
        const struct size_case *c = &size_cases[i];
        const epx_memory_info info = query_case(c, EPX_LOW_LATENCY);

        if ((double)info.low_latency_bytes > 2.0 * (double)info.ll_receive_bytes + CONSTANT)
            fail_msg("%d ranks, %d tokens, hidden %d: %" PRIu64 " bytes for %" PRIu64 " received", c->ranks, c->tokens,
                     c->hidden, info.low_latency_bytes, info.ll_receive_bytes);
    }
}

static void control_is_small(void **state)
{
    (void)state;
    for (size_t i = 0; i < UNIT_COUNT(size_cases); i++)
        assert_true(query_case(&size_cases[i], 0).control_bytes <= CONSTANT);
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

/* ---- The pages themselves ---------------------------------------------------------------------------------------- */

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

static int check_resident(struct fixture *s)
{
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    int64_t rss, mapped;
    void *own = NULL;

    for (int i = 0; i < 4; i++)
        if (fixture_ll(s) || fixture_ht(s))
            return -1;
    if (epx_alloc(s->group, 4096, &own) != EPX_OK || epx_group_memory(s->arg, s->nranks, &info) != EPX_OK)
        return fixture_fail(s, "epx_alloc, epx_group_memory");
    rss = resident_at(own, &mapped);
    /* One allocation of a page was made; whether it was touched is EPX's business. */
    if (rss >= 0 && mapped <= (int64_t)info.heap_bytes &&
        rss <= (int64_t)(info.heap_bytes - info.alloc_bytes + 2 * 65536))
        return 0;
    snprintf(s->why, sizeof(s->why), "resident %lld of %lld mapped; announced %llu, of which %llu for epx_alloc",
             (long long)rss, (long long)mapped, (unsigned long long)info.heap_bytes,
             (unsigned long long)info.alloc_bytes);
    return -1;
}

static void resident_memory_is_not_above_what_was_announced(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    config.alloc_bytes = 1ull << 30; /* address space that nobody touches */
    assert_int_equal(fixture_run(3, &config, check_resident, &config), 0);
}

/* ---- epx_alloc --------------------------------------------------------------------------------------------------- */

/* Frees what is allocated there, which must be unchanged; or allocates and fills it. */
static int alloc_or_free(struct fixture *s, void **p, int value, size_t bytes)
{
    if (*p) {
        void *old = *p;

        *p = NULL;
        return *(unsigned char *)old != (unsigned char)value || epx_free(s->group, old) != EPX_OK;
    }
    if (epx_alloc(s->group, bytes, p) != EPX_OK || (uintptr_t)*p % 256)
        return -1;
    memset(*p, value, bytes);
    return 0;
}

static int check_alloc(struct fixture *s)
{
    void *p[64] = {NULL};
    uint64_t random = (uint64_t)s->rank + 1;

    for (int i = 0; i < 2000; i++) {
        random = workload_hash(random, 1);
        if (alloc_or_free(s, &p[random % 64], (int)(random % 64), (size_t)(random >> 20) % 8000 + 1))
            return fixture_fail(s, "epx_alloc, epx_free or what was stored there");
    }
    /* All back: the whole is there again in one piece. */
    for (int i = 0; i < 64; i++)
        if (p[i] && epx_free(s->group, p[i]) != EPX_OK)
            return fixture_fail(s, "epx_free");
    return epx_alloc(s->group, 1 << 20, &p[0]) == EPX_OK ? 0 : fixture_fail(s, "epx_alloc of the whole");
}

static void allocations_do_not_overlap_and_come_back(void **state)
{
    (void)state;
    assert_int_equal(fixture_run(2, NULL, check_alloc, NULL), 0);
}

/* What lives on, as a table that belongs to rows which are gone, takes no room from rows of another size. */
static int check_small_blocks(struct fixture *s)
{
    const size_t whole = 1 << 20, each = whole / 64;
    void *rows, *more, *tables[8];

    for (int i = 0; i < 8; i++) {
        if (epx_alloc(s->group, whole / 2, &rows) != EPX_OK || epx_alloc(s->group, each, &tables[i]) != EPX_OK ||
            epx_alloc(s->group, 300, &more) != EPX_OK)
            return fixture_fail(s, "epx_alloc of a half, of a small block, and of 300 bytes");
        if (epx_free(s->group, rows) != EPX_OK || epx_free(s->group, more) != EPX_OK)
            return fixture_fail(s, "epx_free");
        if (epx_alloc(s->group, whole - (size_t)(i + 1) * each, &rows) != EPX_OK || epx_free(s->group, rows) != EPX_OK)
            return fixture_fail(s, "epx_alloc of what small blocks leave");
    }
    if (epx_free(s->group, tables[3]) != EPX_OK || epx_alloc(s->group, each, &more) != EPX_OK || more != tables[3])
        return fixture_fail(s, "epx_alloc of a small block where there was one");
    return 0;
}

static void small_blocks_do_not_divide_the_rest(void **state)
{
    epx_group_config config = fixture_config(20000);

    (void)state;
    config.alloc_bytes = 1 << 20;
    assert_int_equal(fixture_run(1, &config, check_small_blocks, NULL), 0);
}

UNIT_TESTS(the_parts_add_up, high_throughput_keeps_to_its_factor, low_latency_keeps_to_its_factor, control_is_small,
           a_bound_on_rows_saves_memory, resident_memory_is_not_above_what_was_announced,
           allocations_do_not_overlap_and_come_back, small_blocks_do_not_divide_the_rest)
