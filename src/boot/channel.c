/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HEAD = 4, RECORD_MAX = HEAD + AUTH_RECORD + CRYPTO_TAG };

/* A record on its way. Sending: `bytes` of the caller's text are in it. Receiving: it has text[taken, bytes). */
struct record {
    size_t done, length; /* of the record itself */
    size_t bytes, taken;
    uint8_t *data, *text;
};

struct sealed {
    struct auth auth;
    struct transfer transfer; /* of a message of the handshake */
    union {
        struct auth_greeting greeting;
        struct auth_reply reply;
        struct auth_proof proof;
    } in, out;
    size_t out_bytes, out_done;
    struct record tx, rx;
    uint8_t buffers[]; /* tx.data, rx.data, rx.text: once the handshake is done */
};

/* ---- Start and end -------------------------------------------------------------------------------------------- */

static void expect(struct channel *channel, enum channel_state state, size_t bytes)
{
    channel->state = state;
    channel->sealed->transfer = (struct transfer){.data = &channel->sealed->in, .bytes = bytes};
}

int channel_start(struct channel *channel, int fd, const uint8_t *key, enum auth_purpose purpose, int server)
{
    struct sealed *sealed;

    *channel = (struct channel){.fd = fd, .state = CHANNEL_OPEN};
    if (!key)
        return 0;
    channel->sealed = sealed = calloc(1, sizeof(*sealed));
    if (!sealed || auth_start(&sealed->auth, key, purpose, server)) {
        channel_close(channel);
        errno = sealed ? EIO : ENOMEM;
        return -1;
    }
    if (server) {
        expect(channel, CHANNEL_GREETING, sizeof(struct auth_greeting));
        return 0;
    }
    channel->state = CHANNEL_SEND_GREETING;
    sealed->out.greeting = sealed->auth.client_greeting;
    sealed->out_bytes = sizeof(struct auth_greeting);
    return 0;
}

void channel_close(struct channel *channel)
{
    if (channel->fd >= 0)
        close(channel->fd);
    free(channel->sealed);
    *channel = CHANNEL_CLOSED;
}

/* ---- Handshake ------------------------------------------------------------------------------------------------ */

/* Room for records comes only now: whoever has not proved itself costs little. Where there is none, it may be tried
 * again. */
static int open_records(struct channel *channel)
{
    struct sealed *larger = realloc(channel->sealed, sizeof(*larger) + 2 * RECORD_MAX + AUTH_RECORD);

    if (!larger) {
        errno = ENOMEM;
        return -1;
    }
    channel->sealed = larger;
    larger->tx.data = larger->buffers;
    larger->rx.data = larger->buffers + RECORD_MAX;
    larger->rx.text = larger->buffers + 2 * (size_t)RECORD_MAX;
    channel->state = CHANNEL_OPEN;
    return 0;
}

static int refuse(enum auth_result result)
{
    errno = result == AUTH_STRANGER ? EACCES : EPROTO;
    return -1;
}

/* Sends the rest of a message of the handshake: 1 = all of it. */
static int send_message(struct channel *channel)
{
    struct sealed *s = channel->sealed;
    struct transfer transfer = {.data = &s->out, .bytes = s->out_bytes, .done = s->out_done};
    const int state = transfer_send(channel->fd, &transfer);

    s->out_done = transfer.done;
    if (state > 0)
        s->out_bytes = s->out_done = 0;
    return state;
}

/* The message that was expected has been received. */
static int take_message(struct channel *channel)
{
    struct sealed *s = channel->sealed;
    enum auth_result result;

    switch (channel->state) {
    case CHANNEL_GREETING:
        result = auth_take_greeting(&s->auth, &s->in.greeting, &s->out.reply);
        s->out_bytes = sizeof(s->out.reply);
        expect(channel, CHANNEL_PROOF, sizeof(s->in.proof));
        if (result == AUTH_STRANGER || (result == AUTH_ALIEN && auth_build(&s->auth)))
            (void)send_message(channel); /* so that it can say why it is not let in */
        break;
    case CHANNEL_REPLY:
        result = auth_take_reply(&s->auth, &s->in.reply, &s->out.proof);
        s->out_bytes = sizeof(s->out.proof);
        if (result == AUTH_OK)
            channel->state = CHANNEL_PROVED;
        break;
    default:
        result = auth_take_proof(&s->auth, &s->in.proof);
        if (result == AUTH_OK)
            channel->state = CHANNEL_PROVED;
        break;
    }
    return result == AUTH_OK ? 0 : refuse(result);
}

int channel_handshake(struct channel *channel)
{
    while (channel->state != CHANNEL_OPEN) {
        int state;
        if (channel->state == CHANNEL_PROVED)
            return open_records(channel) ? -1 : 1;
        state = send_message(channel);
        if (state <= 0)
            return state;
        if (channel->state == CHANNEL_SEND_GREETING)
            expect(channel, CHANNEL_REPLY, sizeof(struct auth_reply));
        state = transfer_receive(channel->fd, &channel->sealed->transfer);
        if (state <= 0)
            return state;
        state = take_message(channel);
        if (state < 0)
            return -1;
    }
    return 1;
}

short channel_events(const struct channel *channel)
{
    return channel->sealed && channel->sealed->out_bytes ? POLLOUT : POLLIN;
}

short channel_blocked_events(const struct channel *channel)
{
    return channel->state == CHANNEL_OPEN || channel->sealed->out_bytes ? POLLOUT : 0;
}

