/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A TCP connection between two ranks of a job: authenticated and sealed (auth.h), or plain where the job has no key
 * (EPX_SECRET=none). Functions return as those of socket.h do. No function but *_all waits.
 */
#ifndef EPX_BOOT_CHANNEL_H
#define EPX_BOOT_CHANNEL_H

#include "boot/auth.h"
#include "boot/socket.h"

enum channel_state {
    CHANNEL_SEND_GREETING,
    CHANNEL_GREETING,
    CHANNEL_REPLY,
    CHANNEL_PROOF,
    CHANNEL_PROVED,
    CHANNEL_OPEN
};

struct sealed; /* keys and buffers of a connection that is not plain */

struct channel {
    int fd;                   /* -1 = closed */
    enum channel_state state; /* the message that is sent or received next; CHANNEL_OPEN: the peer knows the key */
    struct sealed *sealed;    /* NULL = plain */
};

#define CHANNEL_CLOSED ((struct channel){.fd = -1})

/* Takes over fd, also when it fails. key NULL = plain. 0, or -1 with errno. */
int channel_start(struct channel *channel, int fd, const uint8_t *key, enum auth_purpose purpose, int server);
void channel_close(struct channel *channel);
/* Continues the handshake: 1 = the peer knows the key; 0 = would block; -1 = errno. EACCES: it does not know the key;
 * EPROTO: it does not speak this protocol; ENOMEM: it may be called again. */
int channel_handshake(struct channel *channel);
/* What the handshake waits for: POLLIN or POLLOUT. */
short channel_events(const struct channel *channel);
/* What an unfinished channel_send waits for: POLLOUT, or 0 = the other end's part of the handshake. */
short channel_blocked_events(const struct channel *channel);
/* Server: the client's nonce, of AUTH_NONCE bytes. NULL: it has not greeted yet, or not to the end. */
const uint8_t *channel_nonce(const struct channel *channel);

/* The number of the peer's build by its greeting, which anybody may have sent; 0 = not known. */
uint64_t channel_build(const struct channel *channel);

/* As transfer_send and transfer_receive, once the handshake is done. An unfinished send is repeated with the same data.
 * EBADMSG: a record was changed on its way. */
int channel_send(struct channel *channel, struct transfer *transfer);
int channel_receive(struct channel *channel, struct transfer *transfer);
int channel_handshake_all(struct channel *channel, uint64_t deadline);
int channel_send_all(struct channel *channel, const void *data, size_t bytes, uint64_t deadline);
int channel_receive_all(struct channel *channel, void *data, size_t bytes, uint64_t deadline);
/* Waits until something can be received: 1, also at the end of the connection; 0 = deadline; -1 = errno. */
int channel_wait(const struct channel *channel, uint64_t deadline);

#endif
