/* SPDX-License-Identifier: Apache-2.0 */
/* Connections over TCP: a port is a listening socket, a connection is a connected socket. */
#include "boot/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/socket.h"
#include "util/status.h"

enum { BACKLOG = 4096 };

struct conn_port {
    int listener;
};

/* Wire format of an IPv4 or IPv6 address. Both fit the 60 bytes of a conn_address. */
static void address_put(struct conn_address *out, const struct endpoint *at)
{
    memset(out, 0, sizeof(*out));
    out->bytes = (uint32_t)at->length;
    memcpy(out->data, &at->address, at->length);
}

static int address_get(const struct conn_address *from, struct endpoint *at)
{
    memset(at, 0, sizeof(*at));
    if (from->bytes != sizeof(struct sockaddr_in) && from->bytes != sizeof(struct sockaddr_in6))
        return -EINVAL;
    memcpy(&at->address, from->data, from->bytes);
    at->length = (socklen_t)from->bytes;
    return 0;
}

static epx_status port_open(int rank, int one_host, struct conn_address *own, struct conn_port **out)
{
    struct conn_port *port = calloc(1, sizeof(*port));
    struct endpoint at;
    epx_status status;

    if (!port)
        return fail(EPX_ERR_MEMORY, "no memory for the port of rank %d", rank);
    port->listener = -1;
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
    address_put(own, &at);
    *out = port;
    return EPX_OK;

free_port:
    if (port->listener >= 0)
        close(port->listener);
    free(port);
    return status;
}

static int port_connect(struct conn_port *port, const struct conn_address *to)
{
    struct endpoint at;
    int fd, rc = address_get(to, &at);

    (void)port;
    if (rc)
        return rc;
    fd = socket_connect_start(&at);
    return fd < 0 ? -errno : fd;
}

static int port_accept(struct conn_port *port)
{
    const int fd = socket_accept(port->listener);

    return fd < 0 ? -errno : fd;
}

static int conn_send(struct conn_port *port, int conn, const void *data, size_t bytes)
{
    struct transfer transfer = {.data = (void *)(uintptr_t)data, .bytes = bytes};

    (void)port;
    if (transfer_send(conn, &transfer) < 0)
        return errno == EPIPE || errno == ECONNRESET ? -ENOTCONN : -errno;
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

static int conn_recv(struct conn_port *port, int conn, void *data, size_t bytes)
{
    struct transfer transfer = {.data = data, .bytes = bytes};

    (void)port;
    if (transfer_receive(conn, &transfer) < 0 && !transfer.done)
        return errno == ECONNRESET ? -ENOTCONN : -errno;
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

static void conn_close(struct conn_port *port, int conn)
{
    (void)port;
    close(conn);
}

static void port_close(struct conn_port *port)
{
    close(port->listener);
    free(port);
}

const struct conn_ops conn_socket_ops = {
    .port_open = port_open,
    .connect = port_connect,
    .accept = port_accept,
    .send = conn_send,
    .recv = conn_recv,
    .close = conn_close,
    .port_close = port_close,
};
