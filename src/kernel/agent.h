/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent contract: what kernels may use. An agent is a warp, a wavefront, or a CPU thread; kernel code is
 * agent-uniform (every lane takes the same path with the same values), and lanes differ only inside these primitives.
 * A device compiler includes its own prims.h before the kernels; this page says what that header must provide.
 *
 *   KFN, KFN_STEP                    storage class of kernel functions; of those that are a step of their own, or rare
 *   AG_LOOK_AHEAD                    1 where fetching what the next step needs (AG_PREFETCH) is worth finding it
 *   AG_ONE_LANE                      1 where an agent has a single lane: what lanes would share out, it may do in a way of its own
 *   AG_UNROLL                        before a loop of a few steps whose arrays must not need an address
 *   AG_LANES, ag_lane(ag)            how many lanes an agent has, and which this is
 *   AG_ROLLED                        before a loop that is not worth more code than it needs
 *   AG_EACH(ag, type, i, n)          for loop over 0..n-1, shared out among the lanes of this agent
 *   AG_EACH_ALL(ag, type, i, n)      the same, shared out among all lanes of all agents of the launch
 *   AG_EACH_BLOCK(ag, type, i, n)   the same, shared out among all lanes of this agent's block
 *   AG_BLOCKS                       1 where agents form blocks that meet cheaply (a block of a GPU), several to a launch:
 *                                    small work is done by each block for itself. 0: one block, the launch
 *   ag_block_index, ag_block_count  this agent in its block, and how many that has
 *   ag_block_any(ag, v)             only with AG_BLOCKS: the agents of the block meet; is v true for any lane of any?
 *   ag_block_tables(ag, keys)       only with AG_BLOCKS: AG_BLOCK_KEYS words for each agent of the block, one after the other, that
 *                                    all of it see; NULL if `keys` are more
 *   ag_block_number(ag)             likewise: which block this is; agent 0 is of number 0
 *   ag_block_memory(ag, words)      likewise: so many words that all agents of the block see, the same as ag_block_tables(), or
 *                                    NULL; all blocks get the same answer
 *   ag_block_or(word, bits)         likewise: sets bits of such a word; returns what it was. By each lane for itself
 *   ag_bits(word)                    how many are set
 *   ag_fetch(ptr), AG_LINE           prefetches the cache line of so many bytes, by each lane for itself
 *   AG_ROUNDS(ag, type, i, n)        AG_EACH in whole rounds, in which lanes may have i >= n: for ag_scan within
 *   ag_begin(ag, timeout, control)   first call of a kernel
 *   ag_index, ag_count               this agent, and how many the launch has (any number from 1 up)
 *   ag_leader(ag)                    true for one lane: guards single stores
 *   ag_sync(ag)                      lanes of this agent meet; their stores are visible to each other
 *   ag_now(ag)                       nanoseconds, monotonic
 *   ag_load_acquire, ag_store_release[32]   system scope; ag_store_release_device: device scope, among agents of a launch
 *   ag_peek(word), ag_peeked(ag)     looks, by each lane for itself: within AG_EACH; acquires what the looks have seen
 *   ag_store_signal(word, value)     release, by each lane for itself; with AG_BELLS in one order with ag_peek for all
 *   ag_last(ag, word, id)            true for the agent that comes last to *word (0 again then) of all agents of the launch:
 *                                    what the others did before is visible to it. id: 0 to AG_POINTS - 1, one per word
 *   ag_fetch_add(ag, word, n)        device scope, acquire and release; once per agent, the old value to all lanes
 *   ag_fetch_add64(ag, word, n)      the same for 64 bits
 *   ag_claim_slots(ag, ring, n, &seen)   head += n, the old value to all lanes, and what tail_seen said before; together with
 *                                    ag_store_commands after it: releases what the agent did, acquires for that tail_seen
 *   ag_look(word)                    a load by one lane, the value to all, in no order with anything else
 *   ag_timeout(ag)                   the deadline given to ag_begin, in nanoseconds
 *   ag_claim(word, from, to)         compare and swap, system scope
 *   ag_add_stat(word, n)             relaxed add; call from the leader, and once per operation: it may cross a bus
 *   ag_sum(ag, v), ag_any(ag, v)     over the lanes of this agent; ag_scan(ag, v): over those before this one
 *   ag_vote(ag, v, &before)          how many lanes have v, and how many of those before this one; all lanes call it
 *   ag_wait_ge(ag, word, target, ns) until *word >= target (acquire), WAIT_OK / WAIT_TIMEOUT / WAIT_ABORTED
 *   ag_ring(ag, bell), AG_BELLS      after storing to a word that another rank may sleep on; 0 where nobody sleeps (a GPU)
 *   ag_copy, ag_zero                 bulk, by all lanes
 *   copy_set_put/get, ag_copy_many   read once, write n times
 *   word_set_*, ag_copy_words        the same for 4-byte words with strides: scales
 *   copy_set_begin, _offer, _settle  fills a set within AG_EACH over at most 32: offer(set, place, ...) by one lane each
 *   ag_cast_fp8, ag_logfmt_encode    numerics, see docs/formats.md
 *   ag_cast_fp8_many                 casts a row to n destinations and its scales to as many; may use the scratch
 *   sum_set_put, ag_reduce           sum of n rows in fp32, rounded once; sum_set_begin, _offer, _settle as for copies
 *   AG_GLANCES                       looks at all peers at once before waiting for one after the other
 *   ag_scratch(ag, bytes)            private memory of this agent for one row, or NULL
 *   command_set_put(ag, set, i, c), command_set_list(set)   up to 32 commands, wherever the device keeps them
 *   ag_store_commands(ag, ring, first, cmds, n)   n commands of a set into slots first.. with their parity
 *   ag_push(ag, ring, cmds, n)       (kernel/ring.h, made of these) up to 32 commands to the CPU
 *   struct route_kept                what counting keeps for numbering, as a device likes
 *   ag_route_count, ag_route_number  prefix counting of top-k indices: into a table; into the handle, from a table of offsets
 *   ag->abort_word                   what ag_wait_ge looks at besides its word; ag_begin sets it to the group's. Lane 0 writes it
 *   AG_MARK(ag, name)                a moment to be remembered, where a device can show how a kernel spends its time
 */
#ifndef EPX_KERNEL_AGENT_H
#define EPX_KERNEL_AGENT_H

#include "kernel/params.h"

/* Optional: nothing. */
#ifndef AG_MARK
#define AG_MARK(ag, name) ((void)0)
#endif

/* Optional, for the simulation, which asserts what docs/design.md says of completion: an agent has looked at the abort word
 * behind its last read; it ends, and the caller may reuse the memory. */
#ifndef AG_LOOKED
#define AG_LOOKED(ag, g, word) ((void)0)
#define AG_ENDS(ag, g, word) ((void)0)
#endif

/* Optional, for devices whose agents run one after another through long rows: prefetches the first bytes of a row. */
#ifndef AG_PREFETCH
#define AG_PREFETCH(ptr) ((void)(ptr))
#endif

#ifndef KFN
#error "include the device's prims.h before the kernels"
#endif

#endif
