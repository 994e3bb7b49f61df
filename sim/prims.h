/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's primitives once more, for kernels in simulation: before each one another task may go first. Everything that
 * ranks and agents see of each other passes through a primitive, so that every order that matters can come about.
 */
#ifndef EPX_SIM_PRIMS_H
#define EPX_SIM_PRIMS_H

#include "device/cpu/prims.h"
#include "sim/rules.h"
#include "sim/sched.h"

/* Both ways of signals inside a node: a GPU's is the other one. */
#undef AG_NODE_WORD
#define AG_NODE_WORD(g) ((g)->nranks % 3 != 0)

#define AG_GONE(ag, g) sim_rule_gone(g)
#define AG_LOOKED(ag, g, gone, failed) sim_rule_looked(g, gone, failed)
#undef AG_SIGNALS
#define AG_SIGNALS(ag, g, kind, slot, value) \
    (sim_rule_signals(kind, slot, value), (ag)->traced ? cpu_trace_signal(ag, (g)->nranks, kind, slot, value) : (void)0)
#define AG_RECEIVED(ag, g, scope, kind, slot, value) sim_rule_received(g, (scope) != SCOPE_NODE, kind, slot, value)
#define AG_ENDS(ag, g, word, failed) sim_rule_ends(g, word, failed)
#define AG_GOES_ON(ag, g, peer) sim_rule_goes_on(peer)
#define AG_WROTE(ag, g, to, row, bytes) sim_rule_landed((g)->rank, to, 0, (uint64_t)((row) - (g)->heap[to]), bytes)
#define AG_SUMS(ag, g, from, row, bytes) sim_rule_sums(g, from, row, bytes)
#define AG_WRITES(ag, g, to) (sim_writes_row(), sim_point(), sim_rule_writes(g, to))

/* A macro is not expanded inside itself: these call the functions of the same name. */
#define ag_sync(ag) (sim_point(), ag_sync(ag))
#define ag_load_acquire(word) (sim_point(), ag_load_acquire(word))
#define ag_peek(word) (sim_look(), sim_point(), ag_peek(word))
#define ag_store_signal(word, value) (sim_point(), ag_store_signal(word, value))
#define ag_last(ag, word, id) (sim_point(), ag_last(ag, word, id))
#define ag_store_release(word, value) (sim_point(), ag_store_release(word, value))
#define ag_store_release_device(word, value) (sim_point(), ag_store_release_device(word, value))
#define ag_store_release32(word, value) (sim_point(), ag_store_release32(word, value))
#define ag_fetch_add(ag, word, n) (sim_point(), ag_fetch_add(ag, word, n))
#define ag_fetch_add64(ag, word, n) (sim_point(), ag_fetch_add64(ag, word, n))
#define ag_add_fenced(ag, word, n) (sim_point(), ag_add_fenced(ag, word, n))
#define ag_claim_slots(ag, ring, n, seen) (sim_point(), ag_claim_slots(ag, ring, n, seen))
#define ag_look(word) (sim_point(), ag_look(word))
#define ag_look_behind(word) (sim_point(), ag_look_behind(word))
#define ag_store_commands(ag, ring, first, cmds, n) (sim_point(), ag_store_commands(ag, ring, first, cmds, n))
#define ag_claim(word, from, to) (sim_point(), ag_claim(word, from, to))
#define ag_ring(ag, bell) (sim_point(), ag_ring(ag, bell))
#define ag_wait_ge(ag, word, target, ns) (sim_look(), sim_point(), ag_wait_ge(ag, word, target, ns))
#define ag_copy(ag, to, from, bytes) (sim_point(), ag_copy(ag, to, from, bytes))
#define ag_zero(ag, to, bytes) (sim_point(), ag_zero(ag, to, bytes))
#define ag_copy_many(ag, set, n, from, bytes) (sim_point(), ag_copy_many(ag, set, n, from, bytes))
#define ag_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1) \
    (sim_point(), ag_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1))
#define ag_reduce_groups(ag, out, dtype, hidden, set, n, ends, bias0, bias1) \
    (sim_point(), ag_reduce_groups(ag, out, dtype, hidden, set, n, ends, bias0, bias1))
#define ag_reduce_mxfp8(ag, out, hidden, set, n, ends, bias0, bias1) \
    (sim_point(), ag_reduce_mxfp8(ag, out, hidden, set, n, ends, bias0, bias1))
#define ag_reduce_logfmt(ag, out, hidden, begin, end, set, n, weighted, bias0, bias1) \
    (sim_point(), ag_reduce_logfmt(ag, out, hidden, begin, end, set, n, weighted, bias0, bias1))
#define ag_cast_fp8(ag, q, scales, ue8m0, round_scale, x, dtype, hidden) \
    (sim_point(), ag_cast_fp8(ag, q, scales, ue8m0, round_scale, x, dtype, hidden))
#define ag_cast_fp8_many(ag, set, words, n, scratch, ue8m0, round_scale, x, dtype, channels) \
    (sim_point(), ag_cast_fp8_many(ag, set, words, n, scratch, ue8m0, round_scale, x, dtype, channels))
#define ag_logfmt_encode(ag, to, x, hidden) (sim_point(), ag_logfmt_encode(ag, to, x, hidden))
#define ag_nvfp4_encode(ag, to, x, hidden, scale) (sim_point(), ag_nvfp4_encode(ag, to, x, hidden, scale))

#endif
