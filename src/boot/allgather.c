/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One all-gather (wire.h). Rank 0 first receives from all ranks at once, directly into `recv`, then sends `recv` at
 * once to all ranks that have no relay (tree.h). A rank sends all its data before it receives, and rank 0 sends nothing
 * before it has received from all ranks. So no side sends while its peer does not receive, and full socket buffers
 * cannot deadlock, whatever the size. The one exception is an error from rank 0 while a rank still sends: a sending
 * rank checks for it.
 *
 * A rank that comes long before rank 0 would give up before it, and name rank 0, which is only late, instead of a rank
 * that never comes. So rank 0 says HERE to those that have given their part once it has waited for half a second, and
 * their deadline begins again. Children get it through their relay, like results: on the connection to rank 0 it could
 * come after the result.
 */
#include "boot/allgather.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/status.h"

struct wire_frame gather_frame(const struct gather *gather, enum wire_op op, uint64_t bytes)
{
    return (struct wire_frame){
        .magic = WIRE_FRAME_MAGIC, .op = op, .sequence = gather->sequence, .bytes = bytes, .group = gather->group};
}

/* ---- Rank 0 ------------------------------------------------------------------------------------------------- */

enum stage { FRAME, DATA, ERROR_TEXT, DONE };

struct peer {
    enum stage stage;
    struct transfer transfer;
    struct wire_frame frame;
    struct wire_error error;
    int told; /* HERE */
};

struct root {
    const struct gather *gather;
    struct channel *channels;
    struct peer *peers;
    struct pollfd *polls;
    int left;         /* peers that are not DONE */
    const char *duty; /* what late ranks have not done, for the message */
    uint64_t deadline;
};

static void expect(struct peer *peer, enum stage stage, void *data, size_t bytes)
{
    peer->stage = stage;
    peer->transfer = (struct transfer){.data = data, .bytes = bytes};
}

epx_status gather_check_frame(const struct gather *gather, int rank, const struct wire_frame *frame)
{
    if (frame->magic != WIRE_FRAME_MAGIC || frame->op != WIRE_GATHER)
        return fail(EPX_ERR_MISMATCH, "invalid message %u from rank %d, expected an all-gather (%d)", frame->op, rank,
                    WIRE_GATHER);
    if (frame->sequence != gather->sequence)
        return fail(EPX_ERR_MISMATCH, "rank %d is at all-gather %llu, rank 0 at %llu", rank,
                    (unsigned long long)frame->sequence, (unsigned long long)gather->sequence);
    if (frame->group != gather->group)
        return fail(EPX_ERR_MISMATCH,
                    "rank %d is in an all-gather of its group number %u, rank 0 of number %u: create groups in the "
                    "same order on "
                    "all ranks",
                    rank, frame->group, gather->group);
    if (frame->bytes != gather->bytes)
        return fail(EPX_ERR_MISMATCH, "rank %d sends %llu bytes, rank 0 %zu, in all-gather %llu of the process", rank,
                    (unsigned long long)frame->bytes, gather->bytes, (unsigned long long)gather->sequence);
    return EPX_OK;
}

/* The part that was expected from a rank has been received. */
static epx_status advance(struct root *root, int rank)
{
    const struct gather *gather = root->gather;
    struct peer *peer = &root->peers[rank];
    epx_status status;

    switch (peer->stage) {
    case FRAME:
        if (peer->frame.magic == WIRE_FRAME_MAGIC && peer->frame.op == WIRE_ERROR &&
            peer->frame.bytes == sizeof(peer->error)) {
            expect(peer, ERROR_TEXT, &peer->error, sizeof(peer->error));
            return EPX_OK;
        }
        status = gather_check_frame(gather, rank, &peer->frame);
        if (!status)
            expect(peer, DATA, (char *)gather->recv + (size_t)rank * gather->bytes, gather->bytes);
        return status;
    case DATA:
        root->left--;
        /* From here on only an error, or the end of the connection, can arrive before the result is sent. */
        expect(peer, DONE, &peer->frame, sizeof(peer->frame));
        return EPX_OK;
    case DONE:
        if (peer->frame.magic == WIRE_FRAME_MAGIC && peer->frame.op == WIRE_ERROR)
            expect(peer, ERROR_TEXT, &peer->error, sizeof(peer->error));
        else
            return fail(EPX_ERR_MISMATCH, "rank %d sent data before all-gather %llu was complete", rank,
                        (unsigned long long)gather->sequence);
        return EPX_OK;
    case ERROR_TEXT:
        return fail_with(&peer->error);
    }
    return EPX_OK;
}

