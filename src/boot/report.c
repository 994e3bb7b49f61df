/* SPDX-License-Identifier: Apache-2.0 */
/* Error messages: their text, and how they are sent between ranks. */
#include "boot/rendezvous.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/status.h"
#include "util/text.h"

enum { NAMED_RANKS = 8 };

int absent_ranks(const unsigned char *present, int nranks, char *text, size_t bytes)
{
    int absent = 0, named = 0;
    size_t used;

    for (int i = 0; i < nranks; i++)
        absent += !present[i];
    snprintf(text, bytes, absent == 1 ? "rank" : "ranks");
    for (int i = 0; i < nranks && named < NAMED_RANKS; i++) {
        const char *separator = !named ? " " : named + 1 == absent ? " and " : ", ";
        if (present[i])
            continue;
        used = strlen(text);
        snprintf(text + used, bytes - used, "%s%d", separator, i);
        named++;
    }
    used = strlen(text);
    if (absent > named)
        snprintf(text + used, bytes - used, " and %d more", absent - named);
    return absent;
}

epx_status fail_to_meet(int rank)
{
    if (errno == EBADMSG)
        return fail(EPX_ERR_PEER, "what rank %d sent before all ranks had connected was changed on its way", rank);
    return fail(EPX_ERR_PEER, "rank %d ended before all ranks had connected, or its connection was cut", rank);
}

int send_frame(struct channel *channel, enum wire_op op, uint64_t deadline)
{
    struct wire_frame frame = {.magic = WIRE_FRAME_MAGIC, .op = op};

    return channel_send_all(channel, &frame, sizeof(frame), deadline);
}

void send_error(struct channel *channel, epx_status status, const char *text, uint64_t deadline)
{
    struct {
        struct wire_frame frame;
        struct wire_error error;
    } message = {.frame = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_ERROR, .bytes = sizeof(struct wire_error)},
                 .error = {.status = status}};

    snprintf(message.error.text, sizeof(message.error.text), "%s", text);
    (void)channel_send_all(channel, &message, sizeof(message), deadline);
}

epx_status fail_with(const struct wire_error *error)
{
    const int known = error->status > EPX_OK && error->status <= EPX_ERR_INTERNAL;
    char text[WIRE_TEXT];

    text_clean(text, sizeof(text), error->text, sizeof(error->text));
    return fail(known ? (epx_status)error->status : EPX_ERR_PEER, "%s", text);
}

epx_status receive_error(struct channel *channel, const struct wire_frame *frame, uint64_t deadline)
{
    struct wire_error error;

    if (frame->bytes != sizeof(error) || channel_receive_all(channel, &error, sizeof(error), deadline))
        return fail(EPX_ERR_PEER, "the peer of a bootstrap connection failed and sent no reason");
    return fail_with(&error);
}

/* Whether more data may arrive. */
static int discard(int fd)
{
    char ignored[4096];
    ssize_t got;

    do
        got = recv(fd, ignored, sizeof(ignored), 0);
    while (got > 0);
    return got < 0 && (errno == EAGAIN || errno == EINTR);
}

/* Closing a socket with unread bytes resets the connection, and the error may be lost: read until the peers close. */
static void drain(const struct channel *channels, int count, uint64_t deadline)
{
    for (int i = 0; i < count; i++) {
        const int fd = channels[i].fd;
        while (fd >= 0 && socket_wait(fd, POLLIN, deadline) > 0)
            if (!discard(fd) || deadline_passed(deadline))
                break;
    }
}

void disconnect_all(struct channel *channels, int count, epx_status status, const char *text)
{
    uint64_t deadline = deadline_in(RENDEZVOUS_CLOSE_MS), now = deadline_in(0);

    for (int i = 0; i < count; i++)
        if (channels[i].fd >= 0) {
            /* Without waiting: a rank that does not read must not keep the others from getting the error. */
            send_error(&channels[i], status, text, now);
            shutdown(channels[i].fd, SHUT_WR);
        }
    drain(channels, count, deadline);
    for (int i = 0; i < count; i++)
        channel_close(&channels[i]);
}
