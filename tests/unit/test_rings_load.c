/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All rings of a rank carry load: of the bytes that its proxies post in whole operations, which the oracle checks, none
 * posts more than 1.3 times the mean; with 2 and 4 proxies, in both modes, with one other node and with three.
 * ctest: labels=notsan,noasan,noclang
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"
#include "tests/lib/bench_work.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

enum { RANKS = 16, TOKENS = 128, HIDDEN = 256, TOPK = 4, EXPERTS = 32, ROUNDS = 4, MOST_RINGS = 8 };

struct load_case {
    epx_mode mode;
    int rings, ranks_per_node;
};

static void *take(void *context, size_t bytes)
{
    void *ptr = NULL;

    return epx_alloc(context, bytes, &ptr) == EPX_OK ? ptr : NULL;
}

static int is_balanced(const struct load_case *c, int rank, const epx_group *group)
{
    uint64_t bytes[MOST_RINGS], sum = 0, most = 0;
    char text[200] = "";

    if (proxy_ring_count(group->proxies) != c->rings)
        return 0;
    for (int i = 0; i < c->rings; i++) {
        struct proxy_stats stats;
        proxy_ring_stats_read(group->proxies, i, &stats);
        bytes[i] = stats.bytes;
        sum += stats.bytes;
        most = stats.bytes > most ? stats.bytes : most;
        snprintf(text + strlen(text), sizeof(text) - strlen(text), " %llu", (unsigned long long)bytes[i]);
    }
    print_message("rank %d: %.2f times the mean; bytes of each ring:%s\n", rank, (double)most * c->rings / (double)sum,
                  text);
    return sum && (double)most * c->rings <= 1.3 * (double)sum;
}

static int run_rounds(const struct load_case *c, int rank, epx_group *group)
{
    const struct bench_config config = {.mode = c->mode,
                                        .layout = c->mode == EPX_LOW_LATENCY ? EPX_EXPERT_MAJOR : EPX_FLAT,
                                        .ranks = RANKS,
                                        .tokens = TOKENS,
                                        .hidden = HIDDEN,
                                        .topk = TOPK,
                                        .experts = EXPERTS,
                                        .alignment = 1};
    const epx_handle_config handle_config = fixture_handle_config(c->mode, config.layout, TOPK);
    struct bench_work *work = calloc(1, sizeof(*work));
    epx_handle *handle = NULL;
    struct mismatch m;
    int rc = -1;

    if (!work || epx_handle_create(&handle, group, &handle_config) != EPX_OK ||
        bench_work_open(work, &config, rank, take, group))
        return -1;
    work->ranks_per_node = c->ranks_per_node;
    for (int i = 0; i < ROUNDS; i++) {
        rc = bench_work_seed(work, 100 + (uint64_t)i);
        bench_work_poison(work);
        if (rc || bench_work_exchange(work, group, handle) != EPX_OK || bench_work_check(work, &m)) {
            print_message("rank %d, round %d: %s\n", rank, i, rc ? "no memory" : epx_last_error());
            rc = -1;
            break;
        }
    }
    bench_work_close(work);
    free(work);
    return rc;
}

static int carry(struct fixture *s)
{
    const struct load_case *c = s->arg;

    return run_rounds(c, s->rank, s->group) || !is_balanced(c, s->rank, s->group);
}

static epx_group_config config_of(const struct load_case *c)
{
    epx_group_config config = fixture_config_of(60000, EXPERTS, TOKENS, HIDDEN * 2, TOPK);

    config.num_agents = 1;
    config.ranks_per_node = c->ranks_per_node;
    config.modes = c->mode;
    config.alloc_bytes = 64 << 20;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return config;
}

static void all_rings_carry_load(void **state)
{
    struct load_case *c = *state;
    const epx_group_config config = config_of(c);

    child_set_int("EPX_PROXY_THREADS", c->rings);
    assert_int_equal(fixture_group_run(RANKS, &config, carry, c), 0);
    unsetenv("EPX_PROXY_THREADS");
}

#define CASE(mode, rings, per_node) \
    &(struct load_case)             \
    {                               \
        mode, rings, per_node       \
    }
UNIT_MAIN(UNIT_CASE("low_latency_2_rings", all_rings_carry_load, CASE(EPX_LOW_LATENCY, 2, 8)),
          UNIT_CASE("low_latency_4_rings", all_rings_carry_load, CASE(EPX_LOW_LATENCY, 4, 8)),
          UNIT_CASE("low_latency_4_rings_4_nodes", all_rings_carry_load, CASE(EPX_LOW_LATENCY, 4, 4)),
          UNIT_CASE("high_throughput_2_rings", all_rings_carry_load, CASE(EPX_HIGH_THROUGHPUT, 2, 8)),
          UNIT_CASE("high_throughput_4_rings", all_rings_carry_load, CASE(EPX_HIGH_THROUGHPUT, 4, 8)),
          UNIT_CASE("high_throughput_4_rings_4_nodes", all_rings_carry_load, CASE(EPX_HIGH_THROUGHPUT, 4, 4)))
