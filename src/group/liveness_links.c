/* SPDX-License-Identifier: Apache-2.0 */
/* The connections of liveness.h: to whom, and what their frames and ends mean. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "boot/socket.h"
#include "group/liveness_state.h"
#include "util/clock.h"
#include "util/pause.h"
#include "util/status.h"

enum { LINK_MAGIC = 0x4c585045 /* "EPXL" */, RETRY_MIN_NS = 1000000, RETRY_SHIFT_MAX = 10, NO_FILES_NS = 1000000 };
enum link_kind { LINK_HELLO = 1, LINK_NEWS, LINK_GOODBYE };

static const struct conn_ops *const ops = &conn_socket_ops;

epx_status links_open(struct liveness *l, struct conn_address *own)
{
    return ops->port_open(l->o.rank, l->o.one_host, l->o.key, own, &l->port);
}

static void link_free(struct liveness *l, struct link *link)
{
    ops->close(l->port, link->conn);
    free(link->out);
    free(link);
}

void links_close(struct liveness *l)
{
    while (l->links) {
        struct link *link = l->links;

        l->links = link->next;
        link_free(l, link);
    }
    ops->port_close(l->port);
    l->port = NULL;
}

const struct pollfd *links_polls(struct liveness *l, size_t *count)
{
    return conn_socket_polls(l->port, count);
}

/* ---- Sending ----------------------------------------------------------------------------------------------------- */

/* Without memory the frame is not sent: others send theirs. */
static void queue(const struct liveness *l, struct link *link, enum link_kind kind, int rank, int state)
{
    if (link->count == link->room) {
        struct link_frame *larger = realloc(link->out, (link->room + 8) * sizeof(*larger));

        if (!larger)
            return;
        link->out = larger;
        link->room += 8;
    }
    link->out[link->count++] = (struct link_frame){
        .magic = LINK_MAGIC,
        .kind = (uint16_t)kind,
        .state = (uint16_t)state,
        .rank = rank,
        .token = l->token,
        .incarnation = rank == l->o.rank ? l->o.incarnation : l->peers[rank].incarnation,
    };
}

static void flush(struct liveness *l, struct link *link)
{
    const size_t bytes = link->count * sizeof(*link->out);

    while (link->sent < bytes && !link->error) {
        const int n = ops->send(l->port, link->conn, (char *)link->out + link->sent, bytes - link->sent);

        if (n == -EAGAIN)
            return;
        if (n < 0)
            link->error = n;
        else
            link->sent += (size_t)n;
    }
    link->count = link->sent = 0;
}

void links_send_news(struct liveness *l, int rank, enum liveness_state state)
{
    for (struct link *link = l->links; link; link = link->next) {
        if (!link->is_open)
            continue; /* it is told with HELLO */
        queue(l, link, LINK_NEWS, rank, (int)state);
        flush(l, link);
    }
}

void links_send_goodbye(struct liveness *l)
{
    for (struct link *link = l->links; link; link = link->next) {
        queue(l, link, LINK_GOODBYE, l->o.rank, 0);
        flush(l, link);
    }
}

/* ---- Connecting -------------------------------------------------------------------------------------------------- */

static int has_link(const struct liveness *l, int rank, int open)
{
    for (const struct link *link = l->links; link; link = link->next)
        if (link->rank == rank && (!open || link->is_open))
            return 1;
    return 0;
}

static void add_link(struct liveness *l, int conn, int rank)
{
    struct link *link = calloc(1, sizeof(*link));

    if (!link) {
        ops->close(l->port, conn);
        return;
    }
    socket_set_silence(conn, l->o.silence_ms);
    *link = (struct link){.next = l->links, .conn = conn, .rank = rank};
    l->links = link;
    queue(l, link, LINK_HELLO, l->o.rank, 0);
    for (int r = 0; r < l->o.nranks; r++)
        if (l->peers[r].state == LIVENESS_ENDED)
            queue(l, link, LINK_NEWS, r, LIVENESS_ENDED);
}

static int is_neighbour(const struct liveness *l, int rank)
{
    const struct live_peer *peer = &l->peers[rank];

    return rank != l->o.rank && peer->state == LIVENESS_LIVES && !peer->absent && peer->port.bytes;
}

