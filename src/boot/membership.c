/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every rank connects to every other rank that is not excluded. A rank sends only on connections that it made and
 * receives only on connections that it accepted. So both ranks of a connection take part in the round, and a rank
 * detects a closed port when it connects to it.
 *
 *   rank a                                               rank b
 *   connect to b    -- VIEW (purpose, ranks that a ------->  adds those ranks to its own set and sends its own view
 *                           excludes, views it has)          again if that changes it
 *                   <------------------------------ VIEW --
 *   ... until all ranks that are left have sent the same set, and that they have a's view: agreed
 *                   -- DATA 1 ---------------------------->
 *                   <---------------------------- DATA 1 --  one all-gather; and so on
 *   close
 *
 * The set of excluded ranks only grows, so the views converge. When a connection is closed before its rank has agreed,
 * that rank gave up the round: this rank connects again. When it is closed later, that rank failed during the round.
 */
#include "boot/membership.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/rendezvous.h"
#include "util/pause.h"
#include "util/runtime.h"
#include "util/status.h"

enum {
    FRAME_MAGIC = 0x4d585045, /* "EPXM" */
    PAYLOAD_MAX = 64 << 20,
    MAX_PENDING = 64,
    PENDING_TIMEOUT_NS = 2000000000, /* for a new connection to send its first frame */
    RETRY_NS = 20000000,
    BACKOFF_MIN_NS = 20000,
    BACKOFF_MAX_NS = 1000000,
    LINGER_MS = 300,
    END_MS = 1000
};

enum frame_kind { FRAME_VIEW = 1, FRAME_DATA = 2 };

struct frame {
    uint32_t magic;
    uint32_t kind;
    uint64_t token;
    int32_t rank;
    int32_t number; /* VIEW: the purpose; DATA: the number of the all-gather */
    uint64_t bytes;
};
static_assert(sizeof(struct frame) == 32, "on the wire");

/* The receive side of a connection that was accepted. */
struct rx {
    int conn; /* -1 = none */
    struct frame frame;
    size_t got; /* bytes of frame and payload */
    char *payload;
    uint64_t since_ns;
};

struct peer {
    int conn; /* to the peer, for sending; -1 = none */
    uint64_t retry_ns;
    char *tx; /* still to be sent: [sent, length) */
    size_t sent, length, room;
    struct rx rx;
    int arrived; /* it sent a view in this round, though it may have closed the connection since */
    int has_view, purpose;
    uint8_t *excluded, *has; /* [nranks]: from its view */
    struct {
        int number;
        size_t bytes;
        char *data;
    } data[2]; /* of the last two all-gathers */
};

struct membership {
    const struct conn_ops *ops;
    struct conn_port *port;
    int rank, nranks, timeout_ms;
    uint64_t token;
    struct conn_address *addresses;
    struct peer *peers;
    struct rx pending[MAX_PENDING]; /* accepted connections whose rank is not known yet */
    uint8_t *excluded;              /* [nranks] */
    uint8_t *view;                  /* as sent last: excluded[nranks], has[nranks] */
    int purpose, number, agreed;
    int left_out_by;   /* a rank that excludes this one, or -1 */
    int progressed;    /* the last progress() did something */
    epx_status failed; /* status of the first all-gather of this round that failed */
};

/* ---- Sending ------------------------------------------------------------------------------------------------ */

static epx_status queue_frame(struct membership *m, struct peer *peer, enum frame_kind kind, int number,
                              const void *data, size_t bytes)
{
    const struct frame frame = {
        .magic = FRAME_MAGIC, .kind = kind, .token = m->token, .rank = m->rank, .number = number, .bytes = bytes};
    const size_t need = peer->length + sizeof(frame) + bytes;

    if (need > peer->room) {
        char *larger = realloc(peer->tx, 2 * need);
        if (!larger)
            return fail(EPX_ERR_MEMORY, "no memory for a message of %zu bytes", bytes);
        peer->tx = larger;
        peer->room = 2 * need;
    }
    memcpy(peer->tx + peer->length, &frame, sizeof(frame));
    if (bytes)
        memcpy(peer->tx + peer->length + sizeof(frame), data, bytes);
    peer->length = need;
    return EPX_OK;
}

static void close_tx(struct membership *m, struct peer *peer)
{
    if (peer->conn >= 0)
        m->ops->close(m->port, peer->conn);
    peer->conn = -1;
    peer->sent = peer->length = 0;
    peer->retry_ns = host_now_ns() + RETRY_NS;
}

