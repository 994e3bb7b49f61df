/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The `ofi` network, in parts:
 *
 *      lib.c      libfabric, opened at run time
 *      choose.c   which provider, which interface, which card
 *      ofi.c      an endpoint: open, register, connect, close; the table of operations
 *      data.c     put, flush, poll
 *      wait.c     sleep
 *      reach.c    whether anybody listens at a peer's address
 *      process.c  endpoints of the same process, which shm cannot connect
 *      token.c    what tells arrivals of peers from those of strangers
 *      door.c     no connections any more once all peers have connected
 *      source.c   shuts the connections of others that came before
 *
 * A build without libfabric has net/unsupported.c in place of these files.
 *
 * An endpoint has its own fabric, domain, address vector and completion queue, so that a proxy thread shares nothing
 * with another and the provider needs no locks (FI_THREAD_DOMAIN).
 */
#ifndef EPX_NET_OFI_OFI_H
#define EPX_NET_OFI_OFI_H

#include "net/net.h"

#ifndef EPX_HAVE_OFI
#error "the build defines EPX_HAVE_OFI as 1 or 0 (cmake/EpxNetworks.cmake)"
#endif

#if EPX_HAVE_OFI

#include <sys/socket.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

/* The interface asked of libfabric: what 1.15 had is in all later ones, 2.x included. */
#define OFI_API FI_VERSION(1, 15)

/* Every order of completions: FI_ORDER_STRICT, whose name libfabric 2 marks as deprecated by a warning. */
#define OFI_ORDER_STRICT                                                                                      \
    (FI_ORDER_RAR | FI_ORDER_RAW | FI_ORDER_RAS | FI_ORDER_WAR | FI_ORDER_WAW | FI_ORDER_WAS | FI_ORDER_SAR | \
     FI_ORDER_SAW | FI_ORDER_SAS)

/* The only symbols; everything else goes through tables that the library returns. */
struct ofi_lib {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int error);
    uint32_t (*version)(void);
};

/* Opens the library once per process; NULL when it is not there, and in `text` the reason. */
const struct ofi_lib *ofi_lib_get(const char **text);

/* Selects what an endpoint runs on: one info, to be freed by the caller. `provider` "" = EPX_OFI_PROVIDER, else the
 * best there is. A GPU (`pci`) uses the nearest of the provider's cards. `memory_kind` of a GPU: an entry with FI_HMEM,
 * if the provider has one. */
epx_status ofi_choose(const struct ofi_lib *lib, const struct net_options *options, struct fi_info **info);
/* Which of the cards an endpoint takes: as verbs_card_choose() in net/verbs/verbs.c. */
int ofi_card_choose(const char *sysfs, const struct net_options *options, const struct fi_info *const *cards,
                    int count);
/* "tcp;ofi_rxm on lo (127.0.0.1)" */
void ofi_describe(const struct fi_info *info, char *text, size_t bytes);
/* 1 for an IP address that only this machine can reach; 0 for others and for other formats. */
int ofi_address_is_loopback(uint32_t format, const void *address, size_t bytes);

/* ---- An endpoint */

enum { OFI_ADDRESS_VERSION = 2, OFI_MAX_DEPTH = 1024, OFI_SIGNAL_EVERY = 32, OFI_BATCH = 64, OFI_PROVIDER_BYTES = 32 };

/* In net_address.data, before the provider's own address. */
struct ofi_wire_address {
    uint32_t magic;
    uint32_t format; /* FI_SOCKADDR_IN, ... */
    uint32_t bytes;
    char provider[OFI_PROVIDER_BYTES];
};
#define OFI_MAGIC 0x4f465845u

/* In net_region.key. */
struct ofi_wire_key {
    uint64_t key;
    uint64_t base; /* what offset 0 is called on the wire: an address, or 0 */
};

