/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks other than 0 in an all-gather (wire.h, allgather.c): each sends to rank 0, which sends the result. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "boot/allgather.h"
#include "util/status.h"

/* Sends until done or until data arrives, which can only be an error. 1 = done, 0 = data arrived, -1 = errno. */
static int send_or_error(struct channel *channel, const void *data, size_t bytes, uint64_t deadline)
{
    struct transfer transfer = {.data = (void *)(uintptr_t)data, .bytes = bytes};

    for (;;) {
        struct pollfd entry = {.fd = channel->fd, .events = POLLIN | POLLOUT};
        int state = channel_send(channel, &transfer);
        if (state)
            return state;
        state = poll_until(&entry, 1, deadline);
        if (state < 0)
            return -1;
        if (state == 0) {
            errno = ETIMEDOUT;
            return -1;
        }
        if (entry.revents & POLLIN)
            return 0;
    }
}

/* Sends the failure to rank 0, unless in the middle of a message, where rank 0 would take it for data. */
static epx_status fail_client(const struct gather *gather, struct channel *channel, int between_messages)
{
    char text[WIRE_TEXT];
    epx_status status;

    if (errno != ETIMEDOUT)
        return fail(EPX_ERR_PEER, "rank 0 ended during all-gather %llu (%zu bytes per rank)",
                    (unsigned long long)gather->sequence, gather->bytes);
    status = fail(EPX_ERR_TIMEOUT, "rank %d: rank 0 did not reply within %d ms in all-gather %llu", gather->rank,
                  gather->timeout_ms, (unsigned long long)gather->sequence);
    snprintf(text, sizeof(text), "%s", epx_last_error());
    if (between_messages)
        send_error(channel, status, text, deadline_in(0));
    return status;
}

static epx_status recv_result(const struct gather *gather, struct channel *channel, uint64_t deadline)
{
    size_t total = (size_t)gather->nranks * gather->bytes;
    struct wire_frame frame;

    if (channel_receive_all(channel, &frame, sizeof(frame), deadline))
        return fail_client(gather, channel, 1);
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(channel, &frame, deadline);
    if (frame.magic != WIRE_FRAME_MAGIC || frame.op != WIRE_RESULT || frame.sequence != gather->sequence ||
        frame.bytes != total)
        return fail(EPX_ERR_MISMATCH,
                    "invalid message %u with %llu bytes from rank 0, expected the %zu bytes of all-gather %llu",
                    frame.op, (unsigned long long)frame.bytes, total, (unsigned long long)gather->sequence);
    return channel_receive_all(channel, gather->recv, total, deadline) ? fail_client(gather, channel, 1) : EPX_OK;
}

epx_status allgather_client(const struct gather *gather, struct channel *channel)
{
    uint64_t deadline = deadline_in(gather->timeout_ms + RENDEZVOUS_SLACK_MS);
    struct wire_frame frame = gather_frame(gather, WIRE_GATHER, gather->bytes);
    int state = send_or_error(channel, &frame, sizeof(frame), deadline);
    epx_status status;

    if (state > 0)
        state = send_or_error(channel, gather->send, gather->bytes, deadline);
    /* After a broken pipe, rank 0's error may still be in the receive buffer. */
    if (state < 0 && (errno == EPIPE || errno == ECONNRESET))
        state = 0;
    status = state < 0 ? fail_client(gather, channel, 0) : recv_result(gather, channel, deadline);
    if (status)
        channel_close(channel);
    return status;
}