/* Non-zero: the peer's port does not exist any more. */
static int flush_tx(struct membership *m, struct peer *peer)
{
    int n = -EAGAIN;

    while (peer->conn >= 0 && peer->sent < peer->length) {
        n = m->ops->send(m->port, peer->conn, peer->tx + peer->sent, peer->length - peer->sent);
        if (n <= 0)
            break;
        peer->sent += (size_t)n;
        m->progressed = 1;
    }
    if (peer->sent == peer->length)
        peer->sent = peer->length = 0;
    if (peer->conn >= 0 && (n >= 0 || n == -EAGAIN)) { /* the peer never sends here, but it may close */
        char nothing;
        n = m->ops->recv(m->port, peer->conn, &nothing, 1);
    }
    if (n >= 0 || n == -EAGAIN)
        return 0;
    close_tx(m, peer);
    return n == -ECONNREFUSED;
}

static epx_status connect_peer(struct membership *m, int rank)
{
    struct peer *peer = &m->peers[rank];
    int conn;

    if (peer->conn >= 0 || host_now_ns() < peer->retry_ns)
        return EPX_OK;
    conn = m->ops->connect(m->port, &m->addresses[rank]);
    if (conn == -ECONNREFUSED) {
        m->excluded[rank] = 1;
        m->progressed = 1;
        return EPX_OK;
    }
    if (conn == -EMFILE || conn == -ENFILE) {
        errno = -conn;
        return fail_errno(EPX_ERR_SYSTEM, "rank %d cannot connect to rank %d", m->rank, rank);
    }
    if (conn < 0) { /* not reachable now */
        peer->retry_ns = host_now_ns() + RETRY_NS;
        return EPX_OK;
    }
    peer->conn = conn;
    m->progressed = 1;
    return queue_frame(m, peer, FRAME_VIEW, m->purpose, m->view, 2 * (size_t)m->nranks);
}

/* ---- Receiving ---------------------------------------------------------------------------------------------- */

static void close_rx(struct membership *m, struct rx *rx)
{
    if (rx->conn >= 0)
        m->ops->close(m->port, rx->conn);
    free(rx->payload);
    memset(rx, 0, sizeof(*rx));
    rx->conn = -1;
}

/* Belongs to this group and has a valid size. */
static int is_valid(const struct membership *m, const struct frame *f)
{
    if (f->magic != FRAME_MAGIC || f->token != m->token || f->rank < 0 || f->rank >= m->nranks || f->rank == m->rank)
        return 0;
    return f->kind == FRAME_VIEW ? f->bytes == 2 * (uint64_t)m->nranks
                                 : f->kind == FRAME_DATA && f->bytes <= PAYLOAD_MAX;
}

/* 1: a whole frame was received; 0: not yet; -1: close the connection. */
static int recv_frame(struct membership *m, struct rx *rx)
{
    const size_t head = sizeof(rx->frame);

    for (;;) {
        const size_t want = rx->got < head ? head - rx->got : (size_t)rx->frame.bytes - (rx->got - head);
        char *to = rx->got < head ? (char *)&rx->frame + rx->got : rx->payload + (rx->got - head);
        int n;

        if (rx->got >= head && !want)
            return 1;
        n = m->ops->recv(m->port, rx->conn, to, want);
        if (n <= 0)
            return n == -EAGAIN ? 0 : -1;
        m->progressed = 1;
        rx->got += (size_t)n;
        if (rx->got != head)
            continue;
        if (!is_valid(m, &rx->frame) || !(rx->payload = malloc((size_t)rx->frame.bytes + 1)))
            return -1;
    }
}

/* Processes the frame that was received from `peer`. */
static void take_frame(struct membership *m, struct peer *peer)
{
    struct rx *rx = &peer->rx;

    if (rx->frame.kind == FRAME_VIEW) {
        peer->has_view = peer->arrived = 1;
        peer->purpose = rx->frame.number;
        memcpy(peer->excluded, rx->payload, (size_t)m->nranks);
        memcpy(peer->has, rx->payload + m->nranks, (size_t)m->nranks);
        free(rx->payload);
        if (peer->excluded[m->rank] && peer->purpose == m->purpose)
            m->left_out_by = rx->frame.rank; /* even if it has finished and closed the connection since */
    } else {
        const int slot = rx->frame.number & 1;
        free(peer->data[slot].data);
        peer->data[slot].data = rx->payload;
        peer->data[slot].bytes = (size_t)rx->frame.bytes;
        peer->data[slot].number = rx->frame.number;
    }
    rx->payload = NULL;
    rx->got = 0;
}

