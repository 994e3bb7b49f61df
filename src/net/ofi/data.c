/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Puts and their completions.
 *
 *      put ---> held (only with `more`) ---> posted: in the peer's queue ---> completed ---> NET_SENT
 *                                                |
 *                    the peer's completion queue:  remote CQ data = the immediate ---> NET_ARRIVED
 *
 * A put is one fi_writemsg with remote CQ data. By definition the data reaches the peer's completion queue after the
 * bytes of that write; the order of two writes is not assumed. A put with `more` is held back until the next put to the
 * same peer, or flush, decides how to post it: FI_MORE must be followed by another write, and libfabric has no
 * doorbell.
 *
 * libfabric lets completions overtake each other unless comp_order says FI_ORDER_STRICT. Then one put in
 * OFI_SIGNAL_EVERY asks for a completion, and the completion of the last of a chain counts for all before it. Otherwise
 * every put asks for one, and the puts of a peer are reported from the oldest on, up to the first that has not
 * completed.
 *
 * Where the provider connects at first use, two peers that connect to each other at the same time can both fail (seen
 * in libfabric 1.17, one time in a hundred on a busy machine). So the lower rank of each pair first sends a hello, a
 * put without bytes whose CQ data has OFI_HELLO set, and the higher rank posts nothing before it has received the
 * hello. When a rank has received all its hellos nobody has a reason to connect to it any more (door.c). After its
 * hellos a rank tells the sources of its connections, so that they can be told from those of strangers (source.c).
 *
 * libfabric delivers the CQ data of a write without bytes from anybody who connects: no key is checked. So CQ data
 * carries a token that only the two ranks know (token.c); what arrives without one is ignored and counted.
 *
 * A peer is lost when a put to it fails, or when the provider accepts or completes none for the timeout: some providers
 * reconnect internally and return EAGAIN for ever, whether the peer exists or not. After REACH_AFTER_NS without
 * progress EPX checks whether the peer still listens, where the address is a socket address. Before such a loss is
 * reported the connection is shut: it may be that the peer was only stopped, and the memory of puts in flight is free
 * for other things from then on. Time in which this process was stopped does not count: no put could complete then.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "util/clock.h"
#include "util/log.h"

#define REACH_AFTER_NS 200000000u
#define STEP_PART 8            /* of the timeout, or STEP_MIN_NS, counts at most between two looks at the clock */
#define STEP_MIN_NS 100000000u /* a proxy looks before it sleeps; on a busy machine it wakes up late */
/* Hellos are tried to a few peers at a time, with pauses in between: each attempt makes libfabric look at its sockets,
 * and an attempt for each of hundreds of peers in every poll took most of the processor time of creation. */
#define HELLO_BATCH 32
#define HELLO_PAUSE_MIN_NS 1000000u
#define HELLO_PAUSE_MAX_NS 16000000u
#define AWAIT_PAUSE_NS 100000000u
#define SOURCES_EVERY_NS 100000000u
/* Read in one poll. Those of a stranger make no event: one that writes faster than a busy machine reads would keep poll
 * for ever from what comes after them, its own connection's end included. */
enum { ENTRIES_MAX = 16 * OFI_BATCH };

static struct ofi_net *of(struct net *net)
{
    return (struct ofi_net *)net;
}

/* libfabric's own error numbers begin at FI_EOTHER; below they are errno's. ETIMEDOUT says that EPX has given a peer up
 * (docs/net.md). A provider that waits in vain does not say that: the peer may have given up this rank. */
static int to_errno(int error)
{
    if (error == ETIMEDOUT)
        return ECONNRESET;
    return error > 0 && error < FI_ERRNO_OFFSET ? error : EIO;
}

static void release_held(struct ofi_net *n, int peer)
{
    if (!n->peers[peer].has_held)
        return;
    n->peers[peer].has_held = 0;
    for (int i = 0; i < n->nheld; i++) {
        if (n->held[i] == peer) {
            n->held[i] = n->held[--n->nheld];
            return;
        }
    }
}

