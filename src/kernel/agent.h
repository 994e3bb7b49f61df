/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent contract: everything that kernels ask of a device, and so the page for porting EPX to another one.
 *
 * An agent is a warp, a wavefront, or a CPU thread. Kernel code is agent-uniform: every lane takes the same path with
 * the same values, and lanes differ only inside these primitives. A device compiler includes its own prims header
 * before the kernels (device/cpu/prims.h, device/gpu/prims.cuh); it must provide what is listed here.
 * scripts/check_agent.sh compares this list with those headers.
 *
 * In the first column: "b" only with AG_BLOCKS 1; "s" only with AG_STAGED 1; "o" optional, this file has a default;
 * otherwise required. Unless a line says "each lane", all lanes of the agent call a primitive together.
 *
 * Functions
 *   KFN                              storage class of kernel functions
 *   KFN_STEP                         the same, of functions that are a step of their own, or rare: not inlined on a GPU
 *   struct agent                     what a device keeps for one agent. Kernels read waits and wait_ns. Lane 0 may set
 *                                    abort_word, the word that ends ag_wait_ge; ag_begin sets it to the group's
 *
 * Identity
 *   ag_begin(ag, timeout_ns, control)  first call of a kernel: the deadline of waits, and this rank's control block
 *   ag_index(ag)                     number of this agent in the launch
 *   ag_count(ag)                     how many agents the launch has; any number from 1 up
 *   AG_STAGED                        1 where each stage of an operation is a launch of its own (kernel/stages.h)
 * s ag_stage(ag)                     the stage that this launch runs
 *   ag_leader(ag)                    true for one lane: guards single stores
 *   AG_LANES                         how many lanes an agent has
 *   ag_lane(ag)                      which lane this is
 *   AG_ONE_LANE                      1 where AG_LANES is 1: a kernel may take a shorter way. A prediction, which
 *                                    has one lane, takes the other way: a GPU's
 *   ag_timeout(ag)                   the deadline given to ag_begin, in nanoseconds
 *   ag_now(ag)                       monotonic clock, in nanoseconds
 *   ag_scratch(ag, bytes)            private memory of this agent for one row; NULL if it has less
 *
 * Loops
 *   AG_EACH(ag, type, i, n)          for loop over 0..n-1, divided among the lanes of this agent
 *   AG_EACH_ALL(ag, type, i, n)      the same, divided among all lanes of all agents of the launch
 *   AG_EACH_BLOCK(ag, type, i, n)    the same, divided among all lanes of this agent's block
 *   AG_ROUNDS(ag, type, i, n)        AG_EACH in whole rounds: lanes may have i >= n, so that all of them reach ag_scan
 *   AG_UNROLL                        before a loop of a few steps whose arrays must stay in registers
 * b AG_ROLLED                        before a loop that is not worth more code
 *   AG_LOOK_AHEAD                    1 where AG_PREFETCH of the next step's row is worth computing its address
 * o AG_PREFETCH(ptr)                 prefetches the first bytes of a row
 * o AG_WILL_WRITE(ag, bytes)         ranks of the node are about to write so many bytes of rows, all together
 * o AG_ROW_BYTES(bytes)              bytes of rows as the machine would have them: those of a prediction are small
 * b AG_LINE                          bytes of a cache line
 * b ag_fetch(ptr)                    prefetches one line; each lane
 * o AG_MARK(ag, name)                the phase `name` (kernel/marks.h) ends here, for a trace
 * o AG_WAITS(ag, phase, peer)        the next ag_wait_ge is for this peer (-1: none alone), for who looks from outside
 * o AG_WAITS_SIGNAL(ag, kind, slot, value)   ... and for this signal, until that is -1, 0, 0
 * o AG_GLANCES_BEGIN(ag)             this agent begins to look at all peers at once
 * o AG_GLANCED(ag, phase, last, kind, slot, value)   ... and has found this signal of all of them; each lane: whom it
 *                                    missed last, or -1
 * o AG_SIGNALS(ag, g, kind, slot, value)     this signal is given to all peers now
 * o AG_SIGNALLED(ag, kind, slot, value)      ... and has been given to those of this node
 * o AG_GONE(ag, g)                   simulation: a rank of the node that has given up, or -1; behind the last read
 * o AG_LOOKED(ag, g, gone, failed)   simulation: this agent has looked whether its operation has failed
 * o AG_RECEIVED(ag, g, scope, kind, slot, value)   simulation: all active peers of this scope have given this signal
 * o AG_ENDS(ag, g, word, failed)     simulation: this agent ends, and the caller may reuse the memory
 * o AG_GOES_ON(ag, g, peer)          simulation: this rank goes on without a peer from here on
 * o AG_WRITES(ag, g, to)             simulation: this agent writes into memory of rank `to` of its node
 * o AG_WROTE(ag, g, to, row, bytes)  simulation: it has written a row there
 * o AG_SUMS(ag, g, from, row, bytes)  simulation: it reads a row that `from` has written into the own memory
 *
 * Words that other agents, ranks or the host read and write (64 bits unless the name says 32)
 *   ag_load_acquire(word)            acquire, system scope
 *   ag_store_release(word, v)        release, system scope; each lane
 *   ag_store_release32(word, v)      the same for 32 bits
 *   ag_store_release_device(word, v)  release, device scope: among the agents of a launch
 *   ag_store_signal(word, v)         release, each lane; with AG_BELLS in one total order with ag_peek
 *   ag_look(word)                    relaxed load by one lane, the value to all
 *   ag_look_behind(word)             the same, ordered behind all loads whose values this agent has used
 *   ag_peek(word)                    relaxed load, each lane: within AG_EACH
 *   ag_peeked(ag)                    acquires what the lanes' peeks have seen
 *   ag_fetch_add(ag, word, n)        32 bits, acquire and release, device scope; once per agent; old value to all lanes
 *   ag_fetch_add64(ag, word, n)      the same for 64 bits
 *   ag_add_fenced(ag, word, n)       release and add, then a full fence, all system scope; once per agent
 * b ag_max_device(word, v)           the larger of both, acquire and release, device scope; the old value; each lane
 * b ag_claim_device(word, from, to)  compare and swap, acquire and release, device scope; the old value; each lane
 *   ag_claim(word, from, to)         32 bits, compare and swap, system scope; true if it was `from`; each lane
 *   ag_table_add(word, n)            32 bits, relaxed add in memory of the agent or its block; each lane
 *   ag_add_device(word, n)           32 bits, relaxed add, device scope; each lane
 *   ag_add_stat(word, n)             relaxed add, by the leader, once per operation: it may cross a bus
 *   ag_sync(ag)                      barrier of the lanes; their stores are visible to each other
 *   ag_sum(ag, v)                    sum over the lanes
 *   ag_scan(ag, v)                   sum over the lanes before this one
 *   ag_any(ag, v)                    true if v is for any lane
 *   ag_vote(ag, v, &before)          how many lanes have v, and how many of those before this one
 *
 * Waits
 *   ag_wait_ge(ag, word, target, ns)  until *word >= target (acquire), or ns have passed, or the own abort word is set:
 *                                    WAIT_OK, WAIT_TIMEOUT or WAIT_ABORTED (params.h)
 *   ag_ring(ag, bell)                after a store to a word that an agent of another rank may sleep on
 *   AG_BELLS                         1 where agents sleep and must be woken; 0 where they poll (a GPU)
 *   AG_NODE_WORD(g)                  1 where the ranks of a node add up their signals in one word; 0 where each stores
 *                                    a word for each other (a GPU: it does not wait for its stores)
 * o AG_TRACED(ag)                    a trace wants to know of each wait for which rank it is
 *   AG_GLANCES                       how often to look at all peers at once before waiting for one after the other
 *   AG_POINTS                        how many different ids ag_last takes
 *   ag_last(ag, word, id)            true for the last agent of the launch to reach *word, which is 0 again then; it
 *                                    sees what the others did before. One id per word, 0 to AG_POINTS - 1
 *
 * Block: agents that share memory and a barrier. AG_BLOCKS 0: one block, the whole launch, without either
 *   AG_BLOCKS                        1 where a launch has several blocks: small work is done by each block for itself
 *   ag_block_index(ag)               number of this agent in its block
 *   ag_block_count(ag)               how many agents the block has
 * b ag_block_number(ag)              number of the block; agent 0 is in block 0
 * b ag_block_last(ag)                true for the last agent of the block to call it, once per kernel; it sees what the
 *                                    others did before
 * b ag_narrow(ag, blocks)            from now on the launch has only the agents of its first blocks, with new numbers
 *                                    and a new count; all agents of a block; false for those of others, which leave
 * b ag_is_narrow(ag)                 has that happened?
 * b ag_block_any(ag, v)              barrier of the block's agents that have not left the kernel; true if v is for any
 *                                    lane of any of them
 * b AG_BLOCK_KEYS                    words that each agent has in ag_block_tables
 * b ag_block_tables(ag, keys)        shared memory: AG_BLOCK_KEYS words for each agent in turn; NULL if `keys` are more
 * b ag_block_memory(ag, words)       the same memory as one piece; NULL if it has fewer words, in all blocks alike
 * b ag_block_or(word, bits)          atomic or to a word of it; the old value; each lane
 * b ag_bits(word)                    how many bits are set; each lane
 *
 * Copies, by all lanes. A set lists up to 32 destinations, wherever a device keeps it. It is filled by put, or by
 * begin, offer (within AG_EACH over at most 32, each place by one lane) and settle
 *   ag_copy(ag, to, from, bytes)     any alignment
 *   ag_zero(ag, to, bytes)           stores zeros
 *   struct copy_set                  destinations of rows
 *   copy_set_put(ag, set, i, to)     destination i
 *   copy_set_get(ag, set, i)         returns it, to all lanes
 *   copy_set_begin(set)              empty
 *   copy_set_offer(set, place, to)   destination `place`; each lane
 *   copy_set_settle(ag, set)         all lanes may use it
 *   ag_copy_many(ag, set, n, from, bytes) reads once, writes n times
 *   struct int_pair                  two ints, a and b
 *   struct pair_set                  pairs, at most 32
 *   pair_set_begin(set)              as copy_set_begin
 *   pair_set_offer(set, place, a, b)  as copy_set_offer
 *   pair_set_settle(ag, set)         as copy_set_settle
 *   pair_set_get(ag, set, i)         the pair at place i, which may differ from lane to lane
 *   struct word_set                  destinations of 4-byte words with strides: scales
 *   word_set_begin(set)              as copy_set_begin
 *   word_set_offer(set, place, to, stride)  as copy_set_offer
 *   word_set_settle(ag, set)         as copy_set_settle
 *   ag_copy_words(ag, set, n, from, stride, words)  reads once, writes n times
 *
 * Numerics (docs/formats.md); bit-identical on all devices
 *   ag_cast_fp8(ag, q, scales, ...)  one row to FP8 with a scale per 128 channels
 *   ag_cast_fp8_many(ag, set, words, n, scratch, ...)  the same to n destinations, with scales; may use the scratch
 *   ag_logfmt_begin(ag)              all agents of a block, before the first ag_logfmt_encode or ag_reduce_logfmt
 *   ag_logfmt_encode(ag, to, x, hidden)  one row to LogFMT-10; returns its bytes, a multiple of 16
 *   ag_nvfp4_encode(ag, to, x, hidden, scale)  one row to NVFP4; returns its bytes, a multiple of 16
 *   struct sum_set                   rows to be summed
 *   sum_set_put(ag, set, i, data, weight, format)  row i, ROWS_*; NVFP4 rows are always weighted
 *   sum_set_begin(set)               as copy_set_begin
 *   sum_set_offer(set, place, data, weight, format)  as copy_set_offer
 *   sum_set_settle(ag, set)          as copy_set_settle
 *   ag_reduce(ag, out, dtype, hidden, set, n, weighted, bias0, bias1)  sum of n rows in fp32, in order, rounded once
 *   ag_reduce_groups(ag, out, dtype, hidden, set, n, ends, bias0, bias1)  the same of sums of rows, each rounded: bit i
 *                                    of ends says that row i is the last of such a sum; no weights, no LogFMT
 *   ag_reduce_mxfp8(ag, out, hidden, set, n, ends, bias0, bias1)  the same of bf16, each sum rounded to MXFP8
 *   ag_reduce_logfmt(ag, out, hidden, begin, end, set, n, weighted, bias0, bias1)  the same of LogFMT rows and
 *                                    of rounded ones, bf16: channels begin, a multiple of 256, to end; with
 *                                    AG_ONE_LANE all channels
 *   struct route_kept                what counting keeps for numbering, as a device likes
 *   ag_route_count(ag, g, in, t0, t1, table, kept)  adds the top-k indices of t0..t1-1 to counts per expert and rank
 *   ag_route_number(ag, g, h, in, t0, t1, table, kept, &bad)  numbers them into the handle, from a table of offsets
 *
 * Ring of commands to the CPU (kernel/ring.h makes ag_push of these)
 *   struct command_set               up to 32 commands, wherever a device keeps them
 *   command_set_put(ag, set, i, c)   command i
 *   command_set_list(set)            for ag_store_commands
 *   ag_claim_slots(ag, ring, n, &seen)  head += n, the old value to all lanes; *seen = tail_seen before. With
 *                                    ag_store_commands after it: releases what the agent did, acquires for *seen
 *   ag_store_commands(ag, ring, first, cmds, n)  n commands of a set to slots first.. with their parity
 */
