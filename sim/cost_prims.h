/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's primitives for kernels in a prediction: each charges what it would cost on the machine (sim/cost.h), as a
 * warp of 32 lanes. Stages are launches of their own, as on a GPU. Before a primitive that others can see, whoever has
 * an earlier clock goes first.
 */
#ifndef EPX_SIM_COST_PRIMS_H
#define EPX_SIM_COST_PRIMS_H

#include "device/cpu/prims.h"
#include "sim/agent.h"
#include "sim/sched.h"

#define COST(ag) (&sim_agent_of(ag)->cost)

#undef AG_NODE_WORD
#define AG_NODE_WORD(g) 0
#undef AG_STAGED
#define AG_STAGED 1
#define ag_stage(ag) (sim_agent_of(ag)->stage)
/* Where kernels choose by the device or by the bytes of rows, they choose as a GPU would with rows of the real size. */
#undef AG_ONE_LANE
#define AG_ONE_LANE 0
#define AG_ROW_BYTES(bytes) cost_row_bytes(bytes)

#undef AG_EACH
#undef AG_ROUNDS
#undef AG_EACH_ALL
#undef AG_EACH_BLOCK
#define COST_LANES 32
#define COST_BLOCK_LANES 512
#define AG_EACH(ag, type, i, n) for (type i = (cost_loop(COST(ag), (uint64_t)(n), COST_LANES), 0); i < (type)(n); i++)
#define AG_ROUNDS AG_EACH
#define AG_EACH_ALL(ag, type, i, n)                                                                                   \
    for (type i = (cost_loop(COST(ag), (uint64_t)(n), COST_LANES * cost_agents()), (type)(ag)->index); i < (type)(n); \
         i += (type)(ag)->count)
#define AG_EACH_BLOCK(ag, type, i, n)                                                                       \
    for (type i = (cost_loop(COST(ag), (uint64_t)(n), COST_BLOCK_LANES), (type)(ag)->index); i < (type)(n); \
         i += (type)(ag)->count)

/* ---- Words ------------------------------------------------------------------------------------------------------ */

static inline uint64_t cost_load_acquire(const uint64_t *word)
{
    sim_point();
    cost_word(word);
    return ag_load_acquire(word);
}

static inline uint64_t cost_peek_word(const uint64_t *word)
{
    sim_point();
    cost_peek(word);
    return ag_peek(word);
}

static inline enum wait_result cost_wait_ge(struct agent *ag, const uint64_t *word, uint64_t target, uint64_t ns)
{
    struct cost_agent *a = COST(ag);
    enum wait_result result;

    cost_word(word);
    sim_point();
    a->target = target;
    a->abort_word = ag->abort_word;
    a->word = word;
    result = ag_wait_ge(ag, word, target, ns);
    a->word = NULL;
    return result;
}

static inline int cost_last(struct agent *ag, uint32_t *word, int id)
{
    cost_release(0);
    sim_point();
    return ag_last(ag, word, id);
}

static inline void cost_signal(uint64_t *word, uint64_t value)
{
    cost_release(1);
    sim_point();
    ag_store_signal(word, value);
}

#define ag_load_acquire(word) cost_load_acquire(word)
#define ag_peek(word) cost_peek_word(word)
#define ag_look(word) (sim_point(), cost_word(word), ag_look(word))
#define ag_look_behind(word) (sim_point(), cost_word(word), ag_look_behind(word))
#define ag_store_signal(word, value) cost_signal(word, value)
#define ag_store_release(word, value) (cost_release(1), sim_point(), ag_store_release(word, value))
#define ag_store_release_device(word, value) (cost_release(0), sim_point(), ag_store_release_device(word, value))
#define ag_last(ag, word, id) cost_last(ag, word, id)
#define ag_fetch_add(ag, word, n) (cost_word(word), sim_point(), ag_fetch_add(ag, word, n))
#define ag_add_fenced(ag, word, n) (cost_word(word), sim_point(), ag_add_fenced(ag, word, n))
#define ag_fetch_add64(ag, word, n) (cost_word(word), sim_point(), ag_fetch_add64(ag, word, n))
#define ag_claim(word, from, to) (cost_word(word), sim_point(), ag_claim(word, from, to))
#define ag_claim_slots(ag, ring, n, seen) (cost_push(), sim_point(), ag_claim_slots(ag, ring, n, seen))
#define ag_ring(ag, bell) (sim_point(), ag_ring(ag, bell))
#define ag_wait_ge(ag, word, target, ns) cost_wait_ge(ag, word, target, ns)

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

