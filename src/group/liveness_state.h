/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to liveness*.c: a group's part of it. All of it is protected by the thread's lock. */
#ifndef EPX_GROUP_LIVENESS_STATE_H
#define EPX_GROUP_LIVENESS_STATE_H

#include <assert.h>
#include <poll.h>

#include "group/liveness.h"

/* In shared memory; written by its rank alone. */
struct live_page {
    uint64_t left;  /* 1: the rank has ended its group in order */
    uint64_t cause; /* CAUSE_*: the first rank whose end it has found or was told of */
};

#define CAUSE(rank, incarnation) ((uint64_t)(incarnation) << 16 | (uint64_t)((rank) + 1))
#define CAUSE_RANK(cause) ((int)((cause)&0xffff) - 1)

struct live_peer {
    uint64_t incarnation;
    int pidfd;                    /* -1: not watched here */
    const struct live_page *page; /* NULL: not mapped */
    struct heap_export export;    /* of it */
    struct conn_address port;
    enum liveness_state state; /* LIVES, LEFT or ENDED */
    int unreachable;
    uint64_t found; /* the how manieth news of this group; 0: none */
    int told;       /* on_news() has taken it: enum liveness_state */
    uint64_t early; /* the CAUSE of an end that was told before this process was known here; 0: none */
    /* Connections: */
    int proven, absent; /* one was open; the first one was refused */
    uint64_t lost_ns;   /* since when there is none though one was open; 0: there is */
    uint64_t retry_ns;  /* the next one not before that */
    int retries;
};

struct link_frame {
    uint32_t magic;
    uint16_t kind, state; /* NEWS: enum liveness_state */
    int32_t rank, reserved;
    uint64_t token, incarnation; /* of the rank */
};
static_assert(sizeof(struct link_frame) == 32, "on the wire");

struct link {
    struct link *next;
    int conn;
    int rank;    /* -1: not known yet */
    int is_open; /* HELLO has come */
    int error;   /* a send failed by this -errno: sockets report it once */
    struct link_frame in;
    size_t got;
    struct link_frame *out;
    size_t count, room, sent; /* frames; bytes of the first ones */
};

struct liveness {
    struct liveness *next;
    struct liveness_options o;
    uint8_t key[32];
    uint64_t token;
    struct heap memory; /* struct live_page */
    struct conn_port *port;
    struct link *links;
    uint64_t count; /* of news so far */
    int tells, left;
    int busy;          /* on_news() runs */
    uint64_t again_ns; /* when it is called again; 0: it is not */
    struct live_peer peers[];
};

static inline struct live_page *live_own_page(const struct liveness *l)
{
    return l->memory.base;
}

/* The end of the rank's process, or that its machine does not reply, is known from now on. Passes it on. */
void live_found(struct liveness *l, int rank, enum liveness_state state);

/* ---- Connections: liveness_links.c ------------------------------------------------------------------------------- */

epx_status links_open(struct liveness *l, struct conn_address *own);
void links_close(struct liveness *l);
/* All that can be done without waiting. */
void links_step(struct liveness *l, uint64_t now);
/* When links_step() has something to do though nothing has come; UINT64_MAX: never. */
uint64_t links_next(const struct liveness *l);
const struct pollfd *links_polls(struct liveness *l, size_t *count);
void links_send_news(struct liveness *l, int rank, enum liveness_state state);
void links_send_goodbye(struct liveness *l);
/* The connections to the process that had the place of `rank` before. */
void links_forget(struct liveness *l, int rank);
/* Every neighbour has an open connection. */
int links_are_open(const struct liveness *l);

#endif