/* The first living rank at a distance of `step` or more; this rank: there is none. */
static int neighbour_at(const struct liveness *l, int step)
{
    int r = (l->o.rank + step) % l->o.nranks;

    while (r != l->o.rank && !is_neighbour(l, r))
        r = (r + 1) % l->o.nranks;
    return r;
}

/* Refused: nobody has the port any more. Who was connected before has ended, without a goodbye. */
static void refused(struct liveness *l, int rank)
{
    if (l->peers[rank].proven)
        live_found(l, rank, LIVENESS_ENDED);
    else
        l->peers[rank].absent = 1;
}

static void need_link(struct liveness *l, int rank, uint64_t now)
{
    struct live_peer *peer = &l->peers[rank];
    int conn;

    if (now < peer->retry_ns || has_link(l, rank, 0))
        return;
    peer->retry_ns = now + ((uint64_t)RETRY_MIN_NS << peer->retries);
    peer->retries += peer->retries < RETRY_SHIFT_MAX;
    conn = ops->connect(l->port, &peer->port);
    if (conn >= 0)
        add_link(l, conn, rank);
    else if (conn == -ECONNREFUSED)
        refused(l, rank);
}

static int is_lost(const struct live_peer *peer)
{
    return peer->lost_ns && peer->state == LIVENESS_LIVES;
}

static void need_links(struct liveness *l, uint64_t now)
{
    for (int step = 1; step < l->o.nranks; step *= 2) {
        const int r = neighbour_at(l, step);

        if (r != l->o.rank)
            need_link(l, r, now);
    }
    for (int r = 0; r < l->o.nranks; r++)
        if (is_lost(&l->peers[r]))
            need_link(l, r, now);
}

int links_are_open(const struct liveness *l)
{
    for (int step = 1; step < l->o.nranks; step *= 2) {
        const int r = neighbour_at(l, step);

        if (r != l->o.rank && !has_link(l, r, 1))
            return 0;
    }
    return 1;
}

/* ---- Receiving --------------------------------------------------------------------------------------------------- */

static int is_valid(const struct liveness *l, const struct link *link)
{
    const struct link_frame *f = &link->in;

    if (f->magic != LINK_MAGIC || f->token != l->token || f->rank < 0 || f->rank >= l->o.nranks)
        return 0;
    if (f->kind == LINK_NEWS)
        return link->is_open && (f->state == LIVENESS_ENDED || f->state == LIVENESS_UNREACHABLE);
    if (f->kind == LINK_GOODBYE)
        return link->is_open && f->rank == link->rank;
    /* Another process than the one that is known here has the place, or will have it. */
    return f->kind == LINK_HELLO && f->rank != l->o.rank && (link->rank < 0 || link->rank == f->rank) &&
           f->incarnation == l->peers[f->rank].incarnation;
}

static void take_hello(struct liveness *l, struct link *link)
{
    struct live_peer *peer = &l->peers[link->in.rank];

    link->rank = link->in.rank;
    link->is_open = 1;
    peer->proven = 1;
    peer->absent = peer->retries = 0;
    peer->lost_ns = peer->retry_ns = 0;
}

static void take_news(struct liveness *l, const struct link_frame *f)
{
    struct live_peer *peer = &l->peers[f->rank];

    if (f->rank == l->o.rank) /* the network has lost this rank; the others name it */
        return;
    if (f->incarnation == peer->incarnation)
        live_found(l, f->rank, (enum liveness_state)f->state);
    else if (f->state == LIVENESS_ENDED)
        peer->early = CAUSE(f->rank, f->incarnation);
}

static void take_frame(struct liveness *l, struct link *link)
{
    switch (link->in.kind) {
    case LINK_HELLO:
        take_hello(l, link);
        break;
    case LINK_NEWS:
        take_news(l, &link->in);
        break;
    default:
        if (l->peers[link->rank].state == LIVENESS_LIVES)
            l->peers[link->rank].state = LIVENESS_LEFT;
    }
}

