/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a process that takes the place of a rank meets the members. It knows the group's key (ticket.h), and has a port
 * of its own, as every member has.
 *
 *   joiner                                                 every member that it knows and that is there
 *   connect      -- JOIN (rank, incarnation, address, ---> waits in the port's queue until the member's next recovery,
 *                        the caller's request)             which finds it in membership_listen()
 *                <-- WAIT (why not yet) or REFUSED (why) -- on a connection that the member makes
 *                <-------------- WELCOME (caller's data) -- after that the joiner takes part in the next round
 *
 * The joiner keeps its connections open: one that is closed means that the joiner has gone. All frames of a rank's
 * rounds carry the incarnation of its process, in their token: what one process says is never taken for another's.
 */
#include "boot/membership_state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util/pause.h"
#include "util/status.h"
#include "util/text.h"

enum {
    POLL_NS = 200000,
    POLL_MAX_NS = 2000000,
    KNOCK_RETRY_MS = 50,
    REFUSED_ROUNDS = 20, /* so often all doors refuse before the joiner gives up */
    REPLY_MS = 300,
    WELCOME_MS = 2000,
    REQUEST_MAX = 4096,
    REPLY_MAX = 64 << 20
};

struct join_head {
    uint64_t incarnation;
    struct conn_address address;
    uint32_t rank, reserved;
};
static_assert(sizeof(struct join_head) == 80, "on the wire");

uint64_t frame_token(const struct membership *m, uint32_t kind, int rank)
{
    return kind >= FRAME_JOIN ? m->token : m->token ^ m->incarnations[rank];
}

int join_frame_is_valid(const struct membership *m, const struct frame *f)
{
    if (f->token != m->token || f->rank < 0 || f->rank >= m->nranks)
        return 0;
    if (f->kind == FRAME_JOIN)
        return f->bytes >= sizeof(struct join_head) && f->bytes <= sizeof(struct join_head) + REQUEST_MAX;
    return f->kind == FRAME_REPLY && f->rank != m->rank && f->bytes <= REPLY_MAX;
}

void join_open(struct membership *m)
{
    m->reply.conn = -1;
    for (int i = 0; i < MAX_JOINERS; i++)
        m->joiners[i].rx.conn = -1;
}

static void forget(struct membership *m, struct joiner *joiner)
{
    close_rx(m, &joiner->rx);
    free(joiner->payload);
    memset(joiner, 0, sizeof(*joiner));
    joiner->rx.conn = -1;
}

void join_close(struct membership *m)
{
    close_rx(m, &m->reply);
    for (int i = 0; i < MAX_JOINERS; i++)
        forget(m, &m->joiners[i]);
}

/* ---- A member ------------------------------------------------------------------------------------------------- */

/* A place for this incarnation: the one that it has, or a free one. */
static struct joiner *place_for(struct membership *m, uint64_t incarnation)
{
    struct joiner *place = NULL;

    for (int i = 0; i < MAX_JOINERS; i++) {
        if (m->joiners[i].who.incarnation == incarnation)
            return &m->joiners[i];
        if (!place && m->joiners[i].rx.conn < 0)
            place = &m->joiners[i];
    }
    return place;
}

static void take_joiner(struct membership *m, struct rx *pending)
{
    struct join_head head;
    struct joiner *joiner;

    memcpy(&head, pending->payload, sizeof(head));
    joiner = head.incarnation && (int)head.rank == pending->frame.rank ? place_for(m, head.incarnation) : NULL;
    if (!joiner) {
        close_rx(m, pending);
        return;
    }
    forget(m, joiner);
    joiner->rx = *pending;
    joiner->payload = pending->payload;
    joiner->rx.payload = NULL;
    joiner->rx.got = 0;
    joiner->who = (struct membership_joiner){.rank = pending->frame.rank,
                                             .incarnation = head.incarnation,
                                             .address = head.address,
                                             .request = joiner->payload + sizeof(head),
                                             .bytes = (size_t)pending->frame.bytes - sizeof(head)};
    memset(pending, 0, sizeof(*pending));
    pending->conn = -1;
}

void join_take(struct membership *m, struct rx *pending)
{
    if (pending->frame.kind == FRAME_JOIN) {
        take_joiner(m, pending);
        return;
    }
    close_rx(m, &m->reply);
    m->reply = *pending;
    memset(pending, 0, sizeof(*pending));
    pending->conn = -1;
}

/* Forgets joiners that have gone. */
static void check_joiners(struct membership *m)
{
    for (int i = 0; i < MAX_JOINERS; i++) {
        char nothing;

        if (m->joiners[i].rx.conn >= 0 && m->ops->recv(m->port, m->joiners[i].rx.conn, &nothing, 1) != -EAGAIN)
            forget(m, &m->joiners[i]);
    }
}

static int someone_comes(const struct membership *m)
{
    int coming = m->ops->coming ? m->ops->coming(m->port) : 0;

    for (int i = 0; i < MAX_PENDING; i++)
        coming += m->pending[i].conn >= 0;
    return coming > 0;
}

void membership_listen(struct membership *m, int grace_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)grace_ms * 1000000u;

    for (;;) {
        accept_pending(m);
        if (!someone_comes(m) || host_now_ns() >= deadline)
            break;
        pause_ns(POLL_NS);
    }
    check_joiners(m);
}

int membership_joiner(const struct membership *m, int i, struct membership_joiner *out)
{
    for (int k = 0; k < MAX_JOINERS; k++) {
        if (m->joiners[k].rx.conn < 0 || i-- > 0)
            continue;
        *out = m->joiners[k].who;
        return 1;
    }
    return 0;
}

/* On a connection of its own. A joiner that does not take it has gone. */
static int send_reply(struct membership *m, const struct conn_address *to, int reply, const void *data, size_t bytes)
{
    const uint64_t ms = reply == REPLY_WELCOME ? WELCOME_MS : REPLY_MS, deadline = host_now_ns() + ms * 1000000u;
    struct peer peer = {.conn = m->ops->connect(m->port, to), .rx = {.conn = -1}};
    int sent = 0;

    if (peer.conn >= 0 && queue_frame(m, &peer, FRAME_REPLY, reply, data, bytes) == EPX_OK)
        while (!flush_tx(m, &peer) && peer.conn >= 0 && !(sent = peer.length == 0) && host_now_ns() < deadline)
            pause_ns(POLL_NS);
    close_tx(m, &peer);
    free(peer.tx);
    return sent;
}

void membership_reply(struct membership *m, uint64_t incarnation, enum membership_reply reply, const void *data,
                      size_t bytes)
{
    for (int i = 0; i < MAX_JOINERS; i++) {
        struct joiner *joiner = &m->joiners[i];

        if (joiner->rx.conn < 0 || joiner->who.incarnation != incarnation)
            continue;
        if (!send_reply(m, &joiner->who.address, reply, data, bytes) || reply != REPLY_WAIT)
            forget(m, joiner);
    }
}

int membership_has_ended(struct membership *m, int rank, int wait_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)wait_ms * 1000000u;
    const int conn = process_has_ended(m, rank) ? -ECONNREFUSED : m->ops->connect(m->port, &m->addresses[rank]);
    int n = conn;

    while (conn >= 0) {
        char nothing;

        n = m->ops->recv(m->port, conn, &nothing, 1);
        if (n != -EAGAIN || host_now_ns() >= deadline)
            break;
        pause_ns(POLL_NS);
    }
    if (conn >= 0)
        m->ops->close(m->port, conn);
    return n == -ECONNREFUSED;
}

