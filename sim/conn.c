/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulated connections. The client (the rank that connects) sends, the server (the owner of the port) receives, and
 * either may close. The size of each transfer is drawn from the seed, and a rank may stop or die before any of them, or
 * before it connects or closes.
 */
#include "sim/conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sched.h"
#include "util/status.h"

struct conn_port {
    int rank, number;
};

struct sim_conn {
    int used;
    int from, to; /* ranks */
    int port;     /* number of the destination port; 0 = it does not exist */
    int accepted, client_closed, server_closed;
    char *data;
    size_t received, length, room;
};

/* By number; a number is never used again. */
struct port_state {
    int open;
    int *waiting, count, room; /* connections that were not accepted when they were made; some may have ended */
};

/* What has happened to the connections of a process, and what it knew of that when it last waited. */
struct waiter {
    uint64_t events, seen, ns;
};

static struct waiter waiters[SIM_MAX_RANKS];

static struct {
    int deaths_seen;
    struct port_state *ports; /* [1..nports] */
    int nports, ports_room;
    struct sim_conn *conns;
    int count;
    int lowest; /* no connection before it is unused */
} all;

void sim_conns_begin(int deaths_seen)
{
    memset(&all, 0, sizeof(all));
    memset(waiters, 0, sizeof(waiters));
    all.deaths_seen = deaths_seen;
}

void sim_conns_end(void)
{
    for (int i = 0; i < all.count; i++)
        free(all.conns[i].data);
    for (int i = 1; i <= all.nports; i++)
        free(all.ports[i].waiting);
    free(all.ports);
    free(all.conns);
    memset(&all, 0, sizeof(all));
}

static int is_gone(int rank)
{
    return all.deaths_seen && sim_is_dead(rank);
}

static void happened(int rank)
{
    waiters[rank].events++;
    sim_wake(&waiters[rank]);
}

static int is_open(int number)
{
    return number > 0 && number <= all.nports && all.ports[number].open;
}

/* A new port's number, or 0 without memory. */
static int new_port(void)
{
    if (all.nports + 1 >= all.ports_room) {
        const int room = all.ports_room ? 2 * all.ports_room : 64;
        struct port_state *larger = realloc(all.ports, (size_t)room * sizeof(*larger));

        if (!larger)
            return 0;
        all.ports = larger;
        all.ports_room = room;
    }
    all.ports[++all.nports] = (struct port_state){.open = 1};
    return all.nports;
}

/* Connection `at` wants to be accepted. 0, or -ENOMEM. */
static int add_waiting(struct port_state *port, int at)
{
    if (port->count == port->room) {
        const int room = port->room ? 2 * port->room : 8;
        int *larger = realloc(port->waiting, (size_t)room * sizeof(*larger));

        if (!larger)
            return -ENOMEM;
        port->waiting = larger;
        port->room = room;
    }
    port->waiting[port->count++] = at;
    return 0;
}

static epx_status port_open(int rank, int one_host, const uint8_t *key, struct conn_address *own,
                            struct conn_port **out)
{
    struct conn_port *port = calloc(1, sizeof(*port));
    const int number = port ? new_port() : 0;

    (void)rank;
    (void)one_host;
    (void)key;
    if (!number) {
        free(port);
        return fail(EPX_ERR_MEMORY, "no memory for a simulated port");
    }
    port->rank = sim_rank(); /* the process, which may have the place of another rank */
    port->number = number;
    memset(own, 0, sizeof(*own));
    own->bytes = sizeof(*port);
    memcpy(own->data, port, sizeof(*port));
    *out = port;
    return EPX_OK;
}

static void port_close(struct conn_port *port)
{
    struct port_state *state = &all.ports[port->number];

    for (int i = 0; i < all.count; i++)
        if (all.conns[i].used && all.conns[i].port == port->number) {
            all.conns[i].server_closed = 1;
            happened(all.conns[i].from);
        }
    free(state->waiting);
    *state = (struct port_state){.open = 0};
    free(port);
}

static int new_conn(void)
{
    struct sim_conn *larger;

    for (; all.lowest < all.count; all.lowest++)
        if (!all.conns[all.lowest].used)
            return all.lowest;
    larger = realloc(all.conns, (size_t)(all.count + 1) * sizeof(*larger));
    if (!larger)
        return -ENOMEM;
    all.conns = larger;
    return all.count++;
}

