/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Simulated connections. The client (the rank that connects) sends, the server (the owner of the port) receives, and
 * either may close. The size of each transfer is drawn from the seed.
 */
#include "sim/conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sched.h"
#include "util/status.h"

enum { PORTS = 2 * SIM_MAX_RANKS };

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

static struct {
    int deaths_seen, ports; /* so far */
    int open[PORTS];        /* numbers of those that are open; 0 = none */
    struct sim_conn *conns;
    int count;
} all;

void sim_conns_begin(int deaths_seen)
{
    memset(&all, 0, sizeof(all));
    all.deaths_seen = deaths_seen;
}

void sim_conns_end(void)
{
    for (int i = 0; i < all.count; i++)
        free(all.conns[i].data);
    free(all.conns);
    memset(&all, 0, sizeof(all));
}

static int is_gone(int rank)
{
    return all.deaths_seen && sim_is_dead(rank);
}

static int *find_port(int number)
{
    for (int i = 0; i < PORTS; i++)
        if (all.open[i] == number)
            return &all.open[i];
    return NULL;
}

static epx_status port_open(int rank, int one_host, const uint8_t *key, struct conn_address *own,
                            struct conn_port **out)
{
    struct conn_port *port = calloc(1, sizeof(*port));
    int *place = find_port(0);

    (void)one_host;
    (void)key;
    if (!port || !place) {
        free(port);
        return fail(EPX_ERR_MEMORY, "no memory for a simulated port");
    }
    port->rank = rank;
    port->number = *place = ++all.ports;
    memset(own, 0, sizeof(*own));
    own->bytes = sizeof(*port);
    memcpy(own->data, port, sizeof(*port));
    *out = port;
    return EPX_OK;
}

static void port_close(struct conn_port *port)
{
    int *place = find_port(port->number);

    for (int i = 0; i < all.count; i++)
        if (all.conns[i].used && all.conns[i].port == port->number)
            all.conns[i].server_closed = 1;
    if (place)
        *place = 0;
    free(port);
}

static int new_conn(void)
{
    struct sim_conn *larger;

    for (int i = 0; i < all.count; i++)
        if (!all.conns[i].used)
            return i;
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

    sim_point();
    at = new_conn();
    if (at < 0)
        return at;
    memcpy(&server, to->data, sizeof(server));
    memset(&all.conns[at], 0, sizeof(all.conns[at]));
    all.conns[at].used = 1;
    all.conns[at].from = port->rank;
    all.conns[at].to = server.rank;
    all.conns[at].port = find_port(server.number) ? server.number : 0;
    all.conns[at].server_closed = !all.conns[at].port;
    return 2 * at;
}

static int port_accept(struct conn_port *port)
{
    sim_point();
    for (int i = 0; i < all.count; i++) {
        struct sim_conn *conn = &all.conns[i];
        if (conn->used && !conn->accepted && !conn->server_closed && conn->port == port->number) {
            conn->accepted = 1;
            return 2 * i + 1;
        }
    }
    return -EAGAIN;
}

static int conn_send(struct conn_port *port, int end, const void *data, size_t bytes)
{
    const size_t n = 1 + (size_t)sim_draw(bytes);
    struct sim_conn *conn;

    (void)port;
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
    return (int)n;
}

static int conn_recv(struct conn_port *port, int end, void *data, size_t bytes)
{
    struct sim_conn *conn;
    size_t n;

    (void)port;
    sim_point();
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

static void conn_close(struct conn_port *port, int end)
{
    struct sim_conn *conn = &all.conns[end / 2];

    (void)port;
    if (end % 2)
        conn->server_closed = 1;
    else
        conn->client_closed = 1;
    /* The server still receives all data of a connection that the client closed before it was accepted; no one receives
     * it when the port is closed. */
    if (!conn->client_closed || !conn->server_closed)
        return;
    free(conn->data);
    memset(conn, 0, sizeof(*conn));
}

const struct conn_ops sim_conn_ops = {
    .port_open = port_open,
    .connect = port_connect,
    .accept = port_accept,
    .send = conn_send,
    .recv = conn_recv,
    .close = conn_close,
    .port_close = port_close,
};