const uint8_t *channel_nonce(const struct channel *channel)
{
    if (!channel->sealed || channel->state == CHANNEL_GREETING)
        return NULL;
    return channel->sealed->auth.client_greeting.nonce;
}

uint64_t channel_build(const struct channel *channel)
{
    return channel->sealed ? auth_build(&channel->sealed->auth) : 0;
}

/* ---- Records -------------------------------------------------------------------------------------------------- */

/* Sends one record with up to `bytes` of data: how many of them, 0 = would block, -1 = errno. */
static ssize_t send_record(struct channel *channel, const void *data, size_t bytes)
{
    struct sealed *s = channel->sealed;
    struct transfer transfer;
    int state;

    if (s->out_bytes && (state = send_message(channel)) <= 0) /* the client's proof */
        return state;
    if (!s->tx.length) {
        s->tx.bytes = bytes < AUTH_RECORD ? bytes : AUTH_RECORD;
        s->tx.length = auth_seal(&s->auth, data, s->tx.bytes, s->tx.data);
        s->tx.done = 0;
        if (!s->tx.length) {
            errno = EIO;
            return -1;
        }
    }
    transfer = (struct transfer){.data = s->tx.data, .bytes = s->tx.length, .done = s->tx.done};
    state = transfer_send(channel->fd, &transfer);
    s->tx.done = transfer.done;
    if (state <= 0)
        return state;
    s->tx.length = 0;
    return (ssize_t)(s->tx.bytes < bytes ? s->tx.bytes : bytes);
}

int channel_send(struct channel *channel, struct transfer *transfer)
{
    if (!channel->sealed)
        return transfer_send(channel->fd, transfer);
    while (transfer->done < transfer->bytes) {
        const ssize_t sent =
            send_record(channel, (const char *)transfer->data + transfer->done, transfer->bytes - transfer->done);
        if (sent <= 0)
            return (int)sent;
        transfer->done += (size_t)sent;
    }
    return 1;
}

/* Receives the next record: 1, 0 = would block, -1 = errno. Reads no byte of the record after it. */
static int receive_record(struct channel *channel)
{
    struct sealed *s = channel->sealed;
    struct record *rx = &s->rx;

    for (;;) {
        const size_t bytes = rx->done < HEAD ? 0 : auth_record_bytes(rx->data);
        struct transfer transfer = {
            .data = rx->data, .bytes = rx->done < HEAD ? HEAD : HEAD + bytes + CRYPTO_TAG, .done = rx->done};
        int state;

        if (rx->done >= HEAD && !bytes)
            break;
        state = transfer_receive(channel->fd, &transfer);
        rx->done = transfer.done;
        if (state <= 0)
            return state;
        if (rx->done == HEAD)
            continue;
        if (auth_unseal(&s->auth, rx->data, bytes, rx->text))
            break;
        rx->bytes = bytes;
        rx->taken = rx->done = 0;
        return 1;
    }
    errno = EBADMSG;
    return -1;
}

int channel_receive(struct channel *channel, struct transfer *transfer)
{
    struct record *rx = channel->sealed ? &channel->sealed->rx : NULL;

    if (!rx)
        return transfer_receive(channel->fd, transfer);
    if (channel->sealed->out_bytes && send_message(channel) < 0) /* the client's proof */
        return -1;
    while (transfer->done < transfer->bytes) {
        const size_t want = transfer->bytes - transfer->done, left = rx->bytes - rx->taken;
        const size_t n = want < left ? want : left;
        int state;

        memcpy((char *)transfer->data + transfer->done, rx->text + rx->taken, n);
        transfer->done += n;
        rx->taken += n;
        if (n == want)
            break;
        state = receive_record(channel);
        if (state <= 0)
            return state;
    }
    return 1;
}

/* ---- With a deadline ------------------------------------------------------------------------------------------ */

static int wait_for(const struct channel *channel, short events, uint64_t deadline)
{
    const int state = socket_wait(channel->fd, events, deadline);

    if (state == 0)
        errno = ETIMEDOUT;
    return state > 0 ? 0 : -1;
}

int channel_handshake_all(struct channel *channel, uint64_t deadline)
{
    for (;;) {
        const int state = channel_handshake(channel);

        if (state)
            return state > 0 ? 0 : -1;
        if (wait_for(channel, channel_events(channel), deadline))
            return -1;
    }
}

int channel_send_all(struct channel *channel, const void *data, size_t bytes, uint64_t deadline)
{
    struct transfer transfer = {.data = (void *)(uintptr_t)data, .bytes = bytes};
    int state;

    while (!(state = channel_send(channel, &transfer)))
        if (wait_for(channel, POLLOUT, deadline))
            return -1;
    return state > 0 ? 0 : -1;
}

int channel_receive_all(struct channel *channel, void *data, size_t bytes, uint64_t deadline)
{
    struct transfer transfer = {.data = data, .bytes = bytes};
    int state;

    while (!(state = channel_receive(channel, &transfer)))
        if (wait_for(channel, POLLIN, deadline))
            return -1;
    return state > 0 ? 0 : -1;
}

int channel_wait(const struct channel *channel, uint64_t deadline)
{
    const struct sealed *s = channel->sealed;

    return s && s->rx.taken < s->rx.bytes ? 1 : socket_wait(channel->fd, POLLIN, deadline);
}