/* Poll moves the door only when that changes something: it looks for the socket among all descriptors. */
static void check_door(struct ofi_net *n)
{
    if (n->door != (n->awaited ? OFI_DOOR_OPEN : OFI_DOOR_CLOSED))
        n->door = OFI_DOOR_UNKNOWN;
}

static void expect_no_hello(struct ofi_net *n, struct ofi_peer *p)
{
    n->awaited -= p->hello_expected;
    p->hello_expected = 0;
    check_door(n);
}

static void expect_no_source(struct ofi_net *n, struct ofi_peer *p)
{
    n->unnamed -= p->source_expected;
    p->source_expected = 0;
}

static void peer_lost(struct ofi_net *n, int peer, int error, const char *why)
{
    struct ofi_peer *p = &n->peers[peer];

    if (p->state == OFI_FAILED)
        return;
    log_line(LOG_WARN, "ofi: rank %d is lost: %s (%s), %u puts were in flight", peer, why, n->lib->strerror(error),
             p->inflight);
    p->state = OFI_FAILED;
    p->error = error;
    n->inflight -= p->inflight;
    n->unreported++;
    release_held(n, peer);
    if (p->hello_expected)
        expect_no_hello(n, p);
    expect_no_source(n, p);
}

static void put_failed(struct ofi_net *n, int peer, int error, const char *why)
{
    peer_lost(n, peer, to_errno(error), error == ETIMEDOUT ? "the provider waited for it in vain" : why);
}

/* The provider has not said so, and may go on with the puts that are in flight, unless the process has ended. */
static void silent_peer_lost(struct ofi_net *n, int peer, int error, const char *why)
{
    n->peers[peer].reads = !ofi_shut_peer(n, peer) && error != ECONNREFUSED;
    peer_lost(n, peer, error, why);
}

/* ---- Posting */

static void post_done(struct ofi_net *n, struct ofi_peer *p, struct ofi_op *op, int signalled)
{
    op->next = NULL;
    if (p->last)
        p->last->next = op;
    else
        p->first = op;
    p->last = op;
    if (!p->inflight)
        p->moved = 1;
    p->inflight++;
    n->inflight++;
    p->unsignalled = signalled ? 0 : p->unsignalled + 1;
    p->refused_ns = 0;
    if (p->reach_fd)
        ofi_reach_end(p);
}

uint64_t ofi_polled_now(struct ofi_net *n)
{
    const uint64_t now = clock_ns(), passed = now - n->checked_ns, part = n->timeout_ns / STEP_PART;
    const uint64_t most = part > STEP_MIN_NS ? part : STEP_MIN_NS;

    n->checked_ns = now;
    n->polled_ns += passed < most ? passed : most;
    return n->polled_ns;
}

/* The provider has no room, or no connection yet. */
static int post_refused(struct ofi_net *n, int peer)
{
    struct ofi_peer *p = &n->peers[peer];
    uint64_t now = ofi_polled_now(n);
    int error = 0;

    if (!p->refused_ns)
        p->refused_ns = now;
    if (p->inflight) /* check_deadlines does this */
        return -EAGAIN;
    if (now - p->refused_ns >= REACH_AFTER_NS)
        error = ofi_reach(n, peer, n->checked_ns);
    if (!error && now - p->refused_ns < n->timeout_ns)
        return -EAGAIN;
    peer_lost(n, peer, error ? error : ETIMEDOUT,
              error ? "nobody listens at its address" : "no connection, or no room for a put, until the deadline");
    return -p->error;
}

/* follows: another put to this peer is posted next. data: what the peer reads from its completion queue, without the
 * token. */
