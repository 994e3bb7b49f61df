/* SPDX-License-Identifier: Apache-2.0 */
/* Connections over TCP: a port is a listening socket, a connection is a channel. */
#include "boot/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/lobby.h"
#include "util/status.h"

enum { BACKLOG = 4096 };

struct conn_port {
    int listener;
    uint8_t key[CRYPTO_KEY];
    const uint8_t *proof; /* key, or NULL */
    struct lobby lobby;
    struct channel **channels; /* by descriptor, which is what a connection is called outside */
    uint8_t *blocked;          /* by descriptor: the last send could not send all */
    struct pollfd *polls;      /* [room + places and listener] */
    int room;
};

/* Wire format of an IPv4 or IPv6 address. Both fit the 60 bytes of a conn_address. */
void conn_address_put(struct conn_address *out, const struct endpoint *at)
{
    memset(out, 0, sizeof(*out));
    out->bytes = (uint32_t)at->length;
    memcpy(out->data, &at->address, at->length);
}

int conn_address_get(const struct conn_address *from, struct endpoint *at)
{
    memset(at, 0, sizeof(*at));
    if (from->bytes > sizeof(from->data))
        return -EINVAL;
    memcpy(&at->address, from->data, from->bytes);
    at->length = (socklen_t)from->bytes;
    if ((at->address.ss_family != AF_INET || from->bytes != sizeof(struct sockaddr_in)) &&
        (at->address.ss_family != AF_INET6 || from->bytes != sizeof(struct sockaddr_in6)))
        return -EINVAL;
    return 0;
}

static epx_status port_open(int rank, int one_host, const uint8_t *key, struct conn_address *own,
                            struct conn_port **out)
{
    struct conn_port *port = calloc(1, sizeof(*port));
    struct endpoint at;
    epx_status status;

    if (!port)
        return fail(EPX_ERR_MEMORY, "no memory for the port of rank %d", rank);
    port->listener = -1;
    if (key)
        memcpy(port->key, key, sizeof(port->key));
    port->proof = key ? port->key : NULL;
    lobby_open(&port->lobby, port->proof, AUTH_MEMBERSHIP);
    status = interface_own_address(one_host, &at);
    if (status != EPX_OK)
        goto free_port;
    endpoint_set_port(&at, 0);
    port->listener = socket_listen(&at, BACKLOG);
    at.length = sizeof(at.address);
    if (port->listener < 0 || getsockname(port->listener, (struct sockaddr *)&at.address, &at.length)) {
        char text[ENDPOINT_TEXT];
        status = fail_errno(EPX_ERR_SYSTEM, "rank %d cannot listen on %s", rank, endpoint_text(&at, text));
        goto free_port;
    }
    conn_address_put(own, &at);
    *out = port;
    return EPX_OK;

free_port:
    if (port->listener >= 0)
        close(port->listener);
    free(port);
    return status;
}

static int make_room(struct conn_port *port, int room)
{
    struct channel **channels = realloc(port->channels, (size_t)room * sizeof(*channels));
    uint8_t *blocked = channels ? realloc(port->blocked, (size_t)room) : NULL;
    struct pollfd *polls = blocked ? realloc(port->polls, ((size_t)room + LOBBY_PLACES + 1) * sizeof(*polls)) : NULL;

    port->channels = channels ? channels : port->channels;
    port->blocked = blocked ? blocked : port->blocked;
    port->polls = polls ? polls : port->polls;
    if (!polls)
        return -1;
    memset(channels + port->room, 0, (size_t)(room - port->room) * sizeof(*channels));
    port->room = room;
    return 0;
}

/* Gives the channel its number: that of its descriptor, or -ENOMEM. */
static int keep(struct conn_port *port, const struct channel *channel)
{
    const int fd = channel->fd;
    struct channel *kept = malloc(sizeof(*kept));

    if (!kept || (fd >= port->room && make_room(port, 2 * fd + 16))) {
        free(kept);
        return -ENOMEM;
    }
    *kept = *channel;
    port->channels[fd] = kept;
    port->blocked[fd] = 0;
    return fd;
}

