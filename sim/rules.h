/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rule of completion (docs/design.md), asserted by the simulation where it matters rather than through results:
 *
 *   a kernel ends as not good     the abort words of all other ranks of its node are set before
 *   a kernel ends as good         no rank of its node had given up before it looked at its own abort word
 *   a put reads its source        its rank has not given up (sim/net_world.c)
 *   a caller reuses memory        as for a kernel that ends as not good
 *
 *   a kernel ends as not good     its own abort word is set: it recovers with the others, not alone ("Recovery")
 *   a kernel hears a signal       its rank has come through the same recoveries, and agreed on the same masks and
 *                                 epochs in the last one
 *
 *   a late rank has recovered     it knew by its abort word: of no set of ranks that go on without it, or have, are as
 *                                 many missing as it has recovered with
 *
 *   a process has joined          the one that ranks of its node had in this place has died or ended its program
 *   a process has joined          no kernel of a rank of its node ends as good with the memory of the process before,
 *                                 nor does that process write rows into memory of those that go on with the new one
 *
 *   a row is written              its reader has not gone on without the writer ("Masks")
 *   a row is summed               nobody has written there since the rank of which it is expected
 *
 * The first three are asked by the kernels (AG_LOOKED and AG_ENDS of kernel/agent.h) and the network, the last by the
 * test's program. A rank that has given up says so in its control block, where the ranks of its node and the network
 * see it.
 */
#ifndef EPX_SIM_RULES_H
#define EPX_SIM_RULES_H

#include "kernel/params.h"

/* watch_rows: who wrote the rows that combine sums. rouse: who is masked most often wakes up soon. */
void sim_rules_begin(int watch_rows, int rouse);
void sim_rules_end(void);
/* An agent of rank g->rank has done its last read: a rank of its node that has given up by now, or -1. */
int sim_rule_gone(const struct group_dev *g);
/* It has looked since then whether its operation has failed. */
void sim_rule_looked(const struct group_dev *g, int gone, int failed);
/* It ends: from now on the rank's memory may be reused, as far as this agent is concerned. word: its abort word. */
void sim_rule_ends(const struct group_dev *g, uint64_t word, int failed);
/* The caller of a group whose heaps (NULL: of other nodes) these are uses its tensors for something else. */
void sim_rule_reuse(int rank, int nranks, void *const *heaps);
/* The network read `from`'s memory, for rank `to`, after it had given up. */
void sim_rule_late_read(int from, int to);
/* This process, `process` of struct control, has the place of `rank` now. seer: a first process that is a member of its
 * node, and could look whether the one before had ended; -1: none. */
void sim_rule_joined(int rank, uint64_t process, int seer);
/* This process ends its program: another one may have its place. */
void sim_rule_left(void);
/* This process goes on without `peer`: it has masked it in an operation. */
void sim_rule_goes_on(int peer);
/* It is about to recover; late: its abort word says that another rank gave up because of it; restores: whoever was left
 * out is taken back. */
void sim_rule_starts_over(int late, int restores);
/* It has recovered; out[r]: without r; who[r]: with which process in the place of r; agreed: a digest of what all that
 * recovered with it must have the same. */
void sim_rule_members(int nranks, const uint8_t *out, const uint64_t *who, uint64_t agreed);
/* The recovery has set this signal of all to `value`: nobody need give it. */
void sim_rule_resets(int kind, int slot, uint64_t value);
/* In this run ranks recover until all of them have: not all equally often. */
void sim_rules_repeat(void);
/* It gives a signal; it has those of all that it counts on, of its node or all. */
void sim_rule_signals(int kind, int slot, uint64_t value);
void sim_rule_received(const struct group_dev *g, int all, int kind, int slot, uint64_t value);
/* A kernel of rank g->rank is about to write into memory of rank `to`, of its node. */
void sim_rule_writes(const struct group_dev *g, int to);
/* Bytes of `from` are in the heap of `to` now, or, with `split`, in its memory for the network alone (group/heap.c);
 * rank g->rank is about to sum a row of `from`, in its own memory. */
void sim_rule_landed(int from, int to, int split, uint64_t at, uint64_t bytes);
void sim_rule_sums(const struct group_dev *g, int from, const char *row, uint64_t bytes);
/* The control block of the rank whose memory for the network alone this is; NULL: no kernel of it has ended yet. */
const struct control *sim_rule_control(const void *memory);
/* "" or the first breach. */
const char *sim_rules_broken(void);

#endif
