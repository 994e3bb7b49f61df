/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections between any two ranks, which need no third rank. Each rank has a port that accepts connections as long as
 * its group exists. The bytes of a connection arrive in order. No function but wait blocks. Over TCP both ends prove
 * that they know the group's key before the first byte (channel.h). The functions are behind a table because the
 * simulation has its own implementation (sim/conn.c), which has no strangers.
 */
#ifndef EPX_BOOT_CONN_H
#define EPX_BOOT_CONN_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

struct conn_port;

/* The address of a port. */
struct conn_address {
    uint32_t bytes;
    uint8_t data[60];
};

struct conn_ops {
    /* `one_host`: all ranks are on this machine. key: 32 bytes that every rank knows; NULL = nobody proves anything. */
    epx_status (*port_open)(int rank, int one_host, const uint8_t *key, struct conn_address *own,
                            struct conn_port **port);
    /* Starts to connect: a connection (>= 0), which the other side may not have accepted yet; or -errno. */
    int (*connect)(struct conn_port *port, const struct conn_address *to);
    /* A new incoming connection, whose other end knows the key; or -EAGAIN, or another -errno. */
    int (*accept)(struct conn_port *port);
    /* How many connections have not proved yet that their other end knows the key; NULL = there are never any. */
    int (*coming)(const struct conn_port *port);
    /* Number of bytes (> 0), or -errno: -EAGAIN when none can be transferred now, -ENOTCONN after the last byte when
     * the peer closed the connection or its process ended, -ECONNREFUSED when the port does not exist (any more), or
     * belongs to somebody who does not know the key. Unsent data must be the first of the next send. */
    int (*send)(struct conn_port *port, int conn, const void *data, size_t bytes);
    int (*recv)(struct conn_port *port, int conn, void *data, size_t bytes);
    /* Waits until one of the functions above may have something to do, at most `ns`. It may return early. */
    void (*wait)(struct conn_port *port, uint64_t ns);
    void (*close)(struct conn_port *port, int conn);
    void (*port_close)(struct conn_port *port);
};

extern const struct conn_ops conn_socket_ops;

struct endpoint;
/* The address of another rank's port over TCP: 0, or -EINVAL. */
int conn_address_get(const struct conn_address *from, struct endpoint *at);
void conn_address_put(struct conn_address *out, const struct endpoint *at);

#endif