/* Drops everything that was received on the peer's last connection. */
static void reset_rx(struct membership *m, struct peer *peer)
{
    close_rx(m, &peer->rx);
    peer->has_view = 0;
    for (int i = 0; i < 2; i++) {
        free(peer->data[i].data);
        memset(&peer->data[i], 0, sizeof(peer->data[i]));
    }
}

static void recv_frames(struct membership *m, struct peer *peer)
{
    int state = 1;

    while (peer->rx.conn >= 0 && (state = recv_frame(m, &peer->rx)) > 0)
        take_frame(m, peer);
    if (state >= 0)
        return;
    m->progressed = 1;
    if (m->agreed)
        close_rx(m, &peer->rx); /* frames that it sent before still count */
    else
        reset_rx(m, peer);
}

/* The first frame of a pending connection has named its rank. */
static void adopt_pending(struct membership *m, struct rx *pending)
{
    struct peer *peer = &m->peers[pending->frame.rank];

    if (m->agreed) { /* it starts the next round; it connects again when this round is over here, too */
        close_rx(m, pending);
        return;
    }
    reset_rx(m, peer);
    peer->rx = *pending;
    memset(pending, 0, sizeof(*pending));
    pending->conn = -1;
    take_frame(m, peer);
}

static void accept_pending(struct membership *m)
{
    for (int i = 0; i < MAX_PENDING; i++) {
        struct rx *pending = &m->pending[i];
        int state;

        if (pending->conn < 0) {
            pending->conn = m->ops->accept(m->port);
            if (pending->conn < 0) {
                pending->conn = -1;
                continue;
            }
            pending->since_ns = host_now_ns();
            m->progressed = 1;
        }
        state = recv_frame(m, pending);
        if (state > 0)
            adopt_pending(m, pending);
        else if (state < 0 || host_now_ns() - pending->since_ns > PENDING_TIMEOUT_NS)
            close_rx(m, pending);
    }
}

/* ---- Agreement ---------------------------------------------------------------------------------------------- */

/* Adds what the other ranks exclude. */
static epx_status merge_views(struct membership *m)
{
    if (m->left_out_by >= 0)
        return fail(
            EPX_ERR_PEER,
            "rank %d continues without rank %d, which is masked: call epx_mask_clean on all ranks to restore it",
            m->left_out_by, m->rank);
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];

        if (r == m->rank || m->excluded[r] || !peer->has_view)
            continue;
        if (peer->purpose != m->purpose)
            return fail(EPX_ERR_MISMATCH,
                        "rank %d and rank %d call different functions to recover: one epx_group_error_clear, the other"
                        " epx_mask_clean",
                        m->rank, r);
        for (int i = 0; i < m->nranks; i++)
            m->excluded[i] |= peer->excluded[i];
    }
    return EPX_OK;
}

static int all_agree(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (r != m->rank && !m->excluded[r] &&
            (!m->peers[r].has_view || !m->peers[r].has[m->rank] ||
             memcmp(m->peers[r].excluded, m->excluded, (size_t)m->nranks) != 0))
            return 0;
    return 1;
}

/* Everything that can be done without waiting. */
static epx_status progress(struct membership *m)
{
    epx_status status = EPX_OK;

    m->progressed = 0;
    accept_pending(m);
    for (int r = 0; r < m->nranks && status == EPX_OK; r++) {
        struct peer *peer = &m->peers[r];

        if (r == m->rank || (m->excluded[r] && !peer->has_view)) /* an excluded rank that connects is told so */
            continue;
        if (!m->agreed)
            status = connect_peer(m, r);
        if (flush_tx(m, peer) && !m->agreed) {
            m->excluded[r] = 1;
            m->progressed = 1;
        }
        recv_frames(m, peer);
    }
    return status;
}

static epx_status too_late(const struct membership *m, int number)
{
    unsigned char *there = calloc((size_t)m->nranks, 1);
    char names[128];
    epx_status status;

    if (!there)
        return fail(EPX_ERR_MEMORY, "no memory for %d ranks", m->nranks);
    for (int r = 0; r < m->nranks; r++)
        there[r] = r == m->rank || m->excluded[r] ||
                   (number ? m->peers[r].data[number & 1].number == number : m->peers[r].arrived);
    if (absent_ranks(there, m->nranks, names, sizeof(names)))
        status =
            fail(EPX_ERR_TIMEOUT, "rank %d: %s did not join the recovery within %d ms", m->rank, names, m->timeout_ms);
    else
        status = fail(EPX_ERR_TIMEOUT, "rank %d: the ranks did not agree within %d ms on the ranks that are masked",
                      m->rank, m->timeout_ms);
    free(there);
    return status;
}

