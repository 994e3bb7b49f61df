/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A network among ranks that are threads of one process: a put is a copy, and an event in the peer's inbox. One of its
 * calls, on one rank, can be set to block: for a while, or until something has happened, if ever.
 */
#ifndef EPX_TESTS_UNIT_BLOCKING_NET_H
#define EPX_TESTS_UNIT_BLOCKING_NET_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "net/net.h"

enum blocking_call {
    BLOCKING_NONE,
    BLOCKING_PROBE, /* on whichever rank comes first */
    BLOCKING_OPEN,
    BLOCKING_REGION,
    BLOCKING_ADDRESS,
    BLOCKING_CONNECT,
    BLOCKING_PUT,
    BLOCKING_FLUSH,
    BLOCKING_POLL,
    BLOCKING_WAIT_FD,
    BLOCKING_ARM,
    BLOCKING_CLOSE,
    BLOCKING_CALLS
};

static const char *const blocking_calls[BLOCKING_CALLS] = {"none", "probe", "open", "add_region", "address", "connect",
                                                           "put",  "flush", "poll", "wait_fd",    "arm",     "close"};

enum { BLOCKING_RANKS = 8, BLOCKING_INBOX = 1 << 14 };

struct blocking_net {
    struct net base;
    int rank, open, fd;
    char *heap;
    struct blocking_net *peers[BLOCKING_RANKS];
    struct net_event inbox[BLOCKING_INBOX];
    unsigned head, tail;
    struct blocking_net *next;
};

static pthread_mutex_t blocking_lock = PTHREAD_MUTEX_INITIALIZER; /* of all inboxes; not held while a call blocks */

static struct {
    atomic_int call, rank, ms; /* enum blocking_call; -1 = as long as `until` says */
    atomic_int blocked, back;  /* calls that did */
    int (*until)(void);        /* set before the trap; NULL: for ever */
} blocking_trap;

enum { BLOCKING_USED_AFTER_END = 3 };
static atomic_int blocking_ended; /* the process ends, and the library has freed what its calls need */

static inline void blocking_check_end(void)
{
    if (atomic_load(&blocking_ended))
        _exit(BLOCKING_USED_AFTER_END);
}

static inline void blocking_set_trap(enum blocking_call call, int rank, int ms)
{
    atomic_store(&blocking_trap.rank, rank);
    atomic_store(&blocking_trap.ms, ms);
    atomic_store(&blocking_trap.call, (int)call);
}

/* Every call comes through here. The trap catches one. */
static inline void blocking_enter(enum blocking_call call, int rank)
{
    int expected = (int)call, ms;

    blocking_check_end();
    if (atomic_load(&blocking_trap.call) != (int)call || (rank >= 0 && atomic_load(&blocking_trap.rank) != rank) ||
        !atomic_compare_exchange_strong(&blocking_trap.call, &expected, BLOCKING_NONE))
        return;
    ms = atomic_load(&blocking_trap.ms);
    atomic_fetch_add(&blocking_trap.blocked, 1);
    while (ms < 0 && !(blocking_trap.until && blocking_trap.until()))
        usleep(5000);
    usleep(ms < 0 ? 0 : (useconds_t)ms * 1000);
    atomic_fetch_add(&blocking_trap.back, 1);
    blocking_check_end();
}

static inline epx_status blocking_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    blocking_enter(BLOCKING_PROBE, -1);
    snprintf(text, bytes, "for tests");
    return EPX_OK;
}

extern const struct net_ops blocking_ops;

static inline epx_status blocking_open(const struct net_options *options, struct net **net)
{
    struct blocking_net *p;

    blocking_enter(BLOCKING_OPEN, options->rank);
    p = calloc(1, sizeof(*p));
    if (!p)
        return EPX_ERR_MEMORY;
    p->base.ops = &blocking_ops;
    p->rank = options->rank;
    p->open = 1;
    p->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *net = &p->base;
    return p->fd >= 0 ? EPX_OK : EPX_ERR_SYSTEM;
}

static inline unsigned blocking_caps(struct net *net)
{
    (void)net;
    return NET_ORDERED | NET_KNOWN_SENDERS;
}

static inline epx_status blocking_address(struct net *net, struct net_address *address)
{
    blocking_enter(BLOCKING_ADDRESS, ((struct blocking_net *)net)->rank);
    memset(address, 0, sizeof(*address));
    address->bytes = sizeof(net);
    memcpy(address->data, &net, sizeof(net));
    return EPX_OK;
}