/* A posted put. It belongs to the provider until its completion, also after its peer was lost. */
struct ofi_op {
    struct fi_context2 context; /* first: it is what completions bring back */
    struct ofi_op *next;        /* in the peer's queue, or in the free list */
    uint64_t cookie;
    uint32_t peer;
    uint16_t done;
    uint16_t hello; /* a hello of this file's, not a put of the caller's */
};

/*
 * CQ data of 64 bits:  63 hello | 32..62 token of the pair (token.c), 0 without a key | 0..31 the immediate; in a hello
 * the rank that says it (data.c), or OFI_SOURCE and the mark of its connection (source.c), 0 where it has not found it.
 * Where a provider has 32 bits only, they are the immediate.
 */
#define OFI_HELLO ((uint64_t)1 << 63)
#define OFI_SOURCE 0x80000000u
#define OFI_TOKEN_AT 32
#define OFI_TOKEN_MASK 0x7fffffffu

/* Guesses at 31 bits of token that an endpoint ignores before it gives up: one of 2048 attackers is lucky by then.
 * After each OFI_REFUSED_STEP of them it shuts the connections of strangers, though ranks may be on the way still. */
enum { OFI_MAX_REFUSED = 1 << 20, OFI_REFUSED_STEP = 1 << 18 };

enum ofi_peer_state { OFI_UNKNOWN, OFI_CONNECTED, OFI_FAILED };

struct ofi_peer {
    enum ofi_peer_state state;
    int error; /* errno, when failed */
    int reads; /* likewise: of struct net_event */
    fi_addr_t address;
    uint64_t key, base, bytes;   /* of its region */
    uint32_t token;              /* of what this rank sends to it */
    struct ofi_op *first, *last; /* in flight, oldest first */
    uint32_t inflight, unsignalled;
    uint32_t moved; /* progress since check_deadlines last looked */
    uint32_t completed;
    uint64_t completed_cookie; /* collected while a batch of completions is read */
    uint64_t since_ns;         /* no progress since, by polled_ns */
    uint64_t refused_ns;       /* the provider has returned EAGAIN since, likewise */
    int reach_fd;              /* + 1; a connection attempt that finds out whether the peer listens */
    uint64_t reach_ns;         /* when that was last tried */
    int hello_pending;         /* to be sent by this rank */
    int hello_expected;        /* to be received before the first put */
    int hello_received;
    int source_pending;  /* to be sent by this rank, after the hello */
    int source_expected; /* to be received */
    uint32_t source;     /* OFI_SOURCE and the mark of the lower rank's connection; 0 = not known yet */
    int named;           /* source.c */
    int has_held;
    struct net_put held; /* posted with the next put, or by flush */
};

struct ofi_net {
    struct net net;
    const struct ofi_lib *lib;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_mr *mr;
    void *desc;
    uint8_t *base;
    uint64_t bytes;
    int rank, nranks;
    uint64_t timeout_ns;
    int cq_fd, wait_fd;   /* the queue's descriptor, and the one to sleep on (wait.c); -1 = none */
    uint64_t signal_data; /* of cq_fd's entry that says nothing */
    int selective;        /* completions come in order: one in OFI_SIGNAL_EVERY is asked for */
    struct ofi_peer *peers;
    int uses_hello;       /* the provider connects at first use: hellos are sent */
    int hellos;           /* to be sent */
    int hello_next;       /* the peer that was tried last */
    uint64_t hello_at;    /* when the next attempt is due */
    uint32_t hello_pause; /* between attempts */
    uint64_t source_at;   /* when sources are told to those who have their hellos */
    int awaited;          /* to be received */
    int sources, unnamed; /* to be sent, to be received */
    int door;             /* enum ofi_door */
    int listener;         /* ofi_listener(); -1 = not known */
    int shut_due;         /* strangers are to be shut out */
    uint64_t look_at;     /* when strangers are looked for, while hellos are awaited */
    uint32_t *suspects;   /* marks of those that were there last time */
    int nsuspects;
    struct ofi_local *local;   /* process.c */
    struct ofi_tokens *tokens; /* NULL: arrivals are not checked */
    uint64_t refused;          /* arrivals that were not from peers */
    uint32_t refused_news;     /* of these and of shut connections, not yet reported */
    char why[256];             /* net.why */
    int *held, nheld;          /* peers with a held put */
    int *dirty;                /* peers with completions in the current batch */
    int unreported;            /* failed peers that poll has not reported */
    uint8_t *reported;
    struct ofi_op *ops, *free;
    uint32_t depth, inflight; /* of peers that live */
    uint32_t idle_polls;
    uint64_t checked_ns, polled_ns; /* by the clock, and how much of that the process ran (data.c) */
    int warned;
};