/* Connection c has two ends: 2 * c is the client's, 2 * c + 1 is the server's. */
static int port_connect(struct conn_port *port, const struct conn_address *to)
{
    struct conn_port server;
    int at;

    sim_transfer();
    sim_point();
    at = new_conn();
    if (at < 0)
        return at;
    memcpy(&server, to->data, sizeof(server));
    memset(&all.conns[at], 0, sizeof(all.conns[at]));
    if (is_open(server.number) && add_waiting(&all.ports[server.number], at) != 0)
        return -ENOMEM;
    all.conns[at].used = 1;
    all.conns[at].from = port->rank;
    all.conns[at].to = server.rank;
    all.conns[at].port = is_open(server.number) ? server.number : 0;
    all.conns[at].server_closed = !all.conns[at].port;
    happened(server.rank);
    return 2 * at;
}

static int port_accept(struct conn_port *port)
{
    struct port_state *state;
    int kept = 0, first = -1;

    sim_point();
    state = &all.ports[port->number]; /* only now, as in conn_send() */
    for (int i = 0; i < state->count; i++) {
        const int at = state->waiting[i];
        const struct sim_conn *conn = &all.conns[at];

        if (!conn->used || conn->accepted || conn->server_closed || conn->port != port->number)
            continue;
        state->waiting[kept++] = at;
        if (first < 0 || at < first)
            first = at;
    }
    state->count = kept;
    if (first < 0)
        return -EAGAIN;
    all.conns[first].accepted = 1;
    return 2 * first + 1;
}

static int conn_send(struct conn_port *port, int end, const void *data, size_t bytes)
{
    const size_t n = 1 + (size_t)sim_draw(bytes);
    struct sim_conn *conn;

    (void)port;
    sim_transfer();
    sim_point();
    conn = &all.conns[end / 2]; /* only now: another rank may have connected in sim_point() and moved the array */
    if (!conn->port || is_gone(conn->to))
        return -ECONNREFUSED;
    if (conn->server_closed)
        return -ENOTCONN;
    if (conn->length + n > conn->room) {
        char *larger = realloc(conn->data, 2 * (conn->length + n));
        if (!larger)
            return -ENOMEM;
        conn->data = larger;
        conn->room = 2 * (conn->length + n);
    }
    memcpy(conn->data + conn->length, data, n);
    conn->length += n;
    happened(conn->to);
    return (int)n;
}

static int conn_recv(struct conn_port *port, int end, void *data, size_t bytes)
{
    struct sim_conn *conn;
    size_t n;

    (void)port;
    sim_point();
    if (end % 2 && all.conns[end / 2].length > all.conns[end / 2].received)
        sim_transfer();
    conn = &all.conns[end / 2];
    if (end % 2 == 0) /* the client's end: the server never sends */
        return !conn->port || is_gone(conn->to) ? -ECONNREFUSED : conn->server_closed ? -ENOTCONN : -EAGAIN;
    n = conn->length - conn->received;
    n = n < bytes ? n : bytes;
    if (n == 0)
        return conn->client_closed || is_gone(conn->from) ? -ENOTCONN : -EAGAIN;
    n = 1 + (size_t)sim_draw(n);
    memcpy(data, conn->data + conn->received, n);
    conn->received += n;
    return (int)n;
}

/* Ends when something happens, as poll() does. Who waits again and again waits longer and longer: as nap(). */
static void conn_wait(struct conn_port *port, uint64_t ns)
{
    const uint64_t least = ns < 1000000 ? ns : 1000000, most = 50000000;
    struct waiter *w = &waiters[sim_rank()];

    (void)port;
    if (w->events == w->seen) {
        w->ns = w->ns < most ? w->ns + w->ns / 16 : most;
        w->ns = w->ns > least ? w->ns : least;
        if (sim_park(w, sim_now() + w->ns, "waits for connections"))
            w->ns = 0;
    } else {
        w->ns = 0;
    }
    w->seen = w->events;
}

static void conn_close(struct conn_port *port, int end)
{
    struct sim_conn *conn;

    (void)port;
    sim_transfer();
    conn = &all.conns[end / 2];
    if (end % 2)
        conn->server_closed = 1;
    else
        conn->client_closed = 1;
    happened(end % 2 ? conn->from : conn->to);
    /* The server still receives all data of a connection that the client closed before it was accepted; no one receives
     * it when the port is closed. */
    if (!conn->client_closed || !conn->server_closed)
        return;
    free(conn->data);
    memset(conn, 0, sizeof(*conn));
    all.lowest = end / 2 < all.lowest ? end / 2 : all.lowest;
}

const struct conn_ops sim_conn_ops = {
    .port_open = port_open,
    .connect = port_connect,
    .accept = port_accept,
    .send = conn_send,
    .recv = conn_recv,
    .wait = conn_wait,
    .close = conn_close,
    .port_close = port_close,
};