static int post(struct ofi_net *n, const struct net_put *put, int follows, uint64_t data)
{
    struct ofi_peer *p = &n->peers[put->peer];
    const int signalled = !n->selective || !follows || p->unsignalled + 1 >= OFI_SIGNAL_EVERY;
    struct iovec local = {.iov_base = n->base + put->source, .iov_len = put->bytes};
    struct fi_rma_iov remote = {.addr = p->base + put->target, .len = put->bytes, .key = p->key};
    struct fi_msg_rma message = {.msg_iov = &local,
                                 .desc = &n->desc,
                                 .iov_count = 1,
                                 .addr = p->address,
                                 .rma_iov = &remote,
                                 .rma_iov_count = 1,
                                 .data = data | (uint64_t)p->token << OFI_TOKEN_AT};
    struct ofi_op *op = n->free;
    ssize_t rc;

    if (!op || n->inflight >= n->depth)
        return -EAGAIN;
    op->cookie = put->cookie;
    op->peer = (uint32_t)put->peer;
    op->done = 0;
    op->hello = (data & OFI_HELLO) != 0;
    message.context = op;
    n->free = op->next;
    rc = fi_writemsg(n->ep, &message, FI_REMOTE_CQ_DATA | (follows ? FI_MORE : 0) | (signalled ? FI_COMPLETION : 0));
    if (!rc) {
        post_done(n, p, op, signalled);
        return 0;
    }
    op->next = n->free;
    n->free = op;
    if (rc == -FI_EAGAIN)
        return post_refused(n, put->peer);
    put_failed(n, put->peer, (int)-rc, "a put was refused");
    return -p->error;
}

/* ---- Hello */

static void send_hello(struct ofi_net *n, int peer)
{
    const struct net_put nothing = {.peer = peer};

    if (n->peers[peer].state == OFI_CONNECTED && post(n, &nothing, 0, OFI_HELLO | (uint32_t)n->rank) == -EAGAIN)
        return;
    n->peers[peer].hello_pending = 0;
    n->hellos--;
}

/* To those who have got their hellos: connections exist then. */
static void send_sources(struct ofi_net *n)
{
    for (int peer = n->rank + 1; peer < n->nranks; peer++) {
        const struct net_put nothing = {.peer = peer};
        struct ofi_peer *p = &n->peers[peer];

        if (!p->source_pending || p->hello_pending)
            continue;
        if (!p->source)
            ofi_sources_find(n);
        if (p->state == OFI_CONNECTED && post(n, &nothing, 0, OFI_HELLO | p->source) == -EAGAIN)
            return;
        p->source_pending = 0;
        n->sources--;
    }
}

static void send_hellos(struct ofi_net *n)
{
    const uint64_t now = clock_ns();
    const int before = n->hellos;

    if (now < n->hello_at)
        return;
    for (int seen = 0, tried = 0; seen < n->nranks && tried < HELLO_BATCH; seen++) {
        n->hello_next = n->hello_next + 1 < n->nranks ? n->hello_next + 1 : 0;
        if (!n->peers[n->hello_next].hello_pending)
            continue;
        send_hello(n, n->hello_next);
        tried++;
    }
    if (n->hellos < before || !n->hello_pause)
        n->hello_pause = HELLO_PAUSE_MIN_NS;
    else if (n->hello_pause < HELLO_PAUSE_MAX_NS)
        n->hello_pause *= 2;
    n->hello_at = now + n->hello_pause;
    if (now < n->source_at)
        return;
    n->source_at = now + SOURCES_EVERY_NS; /* each time it looks at all descriptors */
    send_sources(n);
}

int ofi_hello_pause(const struct ofi_net *n)
{
    const uint64_t now = clock_ns();

    if (!n->hellos && n->sources)
        return -EAGAIN;
    if (!n->hellos)
        return n->awaited || n->unnamed || n->shut_due ? (int)AWAIT_PAUSE_NS : 0;
    return now < n->hello_at ? (int)(n->hello_at - now) : -EAGAIN;
}

void ofi_start_connection(struct ofi_net *n, int peer)
{
    struct ofi_peer *p = &n->peers[peer];

    if (!n->uses_hello || peer == n->rank)
        return;
    if (peer < n->rank) {
        p->hello_expected = !p->hello_received;
        p->source_expected = n->tokens && !p->source;
        n->awaited += p->hello_expected;
        n->unnamed += p->source_expected;
        check_door(n);
        return;
    }
    check_door(n);
    p->hello_pending = 1;
    n->hellos++;
    p->source_pending = n->tokens != NULL;
    n->sources += p->source_pending;
    send_hello(n, peer);
}