/* While hellos are to be sent or received, for how many nanoseconds poll has nothing to do unless the descriptor says
 * so; -EAGAIN: poll. 0: all are done. */
int ofi_hello_pause(const struct ofi_net *n);

/* Checks, without waiting, whether anybody listens at the peer's address: an errno value if not (ECONNREFUSED, ...), 0
 * if somebody does or it is not known yet. For socket addresses only; 0 for others. */
int ofi_reach(struct ofi_net *n, int peer, uint64_t now);
void ofi_reach_end(struct ofi_peer *peer);

/* The endpoint is one of this process; not any more. */
epx_status ofi_local_add(struct ofi_net *n);
void ofi_local_remove(struct ofi_net *n);
/* EPX_ERR_UNSUPPORTED: the peer's endpoint is of this process too, and the provider has no use for that. */
epx_status ofi_local_check(const struct ofi_net *n, int peer, const uint8_t *name, size_t bytes);

/* The tokens of all peers, where the provider has room for them. */
epx_status ofi_tokens_open(struct ofi_net *n, const struct net_options *options);
void ofi_tokens_close(struct ofi_net *n);
/* The rank that sends with this token; -1: one of several; -2: nobody. */
int ofi_token_peer(const struct ofi_net *n, uint32_t token);
/* OFI_SOURCE and 31 bits of an HMAC, not 0; OFI_SOURCE alone where it cannot be computed. */
uint32_t ofi_token_mark(const struct ofi_net *n, const void *text, size_t bytes);

/* Whether the endpoint takes new connections. */
enum ofi_door { OFI_DOOR_OPEN, OFI_DOOR_CLOSED, OFI_DOOR_UNKNOWN };
void ofi_door_set(struct ofi_net *n, enum ofi_door door);
/* The socket that the provider listens on, or -1. */
int ofi_listener(struct ofi_net *n);
/* Of a socket address; -1 for others. */
int ofi_port_of(const struct sockaddr_storage *at);

/* Looks for the connections to higher ranks whose source is to be sent. */
void ofi_sources_find(struct ofi_net *n);
/* Shuts the connections to this rank that no rank has named; without `all` those that were there at the last look too.
 * 1: done, or it cannot be; 0: not yet. */
int ofi_shut_strangers(struct ofi_net *n, int all);
/* Shuts the connection to this peer, where it is known which it is: 1, or 0. */
int ofi_shut_peer(struct ofi_net *n, int peer);
/* While hellos are awaited: shuts strangers now and then. */
void ofi_look_around(struct ofi_net *n);

/* After connect: starts the connection, or expects the peer to. */
void ofi_start_connection(struct ofi_net *n, int peer);

int ofi_put(struct net *net, const struct net_put *put);
int ofi_flush(struct net *net);
/* The time in which this process ran: an eighth of the timeout counts at most between two calls. */
uint64_t ofi_polled_now(struct ofi_net *n);
int ofi_poll(struct net *net, struct net_event *events, int max);
/* Called when the queue has a descriptor, and before the queue is closed. */
void ofi_wait_open(struct ofi_net *n);
void ofi_wait_close(struct ofi_net *n);
int ofi_wait_fd(struct net *net);
int ofi_arm(struct net *net);

#endif
#endif
