/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the property tests share.
 *
 *   prop_draw.c     a case from a number
 *   prop_steps.c    the operations of one handle on one rank: tensors, calls, checks
 *   prop_recover.c  statistics, and going on after a failure
 *   prop_run.c      ranks, cases, many cases
 */
#ifndef EPX_TESTS_LIB_PROP_ACTOR_H
#define EPX_TESTS_LIB_PROP_ACTOR_H

#include "prop.h"
#include "tensor_memory.h"

enum { PROP_MAX_BUFFERS = 96, PROP_TIMEOUT_MS = 20000, PROP_LATE_PERCENT = 250 }; /* of the deadline */

/* What all ranks share: the case and the routing of every update, computed once. */
struct shared {
    const struct prop_case *c;
    struct oracle_route route[PROP_MAX_UPDATES + 1][PROP_MAX_HANDLES]; /* the last: after a recovery */
    struct workload w[PROP_MAX_UPDATES + 1][PROP_MAX_HANDLES];
    int max_recv[PROP_MAX_GROUPS]; /* most rows of any rank */
    char *error;
    size_t error_bytes;
    int lock;
    char ticket[EPX_TICKET_BYTES]; /* of the group, once it exists */
    int masked;                    /* goes_on: a rank was masked, and nothing is compared until a recovery */
    int stage;                     /* 2: members have called epx_mask_clean */
    struct kept *kept;             /* tensors that a late rank may still read */
};

struct kept {
    void *memory;
    struct kept *next;
};

/* A tensor with a canary behind it. */
struct buffer {
    epx_tensor t;
    char *base;
    size_t bytes;
    int from_epx;
    epx_group *group;
};

/* One handle on one rank. */
struct actor {
    struct shared *shared;
    const struct prop_handle *p;
    int rank, number, update, tokens_per_rank;
    epx_group *group;
    epx_handle *handle;
    epx_stream stream[2];
    int foreign[2]; /* the stream is another actor's */
    epx_event *event;
    struct prop_rng rng; /* this rank's own choices */
    struct workload w;
    const struct oracle_route *route;
    int masked;               /* goes_on: this rank has masked another */
    struct oracle_route left; /* after a recovery: without those that are out */
    struct oracle_recv recv;
    struct buffer buffer[PROP_MAX_BUFFERS];
    int nbuffers;
    int backward;
    int in_heap; /* the next tensors are in memory from epx_alloc */
    epx_tensor *idx;
    epx_layout_info info;
    epx_dispatch_inputs in;
    epx_dispatch_outputs out;
    epx_dispatch_config dispatch_config;
    epx_combine_inputs cin;
    epx_combine_outputs cout;
    epx_combine_config combine_config;
    epx_stats expected; /* what this handle has added to the group's */
    int issued;         /* operations, for prop_case.late_from */
    uint64_t issued_ns; /* when the last dispatch was */
    int failed;
};

/* Keeps the first sentence of all ranks; returns -1. */
int actor_failure(struct actor *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* 0, or -1: recorded as a failure unless faults excuse it. */
int actor_status(struct actor *a, const char *call, epx_status status);

#define TRY(a, call)                      \
    do {                                  \
        if (actor_status(a, #call, call)) \
            return -1;                    \
    } while (0)

/* One update of all handles, and the pairs that follow it. 0 or -1; tensors are freed in any case. */
int actors_update(struct actor *actors, const struct prop_case *c, int update);
/* The statistics of a group, when all operations went well. */
int actors_check_stats(struct actor *actors, const struct prop_case *c, int group);
/* After a failure: 0, or -1 where this rank could not go on, or what followed went wrong. */
int actors_recover(struct actor *actors, const struct prop_case *c);
/* The same for a process that has joined, perhaps before the members' epx_mask_clean. */
int actors_joined(struct actor *actors, const struct prop_case *c);
/* Waits until there is a ticket, and some time more. 0, or -1: there is none. */
int actors_await_ticket(struct shared *s, uint64_t draw);

#endif
