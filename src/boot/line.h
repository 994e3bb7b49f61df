/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines between ranks that do not need everybody: each rank has a port that others may call at any time as long as its
 * group lives; what is said on a line arrives in order. Nothing blocks. Behind a table, for simulations have lines of
 * their own.
 */
#ifndef EPX_BOOT_LINE_H
#define EPX_BOOT_LINE_H

#include <stddef.h>
#include <stdint.h>

#include "epx/epx.h"

struct line_port;

/* Where a port can be called. */
struct line_address {
    uint32_t bytes;
    uint8_t data[60];
};

struct line_ops {
    /* `near`: all ranks are on this machine. */
    epx_status (*open)(int rank, int near, struct line_address *own, struct line_port **port);
    /* A line (>= 0), though nobody may have answered yet; or -errno. */
    int (*call)(struct line_port *port, const struct line_address *to);
    /* A line that somebody called, or -EAGAIN, or another -errno. */
    int (*answer)(struct line_port *port);
    /* How many bytes (> 0), -EAGAIN for none now, -ENOTCONN after the last when the other end hung up or ended,
     * -ECONNREFUSED where no such port is (any more), or another -errno. */
    int (*say)(struct line_port *port, int line, const void *data, size_t bytes);
    int (*hear)(struct line_port *port, int line, void *data, size_t bytes);
    void (*hang_up)(struct line_port *port, int line);
    void (*close)(struct line_port *port);
};

extern const struct line_ops line_socket_ops;
/* Set by a simulation while it runs, NULL otherwise. */
extern const struct line_ops *line_override;

#endif
