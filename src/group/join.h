/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process takes the place of a rank that has ended: what the members do. joiner.c is that process's side; once it is
 * welcome it does all that follows like any member.
 *
 *   members                                              the process that joins
 *   agree on who is left (membership)                    waits at the ports of members: JOIN
 *   roll call: who has which process at its door  <----- settings, machine, address
 *     the same choice on all; the process that it
 *     replaces must have ended, or be unable to write
 *   those that were asked          -- WELCOME ---------> nodes, members, addresses: makes its heap and tables
 *   agree on who is left: with it                        takes part
 *   roll call: nobody new; incarnations of all
 *   heaps again: the memory of who is new is mapped in the place of the old
 *   epochs, signals, network: as in every recovery (recover.c)
 */
#ifndef EPX_GROUP_JOIN_H
#define EPX_GROUP_JOIN_H

#include "group/fabric.h"
#include "group/objects.h"

enum { JOIN_ROUNDS = 16 }; /* of consensus in one recovery */

struct join_round {
    int unmask;
    int admitted; /* by the last roll call: agree again, with them */
    int untold; /* this rank was not told how a restart ended: others may have gone on, and call another function now */
    int replaced;                     /* a member is another process than some member knows: heaps again */
    uint8_t in[KERNEL_MAX_RANKS];     /* admitted in this recovery */
    uint8_t failed[KERNEL_MAX_RANKS]; /* and did not come */
    uint8_t out[KERNEL_MAX_RANKS];    /* left out by a roll call that all members have come through */
};

/* out[]: those that were admitted are in; those that did not come, or that a roll call has left out, are out. */
void join_mark(const struct epx_group *group, const struct join_round *join, uint8_t *out);
/* The members did not agree in time. 1: perhaps because of a process that was admitted; it is left out from now on. */
int join_give_up(struct epx_group *group, struct join_round *join);
/* Collective over the members, after they have agreed. */
epx_status join_roll_call(struct epx_group *group, struct join_round *join, const uint8_t *out);
/* After a restart with `replaced`: ranks that were out cannot come back any more. */
void join_done(struct epx_group *group, const uint8_t *out);

epx_status group_ticket(struct epx_group *group, char *text, size_t bytes);
/* Waits at most timeout_ms until the members admit this process as `rank`; the group is registered. */
epx_status group_join(const char *ticket, int rank, const epx_group_config *config, int timeout_ms,
                      struct epx_group **group);

/* ---- What the two sides say ------------------------------------------------------------------------------------ */

struct join_request {
    uint64_t build; /* util/build.h */
    uint32_t bytes; /* of this struct */
    uint32_t reserved;
    int64_t fields[20]; /* settings_pack() */
    struct fabric_offer place;
};

/* Followed by a join_rank for each rank. */
struct join_welcome {
    int32_t unmask, nranks;
    int32_t place, reserved; /* enum heap_place: where heaps lie */
    uint64_t number;         /* of the group */
};

struct join_rank {
    uint64_t incarnation;
    struct conn_address address;
    uint8_t identity[64], host[64];
    int32_t node, out;
};

#endif
