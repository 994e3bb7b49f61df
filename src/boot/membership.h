/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Consensus on the ranks that are left, and an all-gather among them. The bootstrap needs all ranks; this does not.
 *
 *   when the group is created   membership_open, all-gather of addresses by the bootstrap, membership_set_peers
 *   a round begins              membership_agree: who is excluded
 *   among those who are left    membership_allgather, at least once
 *   the round ends              membership_end
 *
 * A rank is excluded when a caller excludes it (it is masked), or when its port is closed, as it is when its process
 * ends.
 */
#ifndef EPX_BOOT_MEMBERSHIP_H
#define EPX_BOOT_MEMBERSHIP_H

#include "boot/conn.h"

struct membership;

/* key: of the group, 32 bytes; NULL = connections are not authenticated. */
epx_status membership_open(int rank, int nranks, int one_host, const uint8_t *key, struct conn_address *own,
                           struct membership **membership);
/* The addresses of all ranks, and a random number that only ranks of this group know. */
void membership_set_peers(struct membership *membership, const struct conn_address *all, uint64_t token);
/* The process of `rank`, on this machine: once it has ended, its port counts as closed, whoever listens there then. */
void membership_set_process(struct membership *membership, int rank, int64_t pid);
enum {
    MEMBERSHIP_RESTORES = 1,    /* a recovery that takes back who was left out */
    MEMBERSHIP_CREATION = -1,   /* of the group; other purposes are recoveries */
    MEMBERSHIP_ANY_PURPOSE = -2 /* of a process that joins: whatever the others recover for */
};

/*
 * Collective over the ranks that are not excluded. excluded[nranks]: in, the ranks that this rank excludes; on success,
 * the ranks that any rank excludes, the same on every rank that succeeds. Ranks with different values of `purpose` all
 * fail. A timeout names the ranks that neither joined nor ended. After a failure call membership_end. After success
 * call membership_allgather at least once: a rank that closes its connections before all have agreed counts as having
 * given up.
 */
epx_status membership_agree(struct membership *membership, int purpose, uint8_t *excluded, int timeout_ms);
/* Every rank that is left sends `bytes`; recv[nranks * bytes] has zeros for the excluded ones. */
epx_status membership_allgather(struct membership *membership, const void *send, void *recv, size_t bytes);
/* The next all-gather: should its result not have come after `ms`, fn(arg) is called once, and the wait goes on. Only
 * on ranks that do not lead the round. fn NULL: no more. */
void membership_on_silence(struct membership *membership, int ms, void (*fn)(void *arg), void *arg);
/* The last round failed because a rank continues without this one, which is masked there, or has done so before. From
 * then on a round succeeds here only with more ranks than are missing of those that were to go on without this one, or
 * if it restores: ranks that are left out make no second set, not even when the others have ended. */
int membership_left_out(const struct membership *membership);
/* Before a round: rank `by` has given up because of this one, and may go on without it, with any but those in `out`.
 * Until this rank has recovered, all of them count as ranks that were to go on without it. */
void membership_was_late(struct membership *membership, int by, const uint8_t *out);
/* This rank has recovered: it is not left out any more. */
void membership_taken_back(struct membership *membership);
/* Who leads the round, or led one that has failed. */
int membership_coordinator(const struct membership *membership);
void membership_end(struct membership *membership);
void membership_close(struct membership *membership);

/* ---- A process takes the place of a rank that has ended: membership_join.c -------------------------------------- */

struct membership_joiner {
    int rank;             /* whose place it asks for */
    uint64_t incarnation; /* a random number that it has chosen; never 0 */
    struct conn_address address;
    const void *request; /* the caller's */
    size_t bytes;
};

enum membership_reply { REPLY_WELCOME = 1, REPLY_WAIT, REPLY_REFUSED };

/* The process that has the place of `rank`: 0 = the one that has created the group. */
uint64_t membership_incarnation(const struct membership *membership, int rank);
const struct conn_address *membership_address(const struct membership *membership, int rank);
uint64_t membership_token(const struct membership *membership);
/* `rank` is another process from now on. This rank itself: before its first round. */
void membership_replace(struct membership *membership, int rank, uint64_t incarnation,
                        const struct conn_address *address);
/* Between consensus and the first all-gather: accepts processes that ask to join. Those that are about to prove
 * themselves have `grace_ms`. */
void membership_listen(struct membership *membership, int grace_ms);
/* Those that wait, from i = 0 on; 0: there is no such number. */
int membership_joiner(const struct membership *membership, int i, struct membership_joiner *joiner);
/* To the joiner of this incarnation, which is forgotten unless it waits on. WAIT and REFUSED: a text. */
void membership_reply(struct membership *membership, uint64_t incarnation, enum membership_reply reply,
                      const void *data, size_t bytes);
/* Whether the process that has the place of `rank` has ended: it is known here, or its port is closed, seen within
 * wait_ms. */
int membership_has_ended(struct membership *membership, int rank, int wait_ms);
/* The joiner: asks at all addresses (those of 0 bytes are not known) until it is welcome. *welcome is the caller's to
 * free. The status of a refusal is EPX_ERR_MISMATCH. deadline: of host_now_ns(). */
epx_status membership_knock(struct membership *membership, const struct conn_address *doors, const void *request,
                            size_t bytes, uint64_t deadline, void **welcome, size_t *welcome_bytes);

#endif