static epx_status rank_lost(const struct gather *gather, int rank)
{
    unsigned long long sequence = gather->sequence;

    if (errno == EBADMSG)
        return fail(EPX_ERR_PEER, "what rank %d sent in all-gather %llu was changed on its way", rank, sequence);
    if (errno == ENOTCONN || errno == ECONNRESET || errno == EPIPE)
        return fail(EPX_ERR_PEER,
                    "rank %d ended during all-gather %llu (%zu bytes per rank), or its connection was cut", rank,
                    sequence, gather->bytes);
    return fail_errno(EPX_ERR_PEER, "rank %d was lost during all-gather %llu (%zu bytes per rank)", rank, sequence,
                      gather->bytes);
}

static epx_status recv_rank(struct root *root, int rank)
{
    struct peer *peer = &root->peers[rank];

    for (;;) {
        int state = channel_receive(&root->channels[rank], &peer->transfer);
        epx_status status;
        if (state < 0)
            return rank_lost(root->gather, rank);
        if (state == 0)
            return EPX_OK;
        status = advance(root, rank);
        if (status)
            return status;
    }
}

/* A relay that is stopped keeps its children from the result before, all or some of them, and so from coming: where the
 * relay is absent, it is named alone. A relay that a child keeps from coming has said so before (pass_on()). Returns
 * how many are not named. */
static int forgive_children(const struct gather *gather, unsigned char *present)
{
    const int block = gather->tree ? gather->tree->block : 0;
    int forgiven = 0;

    for (int relay = block; block && relay < gather->nranks; relay += block) {
        const int end = relay + block < gather->nranks ? relay + block : gather->nranks;

        for (int r = relay + 1; !present[relay] && r < end; r++)
            if (gather->tree->served[r] && !present[r]) {
                present[r] = 1;
                forgiven++;
            }
    }
    return forgiven;
}

static epx_status gather_timeout(const struct root *root)
{
    const struct gather *gather = root->gather;
    char absent[128], more[80] = "";
    unsigned char *present = calloc((size_t)gather->nranks, 1);
    int forgiven;

    if (!present)
        return fail(EPX_ERR_TIMEOUT, "%d ranks did not %s within %d ms", root->left, root->duty, gather->timeout_ms);
    present[0] = 1;
    for (int i = 1; i < gather->nranks; i++)
        present[i] = root->peers[i].stage == DONE;
    forgiven = gather->sequence > 1 ? forgive_children(gather, present) : 0;
    absent_ranks(present, gather->nranks, absent, sizeof(absent));
    free(present);
    if (forgiven)
        snprintf(more, sizeof(more), ", nor did %d ranks to which it passes on rank 0's data", forgiven);
    return fail(EPX_ERR_TIMEOUT, "%s did not %s within %d ms (all-gather %llu, %zu bytes per rank)%s", absent,
                root->duty, gather->timeout_ms, (unsigned long long)gather->sequence, gather->bytes, more);
}

/* At most until `until`; a failure once the deadline has passed. */
static epx_status wait_for_peers(struct root *root, uint64_t until)
{
    int ready = poll_until(root->polls, (size_t)root->gather->nranks, until < root->deadline ? until : root->deadline);

    if (ready < 0)
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot wait for the other ranks");
    return ready || !deadline_passed(root->deadline) ? EPX_OK : gather_timeout(root);
}

/* To ranks that wait for the result: nothing is on its way to them, so a frame finds room. */
static void send_here(struct root *root)
{
    const unsigned char *served = root->gather->tree ? root->gather->tree->served : NULL;

    for (int i = 1; i < root->gather->nranks; i++)
        if (root->peers[i].stage == DONE && !root->peers[i].told && !(served && served[i])) {
            root->peers[i].told = 1;
            (void)send_frame(&root->channels[i], WIRE_HERE, deadline_in(0));
        }
}

