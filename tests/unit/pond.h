/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A network among ranks that are threads of one process: a put is a copy, and an event in the peer's inbox. One of its
 * calls, on one rank, can be set to block: for ever, or for a while.
 */
#ifndef EPX_TESTS_UNIT_POND_H
#define EPX_TESTS_UNIT_POND_H

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

enum pond_call {
    POND_NONE,
    POND_PROBE, /* on whichever rank comes first */
    POND_OPEN,
    POND_REGION,
    POND_ADDRESS,
    POND_CONNECT,
    POND_PUT,
    POND_FLUSH,
    POND_POLL,
    POND_WAIT_FD,
    POND_ARM,
    POND_CLOSE,
    POND_CALLS
};

static const char *const pond_calls[POND_CALLS] = {"none", "probe", "open", "add_region", "address", "connect",
                                                   "put",  "flush", "poll", "wait_fd",    "arm",     "close"};

enum { POND_RANKS = 8, POND_INBOX = 1 << 14 };

struct pond {
    struct net base;
    int rank, open, fd;
    char *heap;
    struct pond *peers[POND_RANKS];
    struct net_event inbox[POND_INBOX];
    unsigned head, tail;
    struct pond *next;
};

static pthread_mutex_t pond_lock = PTHREAD_MUTEX_INITIALIZER; /* of all inboxes; not held while a call blocks */

static struct {
    atomic_int call, rank, ms; /* enum pond_call; -1 = for ever */
    atomic_int blocked, back;  /* calls that did */
} pond_trap;

static inline void pond_set_trap(enum pond_call call, int rank, int ms)
{
    atomic_store(&pond_trap.rank, rank);
    atomic_store(&pond_trap.ms, ms);
    atomic_store(&pond_trap.call, (int)call);
}

/* Every call comes through here. The trap catches one. */
static inline void pond_enter(enum pond_call call, int rank)
{
    int expected = (int)call, ms;

    if (atomic_load(&pond_trap.call) != (int)call || (rank >= 0 && atomic_load(&pond_trap.rank) != rank) ||
        !atomic_compare_exchange_strong(&pond_trap.call, &expected, POND_NONE))
        return;
    ms = atomic_load(&pond_trap.ms);
    atomic_fetch_add(&pond_trap.blocked, 1);
    while (ms < 0)
        sleep(1);
    usleep((useconds_t)ms * 1000);
    atomic_fetch_add(&pond_trap.back, 1);
}

static inline epx_status pond_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    pond_enter(POND_PROBE, -1);
    snprintf(text, bytes, "for tests");
    return EPX_OK;
}

extern const struct net_ops pond_ops;

static inline epx_status pond_open(const struct net_options *options, struct net **net)
{
    struct pond *p;

    pond_enter(POND_OPEN, options->rank);
    p = calloc(1, sizeof(*p));
    if (!p)
        return EPX_ERR_MEMORY;
    p->base.ops = &pond_ops;
    p->rank = options->rank;
    p->open = 1;
    p->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *net = &p->base;
    return p->fd >= 0 ? EPX_OK : EPX_ERR_SYSTEM;
}

static inline unsigned pond_caps(struct net *net)
{
    (void)net;
    return NET_ORDERED;
}

static inline epx_status pond_address(struct net *net, struct net_address *address)
{
    pond_enter(POND_ADDRESS, ((struct pond *)net)->rank);
    memset(address, 0, sizeof(*address));
    address->bytes = sizeof(net);
    memcpy(address->data, &net, sizeof(net));
    return EPX_OK;
}

static inline epx_status pond_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    struct pond *p = (struct pond *)net;

    pond_enter(POND_REGION, p->rank);
    p->heap = memory->base;
    memset(region, 0, sizeof(*region));
    region->bytes = memory->bytes;
    return EPX_OK;
}

static inline epx_status pond_connect(struct net *net, int peer, const struct net_address *address,
                                      const struct net_region *region)
{
    struct pond *p = (struct pond *)net;

    (void)region;
    pond_enter(POND_CONNECT, p->rank);
    memcpy(&p->peers[peer], address->data, sizeof(p->peers[peer]));
    return EPX_OK;
}

/* With the lock held. */
static inline int pond_deliver(struct pond *p, const struct net_event *event)
{
    const uint64_t one = 1;

    if (p->tail - p->head == POND_INBOX)
        return -EAGAIN;
    p->inbox[p->tail++ % POND_INBOX] = *event;
    return write(p->fd, &one, sizeof(one)) < 0 ? -errno : 0;
}

static inline int pond_put(struct net *net, const struct net_put *put)
{
    struct pond *p = (struct pond *)net, *to = p->peers[put->peer];
    int rc = -ECONNRESET;

    pond_enter(POND_PUT, p->rank);
    pthread_mutex_lock(&pond_lock);
    if (to->open) {
        rc = pond_deliver(to, &(struct net_event){.kind = NET_ARRIVED, .peer = p->rank, .immediate = put->immediate});
        if (rc == 0) {
            memcpy(to->heap + put->target, p->heap + put->source, put->bytes);
            rc = pond_deliver(
                p, &(struct net_event){.kind = NET_SENT, .peer = put->peer, .count = 1, .cookie = put->cookie});
        }
    }
    pthread_mutex_unlock(&pond_lock);
    return rc;
}

static inline int pond_flush(struct net *net)
{
    pond_enter(POND_FLUSH, ((struct pond *)net)->rank);
    return 0;
}

static inline int pond_poll(struct net *net, struct net_event *events, int max)
{
    struct pond *p = (struct pond *)net;
    uint64_t count;
    int n = 0;

    pond_enter(POND_POLL, p->rank);
    pthread_mutex_lock(&pond_lock);
    while (n < max && p->head != p->tail)
        events[n++] = p->inbox[p->head++ % POND_INBOX];
    if (p->head == p->tail && read(p->fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        n = -errno;
    pthread_mutex_unlock(&pond_lock);
    return n;
}

static inline int pond_wait_fd(struct net *net)
{
    pond_enter(POND_WAIT_FD, ((struct pond *)net)->rank);
    return ((struct pond *)net)->fd;
}

static inline int pond_arm(struct net *net)
{
    pond_enter(POND_ARM, ((struct pond *)net)->rank);
    return 0;
}

/* Others may still put to an endpoint that closes: its memory goes with the process. */
static struct pond *pond_closed;

static inline void pond_close(struct net *net)
{
    struct pond *p = (struct pond *)net;

    pond_enter(POND_CLOSE, p->rank);
    pthread_mutex_lock(&pond_lock);
    p->open = 0;
    close(p->fd);
    p->next = pond_closed;
    pond_closed = p;
    pthread_mutex_unlock(&pond_lock);
}

const struct net_ops pond_ops = {.name = "pond",
                                 .probe = pond_probe,
                                 .open = pond_open,
                                 .caps = pond_caps,
                                 .address = pond_address,
                                 .add_region = pond_add_region,
                                 .connect = pond_connect,
                                 .put = pond_put,
                                 .flush = pond_flush,
                                 .poll = pond_poll,
                                 .wait_fd = pond_wait_fd,
                                 .arm = pond_arm,
                                 .close = pond_close};

#endif