static inline void cost_copy_many(struct agent *ag, const struct copy_set *set, int n, const void *from, size_t bytes)
{
    cost_move(COST(ag), &from, 1, bytes, set->to, n, bytes);
    ag_copy_many(ag, set, n, from, bytes);
}

/* LogFMT rows are charged as 10 bits per channel. */
static inline void cost_reduce(struct agent *ag, void *out, int dtype, int hidden, const struct sum_set *set, int n,
                               int weighted, const void *bias0, const void *bias1)
{
    const uint64_t bytes = (uint64_t)hidden * (dtype == DTYPE_FP32 ? 4 : 2);
    const void *from[KERNEL_MAX_TOPK];

    for (int i = 0; i < n; i++)
        from[i] = set->row[i].data;
    cost_move(COST(ag), from, n, n && set->row[0].format == ROW_LOGFMT ? bytes * 5 / 8 : bytes, &out, 1, bytes);
    ag_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1);
}

static inline void cost_cast_fp8(struct agent *ag, void *q, void *scales, int ue8m0, int round_scale, const void *x,
                                 int dtype, int hidden)
{
    cost_move(COST(ag), &x, 1, (uint64_t)hidden * (dtype == DTYPE_FP32 ? 4 : 2), &q, 1, (uint64_t)hidden);
    ag_cast_fp8(ag, q, scales, ue8m0, round_scale, x, dtype, hidden);
}

static inline void cost_cast_fp8_many(struct agent *ag, const struct copy_set *set, const struct word_set *words, int n,
                                      char *scratch, int ue8m0, int round_scale, const void *x, int dtype, int channels)
{
    cost_move(COST(ag), &x, 1, (uint64_t)channels * (dtype == DTYPE_FP32 ? 4 : 2), set->to, n, (uint64_t)channels);
    ag_cast_fp8_many(ag, set, words, n, scratch, ue8m0, round_scale, x, dtype, channels);
}

#define ag_copy(ag, to, from, bytes) (cost_copy(COST(ag), from, to, bytes), ag_copy(ag, to, from, bytes))
#define ag_zero(ag, to, bytes) (cost_copy(COST(ag), to, to, bytes), ag_zero(ag, to, bytes))
#define ag_copy_many(ag, set, n, from, bytes) cost_copy_many(ag, set, n, from, bytes)
#define ag_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1) \
    cost_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1)
#define ag_cast_fp8(ag, q, scales, ue8m0, round_scale, x, dtype, hidden) \
    cost_cast_fp8(ag, q, scales, ue8m0, round_scale, x, dtype, hidden)
#define ag_cast_fp8_many(ag, set, words, n, scratch, ue8m0, round_scale, x, dtype, channels) \
    cost_cast_fp8_many(ag, set, words, n, scratch, ue8m0, round_scale, x, dtype, channels)

/* ---- Routing ---------------------------------------------------------------------------------------------------- */

#define ag_route_count(ag, g, in, t0, t1, table, kept)                       \
    (cost_route(COST(ag), (uint64_t)((t1) - (t0)) * (uint64_t)(in)->topk_n), \
     ag_route_count(ag, g, in, t0, t1, table, kept))
#define ag_route_number(ag, g, h, in, t0, t1, table, kept, bad)              \
    (cost_route(COST(ag), (uint64_t)((t1) - (t0)) * (uint64_t)(in)->topk_n), \
     ag_route_number(ag, g, h, in, t0, t1, table, kept, bad))

#endif