#ifndef EPX_KERNEL_AGENT_H
#define EPX_KERNEL_AGENT_H

#include "kernel/marks.h"
#include "kernel/params.h"

#ifndef AG_WAITS
#define AG_WAITS(ag, phase, peer) ((void)(ag), (void)(phase), (void)(peer))
#define AG_WAITS_SIGNAL(ag, kind, slot, value) ((void)0)
#define AG_SIGNALS(ag, g, kind, slot, value) ((void)0)
#endif
#ifndef AG_SIGNALLED
#define AG_SIGNALLED(ag, kind, slot, value) ((void)0)
#endif
#ifndef AG_TRACED
#define AG_TRACED(ag) 0
#endif
#ifndef AG_MARK
#define AG_MARK(ag, name) ((void)0)
#endif
#ifndef AG_GLANCED
#define AG_GLANCES_BEGIN(ag) ((void)0)
#define AG_GLANCED(ag, phase, last, kind, slot, value) ((void)((last) == (phase)))
#endif

/* For the simulation, which asserts the rule of completion (docs/design.md). */
#ifndef AG_LOOKED
#define AG_GONE(ag, g) (-1)
#define AG_LOOKED(ag, g, gone, failed) ((void)(gone), (void)(failed))
#define AG_RECEIVED(ag, g, scope, kind, slot, value) ((void)0)
#define AG_ENDS(ag, g, word, failed) ((void)(failed))
#define AG_GOES_ON(ag, g, peer) ((void)0)
#define AG_WRITES(ag, g, to) ((void)0)
#define AG_WROTE(ag, g, to, row, bytes) ((void)(row), (void)(bytes))
#define AG_SUMS(ag, g, from, row, bytes) ((void)(row))
#endif

#ifndef AG_ROW_BYTES
#define AG_ROW_BYTES(bytes) (bytes)
#endif
#ifndef AG_WILL_WRITE
#define AG_WILL_WRITE(ag, bytes) ((void)0)
#endif
#ifndef AG_PREFETCH
#define AG_PREFETCH(ptr) ((void)(ptr))
#endif

#ifndef KFN
#error "include the device's prims header before the kernels"
#endif

#endif
