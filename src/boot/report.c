/* SPDX-License-Identifier: Apache-2.0 */
/* Error messages: their text, and how they are sent between ranks. */
#include "boot/rendezvous.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/status.h"

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

int send_frame(int fd, enum wire_op op, uint64_t deadline)
{
    struct wire_frame frame = {.magic = WIRE_FRAME_MAGIC, .op = op};

    return send_all(fd, &frame, sizeof(frame), deadline);
}

void send_error(int fd, epx_status status, const char *text, uint64_t deadline)
{
    struct {
        struct wire_frame frame;
        struct wire_error error;
    } message = {.frame = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_ERROR, .bytes = sizeof(struct wire_error)},
                 .error = {.status = status}};

    snprintf(message.error.text, sizeof(message.error.text), "%s", text);
    (void)send_all(fd, &message, sizeof(message), deadline);
}

epx_status fail_with(const struct wire_error *error)
{
    int known = error->status > EPX_OK && error->status <= EPX_ERR_INTERNAL;

    return fail(known ? (epx_status)error->status : EPX_ERR_PEER, "%.*s", WIRE_TEXT - 1, error->text);
}

epx_status receive_error(int fd, const struct wire_frame *frame, uint64_t deadline)
{
    struct wire_error error;

    if (frame->bytes != sizeof(error) || receive_all(fd, &error, sizeof(error), deadline))
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
static void drain(const int *fds, int count, uint64_t deadline)
{
    for (int i = 0; i < count; i++) {
        while (fds[i] >= 0 && socket_wait(fds[i], POLLIN, deadline) > 0)
            if (!discard(fds[i]) || deadline_passed(deadline))
                break;
    }
}

void disconnect_all(int *fds, int count, epx_status status, const char *text)
{
    uint64_t deadline = deadline_in(RENDEZVOUS_CLOSE_MS), now = deadline_in(0);

    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) {
            /* Without waiting: a rank that does not read must not keep the others from getting the error. */
            send_error(fds[i], status, text, now);
            shutdown(fds[i], SHUT_WR);
        }
    drain(fds, count, deadline);
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) {
            close(fds[i]);
            fds[i] = -1;
        }
}