static int port_connect(struct conn_port *port, const struct conn_address *to)
{
    struct endpoint at;
    struct channel channel;
    int fd, rc = conn_address_get(to, &at);

    if (rc)
        return rc;
    fd = socket_connect_start(&at);
    if (fd < 0 || channel_start(&channel, fd, port->proof, AUTH_MEMBERSHIP, 0))
        return -errno;
    rc = keep(port, &channel);
    if (rc < 0)
        channel_close(&channel);
    return rc;
}

static int port_accept(struct conn_port *port)
{
    struct channel channel;
    const int rc = lobby_accept(&port->lobby, port->listener) ? -errno : -EAGAIN;

    int kept;

    if (!lobby_next(&port->lobby, &channel))
        return rc;
    kept = keep(port, &channel);
    if (kept >= 0)
        return kept;
    lobby_return(&port->lobby, &channel); /* another try may find memory; the other end counts on this connection */
    return -EAGAIN;
}

static int port_coming(const struct conn_port *port)
{
    return lobby_count(&port->lobby);
}

/* Over another process's port the handshake fails: a rank keeps its port as long as it is there. */
static int failure(void)
{
    switch (errno) {
    case EPIPE:
    case ECONNRESET:
    case EBADMSG:
        return -ENOTCONN;
    case EACCES:
    case EPROTO:
        return -ECONNREFUSED;
    case ENOMEM: /* another try may find some */
        return -EAGAIN;
    default:
        return -errno;
    }
}

static int conn_send(struct conn_port *port, int conn, const void *data, size_t bytes)
{
    struct channel *channel = port->channels[conn];
    struct transfer transfer = {.data = (void *)(uintptr_t)data, .bytes = bytes};
    int state = channel_handshake(channel);

    if (state > 0)
        state = channel_send(channel, &transfer);
    if (state < 0)
        return failure();
    port->blocked[conn] = !state;
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

static int conn_recv(struct conn_port *port, int conn, void *data, size_t bytes)
{
    struct channel *channel = port->channels[conn];
    struct transfer transfer = {.data = data, .bytes = bytes};
    int state = channel_handshake(channel);

    if (state > 0)
        state = channel_receive(channel, &transfer);
    if (state < 0 && !transfer.done)
        return failure();
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

/* A handshake that waits to send is in `blocked` too, or has the other end's turn. */
static void conn_wait(struct conn_port *port, uint64_t ns)
{
    struct pollfd alone[LOBBY_PLACES + 1], *polls = port->polls ? port->polls : alone;
    const int room = lobby_has_room(&port->lobby);
    nfds_t count = LOBBY_PLACES + 1;

    lobby_polls(&port->lobby, polls);
    polls[LOBBY_PLACES] = (struct pollfd){.fd = room ? port->listener : -1, .events = POLLIN};
    for (int fd = 0; fd < port->room; fd++) {
        const struct channel *channel = port->channels[fd];

        if (!channel)
            continue;
        polls[count++] = (struct pollfd){
            .fd = fd, .events = (short)(POLLIN | (port->blocked[fd] ? channel_blocked_events(channel) : 0))};
    }
    (void)poll(polls, count, (int)((ns + 999999) / 1000000));
}

static void conn_close(struct conn_port *port, int conn)
{
    channel_close(port->channels[conn]);
    free(port->channels[conn]);
    port->channels[conn] = NULL;
}

static void port_close(struct conn_port *port)
{
    for (int i = 0; i < port->room; i++)
        if (port->channels[i])
            conn_close(port, i);
    lobby_close(&port->lobby);
    close(port->listener);
    free(port->channels);
    free(port->blocked);
    free(port->polls);
    free(port);
}

const struct conn_ops conn_socket_ops = {
    .port_open = port_open,
    .connect = port_connect,
    .accept = port_accept,
    .coming = port_coming,
    .send = conn_send,
    .recv = conn_recv,
    .wait = conn_wait,
    .close = conn_close,
    .port_close = port_close,
};