/* 0: nothing more has come; -errno: the connection has ended. */
static int receive(struct liveness *l, struct link *link)
{
    for (;;) {
        const int n = ops->recv(l->port, link->conn, (char *)&link->in + link->got, sizeof(link->in) - link->got);

        if (n <= 0)
            return n == -EAGAIN ? 0 : n;
        link->got += (size_t)n;
        if (link->got < sizeof(link->in))
            continue;
        link->got = 0;
        if (!is_valid(l, link))
            return -EPROTO;
        take_frame(l, link);
    }
}

/* Did the other machine answer nothing at all? */
static int is_silence(int error)
{
    return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
}

static void take_end(struct liveness *l, const struct link *link, int error, uint64_t now)
{
    const uint64_t silence = (uint64_t)l->o.silence_ms * 1000000u;
    struct live_peer *peer = link->rank >= 0 ? &l->peers[link->rank] : NULL;

    if (!peer || peer->state != LIVENESS_LIVES || has_link(l, link->rank, 1))
        return;
    if (error == ECONNREFUSED) {
        refused(l, link->rank);
        return;
    }
    if (!link->is_open)
        return; /* need_link() tries again */
    peer->lost_ns = is_silence(error) && now > silence ? now - silence : now;
    peer->retry_ns = 0;
}

/* The kernel of the other machine has accepted a connection, though its process may be stopped. */
static int kernel_replies(const struct liveness *l, int rank)
{
    for (const struct link *link = l->links; link; link = link->next) {
        struct tcp_info info = {0};
        socklen_t bytes = sizeof(info);

        if (link->rank == rank && getsockopt(link->conn, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
            info.tcpi_state == TCP_ESTABLISHED)
            return 1;
    }
    return 0;
}

static void find_silence(struct liveness *l, uint64_t now)
{
    for (int r = 0; r < l->o.nranks; r++)
        if (is_lost(&l->peers[r]) && now - l->peers[r].lost_ns >= (uint64_t)l->o.silence_ms * 1000000u &&
            !kernel_replies(l, r))
            live_found(l, r, LIVENESS_UNREACHABLE);
}

void links_forget(struct liveness *l, int rank)
{
    for (struct link **at = &l->links; *at;) {
        struct link *link = *at;

        if (link->rank != rank) {
            at = &link->next;
            continue;
        }
        *at = link->next;
        link_free(l, link);
    }
}

static void accept_links(struct liveness *l)
{
    int conn;

    while ((conn = ops->accept(l->port)) >= 0)
        add_link(l, conn, -1);
    if (conn != -EAGAIN)
        pause_ns(NO_FILES_NS); /* this process has no descriptor for it, and poll() would return at once */
}

void links_step(struct liveness *l, uint64_t now)
{
    accept_links(l);
    for (struct link **at = &l->links; *at;) {
        struct link *link = *at;
        int end;

        flush(l, link);
        end = receive(l, link); /* what came before the end counts */
        end = link->error ? link->error : end;
        if (!end) {
            at = &link->next;
            continue;
        }
        *at = link->next;
        take_end(l, link, -end, now);
        link_free(l, link);
    }
    find_silence(l, now);
    need_links(l, now);
    for (struct link *link = l->links; link; link = link->next)
        flush(l, link); /* an end is seen by the next step */
}

uint64_t links_next(const struct liveness *l)
{
    uint64_t next = UINT64_MAX;

    for (const struct link *link = l->links; link; link = link->next)
        if (link->error)
            return 0;
    for (int step = 1; step < l->o.nranks; step *= 2) {
        const int r = neighbour_at(l, step);

        if (r != l->o.rank && !has_link(l, r, 0) && l->peers[r].retry_ns < next)
            next = l->peers[r].retry_ns;
    }
    for (int r = 0; r < l->o.nranks; r++) {
        const struct live_peer *peer = &l->peers[r];
        const uint64_t silent = peer->lost_ns + (uint64_t)l->o.silence_ms * 1000000u;

        if (!is_lost(peer))
            continue;
        if (!has_link(l, r, 0) && peer->retry_ns < next)
            next = peer->retry_ns;
        if (!peer->unreachable && silent < next)
            next = silent;
    }
    return next;
}