/* A hello may arrive before our own connect. */
static void recv_hello(struct ofi_net *n, int peer)
{
    struct ofi_peer *p = &n->peers[peer];

    p->hello_received = 1;
    p->refused_ns = 0;
    expect_no_hello(n, p);
}

/* peer < 0: two ranks have the same token. That all have told is not known then, and nobody is shut out. */
static void recv_source(struct ofi_net *n, int peer, uint32_t source)
{
    if (peer < 0 || peer >= n->rank)
        return;
    n->peers[peer].source = source;
    expect_no_source(n, &n->peers[peer]);
}

/* ---- Puts */

/* 0: posted, or dropped because its peer is lost; -EAGAIN: still held. */
static int post_held(struct ofi_net *n, int peer, int follows)
{
    if (post(n, &n->peers[peer].held, follows, n->peers[peer].held.immediate) == -EAGAIN)
        return -EAGAIN;
    release_held(n, peer);
    return 0;
}

/* Posts the held puts of all peers but one. A put without room stays held. */
static void post_others(struct ofi_net *n, int but)
{
    for (int i = n->nheld - 1; i >= 0; i--)
        if (n->held[i] != but)
            post_held(n, n->held[i], 0);
}

static int check_put(const struct ofi_net *n, const struct net_put *put)
{
    const struct ofi_peer *p;

    if (put->peer < 0 || put->peer >= n->nranks)
        return -EINVAL;
    p = &n->peers[put->peer];
    if (p->state == OFI_FAILED) /* before poll has told it, with `reads`, an error would say that nothing is read */
        return n->reported[put->peer] ? -p->error : -EAGAIN;
    if (p->state != OFI_CONNECTED || !n->mr)
        return -ENOTCONN;
    if (put->source > n->bytes || put->bytes > n->bytes - put->source || put->target > p->bytes ||
        put->bytes > p->bytes - put->target)
        return -EFAULT;
    return 0;
}

int ofi_put(struct net *net, const struct net_put *put)
{
    struct ofi_net *n = of(net);
    int rc = check_put(n, put);
    struct ofi_peer *p;

    if (rc)
        return rc;
    p = &n->peers[put->peer];
    if (p->hello_pending || p->hello_expected)
        return post_refused(n, put->peer);
    if (n->nheld > p->has_held)
        post_others(n, put->peer);
    if (p->has_held && post_held(n, put->peer, 1))
        return -EAGAIN;
    if (p->state == OFI_FAILED)
        return -p->error;
    if (!put->more)
        return post(n, put, 0, put->immediate);
    p->held = *put;
    p->has_held = 1;
    n->held[n->nheld++] = put->peer;
    return 0;
}

/* A put without room is posted by poll. */
int ofi_flush(struct net *net)
{
    post_others(of(net), -1);
    return 0;
}

/* ---- Completions */

/* Counts what has completed, from the oldest on; the event comes at the end of the batch. */
static void complete(struct ofi_net *n, struct ofi_op *op, int *ndirty)
{
    struct ofi_peer *p = &n->peers[op->peer];

    op->done = 1;
    if (n->selective) /* in order: all earlier ones have completed as well */
        for (struct ofi_op *at = p->first; at && at != op; at = at->next)
            at->done = 1;
    while (p->first && p->first->done) {
        struct ofi_op *oldest = p->first;
        p->first = oldest->next;
        if (!p->first)
            p->last = NULL;
        p->inflight--;
        if (p->state == OFI_CONNECTED) {
            n->inflight--;
            p->moved = 1;
        }
        if (p->state == OFI_CONNECTED && !oldest->hello) {
            if (!p->completed++)
                n->dirty[(*ndirty)++] = (int)oldest->peer;
            p->completed_cookie = oldest->cookie;
        }
        oldest->next = n->free;
        n->free = oldest;
    }
}

/* The put that a completion belongs to; NULL: it is an incoming operation. */
static struct ofi_op *own_op(const struct ofi_net *n, void *context, uint64_t flags)
{
    struct ofi_op *op = context;

