/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks other than 0 in an all-gather (wire.h, allgather.c). Each sends to rank 0. The result comes from rank 0, or for
 * a child of the tree (tree.h) from its relay; rank 0 then sends it nothing but an error. A relay passes on what it has
 * got, the result or an error, before it returns.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "boot/allgather.h"
#include "util/status.h"

/* ---- Up --------------------------------------------------------------------------------------------------------- */

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
    const unsigned long long sequence = gather->sequence;
    char text[WIRE_TEXT];
    epx_status status;

    if (errno == EBADMSG)
        status = fail(EPX_ERR_PEER, "rank %d: what rank 0 sent in all-gather %llu was changed on its way", gather->rank,
                      sequence);
    else if (errno == ETIMEDOUT)
        status = fail(EPX_ERR_TIMEOUT, "rank %d: rank 0 did not reply within %d ms in all-gather %llu", gather->rank,
                      gather->timeout_ms, sequence);
    else
        return fail(EPX_ERR_PEER, "rank 0 ended during all-gather %llu (%zu bytes per rank), or its connection was cut",
                    sequence, gather->bytes);
    snprintf(text, sizeof(text), "%s", epx_last_error());
    if (between_messages)
        send_error(channel, status, text, deadline_in(0));
    return status;
}

/* Since the last word of rank 0. */
static uint64_t client_deadline(const struct gather *gather)
{
    return deadline_in(gather->timeout_ms + RENDEZVOUS_SLACK_MS);
}

static int is_here(const struct wire_frame *frame)
{
    return frame->magic == WIRE_FRAME_MAGIC && frame->op == WIRE_HERE;
}

/* ---- Down from rank 0 ------------------------------------------------------------------------------------------- */

/* Rank 0 waits for others. Nothing else is on its way to the children: a frame finds room. */
static void pass_on_here(const struct gather *gather)
{
    for (int i = 0; gather->tree && i < gather->tree->count; i++)
        if (gather->tree->children[i].fd >= 0 && send_frame(&gather->tree->children[i], WIRE_HERE, deadline_in(0)))
            channel_close(&gather->tree->children[i]); /* it is lost, which rank 0 notices too */
}

static epx_status check_result(const struct gather *gather, int from, const struct wire_frame *frame)
{
    const size_t total = (size_t)gather->nranks * gather->bytes;

    if (frame->magic != WIRE_FRAME_MAGIC || frame->op != WIRE_RESULT || frame->sequence != gather->sequence ||
        frame->bytes != total)
        return fail(EPX_ERR_MISMATCH,
                    "invalid message %u with %llu bytes from rank %d, expected the %zu bytes of all-gather %llu",
                    frame->op, (unsigned long long)frame->bytes, from, total, (unsigned long long)gather->sequence);
    return EPX_OK;
}

static epx_status recv_result(const struct gather *gather, struct channel *channel, uint64_t deadline)
{
    const size_t total = (size_t)gather->nranks * gather->bytes;
    struct wire_frame frame;
    epx_status status;

    for (;;) {
        if (channel_receive_all(channel, &frame, sizeof(frame), deadline))
            return fail_client(gather, channel, 1);
        if (!is_here(&frame))
            break;
        deadline = client_deadline(gather);
        pass_on_here(gather);
    }
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(channel, &frame, deadline);
    status = check_result(gather, 0, &frame);
    if (status)
        return status;
    return channel_receive_all(channel, gather->recv, total, deadline) ? fail_client(gather, channel, 1) : EPX_OK;
}

/* ---- Down from a relay ------------------------------------------------------------------------------------------ */

struct down {
    const struct gather *gather;
    struct channel *root, *relay;
    int root_ended;
    uint64_t deadline;
};