static epx_status collect(struct root *root)
{
    const uint64_t here = deadline_in(RENDEZVOUS_HERE_MS);
    const struct gather *gather = root->gather;
    epx_status status = EPX_OK;

    for (int i = 0; i < gather->nranks; i++) {
        root->polls[i] = (struct pollfd){.fd = root->channels[i].fd, .events = POLLIN};
        expect(&root->peers[i], FRAME, &root->peers[i].frame, sizeof(root->peers[i].frame));
    }
    root->left = gather->nranks - 1;
    root->duty = "send data";
    while (!status && root->left) {
        status = wait_for_peers(root, deadline_passed(here) ? root->deadline : here);
        for (int i = 1; !status && i < gather->nranks; i++)
            if (root->polls[i].revents)
                status = recv_rank(root, i);
        if (!status && root->left && deadline_passed(here))
            send_here(root);
    }
    return status;
}

/* A rank that is lost in the middle of its result cannot get an error message any more; the other ranks do. */
static void drop(struct root *root, int rank)
{
    channel_close(&root->channels[rank]);
    root->polls[rank].fd = -1;
    root->left--;
}

static void send_result(struct root *root, int rank, epx_status *status)
{
    struct peer *peer = &root->peers[rank];
    int state = channel_send(&root->channels[rank], &peer->transfer);

    if (state > 0 && peer->stage == FRAME) {
        expect(peer, DATA, root->gather->recv, (size_t)root->gather->nranks * root->gather->bytes);
        state = channel_send(&root->channels[rank], &peer->transfer);
    }
    if (state < 0) {
        *status = rank_lost(root->gather, rank);
        drop(root, rank);
    } else if (state > 0) {
        peer->stage = DONE;
        root->polls[rank].fd = -1;
        root->left--;
    }
}

/* Continues when one rank is lost: the other ranks still get their result. */
static epx_status distribute(struct root *root)
{
    const struct gather *gather = root->gather;
    const unsigned char *served = gather->tree ? gather->tree->served : NULL;
    uint64_t total = (uint64_t)gather->nranks * gather->bytes;
    epx_status status = EPX_OK;

    root->left = 0;
    for (int i = 1; i < gather->nranks; i++) {
        root->polls[i] = (struct pollfd){.fd = served && served[i] ? -1 : root->channels[i].fd, .events = POLLOUT};
        root->left += root->polls[i].fd >= 0;
        if (root->polls[i].fd < 0)
            continue;
        root->peers[i].frame = gather_frame(gather, WIRE_RESULT, total);
        expect(&root->peers[i], FRAME, &root->peers[i].frame, sizeof(root->peers[i].frame));
    }
    root->duty = "receive the result";
    while (root->left) {
        epx_status waited = wait_for_peers(root, root->deadline);
        for (int i = 1; i < gather->nranks; i++) {
            if (root->polls[i].fd < 0)
                continue;
            if (waited)
                drop(root, i);
            else if (root->polls[i].revents)
                send_result(root, i, &status);
        }
        status = waited ? waited : status;
    }
    return status;
}

epx_status allgather_root(const struct gather *gather, struct channel *channels)
{
    struct root root = {.gather = gather, .channels = channels, .deadline = deadline_in(gather->timeout_ms)};
    epx_status status = EPX_ERR_MEMORY;
    char text[WIRE_TEXT];

    root.peers = calloc((size_t)gather->nranks, sizeof(*root.peers));
    root.polls = calloc((size_t)gather->nranks, sizeof(*root.polls));
    if (!root.peers || !root.polls) {
        fail(EPX_ERR_MEMORY, "rank 0 has no memory for an all-gather among %d ranks", gather->nranks);
        goto free_all;
    }
    if (gather->bytes)
        memmove(gather->recv, gather->send, gather->bytes);
    status = collect(&root);
    if (!status)
        status = distribute(&root);

free_all:
    free(root.polls);
    free(root.peers);
    if (status) {
        snprintf(text, sizeof(text), "%s", epx_last_error());
        disconnect_all(channels, gather->nranks, status, text);
    }
    return status;
}
