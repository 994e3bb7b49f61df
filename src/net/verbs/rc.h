/* SPDX-License-Identifier: Apache-2.0 */
/* Reliable connections: one queue pair per peer, created at the first put. */
#ifndef EPX_NET_VERBS_RC_H
#define EPX_NET_VERBS_RC_H

#include "net/verbs/verbs.h"

#if EPX_HAVE_VERBS

enum {
    RC_CHAIN = 16,      /* puts posted with one doorbell; the last of a chain alone is signalled */
    RC_DEPTH = 128,     /* puts in flight per peer; a power of two */
    RC_RECEIVES = 4096, /* receives waiting in the shared queue */
    RC_SENDS = 4096,    /* puts in flight of the endpoint */
    HELLO_SENDS = 32,   /* hellos in flight */
    HELLO_BYTES = 128   /* of a receive buffer: 40 bytes of routing header, then the hello */
};

struct verbs_pair { /* this rank and one peer */
    struct ibv_qp *qp;
    uint32_t psn;
    /* State of the handshake; see hello.c. */
    int have;             /* its queue pair is known, ours sends and receives */
    int done;             /* the peer has confirmed that it knows ours: puts may be posted */
    int wanted;           /* a put waits */
    uint64_t repeat_ns;   /* when to repeat the hello; 0 = never */
    uint64_t deadline_ns; /* by polled_ns: when to give it up; 0 = not set yet */
    uint32_t pause_ms;
    /* Puts are numbered from 1; `posted` counts those in the chain too. */
    uint32_t posted, completed;
    uint32_t chained;
    int dirty;        /* in the list of peers with a chain */
    int receives_due; /* consumed and not yet given back; without a shared queue only */
    struct ibv_send_wr chain[RC_CHAIN];
    struct ibv_sge pieces[RC_CHAIN];
    uint64_t cookies[RC_DEPTH];
};

struct rc_state {
    uint32_t depth;    /* puts in flight per peer, a power of two */
    int shared;        /* one receive queue for all pairs */
    int receive_depth; /* of the shared queue, or of every queue pair */
    struct ibv_srq *srq;
    int receives_due; /* of the shared queue */
    int timeout, retries;
    int dirty_count;
    int *dirty; /* [nranks]: peers whose chain has something */
    /* Hellos. */
    struct ibv_qp *ud;
    struct ibv_mr *ud_mr;
    uint8_t *ud_memory; /* hello_receives buffers of HELLO_BYTES, then HELLO_SENDS of them */
    uint32_t qkey;
    int hello_receives;
    int hello_sending;
    uint32_t hello_next;
    uint64_t repeat_ns; /* when to check the pairs that have repeat_ns: verbs_net.asking of them */
};

static inline struct rc_state *rc_of(const struct verbs_net *net)
{
    return net->state;
}

/* The pair, made with a queue pair that can receive nothing yet; NULL: the peer was marked lost. */
struct verbs_pair *rc_pair(struct verbs_net *net, int peer);
/* Connects the pair's queue pair with the peer's. 0, or -1: the peer was marked lost. */
int rc_pair_connect(struct verbs_net *net, int peer, uint32_t qpn, uint32_t psn);

epx_status hello_open(struct verbs_net *net);
/* A put waits for this peer: sends a hello, unless the handshake is under way. */
void hello_want(struct verbs_net *net, int peer);
void hello_take(struct verbs_net *net, const struct ibv_wc *wc);
/* Repeats hellos; returns how many pairs are waiting for a reply. */
int hello_progress(struct verbs_net *net);
/* Gives up those that have waited for the group's timeout. */
void hello_expire(struct verbs_net *net);
/* The peer is lost: no more hellos. */
void hello_stop(struct verbs_net *net, int peer);
void hello_close(struct verbs_net *net);

#endif
#endif