/* Rank 0 may have ended because it has all it needs: then the result is on its way through the relay. */
static epx_status recv_root_error(struct down *down)
{
    const uint64_t deadline = deadline_in(RENDEZVOUS_CLOSE_MS);
    struct wire_frame frame;

    if (channel_receive_all(down->root, &frame, sizeof(frame), deadline)) {
        down->root_ended = 1;
        return EPX_OK;
    }
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(down->root, &frame, deadline);
    return fail(EPX_ERR_MISMATCH, "invalid message %u from rank 0, expected an error (%d)", frame.op, WIRE_ERROR);
}

/* Rank 0 knows better what has happened, unless nobody else has noticed yet: then this rank tells it. */
static epx_status relay_lost(struct down *down)
{
    const struct gather *gather = down->gather;
    const unsigned long long sequence = gather->sequence;
    const int late = errno == ETIMEDOUT, relay = gather->tree->parent_rank;
    char text[WIRE_TEXT];
    epx_status status = EPX_OK;

    if (!late && !down->root_ended && channel_wait(down->root, deadline_in(RENDEZVOUS_CLOSE_MS)) > 0)
        status = recv_root_error(down);
    if (status)
        return status;
    if (late)
        status = fail(EPX_ERR_TIMEOUT, "rank %d: rank %d did not pass on rank 0's data within %d ms in all-gather %llu",
                      gather->rank, relay, gather->timeout_ms, sequence);
    else
        status =
            fail(EPX_ERR_PEER, "rank %d ended during all-gather %llu (%zu bytes per rank), or its connection was cut",
                 down->root_ended ? 0 : relay, sequence, gather->bytes);
    snprintf(text, sizeof(text), "%s", epx_last_error());
    if (!down->root_ended)
        send_error(down->root, status, text, deadline_in(0));
    return fail(status, "%s", text);
}

static epx_status recv_passed(struct down *down, void *data, size_t bytes)
{
    struct transfer transfer = {.data = data, .bytes = bytes};
    epx_status status = EPX_OK;

    while (!status) {
        struct pollfd polls[2] = {{.fd = down->relay->fd, .events = POLLIN},
                                  {.fd = down->root_ended ? -1 : down->root->fd, .events = POLLIN}};
        int state = channel_receive(down->relay, &transfer);

        if (state > 0)
            return EPX_OK;
        if (state == 0 && (state = poll_until(polls, 2, down->deadline)) == 0) {
            errno = ETIMEDOUT;
            state = -1;
        }
        if (state < 0)
            return relay_lost(down);
        if (polls[1].revents)
            status = recv_root_error(down);
    }
    return status;
}