    if ((flags & FI_REMOTE_WRITE) || op < n->ops || op >= n->ops + (size_t)n->depth * 4)
        return NULL;
    return op;
}

static int take_sent(struct ofi_net *n, int ndirty, struct net_event *events)
{
    for (int i = 0; i < ndirty; i++) {
        struct ofi_peer *p = &n->peers[n->dirty[i]];
        events[i] = (struct net_event){
            .kind = NET_SENT, .peer = n->dirty[i], .count = p->completed, .cookie = p->completed_cookie};
        p->completed = 0;
    }
    return ndirty;
}

static void refuse(struct ofi_net *n)
{
    if (!n->refused)
        log_line(LOG_WARN,
                 "ofi: ignored an arrival that no rank of this group has sent, and counts more: somebody else "
                 "writes to the port of this rank");
    n->refused++;
    n->refused_news++;
    n->shut_due |= n->tokens && n->refused % OFI_REFUSED_STEP == 0;
}

/* CQ data of an incoming write: 1 and the event, or 0. */
static int take_arrival(struct ofi_net *n, uint64_t data, struct net_event *event)
{
    const uint32_t low = (uint32_t)data;
    const int peer = n->tokens ? ofi_token_peer(n, (uint32_t)(data >> OFI_TOKEN_AT) & OFI_TOKEN_MASK) : -1;
    const int hello = n->uses_hello && (data & OFI_HELLO), source = hello && n->tokens && (low & OFI_SOURCE);

    if (peer < -1 || (hello && !source && (low >= (uint32_t)n->nranks || (peer >= 0 && low != (uint32_t)peer)))) {
        refuse(n);
        return 0;
    }
    if (source) {
        recv_source(n, peer, low);
        return 0;
    }
    if (hello) {
        recv_hello(n, (int)low);
        return 0;
    }
    *event = (struct net_event){.kind = NET_ARRIVED, .peer = peer, .immediate = low};
    return 1;
}

/* An entry makes at most one event, so that a batch never overflows `events`. */
static int take_batch(struct ofi_net *n, const struct fi_cq_data_entry *entries, int count, struct net_event *events)
{
    int used = 0, ndirty = 0;

    for (int i = 0; i < count; i++) {
        struct ofi_op *op = own_op(n, entries[i].op_context, entries[i].flags);
        if (op)
            complete(n, op, &ndirty);
        else if (!(entries[i].flags & FI_REMOTE_CQ_DATA))
            continue;
        else
            used += take_arrival(n, entries[i].data, &events[used]);
    }
    return used + take_sent(n, ndirty, events + used);
}

static void take_error(struct ofi_net *n)
{
    struct fi_cq_err_entry entry;
    char detail[128] = "";
    struct ofi_op *op;
    int ignored = 0;

    memset(&entry, 0, sizeof(entry));
    if (fi_cq_readerr(n->cq, &entry, 0) != 1)
        return;
    op = own_op(n, entry.op_context, entry.flags);
    if (op) {
        put_failed(n, (int)op->peer, entry.err, "a put failed");
        complete(n, op, &ignored);
        return;
    }
    /* Incoming: a connection that ended, or one from a stranger. It affects no put of ours. */
    fi_cq_strerror(n->cq, entry.prov_errno, entry.err_data, detail, sizeof(detail));
    if (!n->warned++)
        log_line(LOG_WARN, "ofi: an incoming operation failed: %s; %s", n->lib->strerror(entry.err), detail);
}

static int take_lost(struct ofi_net *n, struct net_event *events, int max)
{
    int used = 0;

    for (int peer = 0; peer < n->nranks && used < max && n->unreported; peer++) {
        if (n->peers[peer].state != OFI_FAILED || n->reported[peer])
            continue;
        events[used++] = (struct net_event){
            .kind = NET_FAILED, .peer = peer, .error = n->peers[peer].error, .reads = n->peers[peer].reads};
        n->reported[peer] = 1;
        n->unreported--;
    }
    return used;
}

