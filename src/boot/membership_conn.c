/* SPDX-License-Identifier: Apache-2.0 */
/* The connections of membership.c: frames in both directions. */
#include "boot/membership_state.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util/descriptor.h"
#include "util/pause.h"
#include "util/status.h"

enum {
    FRAME_MAGIC = 0x4d585045, /* "EPXM" */
    PAYLOAD_MAX = 64 << 20,
    PENDING_TIMEOUT_NS = 2000000000, /* for a new connection to send its first frame */
    FILES_NS = 1000000000,           /* for descriptors of this process to become free */
    RETRY_NS = 20000000
};

/* ---- Sending ------------------------------------------------------------------------------------------------ */

int lowest_left(const struct membership *m)
{
    int r = 0;

    while (r < m->rank && m->excluded[r])
        r++;
    return r;
}

/* An excluded rank that connects is told so. */
int is_in_touch(const struct membership *m, int rank)
{
    if (rank == m->rank)
        return 0;
    if (m->excluded[rank])
        return m->peers[rank].has_view;
    return rank == m->coordinator || m->coordinator == m->rank;
}

int is_sent(const struct peer *peer)
{
    return peer->conn < 0 || (peer->sent == peer->length && !peer->result);
}

static epx_status append(struct peer *peer, const void *data, size_t bytes)
{
    const size_t need = peer->length + bytes;

    if (need > peer->room) {
        char *larger = realloc(peer->tx, 2 * need);
        if (!larger)
            return fail(EPX_ERR_MEMORY, "no memory for a message of %zu bytes", bytes);
        peer->tx = larger;
        peer->room = 2 * need;
    }
    if (bytes)
        memcpy(peer->tx + peer->length, data, bytes);
    peer->length = need;
    return EPX_OK;
}

static epx_status queue_bytes(struct peer *peer, const struct frame *frame, const void *data, size_t bytes)
{
    const size_t before = peer->length;
    epx_status status = append(peer, frame, sizeof(*frame));

    if (status == EPX_OK)
        status = append(peer, data, bytes);
    if (status != EPX_OK)
        peer->length = before;
    return status;
}

static struct frame make_frame(const struct membership *m, enum frame_kind kind, int number, size_t bytes)
{
    return (struct frame){.magic = FRAME_MAGIC,
                          .kind = kind,
                          .token = frame_token(m, kind, m->rank),
                          .rank = m->rank,
                          .number = number,
                          .bytes = bytes};
}

epx_status queue_frame(struct membership *m, struct peer *peer, enum frame_kind kind, int number, const void *data,
                       size_t bytes)
{
    const struct frame frame = make_frame(m, kind, number, bytes);

    if (peer->result) { /* a failure: the frame comes behind it */
        const epx_status status =
            append(peer, peer->result + peer->result_sent, peer->result_bytes - peer->result_sent);

        if (status != EPX_OK)
            return status;
        peer->result = NULL;
    }
    return queue_bytes(peer, &frame, data, bytes);
}

epx_status queue_result(struct membership *m, struct peer *peer, int number, const char *data, size_t bytes)
{
    const struct frame frame = make_frame(m, FRAME_DATA, number, bytes);

    peer->result = bytes ? data : NULL;
    peer->result_sent = 0;
    peer->result_bytes = bytes;
    return queue_bytes(peer, &frame, NULL, 0);
}

void close_tx(struct membership *m, struct peer *peer)
{
    if (peer->conn >= 0)
        m->ops->close(m->port, peer->conn);
    peer->conn = -1;
    peer->sent = peer->length = 0;
    peer->result = NULL;
    peer->told = 0;
    peer->retry_ns = host_now_ns() + RETRY_NS;
}

/* Sends data[*done, bytes): the last result of the connection's send. */
static int send_from(struct membership *m, int conn, const char *data, size_t *done, size_t bytes)
{
    int n = 1;

    while (n > 0 && *done < bytes) {
        n = m->ops->send(m->port, conn, data + *done, bytes - *done);
        if (n > 0) {
            *done += (size_t)n;
            m->progressed = 1;
        }
    }
    return n;
}

int flush_tx(struct membership *m, struct peer *peer)
{
    int n = -EAGAIN;

    if (peer->conn >= 0 && peer->sent < peer->length)
        n = send_from(m, peer->conn, peer->tx, &peer->sent, peer->length);
    if (peer->sent == peer->length)
        peer->sent = peer->length = 0;
    if (peer->conn >= 0 && !peer->length && peer->result) {
        n = send_from(m, peer->conn, peer->result, &peer->result_sent, peer->result_bytes);
        if (peer->result_sent == peer->result_bytes)
            peer->result = NULL;
    }
    if (peer->conn >= 0 && (n >= 0 || n == -EAGAIN)) { /* the peer never sends here, but it may close */
        char nothing;
        n = m->ops->recv(m->port, peer->conn, &nothing, 1);
    }
    if (n >= 0 || n == -EAGAIN)
        return 0;
    close_tx(m, peer);
    return n == -ECONNREFUSED;
}