static inline epx_status blocking_add_region(struct net *net, const struct net_memory *memory,
                                             struct net_region *region)
{
    struct blocking_net *p = (struct blocking_net *)net;

    blocking_enter(BLOCKING_REGION, p->rank);
    p->heap = memory->base;
    memset(region, 0, sizeof(*region));
    region->bytes = memory->bytes;
    return EPX_OK;
}

static inline epx_status blocking_connect(struct net *net, int peer, const struct net_address *address,
                                          const struct net_region *region)
{
    struct blocking_net *p = (struct blocking_net *)net;

    (void)region;
    blocking_enter(BLOCKING_CONNECT, p->rank);
    memcpy(&p->peers[peer], address->data, sizeof(p->peers[peer]));
    return EPX_OK;
}

/* With the lock held. */
static inline int blocking_deliver(struct blocking_net *p, const struct net_event *event)
{
    const uint64_t one = 1;

    if (p->tail - p->head == BLOCKING_INBOX)
        return -EAGAIN;
    p->inbox[p->tail++ % BLOCKING_INBOX] = *event;
    return write(p->fd, &one, sizeof(one)) < 0 ? -errno : 0;
}

static inline int blocking_put(struct net *net, const struct net_put *put)
{
    struct blocking_net *p = (struct blocking_net *)net, *to = p->peers[put->peer];
    int rc = -ECONNRESET;

    blocking_enter(BLOCKING_PUT, p->rank);
    pthread_mutex_lock(&blocking_lock);
    if (to->open) {
        rc = blocking_deliver(to,
                              &(struct net_event){.kind = NET_ARRIVED, .peer = p->rank, .immediate = put->immediate});
        if (rc == 0) {
            memcpy(to->heap + put->target, p->heap + put->source, put->bytes);
            rc = blocking_deliver(
                p, &(struct net_event){.kind = NET_SENT, .peer = put->peer, .count = 1, .cookie = put->cookie});
        }
    }
    pthread_mutex_unlock(&blocking_lock);
    return rc;
}

static inline int blocking_flush(struct net *net)
{
    blocking_enter(BLOCKING_FLUSH, ((struct blocking_net *)net)->rank);
    return 0;
}

static inline int blocking_poll(struct net *net, struct net_event *events, int max)
{
    struct blocking_net *p = (struct blocking_net *)net;
    uint64_t count;
    int n = 0;

    blocking_enter(BLOCKING_POLL, p->rank);
    pthread_mutex_lock(&blocking_lock);
    while (n < max && p->head != p->tail)
        events[n++] = p->inbox[p->head++ % BLOCKING_INBOX];
    if (p->head == p->tail && read(p->fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        n = -errno;
    pthread_mutex_unlock(&blocking_lock);
    return n;
}

static inline int blocking_wait_fd(struct net *net)
{
    blocking_enter(BLOCKING_WAIT_FD, ((struct blocking_net *)net)->rank);
    return ((struct blocking_net *)net)->fd;
}

static inline int blocking_arm(struct net *net)
{
    blocking_enter(BLOCKING_ARM, ((struct blocking_net *)net)->rank);
    return 0;
}

/* Others may still put to an endpoint that closes: its memory goes with the process. */
static struct blocking_net *blocking_closed;

static inline void blocking_close(struct net *net)
{
    struct blocking_net *p = (struct blocking_net *)net;

    blocking_enter(BLOCKING_CLOSE, p->rank);
    pthread_mutex_lock(&blocking_lock);
    p->open = 0;
    close(p->fd);
    p->next = blocking_closed;
    blocking_closed = p;
    pthread_mutex_unlock(&blocking_lock);
}

const struct net_ops blocking_ops = {.name = "blocking_net",
                                     .probe = blocking_probe,
                                     .open = blocking_open,
                                     .caps = blocking_caps,
                                     .address = blocking_address,
                                     .add_region = blocking_add_region,
                                     .connect = blocking_connect,
                                     .put = blocking_put,
                                     .flush = blocking_flush,
                                     .poll = blocking_poll,
                                     .wait_fd = blocking_wait_fd,
                                     .arm = blocking_arm,
                                     .close = blocking_close};

#endif