static epx_status recv_from_relay(const struct gather *gather, struct channel *root, uint64_t deadline)
{
    struct down down = {.gather = gather, .root = root, .relay = &gather->tree->parent, .deadline = deadline};
    struct wire_frame frame;
    epx_status status;

    while (!(status = recv_passed(&down, &frame, sizeof(frame))) && is_here(&frame))
        down.deadline = client_deadline(gather);
    if (!status && frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(down.relay, &frame, deadline_in(RENDEZVOUS_CLOSE_MS));
    if (!status)
        status = check_result(gather, gather->tree->parent_rank, &frame);
    return status ? status : recv_passed(&down, gather->recv, (size_t)gather->nranks * gather->bytes);
}

/* ---- A relay passes on ------------------------------------------------------------------------------------------ */

struct passing {
    struct transfer transfer;
    int in_data;
};

/* Whether the child is done with: it has all, or it is lost, which rank 0 notices too. */
static int pass_to(const struct gather *gather, struct channel *child, struct passing *passing)
{
    for (;;) {
        const int state = channel_send(child, &passing->transfer);

        if (state < 0)
            channel_close(child);
        if (state <= 0 || passing->in_data)
            return state != 0;
        passing->in_data = 1;
        passing->transfer = (struct transfer){.data = gather->recv, .bytes = (size_t)gather->nranks * gather->bytes};
    }
}

/* A child that takes nothing is named by its relay before rank 0, which waits for both in the next all-gather and does
 * not know why, ends its own wait. */
static int pass_ms(const struct gather *gather)
{
    return gather->timeout_ms / 4 * 3;
}

static epx_status children_late(const struct gather *gather, const struct pollfd *polls)
{
    int late = 0;

    while (late < gather->tree->count && polls[late].fd < 0)
        late++;
    return fail(EPX_ERR_TIMEOUT, "rank %d did not receive the result of all-gather %llu from rank %d within %d ms",
                gather->tree->child_ranks[late], (unsigned long long)gather->sequence, gather->rank, pass_ms(gather));
}

static epx_status pass_on(const struct gather *gather)
{
    const uint64_t deadline = deadline_in(pass_ms(gather));
    struct tree *tree = gather->tree;
    struct wire_frame frame = gather_frame(gather, WIRE_RESULT, (uint64_t)gather->nranks * gather->bytes);
    struct passing *passing = calloc((size_t)tree->count, sizeof(*passing));
    struct pollfd *polls = calloc((size_t)tree->count, sizeof(*polls));
    epx_status status = EPX_OK;
    int left = tree->count;

    if (!passing || !polls)
        status = fail(EPX_ERR_MEMORY, "rank %d has no memory for an all-gather among %d ranks", gather->rank,
                      gather->nranks);
    for (int i = 0; !status && i < tree->count; i++) {
        polls[i] = (struct pollfd){.fd = tree->children[i].fd, .events = POLLOUT};
        passing[i].transfer = (struct transfer){.data = &frame, .bytes = sizeof(frame)};
        left -= polls[i].fd < 0;
    }
    while (!status && left) {
        const int ready = poll_until(polls, (size_t)tree->count, deadline);

        if (ready < 0)
            status = fail_errno(EPX_ERR_SYSTEM, "rank %d cannot wait for its children", gather->rank);
        else if (ready == 0)
            status = children_late(gather, polls);
        for (int i = 0; !status && i < tree->count; i++)
            if (polls[i].fd >= 0 && polls[i].revents && pass_to(gather, &tree->children[i], &passing[i])) {
                polls[i].fd = -1;
                left--;
            }
    }
    /* Those in the middle of the result would take an error for the rest of it: rank 0 tells them. */
    for (int i = 0; status && left && passing && polls && i < tree->count; i++)
        if (polls[i].fd >= 0)
            channel_close(&tree->children[i]);
    free(polls);
    free(passing);
    return status;
}

static epx_status receive(const struct gather *gather, struct channel *root, uint64_t deadline)
{
    const struct tree *tree = gather->tree;
    epx_status status;

    if (tree && tree->parent.fd >= 0)
        return recv_from_relay(gather, root, deadline);
    status = recv_result(gather, root, deadline);
    if (status || !tree || !tree->count)
        return status;
    status = pass_on(gather);
    if (status) {
        char text[WIRE_TEXT];
        snprintf(text, sizeof(text), "%s", epx_last_error());
        send_error(root, status, text, deadline_in(0));
        return fail(status, "%s", text);
    }
    return EPX_OK;
}

/* On failure: the children get the reason, and nothing can be used again. */
static void end_client(const struct gather *gather, struct channel *channel, epx_status status)
{
    char text[WIRE_TEXT];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    channel_close(channel);
    if (gather->tree) {
        disconnect_all(gather->tree->children, gather->tree->count, status, text);
        tree_close(gather->tree);
    }
    (void)fail(status, "%s", text);
}

epx_status allgather_client(const struct gather *gather, struct channel *channel)
{
    uint64_t deadline = client_deadline(gather);
    struct wire_frame frame = gather_frame(gather, WIRE_GATHER, gather->bytes);
    int state = send_or_error(channel, &frame, sizeof(frame), deadline);
    epx_status status;

    if (state > 0)
        state = send_or_error(channel, gather->send, gather->bytes, deadline);
    /* After a broken pipe, rank 0's error may still be in the receive buffer. */
    if (state < 0 && (errno == EPIPE || errno == ECONNRESET))
        state = 0;
    status = state < 0 ? fail_client(gather, channel, 0) : receive(gather, channel, deadline);
    if (status)
        end_client(gather, channel, status);
    return status;
}