/* Finds peers to which nothing completes. Called now and then. */
static void check_deadlines(struct ofi_net *n)
{
    const uint64_t now = ofi_polled_now(n);

    for (int peer = 0; peer < n->nranks; peer++) {
        struct ofi_peer *p = &n->peers[peer];
        if (p->state != OFI_CONNECTED || !p->inflight)
            continue;
        if (p->moved) {
            p->moved = 0;
            p->since_ns = now;
        } else if (now - p->since_ns >= REACH_AFTER_NS) {
            int error = ofi_reach(n, peer, n->checked_ns);
            if (error)
                silent_peer_lost(n, peer, error, "nobody listens at its address");
            else if (now - p->since_ns > n->timeout_ns)
                silent_peer_lost(n, peer, ETIMEDOUT, "no put completed until the deadline");
        }
    }
}

/* What is no completion: refused arrivals, lost peers. */
static int take_rest(struct ofi_net *n, struct net_event *events, int max)
{
    int used = 0;

    if (n->refused_news && max > 0) {
        events[used++] = (struct net_event){.kind = NET_REFUSED, .peer = -1, .count = n->refused_news};
        n->refused_news = 0;
    }
    return n->unreported ? used + take_lost(n, events + used, max - used) : used;
}

/* A stranger who may guess for ever is right one day. */
static int too_many_guesses(struct ofi_net *n)
{
    if (n->refused <= OFI_MAX_REFUSED)
        return 0;
    snprintf(n->why, sizeof(n->why),
             "%llu arrivals with a wrong token came from outside the group: somebody else writes to the port of this "
             "rank, which gives up before a guess is right (docs/security.md)",
             (unsigned long long)n->refused);
    n->net.why = n->why;
    log_line(LOG_ERROR, "ofi: %s", n->why);
    return 1;
}

/* A rank that has just connected has its hello in the queue, and would be shut with the strangers. It is read first,
 * unless so much else comes that the queue does not get empty. */
static int hellos_may_wait(const struct ofi_net *n, int drained)
{
    return n->awaited && !drained && n->refused % OFI_REFUSED_STEP < OFI_REFUSED_STEP / 4;
}

/* What is due before the next arrivals are believed. */
static void check_strangers(struct ofi_net *n, int drained)
{
    if (n->door == OFI_DOOR_UNKNOWN)
        ofi_door_set(n, n->awaited ? OFI_DOOR_OPEN : OFI_DOOR_CLOSED);
    if (n->shut_due && (!n->unnamed || n->refused >= OFI_REFUSED_STEP) && !hellos_may_wait(n, drained))
        n->shut_due = !ofi_shut_strangers(n, 1);
}

int ofi_poll(struct net *net, struct net_event *events, int max)
{
    struct ofi_net *n = of(net);
    struct fi_cq_data_entry entries[OFI_BATCH];
    int used = 0, seen = 0, drained = 0;

    if (n->hellos)
        send_hellos(n);
    else if (n->sources)
        send_sources(n);
    if (n->nheld)
        post_others(n, -1);
    while (used < max && seen < ENTRIES_MAX) {
        const int want = max - used < OFI_BATCH ? max - used : OFI_BATCH;
        const ssize_t got = fi_cq_read(n->cq, entries, (size_t)want);
        if (got > 0)
            used += take_batch(n, entries, (int)got, events + used);
        else if (got == -FI_EAVAIL)
            take_error(n);
        else if (got && got != -FI_EAGAIN)
            return -to_errno((int)-got);
        drained = got < want;
        if (drained)
            break;
        seen += want;
    }
    if (!used && n->inflight && !(++n->idle_polls & 63))
        check_deadlines(n);
    if (n->door == OFI_DOOR_UNKNOWN || n->shut_due)
        check_strangers(n, drained);
    if (n->awaited && n->tokens)
        ofi_look_around(n);
    if (n->refused_news && too_many_guesses(n))
        return -EPROTO;
    return n->refused_news || n->unreported ? used + take_rest(n, events + used, max - used) : used;
}

#endif
