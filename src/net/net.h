/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Networks behind one table of operations. A network has one transfer, PUT: write these bytes there, and deliver this
 * 32-bit immediate there once they have landed. Two puts may arrive in any order. The proxy interprets the immediate
 * (kernel/command.h).
 *
 * An endpoint (struct net) belongs to ONE proxy thread, which makes all calls from open to close: no locks. Peers are
 * numbered by rank; endpoint i of a rank is connected to endpoint i of every peer. All calls are non-blocking but open,
 * register, connect and close, which have deadlines; proxy/request.c bounds a library that does not return.
 */
#ifndef EPX_NET_NET_H
#define EPX_NET_NET_H

#include "epx/epx.h"

struct net; /* starts with `const struct net_ops *ops` */

enum {
    NET_ORDERED = 1,        /* puts to one peer land in the order they were posted */
    NET_DEVICE_MEMORY = 2,  /* can register GPU memory, of the kind that open was told */
    NET_NEEDS_PROGRESS = 4, /* incoming data moves only while poll is called */
    NET_KNOWN_SENDERS = 8   /* what arrives was sent by a peer; else by whoever knows the address */
};

#define NET_ADDRESS_MAX 240
struct net_address { /* travels through the bootstrap */
    uint32_t bytes;
    uint32_t version; /* of the back end's address format */
    uint8_t data[NET_ADDRESS_MAX];
};

#define NET_KEY_MAX 56
struct net_region { /* `key` travels through the bootstrap: what a peer needs to write into the region */
    uint64_t bytes;
    uint32_t key_bytes;
    uint32_t reserved;
    uint8_t key[NET_KEY_MAX];
};

struct net_memory { /* the rank's heap, as a network may register it */
    void *base;
    uint64_t bytes;
    int kind;   /* epx_device: whose memory it is; EPX_DEVICE_CPU = the host's, also where a GPU maps it */
    int index;  /* which GPU */
    int dmabuf; /* a descriptor of it, from its first byte on; -1 = none */
};

static inline int net_memory_is_gpu(int kind) /* not the host's */
{
    return kind == EPX_DEVICE_CUDA || kind == EPX_DEVICE_HIP;
}

struct net_options {
    int rank, nranks;
    int index; /* which endpoint of the rank */
    int timeout_ms;
    const char *provider; /* "" = automatic; ofi: "tcp", "shm", "efa", ...; verbs: card filter as EPX_IB_HCA */
    void *world;          /* a simulation's: the world all ranks share; others ignore it */
    const uint8_t *key;   /* 32 bytes that only the ranks of the group know; NULL: arrivals are not checked */
    /* net_memory.kind of what will be registered; where it cannot be, caps() lacks NET_DEVICE_MEMORY */
    int memory_kind;
    const char *pci; /* address of the GPU whose data it moves; NULL or "" = the processor */
    int gpu;         /* its number on this machine: GPUs that are equally near to some cards are spread over them */
};

struct net_put {
    int peer;                /* rank */
    uint32_t bytes;          /* 0 = only the immediate */
    uint64_t source, target; /* offsets in the own region and in the peer's */
    uint32_t immediate;
    uint32_t more;   /* 1: another put follows at once; the doorbell may wait for it, or for flush */
    uint64_t cookie; /* returned in NET_SENT; consecutive puts to a peer may be completed by the last one alone */
};

enum net_event_kind {
    NET_SENT, /* the put with this cookie, and all earlier ones to this peer since the last NET_SENT: `count` of them */
    NET_ARRIVED, /* a peer's immediate; its bytes are visible */
    /* This peer is lost: what was posted to it will not complete. `error` is an errno value. Nothing that is stored in
     * the own region from now on reaches it, or, with `reads`, once the endpoint is closed. */
    NET_FAILED,
    NET_REFUSED /* `count` arrivals or connections were not from peers: ignored, or shut */
};

struct net_event {
    enum net_event_kind kind;
    int peer;           /* SENT, FAILED; -1 where a back end cannot tell (ARRIVED: see the immediate) */
    uint32_t immediate; /* ARRIVED */
    uint32_t count;     /* SENT: how many puts it completes, 1 or more; REFUSED */
    int error, reads;   /* FAILED */
    uint64_t cookie;
};

struct net_ops {
    const char *name;
    /* EPX_OK if it can run on this machine; `text` says what was found, or what is missing, in one line. */
    epx_status (*probe)(const char *provider, char *text, size_t bytes);
    epx_status (*open)(const struct net_options *options, struct net **net);
    unsigned (*caps)(struct net *net);
    epx_status (*address)(struct net *net, struct net_address *address);
    /* Registers the rank's heap, once per endpoint. */
    epx_status (*add_region)(struct net *net, const struct net_memory *memory, struct net_region *region);
    /* Called once for every peer on another node, with what it exported. */
    epx_status (*connect)(struct net *net, int peer, const struct net_address *address,
                          const struct net_region *region);
    /* 0; -EAGAIN: no room now, poll and try again; another -errno: the peer or the card failed. */
    int (*put)(struct net *net, const struct net_put *put);
    /* Rings the doorbell for what `more` held back. */
    int (*flush)(struct net *net);
    /* Up to `max` events; the number, or -errno when the endpoint itself is broken. Makes progress. */
    int (*poll)(struct net *net, struct net_event *events, int max);
    /* A file descriptor that becomes readable when poll would find something, or -1. arm() is called before sleeping on
     * it: 0 = safe to sleep, more = safe for that many nanoseconds, and connections are being made, which wakes without
     * events; -EAGAIN = poll first. */
    int (*wait_fd)(struct net *net);
    int (*arm)(struct net *net);
    void (*close)(struct net *net);
};

struct net {
    const struct net_ops *ops;
    const char *why; /* where poll failed for a reason that errno has no word for; else NULL */
};

/* "" or "auto": EPX_NET, else the first that can run here. Other names as in net/name.h: "verbs", "ofi", "ofi:tcp",
 * "tcp", "null" (accepts puts and discards them, for measurements), ... *provider points into `name`, or to a constant.
 * */
epx_status net_find(const char *name, const struct net_ops **ops, const char **provider);

extern const struct net_ops net_ofi_ops, net_verbs_ops, net_null_ops;

#endif