/* Sleeps, twice as long each time, while there is no progress. */
static void backoff(const struct membership *m, uint64_t *ns)
{
    *ns = m->progressed ? BACKOFF_MIN_NS : 2 * *ns < BACKOFF_MAX_NS ? 2 * *ns : BACKOFF_MAX_NS;
    if (!m->progressed)
        pause_ns(*ns);
}

/* Sends the view to all connected ranks if it has changed. */
static epx_status send_view(struct membership *m)
{
    const size_t n = (size_t)m->nranks;
    epx_status status = EPX_OK;
    int changed = memcmp(m->view, m->excluded, n) != 0;

    memcpy(m->view, m->excluded, n);
    for (size_t r = 0; r < n; r++) {
        changed |= m->view[n + r] != m->peers[r].has_view;
        m->view[n + r] = (uint8_t)m->peers[r].has_view;
    }
    for (int r = 0; changed && r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r] && m->peers[r].conn >= 0)
            status = queue_frame(m, &m->peers[r], FRAME_VIEW, m->purpose, m->view, 2 * n);
    return status;
}

/* After a mismatch: gives the other ranks time to receive this rank's view and to report the same. */
static epx_status linger(struct membership *m, epx_status status)
{
    const uint64_t until = host_now_ns() + (uint64_t)LINGER_MS * 1000000u;
    char text[512];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    while (status == EPX_ERR_MISMATCH && host_now_ns() < until && progress(m) == EPX_OK)
        pause_ns(BACKOFF_MAX_NS);
    return fail(status, "%s", text);
}

epx_status membership_agree(struct membership *m, int purpose, uint8_t *excluded, int timeout_ms)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)timeout_ms * 1000000u;
    uint64_t ns = BACKOFF_MIN_NS;
    epx_status status = EPX_OK;

    membership_end(m);
    memcpy(m->excluded, excluded, (size_t)m->nranks);
    m->excluded[m->rank] = 0;
    memset(m->view, 0, 2 * (size_t)m->nranks);
    memcpy(m->view, m->excluded, (size_t)m->nranks);
    m->purpose = purpose;
    m->timeout_ms = timeout_ms;
    m->number = 0;
    m->left_out_by = -1;
    m->failed = EPX_OK;
    for (int r = 0; r < m->nranks; r++)
        m->peers[r].arrived = 0;
    for (;;) {
        status = progress(m);
        if (status == EPX_OK)
            status = merge_views(m);
        if (status == EPX_OK)
            status = send_view(m);
        if (status != EPX_OK)
            return linger(m, status);
        if (all_agree(m))
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, 0);
        backoff(m, &ns);
    }
    m->agreed = 1;
    memcpy(excluded, m->excluded, (size_t)m->nranks);
    return EPX_OK;
}

/* ---- All-gather --------------------------------------------------------------------------------------------- */

/* *all: the data of all ranks has arrived. Fails when the data of a rank cannot arrive any more. */
static epx_status check_arrivals(const struct membership *m, int number, size_t bytes, int *all)
{
    *all = 1;
    for (int r = 0; r < m->nranks; r++) {
        const struct peer *peer = &m->peers[r];
        const int there = peer->data[number & 1].number == number && peer->data[number & 1].data;

        if (r == m->rank || m->excluded[r])
            continue;
        if (there && peer->data[number & 1].bytes != bytes)
            return fail(EPX_ERR_INTERNAL, "rank %d sends %zu bytes to an all-gather, rank %d %zu", m->rank, bytes, r,
                        peer->data[number & 1].bytes);
        if (!there && peer->rx.conn < 0)
            return fail(EPX_ERR_PEER, "rank %d ended or gave up during the recovery", r);
        *all &= there;
    }
    return EPX_OK;
}

