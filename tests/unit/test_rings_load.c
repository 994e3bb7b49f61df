/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All rings of a rank carry load: of the bytes that its proxies post in whole operations, which the oracle checks, none
 * posts more than 1.3 times the mean; with 2 and 4 proxies, in both modes, with one other node and with three.
 * ctest: labels=notsan,noasan
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/objects.h"
#include "tests/lib/bench_work.h"
#include "tests/lib/thread_boot.h"
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

static epx_status exchange(epx_group *group, epx_handle *handle, struct bench_work *work)
{
    const int low_latency = work->config->mode == EPX_LOW_LATENCY;
    epx_dispatch_inputs in = bench_work_dispatch_inputs(work);
    epx_dispatch_outputs out = bench_work_dispatch_outputs(work);
    epx_combine_inputs cin = bench_work_combine_inputs(work);
    epx_combine_outputs cout = bench_work_combine_outputs(work);
    epx_layout_info info = bench_work_layout_info(work);
    epx_status status = epx_handle_update(handle, &work->idx, low_latency ? NULL : &info, NULL);

    if (status == EPX_OK)
        status = epx_dispatch(handle, &in, &out, low_latency ? &info : NULL, NULL, NULL);
    if (status == EPX_OK)
        status = epx_combine(handle, &cin, &cout, NULL, NULL);
    return status == EPX_OK ? epx_stream_sync(group, NULL) : status;
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
    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    struct bench_work *work = calloc(1, sizeof(*work));
    epx_handle *handle = NULL;
    struct mismatch m;
    int rc = -1;

    handle_config.mode = c->mode;
    handle_config.layout = config.layout;
    handle_config.topk = TOPK;
    if (!work || epx_handle_create(&handle, group, &handle_config) != EPX_OK ||
        bench_work_open(work, &config, rank, take, group))
        return -1;
    work->ranks_per_node = c->ranks_per_node;
    for (int i = 0; i < ROUNDS; i++) {
        rc = bench_work_seed(work, 100 + (uint64_t)i);
        bench_work_poison(work);
        if (rc || exchange(group, handle, work) != EPX_OK || bench_work_check(work, &m)) {
            print_message("rank %d, round %d: %s\n", rank, i, rc ? "no memory" : epx_last_error());
            rc = -1;
            break;
        }
    }
    bench_work_close(work);
    free(work);
    return rc;
}

static int carry(int rank, int n, epx_bootstrap *boot, void *arg)
{
    const struct load_case *c = arg;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_group *group;
    int rc;

    (void)n;
    config.device = EPX_DEVICE_CPU;
    config.num_experts = EXPERTS;
    config.max_tokens_per_rank = TOKENS;
    config.max_hidden_bytes = HIDDEN * 2;
    config.max_topk = TOPK;
    config.num_agents = 1;
    config.timeout_ms = 60000;
    config.ranks_per_node = c->ranks_per_node;
    config.modes = c->mode;
    config.alloc_bytes = 64 << 20;
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    if (epx_group_create(&group, boot, &config) != EPX_OK) {
        print_message("rank %d: %s\n", rank, epx_last_error());
        return -1;
    }
    rc = run_rounds(c, rank, group);
    if (!rc && !is_balanced(c, rank, group))
        rc = -1;
    return epx_group_destroy(group) != EPX_OK || rc;
}

static void all_rings_carry_load(void **state)
{
    struct load_case *c = *state;
    char text[8];

    snprintf(text, sizeof(text), "%d", c->rings);
    setenv("EPX_PROXY_THREADS", text, 1);
    assert_int_equal(run_ranks(RANKS, carry, c), 0);
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
