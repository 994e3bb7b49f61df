/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internals of the verbs network. verbs.c has what all cards share (device, completion queue, registration, events,
 * failure); the two transports, rc.c and efa.c, have queue pairs and posting.
 *
 *     proxy thread of rank a, endpoint i              rank b, endpoint i
 *     put -> chain of work requests per peer
 *     flush -> one doorbell per chain ----- RDMA_WRITE_WITH_IMM ----> heap, then one zero-length receive is consumed:
 *     poll <- completion of the chain's last                         poll -> NET_ARRIVED with the immediate
 *            = NET_SENT for all of the chain                         receives are given back in batches
 */
#ifndef EPX_NET_VERBS_VERBS_H
#define EPX_NET_VERBS_VERBS_H

#include "net/net.h"
#include "net/verbs/card.h"
#include "net/verbs/lib.h"

#if EPX_HAVE_VERBS

struct verbs_net;

#define VERBS_ADDRESS_VERSION 1
struct verbs_address { /* in net_address.data; little endian */
    uint64_t token;    /* random: a hello without it is not from this group */
    uint32_t qpn;      /* RC: of the datagram queue pair for hellos; SRD: of the queue pair itself */
    uint32_t qkey;
    uint8_t gid[16];
    uint16_t lid;
    uint8_t mtu, transport, link_layer;
    uint8_t reserved[3];
};
_Static_assert(sizeof(struct verbs_address) == 40, "crosses the bootstrap");

struct verbs_key { /* in net_region.key */
    uint64_t base;
    uint32_t rkey;
    uint32_t reserved;
};
_Static_assert(sizeof(struct verbs_key) == 16, "crosses the bootstrap");

/* wr_id: kind in 8 bits, peer in 24, number in 32. */
enum verbs_wr_kind { WR_PUT = 1, WR_RECEIVE, WR_HELLO, WR_HELLO_RECEIVE };
#define WR_ID(kind, peer, number) ((uint64_t)(kind) << 56 | (uint64_t)(uint32_t)(peer) << 32 | (uint32_t)(number))
#define WR_KIND(id) ((int)((id) >> 56))
#define WR_PEER(id) ((int)((id) >> 32 & 0xffffff))
#define WR_NUMBER(id) ((uint32_t)(id))

enum {
    VERBS_RECEIVE_BATCH = 32, /* receives are posted in lists of this length */
    VERBS_INLINE = 64,        /* bytes that travel inside the work request */
    VERBS_POLL = 32,          /* completions taken at once */
    VERBS_BROKEN_POLLS = 1024 /* before one reports that the endpoint is broken, should they all find something */
};

struct verbs_peer {
    int known;         /* connect() was called */
    int error;         /* errno value: lost; 0 = not */
    int drains;        /* lost, and puts to it have not completed */
    int report;        /* NET_FAILED is still to be reported */
    int told;          /* it was */
    int reads;         /* of NET_FAILED */
    int moved;         /* since the last check the first put was posted, or the oldest one completed */
    uint64_t since_ns; /* by polled_ns: when that was */
    uint32_t rkey;
    uint64_t base, bytes; /* of its region */
    struct verbs_address address;
    struct ibv_ah *ah;         /* to its datagram or SRD queue pair */
    struct verbs_pair *pair;   /* RC: from the first hello on */
    struct srd_window *window; /* SRD: from the first put on */
};

/* What differs between RC and SRD. Every slot filled. */
struct verbs_transport {
    unsigned caps;
    /* Before the completion queue is made: how many completions the transport may leave in it. */
    epx_status (*size)(struct verbs_net *net, const struct ibv_device_attr *device, int *entries);
    epx_status (*open)(struct verbs_net *net);
    void (*address)(struct verbs_net *net, struct verbs_address *address);
    /* 0; -EAGAIN; -errno: the peer is lost. The put was checked. */
    int (*put)(struct verbs_net *net, int peer, const struct net_put *put);
    void (*flush)(struct verbs_net *net);
    /* The completion of a put: 1 and the event, or 0. */
    int (*sent)(struct verbs_net *net, const struct ibv_wc *wc, struct net_event *event);
    /* How many puts to the peer have not completed. */
    uint32_t (*in_flight)(const struct verbs_net *net, int peer);
    /* Any other completion: a receive (an arrival, or flushed), a hello. */
    void (*other)(struct verbs_net *net, const struct ibv_wc *wc);
    /* Repeats hellos that are due; called now and then. Non-zero while there are any. */
    int (*progress)(struct verbs_net *net);
    /* Gives up hellos without a reply, by polled_ns. */
    void (*expire)(struct verbs_net *net);
    /* The peer was marked lost: what was posted to it is to complete soon. */
    void (*lost)(struct verbs_net *net, int peer);
    void (*close)(struct verbs_net *net);
};
extern const struct verbs_transport verbs_rc, verbs_srd;

