/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which processes of a group have ended, and which machines do not reply? Their kernels know. One thread of a process,
 * for all its groups, sleeps in poll() until a kernel has something to report.
 *
 *   rank X                 ranks of its house                   a neighbour of another house        all others
 *   ends: killed,     ->   pidfd of X; its page: not LEFT
 *   crashed, exit()        page: cause = X; NEWS(X ended) --->  passes it on once  ------------->   the same
 *                     ->   ........................             end of the connection, no GOODBYE:
 *                                                               connects: refused: NEWS(X ended)
 *   its machine is gone .................................  ->   no reply for silence_ms: NEWS(X unreachable)
 *   is stopped             its kernel replies: no news
 *   leaves its group       its page: LEFT ..............   ->   GOODBYE: no news, also when its process ends
 *
 * House: ranks of one node and one host, which can use each other's process numbers; another process each. A rank has
 * a page of memory there, which outlives it: LEFT, and the first rank whose end it knew.
 *
 * Connections: only where a group has several houses. Rank r keeps one to the first living rank from r + 1, r + 2,
 * r + 4, ... on, modulo the ranks. A neighbour that ended or left is replaced by the one behind it, so the first
 * connections make a ring of all that live, and the others keep it in one piece while many end at once. They carry
 * HELLO, NEWS and GOODBYE, both ways. A refused first connection is no news: that rank may have left.
 *
 * Order: a rank that ends because it was told of X must not be taken for the first. It passes the news on before its
 * own program can see them; on a connection they precede its end, and inside a house its page names X.
 *
 * A connection that is lost without an end of the process (a firewall, a NAT) is made again. A firewall that refuses
 * in the place of the machine looks like an end. Ranks that are threads of one process end together: nothing watches.
 */
#ifndef EPX_GROUP_LIVENESS_H
#define EPX_GROUP_LIVENESS_H

#include "boot/conn.h"
#include "device/device.h"

struct liveness;

enum liveness_state { LIVENESS_LIVES, LIVENESS_LEFT, LIVENESS_UNREACHABLE, LIVENESS_ENDED };

/* What a rank tells the others; goes through the bootstrap as it is. */
struct liveness_card {
    uint64_t address; /* of its page; with token and file as in struct heap_export */
    int64_t token;
    uint8_t file[16];
    struct conn_address port; /* 0 bytes: it accepts no connections */
};

struct liveness_options {
    int rank, nranks;
    uint64_t incarnation;
    int links;    /* 1: the group has several houses */
    int one_host; /* ... of one machine */
    const uint8_t *key;
    int silence_ms;
    /* From the thread, for one rank after the other, in the order of their ends. 0: not now, it is called again. */
    int (*on_news)(void *context, int rank, enum liveness_state state);
    void *context;
};

/* Can this process watch others by pidfd? */
int liveness_has_pidfd(void);
epx_status liveness_open(const struct liveness_options *options, struct liveness_card *own, struct liveness **out);
/* The process that has the place of `rank` from now on. `mate`: of this rank's house. */
void liveness_set_peer(struct liveness *l, int rank, uint64_t incarnation, int64_t pid, int mate,
                       const struct liveness_card *card);
/* All peers are set: watches from now on. token: the same on all ranks of the group, and on no others. */
epx_status liveness_start(struct liveness *l, uint64_t token);
/* Waits until this rank's connections are made. 0: they are not, after so long. */
int liveness_meet(struct liveness *l, int ms);
/* From now on news go to on_news(), also those that have come before. */
void liveness_tell(struct liveness *l);
enum liveness_state liveness_of(struct liveness *l, int rank);
/* The ranks have met again: those that were unreachable are not, until that is news again. */
void liveness_met_again(struct liveness *l);
/* This rank ends its group in order: its end is no news, and it gets none. */
void liveness_leave(struct liveness *l);
/* 0; or -1: on_news() does not return. The thread is left behind then, with all that it uses. */
int liveness_close(struct liveness *l);

#endif
