/* SPDX-License-Identifier: Apache-2.0 */
/* Lines over TCP: a port is a listening socket, a line is a connection. */
#include "boot/line.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/socket.h"
#include "util/status.h"

enum { BACKLOG = 4096 };

const struct line_ops *line_override;

struct line_port {
    int listener;
};

/* IPv4 or IPv6, as it travels: both fit the 60 bytes of a line_address. */
static void address_put(struct line_address *out, const struct endpoint *at)
{
    memset(out, 0, sizeof(*out));
    out->bytes = (uint32_t)at->length;
    memcpy(out->data, &at->address, at->length);
}

static int address_get(const struct line_address *from, struct endpoint *at)
{
    memset(at, 0, sizeof(*at));
    if (from->bytes != sizeof(struct sockaddr_in) && from->bytes != sizeof(struct sockaddr_in6))
        return -EINVAL;
    memcpy(&at->address, from->data, from->bytes);
    at->length = (socklen_t)from->bytes;
    return 0;
}

static epx_status port_open(int rank, int near, struct line_address *own, struct line_port **out)
{
    struct line_port *port = calloc(1, sizeof(*port));
    struct endpoint at;
    epx_status status;

    if (!port)
        return fail(EPX_ERR_MEMORY, "no memory for the port of rank %d", rank);
    port->listener = -1;
    status = interface_own_address(near, &at);
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

static int port_call(struct line_port *port, const struct line_address *to)
{
    struct endpoint at;
    int fd, rc = address_get(to, &at);

    (void)port;
    if (rc)
        return rc;
    fd = socket_call(&at);
    return fd < 0 ? -errno : fd;
}

static int port_answer(struct line_port *port)
{
    const int fd = socket_accept(port->listener);

    return fd < 0 ? -errno : fd;
}

static int line_say(struct line_port *port, int line, const void *data, size_t bytes)
{
    struct transfer transfer = {.data = (void *)(uintptr_t)data, .bytes = bytes};

    (void)port;
    if (transfer_send(line, &transfer) < 0)
        return errno == EPIPE || errno == ECONNRESET ? -ENOTCONN : -errno;
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

static int line_hear(struct line_port *port, int line, void *data, size_t bytes)
{
    struct transfer transfer = {.data = data, .bytes = bytes};

    (void)port;
    if (transfer_receive(line, &transfer) < 0 && !transfer.done)
        return errno == ECONNRESET ? -ENOTCONN : -errno;
    return transfer.done ? (int)transfer.done : -EAGAIN;
}

static void line_hang_up(struct line_port *port, int line)
{
    (void)port;
    close(line);
}

static void port_close(struct line_port *port)
{
    close(port->listener);
    free(port);
}

const struct line_ops line_socket_ops = {
    .open = port_open,
    .call = port_call,
    .answer = port_answer,
    .say = line_say,
    .hear = line_hear,
    .hang_up = line_hang_up,
    .close = port_close,
};