struct verbs_net {
    struct net net;
    const struct verbs_lib *lib;
    const struct verbs_transport *transport;
    struct verbs_card card;
    int rank, nranks, timeout_ms;
    int sl, tc;
    uint64_t token;
    uint8_t key[32]; /* of hellos */
    int has_key;
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    int wait_fd; /* epoll over completions and asynchronous events */
    uint32_t unacknowledged;
    int stashed; /* `stash` is a completion that arming found */
    struct ibv_wc stash;
    int broken;      /* errno value: the endpoint itself failed */
    int broken_told; /* poll or flush has said so */
    uint32_t idle_polls, broken_polls;
    int asking;                     /* peers that are to reply to a hello */
    uint64_t checked_ns, polled_ns; /* of deadline.c: by the clock, and how much of that was spent polling */
    uint64_t look_ns;               /* when the clock was read for the next check; 0 = it was not */
    int untaken;                    /* completions from before that may still be in the queue */
    uint32_t polls;                 /* without a look at the clock */
    int draining;                   /* peers with `drains` */
    uint64_t port_down_ns;          /* since when; 0 = up */
    uint64_t grace_ns;              /* how long a port may be down: as long as the card repeats what it sends */
    uint8_t *heap;
    uint64_t heap_bytes;
    struct ibv_mr *mr;
    int inline_bytes;                                 /* largest put that travels inside its work request */
    uint32_t outstanding, send_room;                  /* work requests posted and not completed; how many may be */
    struct ibv_recv_wr receives[VERBS_RECEIVE_BATCH]; /* a list, ready to be posted */
    int reports;                                      /* peers with `report` */
    struct verbs_peer *peers;                         /* [nranks] */
    void *state;                                      /* the transport's own */
};

static inline struct verbs_net *verbs_of(struct net *net)
{
    return (struct verbs_net *)net;
}

/* Marks a peer lost, once, and logs it. */
void verbs_peer_lost(struct verbs_net *net, int peer, int error, const char *what);
/* The endpoint can no longer be used. */
void verbs_break(struct verbs_net *net, int error, const char *what);
/* The errno value that a completion status comes closest to. */
int verbs_status_errno(enum ibv_wc_status status);
/* Where datagrams and queue pairs of this endpoint reach `to`. */
void verbs_ah_attr(const struct verbs_net *net, const struct verbs_address *to, struct ibv_ah_attr *attr);
/* VERBS_RECEIVE_BATCH receives to a shared queue or, without one, to a queue pair. 0 or an errno value. */
int verbs_post_receives(struct verbs_net *net, struct ibv_srq *srq, struct ibv_qp *qp, int peer);

/* ---- Puts that do not complete: deadline.c ------------------------------------------------------------------ */

/* Of verbs_peer_lost(): NET_FAILED is reported once the card no longer reads what was put. */
void verbs_deadline_lost(struct verbs_net *net, int peer);
/* While `draining`, after completions were polled. */
void verbs_deadline_drained(struct verbs_net *net);
/* Before completions are polled, while something is awaited: reads the clock now and then. */
void verbs_deadline_begin(struct verbs_net *net);
/* After it, while `look_ns`, with what was found. */
void verbs_deadline_polled(struct verbs_net *net, int taken, int asked);
/* The next poll reads the clock. */
void verbs_deadline_sleep(struct verbs_net *net);

/* ---- Events that are no completions: event.c ---------------------------------------------------------------- */

epx_status verbs_event_open(struct verbs_net *net);
/* Handles asynchronous events of the card: a fatal error, a port that is down, a queue pair that failed. */
void verbs_event_check(struct verbs_net *net);
/* Asks for an event with the next completion: 0, or -EAGAIN when there is something to poll already. */
int verbs_event_arm(struct verbs_net *net);
void verbs_event_close(struct verbs_net *net);

#endif
#endif