uint64_t membership_incarnation(const struct membership *m, int rank)
{
    return m->incarnations[rank];
}

const struct conn_address *membership_address(const struct membership *m, int rank)
{
    return &m->addresses[rank];
}

uint64_t membership_token(const struct membership *m)
{
    return m->token;
}

void membership_replace(struct membership *m, int rank, uint64_t incarnation, const struct conn_address *address)
{
    m->incarnations[rank] = incarnation;
    m->addresses[rank] = *address;
    forget_process(m, rank);
}

/* ---- The joiner ----------------------------------------------------------------------------------------------- */

struct knock {
    const struct conn_address *doors;
    const char *frame; /* head and request */
    size_t bytes;
    int refused; /* rounds in which every door was closed */
    char wait[256];
};

/* One round of all doors: how many are not closed. */
static int knock_once(struct membership *m, struct knock *k, int *doors)
{
    int open = 0;

    *doors = 0;
    for (int r = 0; r < m->nranks; r++) {
        struct peer *peer = &m->peers[r];
        int conn;

        if (!k->doors[r].bytes || r == m->rank)
            continue;
        ++*doors;
        if (peer->conn < 0 && host_now_ns() >= peer->retry_ns) {
            conn = m->ops->connect(m->port, &k->doors[r]);
            peer->conn = conn < 0 ? -1 : conn;
            peer->retry_ns = host_now_ns() + (uint64_t)KNOCK_RETRY_MS * 1000000u;
            if (conn >= 0 && queue_frame(m, peer, FRAME_JOIN, 0, k->frame, k->bytes) != EPX_OK)
                close_tx(m, peer);
        }
        if (peer->conn >= 0 && flush_tx(m, peer) && (errno == EACCES || errno == EPROTO))
            peer->arrived = 1; /* somebody is there who does not know the key */
        open += peer->conn >= 0 && !peer->arrived;
    }
    return open;
}

