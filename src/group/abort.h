/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Abort words: one in each rank's heap (struct control). Whoever fails writes the words of its node, and sends the
 * same to other nodes by put; every wait of a kernel ends when its own word is set. docs/design.md ("Completion")
 * says what a rank must have done before it acts on its word.
 */
#ifndef EPX_GROUP_ABORT_H
#define EPX_GROUP_ABORT_H

#include "group/objects.h"

/* The own word; 0 = no operation was aborted. */
uint64_t abort_word(struct epx_group *group);
/* Who has given up because of this rank, by the own word, and may go on without it: it was masked, left out of a
 * recovery, or too late. -1: nobody. */
int group_late_for(struct epx_group *group);
/* This rank has found that `culprit` (-1: itself) has failed: aborts what the ranks of its node, and through the
 * proxies those of others, wait for. */
void group_abort(struct epx_group *group, int status, int culprit);
/* A rank of another node has failed: sets the own word only. Whoever acts on it, a kernel or a caller's thread, tells
 * the other ranks of the node first (give_up() in kernel/begin_end.h, group_give_up()). */
void group_aborted_by(struct epx_group *group, uint64_t word);
/* control.waits of this rank: whom its kernels wait for. */
uint64_t group_waits_word(struct epx_group *group);
void group_publish_waits(struct epx_group *group, int peer);
/* This rank cannot use its group until it has recovered; nobody else is told. */
void group_abort_alone(struct epx_group *group, int status);
/* The own word, for a thread that is about to tell its caller of it. The caller may then reuse memory that the ranks
 * of the node, or the network, would still read: before this returns, the node is told and the network has stopped,
 * as a kernel does at its end. No kernel may have run since the word was set. Beside a recovery by another thread it
 * only reads the word: the network is not there, and ranks of the node may have cleared theirs. */
uint64_t group_give_up(struct epx_group *group);
/* From one to the other, other threads touch neither the network nor words of other ranks. */
void group_recovery_begins(struct epx_group *group);
void group_recovery_ends(struct epx_group *group);
/* With group->giving_up held. */
int group_recovers_elsewhere(const struct epx_group *group);
/* The group continues without that rank of the node. If it is late rather than dead, it must not take data that it
 * finds from now on for data of its own operation. */
void group_abort_left_out(struct epx_group *group, int rank);
/* Ranks of the node in `out` have been told so: waits until none of them is in the midst of writing rows into memory of
 * the others (writes_begin() in kernel/late_writes.h), or its process has ended. */
epx_status group_await_writers(struct epx_group *group, const uint8_t *out);
/* EPX_OK unless the group has failed: then its error is returned again, with its message. */
epx_status group_usable(struct epx_group *group);

#endif