/* Others cannot be told, and would wait for this rank until their deadline: it does not give up at once. */
static epx_status no_files(struct membership *m, int rank, int error)
{
    const uint64_t now = host_now_ns();

    if (!m->no_files_ns)
        m->no_files_ns = now;
    m->peers[rank].retry_ns = now + RETRY_NS;
    if (now - m->no_files_ns < FILES_NS)
        return EPX_OK;
    errno = error;
    return fail_errno(EPX_ERR_SYSTEM, "rank %d cannot connect to rank %d", m->rank, rank);
}

epx_status connect_peer(struct membership *m, int rank)
{
    struct peer *peer = &m->peers[rank];
    epx_status status;
    int conn;

    if (peer->conn >= 0 || host_now_ns() < peer->retry_ns)
        return EPX_OK;
    conn = m->ops->connect(m->port, &m->addresses[rank]);
    if (conn == -ECONNREFUSED && !m->agreed) {
        m->excluded[rank] = 1;
        m->progressed = 1;
        return EPX_OK;
    }
    if (conn == -EMFILE || conn == -ENFILE)
        return no_files(m, rank, -conn);
    if (conn < 0) { /* not reachable now */
        peer->retry_ns = host_now_ns() + RETRY_NS;
        return EPX_OK;
    }
    peer->conn = conn;
    peer->viewed = 1;
    m->progressed = 1;
    m->no_files_ns = 0;
    status = queue_frame(m, peer, FRAME_VIEW, m->purpose, m->view, 2 * (size_t)m->nranks);
    if (status == EPX_OK && m->agreed && !m->excluded[rank])
        status = queue_frame(m, peer, FRAME_COMMIT, m->purpose, m->excluded, (size_t)m->nranks);
    return status;
}

/* ---- Processes of this machine ----------------------------------------------------------------------------------- */

void forget_process(struct membership *m, int rank)
{
    if (m->processes[rank] >= 0)
        close(m->processes[rank]);
    m->processes[rank] = -1;
}

/* Ranks that are threads have none: their ports end when they say so. Nor has a kernel before 5.3. */
void membership_set_process(struct membership *m, int rank, int64_t pid)
{
    forget_process(m, rank);
#ifdef SYS_pidfd_open
    if (pid > 0 && pid != (int64_t)getpid())
        m->processes[rank] = fd_own((int)syscall(SYS_pidfd_open, (pid_t)pid, 0));
#endif
}

int process_has_ended(const struct membership *m, int rank)
{
    struct pollfd process = {.fd = m->processes[rank], .events = POLLIN};

    return process.fd >= 0 && poll(&process, 1, 0) == 1 && (process.revents & POLLIN);
}

/* ---- Receiving ---------------------------------------------------------------------------------------------- */

void close_rx(struct membership *m, struct rx *rx)
{
    if (rx->conn >= 0)
        m->ops->close(m->port, rx->conn);
    free(rx->payload);
    memset(rx, 0, sizeof(*rx));
    rx->conn = -1;
}

int frame_is_valid(const struct frame *f, uint64_t token, int rank, int nranks)
{
    if (f->magic != FRAME_MAGIC || f->token != token || f->rank < 0 || f->rank >= nranks || f->rank == rank)
        return 0;
    switch (f->kind) {
    case FRAME_VIEW:
        return f->bytes == 2 * (uint64_t)nranks;
    case FRAME_COMMIT:
        return f->bytes == (uint64_t)nranks;
    case FRAME_FAIL:
        return f->bytes == sizeof(struct failure);
    default:
        return f->kind == FRAME_DATA && f->bytes <= PAYLOAD_MAX;
    }
}

/* From a process that has the place of its rank now. */
static int is_from_member(const struct membership *m, const struct frame *f)
{
    if (f->kind >= FRAME_JOIN)
        return f->magic == FRAME_MAGIC && join_frame_is_valid(m, f);
    return f->rank >= 0 && f->rank < m->nranks &&
           frame_is_valid(f, frame_token(m, f->kind, f->rank), m->rank, m->nranks);
}

/* 1: a whole frame was received; 0: not yet, also where there is no memory for the rest of it; -1: close the
 * connection. */