static epx_status gather(struct membership *m, const void *send, void *recv, size_t bytes)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)m->timeout_ms * 1000000u;
    const int number = ++m->number;
    uint64_t ns = BACKOFF_MIN_NS;
    epx_status status = EPX_OK;
    int all = 0;

    for (int r = 0; r < m->nranks && status == EPX_OK; r++)
        if (r != m->rank && !m->excluded[r])
            status = queue_frame(m, &m->peers[r], FRAME_DATA, number, send, bytes);
    while (status == EPX_OK) {
        status = progress(m);
        if (status == EPX_OK)
            status = check_arrivals(m, number, bytes, &all);
        if (all || status != EPX_OK)
            break;
        if (host_now_ns() >= deadline)
            return too_late(m, number);
        backoff(m, &ns);
    }
    if (status != EPX_OK)
        return status;
    for (int r = 0; r < m->nranks; r++) {
        char *to = (char *)recv + (size_t)r * bytes;
        if (m->excluded[r])
            memset(to, 0, bytes);
        else
            memmove(to, r == m->rank ? send : m->peers[r].data[number & 1].data, bytes);
    }
    return EPX_OK;
}

/* After a failed all-gather other ranks may be one all-gather ahead: they would take this rank's next data for that
 * one. So the round is over, and every later call returns the same failure. */
epx_status membership_allgather(struct membership *m, const void *send, void *recv, size_t bytes)
{
    if (m->failed == EPX_OK)
        m->failed = gather(m, send, recv, bytes);
    return m->failed;
}

/* ---- Open and close ----------------------------------------------------------------------------------------- */

static int all_sent(const struct membership *m)
{
    for (int r = 0; r < m->nranks; r++)
        if (m->peers[r].conn >= 0 && m->peers[r].sent < m->peers[r].length)
            return 0;
    return 1;
}

void membership_end(struct membership *m)
{
    const uint64_t deadline = host_now_ns() + (uint64_t)END_MS * 1000000u;

    /* Sends what is still queued. */
    while (m->agreed && !all_sent(m) && host_now_ns() < deadline) {
        for (int r = 0; r < m->nranks; r++)
            flush_tx(m, &m->peers[r]);
        if (!all_sent(m))
            pause_ns(BACKOFF_MIN_NS);
    }
    m->agreed = 0;
    for (int r = 0; r < m->nranks; r++) {
        close_tx(m, &m->peers[r]);
        m->peers[r].retry_ns = 0;
        reset_rx(m, &m->peers[r]);
    }
    for (int i = 0; i < MAX_PENDING; i++)
        close_rx(m, &m->pending[i]);
}

void membership_set_peers(struct membership *m, const struct conn_address *all, uint64_t token)
{
    memcpy(m->addresses, all, (size_t)m->nranks * sizeof(*all));
    m->token = token;
}

epx_status membership_open(int rank, int nranks, int one_host, struct conn_address *own, struct membership **out)
{
    const size_t n = (size_t)nranks;
    struct membership *m = calloc(1, sizeof(*m));
    epx_status status;

    *out = NULL;
    if (!m)
        return fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    m->ops = runtime()->conns ? runtime()->conns : &conn_socket_ops;
    m->rank = rank;
    m->nranks = nranks;
    for (int i = 0; i < MAX_PENDING; i++)
        m->pending[i].conn = -1;
    m->addresses = calloc(n, sizeof(*m->addresses));
    m->peers = calloc(n, sizeof(*m->peers));
    m->excluded = calloc(3 + 2 * n, n); /* excluded, view, then excluded and has of every peer */
    m->view = m->excluded ? m->excluded + n : NULL;
    for (size_t r = 0; m->peers && m->excluded && r < n; r++) {
        m->peers[r].excluded = m->excluded + (3 + 2 * r) * n;
        m->peers[r].has = m->excluded + (4 + 2 * r) * n;
    }
    for (int r = 0; m->peers && r < nranks; r++)
        m->peers[r].conn = m->peers[r].rx.conn = -1;
    if (!m->addresses || !m->peers || !m->excluded)
        status = fail(EPX_ERR_MEMORY, "no memory for the membership of %d ranks", nranks);
    else
        status = m->ops->port_open(rank, one_host, own, &m->port);
    if (status != EPX_OK) {
        membership_close(m);
        return status;
    }
    *out = m;
    return EPX_OK;
}

void membership_close(struct membership *m)
{
    if (!m)
        return;
    if (m->port) {
        membership_end(m);
        m->ops->port_close(m->port);
    }
    for (int r = 0; m->peers && r < m->nranks; r++)
        free(m->peers[r].tx);
    free(m->peers);
    free(m->addresses);
    free(m->excluded);
    free(m);
}