/* 0: on with it; 1: welcome; -1: refused. */
static int take_reply(struct membership *m, struct knock *k, void **welcome, size_t *bytes)
{
    struct rx *rx = &m->reply;
    char text[sizeof(k->wait) - 32];
    int result = 0;

    if (!rx->payload)
        return 0;
    text_clean(text, sizeof(text), rx->payload, (size_t)rx->frame.bytes);
    if (rx->frame.number == REPLY_WELCOME) {
        *welcome = rx->payload;
        *bytes = (size_t)rx->frame.bytes;
        rx->payload = NULL;
        result = 1;
    } else if (rx->frame.number == REPLY_REFUSED) {
        fail(EPX_ERR_MISMATCH, "epx_group_join: rank %d refuses this process: %s", rx->frame.rank, text);
        result = -1;
    } else {
        snprintf(k->wait, sizeof(k->wait), "rank %d: %s", rx->frame.rank, text);
    }
    close_rx(m, rx);
    return result;
}

static epx_status nobody_there(const struct membership *m, const struct knock *k, int doors)
{
    if (k->wait[0])
        return fail(EPX_ERR_PEER, "epx_group_join: rank %d was not admitted before the group ended; %s", m->rank,
                    k->wait);
    return fail(EPX_ERR_PEER,
                "epx_group_join: rank %d: none of the %d ranks of the ticket is there: the group has ended, the ticket "
                "is too old, or this process has another secret than the group (EPX_SECRET, EPX_SECRET_FILE)",
                m->rank, doors);
}

static epx_status not_welcome(const struct membership *m, const struct knock *k, int open)
{
    if (k->wait[0])
        return fail(EPX_ERR_TIMEOUT, "epx_group_join: rank %d was not admitted in time; %s", m->rank, k->wait);
    return fail(EPX_ERR_TIMEOUT,
                "epx_group_join: rank %d was not admitted in time: %d ranks were asked, and none has answered; they "
                "answer in epx_group_error_clear after a failure, and in epx_mask_clean",
                m->rank, open);
}

static epx_status wait_for_welcome(struct membership *m, struct knock *k, uint64_t deadline, void **welcome,
                                   size_t *bytes)
{
    uint64_t ns = POLL_NS, retry = 0;
    int open = 0, doors = 0;

    for (;;) {
        int reply;

        open = knock_once(m, k, &doors);
        accept_pending(m);
        reply = take_reply(m, k, welcome, bytes);
        if (reply)
            return reply > 0 ? EPX_OK : EPX_ERR_MISMATCH;
        if (host_now_ns() >= retry) {
            retry = host_now_ns() + (uint64_t)KNOCK_RETRY_MS * 1000000u;
            k->refused = open ? 0 : k->refused + 1;
        }
        if (k->refused > REFUSED_ROUNDS)
            return nobody_there(m, k, doors);
        if (host_now_ns() >= deadline)
            return not_welcome(m, k, open);
        ns = m->progressed ? POLL_NS : ns + ns / 4 < POLL_MAX_NS ? ns + ns / 4 : POLL_MAX_NS;
        m->progressed = 0;
        pause_ns(ns);
    }
}

epx_status membership_knock(struct membership *m, const struct conn_address *doors, const void *request, size_t bytes,
                            uint64_t deadline, void **welcome, size_t *welcome_bytes)
{
    struct join_head head = {
        .incarnation = m->incarnations[m->rank], .address = m->addresses[m->rank], .rank = (uint32_t)m->rank};
    struct knock k = {.doors = doors, .bytes = sizeof(head) + bytes};
    char *frame = malloc(sizeof(head) + bytes);
    epx_status status;

    *welcome = NULL;
    if (!frame)
        return fail(EPX_ERR_MEMORY, "no memory for a request of %zu bytes", bytes);
    membership_end(m);
    close_rx(m, &m->reply); /* every member that was asked may have answered */
    for (int r = 0; r < m->nranks; r++)
        m->peers[r].arrived = 0;
    memcpy(frame, &head, sizeof(head));
    memcpy(frame + sizeof(head), request, bytes);
    k.frame = frame;
    status = wait_for_welcome(m, &k, deadline, welcome, welcome_bytes);
    free(frame);
    return status;
}
