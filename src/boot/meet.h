/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks meet over TCP (wire.h): what the environment says, rank 0's side, the others' side, and errors on the way. */
#ifndef EPX_BOOT_MEET_H
#define EPX_BOOT_MEET_H

#include "boot/socket.h"
#include "boot/wire.h"
#include "epx/epx.h"

enum {
    MEET_MORE_PORTS = 16,    /* ports after MASTER_PORT that rank 0 may take */
    MEET_MAX_ADDRESSES = 16, /* of a host name, or of interfaces */
    MEET_HELLO_MS = 2000,    /* what a visitor gets to say hello */
    MEET_ANSWER_MS = 400,    /* what a port gets to answer the first time; more each time */
    MEET_ANSWER_MOST_MS = 5000,
    MEET_SLACK_MS = 1000,   /* others wait this much longer than rank 0, whose message names the missing ranks */
    MEET_GOODBYE_MS = 1000, /* for errors to reach the others before connections close */
    MEET_MAX_RANKS = 65536
};

struct meeting {
    int rank, nranks;
    int timeout_ms;
    const char *host;       /* MASTER_ADDR */
    int port;               /* the first of them */
    uint64_t job;           /* differs between jobs that might meet on one port */
    const char *interfaces; /* EPX_SOCKET_IFNAME, or NULL */
};

/* Reads RANK, WORLD_SIZE and, for more than one rank, MASTER_ADDR and MASTER_PORT. The strings belong to the
 * environment. */
epx_status meet_settings(struct meeting *meeting);

/* Resolves a host name before the deadline, port 0. EPX_ERR_TIMEOUT and EPX_ERR_SYSTEM may be tried again. */
epx_status resolve_host(const char *host, uint64_t deadline, struct endpoint *out, int limit, int *count);

/* Whether MASTER_ADDR says by itself that all ranks are on one machine: then interfaces have no say. A name that only
 * resolves to a loopback address does not, for it may mean something else on another machine. */
int host_is_loopback(const char *host);

/* Rank 0: waits for all others; fds[r] is the connection of rank r, fds[0] = -1. */
epx_status meet_as_root(const struct meeting *meeting, int *fds);
/* The others: finds rank 0, waits until all have come. */
epx_status meet_as_leaf(const struct meeting *meeting, int *fd);

/* "rank 3", "ranks 3 and 5", "ranks 3, 5 and 2 more": those of 0..nranks-1 whose mark is 0. Returns how many. */
int absent_ranks(const unsigned char *present, int nranks, char *text, size_t bytes);

/* Sends an operation without payload. */
int send_frame(int fd, enum wire_op op, uint64_t deadline);
/* Tells the other end why this one gives up; as far as it can be done without waiting long. */
void send_error(int fd, epx_status status, const char *text, uint64_t deadline);
/* The rest of a WIRE_ERROR frame: fails with the sender's status and text. */
epx_status receive_error(int fd, const struct wire_frame *frame, uint64_t deadline);
epx_status fail_with(const struct wire_error *error);
/* Tells all connected ranks of a failure, waits shortly until they have read it, closes, sets fds to -1. */
void dismiss(int *fds, int count, epx_status status, const char *text);

#endif
