/* SPDX-License-Identifier: Apache-2.0 */
/* Rendezvous over TCP (wire.h): settings, rank 0's side, the other ranks' side, and how errors reach all ranks. */
#ifndef EPX_BOOT_RENDEZVOUS_H
#define EPX_BOOT_RENDEZVOUS_H

#include "boot/channel.h"
#include "boot/socket.h"
#include "boot/wire.h"
#include "epx/epx.h"

enum {
    RENDEZVOUS_MORE_PORTS = 16,    /* ports after the first that rank 0 may use where it is asked to look for one */
    RENDEZVOUS_MAX_ADDRESSES = 16, /* of a host name, or of interfaces */
    RENDEZVOUS_HELLO_MS = 2000,    /* for a new connection to send its hello */
    RENDEZVOUS_REPLY_MS = 400,     /* for a port to reply in the first round; doubles each round */
    RENDEZVOUS_REPLY_MAX_MS = 5000,
    /* Other ranks wait this much longer than rank 0, whose error names the missing ranks. It covers what does not grow
     * with the deadline, the way of a message: their deadline begins with a message of rank 0, WELCOME, START or HERE,
     * and rank 0's own begins before. */
    RENDEZVOUS_SLACK_MS = 1000,
    RENDEZVOUS_HERE_MS = 500, /* after which rank 0 says in an all-gather that it is there: before the slack is over */
    RENDEZVOUS_CLOSE_MS = 1000, /* for errors to reach the other ranks before connections are closed */
    RENDEZVOUS_MAX_RANKS = 65536
};

struct rendezvous_config {
    int rank, nranks;
    int timeout_ms;
    const char *host;       /* name or address of rank 0's machine, or several separated by commas */
    const char *host_from;  /* what a launcher derived `host` from (launcher.h); NULL = the user has set it */
    const char *host_hint;  /* how the user can set it */
    int port;               /* the first port to try */
    int ports;              /* how many, from the first on; 1 = that one, or an error */
    const uint8_t *key;     /* that all ranks know; NULL = nobody proves anything */
    const char *key_from;   /* where it is from, for messages */
    uint64_t job;           /* differs between jobs that might use the same port */
    const char *interfaces; /* EPX_SOCKET_IFNAME, or NULL */
    int block;              /* rank 0: what it tells the others of the tree (tree.h); 0 = there is none */
};

struct launcher;
struct secret;
/* The strings of `config` belong to `launcher`, the key to `secret`. */
void rendezvous_from_launcher(const struct launcher *launcher, const struct secret *secret, int timeout_ms,
                              struct rendezvous_config *config);

/* Resolves a host name, or several separated by commas, before the deadline; port 0. EPX_ERR_TIMEOUT and EPX_ERR_SYSTEM
 * may be retried. */
epx_status resolve_host(const char *host, uint64_t deadline, struct endpoint *out, int limit, int *count);

/* Whether `host` is a loopback address or "localhost", so that all ranks are on one machine and interfaces do not
 * matter. A name that resolves to a loopback address is not enough: it may resolve to something else on another
 * machine. */
int host_is_loopback(const char *host);

/* Rank 0: waits for all other ranks; channels[r] is the connection of rank r, channels[0] is closed. */
epx_status rendezvous_root(const struct rendezvous_config *config, struct channel *channels);
/* Other ranks: connects to rank 0 and waits until all ranks have. *block: that of rank 0. */
epx_status rendezvous_client(const struct rendezvous_config *config, struct channel *channel, int *block);

/* What rank 0 thinks of a hello of its own job. present[nranks]: ranks that have joined. */
epx_status check_hello(const struct wire_hello *hello, int nranks, const unsigned char *present);

/* "rank 3", "ranks 3 and 5", "ranks 3, 5 and 2 more": those of 0..nranks-1 whose mark is 0. Returns how many. */
int absent_ranks(const unsigned char *present, int nranks, char *text, size_t bytes);

/* The connection to `rank` failed before all ranks had met; errno says how. */
epx_status fail_to_meet(int rank);

/* Sends an operation without payload. */
int send_frame(struct channel *channel, enum wire_op op, uint64_t deadline);
/* Sends the reason of a failure to the peer, as far as that is possible before the deadline. */
void send_error(struct channel *channel, epx_status status, const char *text, uint64_t deadline);
/* The rest of a WIRE_ERROR frame: fails with the sender's status and text. */
epx_status receive_error(struct channel *channel, const struct wire_frame *frame, uint64_t deadline);
epx_status fail_with(const struct wire_error *error);
/* Sends a failure to all connected ranks, waits a short time until they have read it, closes. */
void disconnect_all(struct channel *channels, int count, epx_status status, const char *text);

#endif