static int recv_frame(struct membership *m, struct rx *rx)
{
    const size_t head = sizeof(rx->frame);

    for (;;) {
        const size_t want = rx->got < head ? head - rx->got : (size_t)rx->frame.bytes - (rx->got - head);
        char *to;
        int n;

        if (rx->got >= head && !rx->payload && !(rx->payload = malloc((size_t)rx->frame.bytes + 1)))
            return 0;
        to = rx->got < head ? (char *)&rx->frame + rx->got : rx->payload + (rx->got - head);
        if (rx->got >= head && !want)
            return 1;
        n = m->ops->recv(m->port, rx->conn, to, want);
        if (n <= 0)
            return n == -EAGAIN ? 0 : -1;
        m->progressed = 1;
        rx->got += (size_t)n;
        if (rx->got == head && !is_from_member(m, &rx->frame))
            return -1;
    }
}

static void take_view(struct membership *m, struct peer *peer)
{
    const struct rx *rx = &peer->rx;

    peer->has_view = peer->arrived = peer->fresh = 1;
    peer->purpose = rx->frame.number;
    memcpy(peer->excluded, rx->payload, (size_t)m->nranks);
    if (rx->frame.rank == m->coordinator) {
        memcpy(m->reported, rx->payload + m->nranks, (size_t)m->nranks);
        m->reported_ns = host_now_ns();
    }
    if (!peer->excluded[m->rank] || !same_purpose(m->purpose, peer->purpose))
        return;
    m->left_out_by = rx->frame.rank; /* even if it has finished and closed the connection since */
    for (int r = 0; r < m->nranks; r++)
        m->without[r] |= !peer->excluded[r];
}

/* What this rank has learned since its last view does not count: it is the same for a rank that fails after all have
 * agreed. Who waits for this rank in another round sees its connection end. */
static void take_commit(struct membership *m, const struct peer *peer)
{
    const uint8_t *excluded = (const uint8_t *)peer->rx.payload;
    const int from = peer->rx.frame.rank;

    if (m->agreed || !peer->viewed || excluded[m->rank] || excluded[from])
        return;
    memcpy(m->excluded, excluded, (size_t)m->nranks);
    m->coordinator = from;
    m->agreed = 1;
}

static void take_data(struct peer *peer)
{
    struct rx *rx = &peer->rx;
    const int slot = rx->frame.number & 1;

    free(peer->data[slot].data);
    peer->data[slot].data = rx->payload;
    peer->data[slot].bytes = (size_t)rx->frame.bytes;
    peer->data[slot].number = rx->frame.number;
    rx->payload = NULL;
}

/* Processes the frame that was received from `peer`. */
static void take_frame(struct membership *m, struct peer *peer)
{
    struct rx *rx = &peer->rx;

    switch (rx->frame.kind) {
    case FRAME_VIEW:
        take_view(m, peer);
        break;
    case FRAME_COMMIT:
        take_commit(m, peer);
        break;
    case FRAME_FAIL:
        if (m->fail_from < 0 && !m->excluded[rx->frame.rank]) {
            m->fail_from = rx->frame.rank;
            memcpy(&m->failure, rx->payload, sizeof(m->failure));
        }
        break;
    case FRAME_DATA:
        take_data(peer);
        break;
    default: /* not on this connection */
        break;
    }
    free(rx->payload);
    rx->payload = NULL;
    rx->got = 0;
}

void reset_rx(struct membership *m, struct peer *peer)
{
    close_rx(m, &peer->rx);
    peer->has_view = 0;
    for (int i = 0; i < 2; i++) {
        free(peer->data[i].data);
        memset(&peer->data[i], 0, sizeof(peer->data[i]));
    }
}

void recv_frames(struct membership *m, struct peer *peer)
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
    struct peer *peer;

    if (pending->frame.kind >= FRAME_JOIN) {
        join_take(m, pending);
        return;
    }
    peer = &m->peers[pending->frame.rank];
    /* In the first case it starts the next round; it connects again when this round is over here, too. One that the
     * others go on without is told so at any time. */
    if ((m->agreed && !m->excluded[pending->frame.rank]) || pending->frame.kind != FRAME_VIEW) {
        close_rx(m, pending);
        return;
    }
    reset_rx(m, peer);
    peer->rx = *pending;
    memset(pending, 0, sizeof(*pending));
    pending->conn = -1;
    take_frame(m, peer);
}

void accept_pending(struct membership *m)
{
    int more = 1; /* the port is asked until it has no other */

    for (int i = 0; i < MAX_PENDING; i++) {
        struct rx *pending = &m->pending[i];
        int state;

        if (pending->conn < 0) {
            pending->conn = more ? m->ops->accept(m->port) : -1;
            if (pending->conn < 0) {
                more = 0;
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
