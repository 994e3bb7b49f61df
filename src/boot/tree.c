/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of results (tree.h): its shape, and rank 0's side of making it. */
#include "boot/tree.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot/conn.h"
#include "util/env.h"
#include "util/status.h"

/* ---- Shape ---------------------------------------------------------------------------------------------------- */

int tree_block(int nranks)
{
    int block = nranks < TREE_MIN_RANKS ? 0 : 1;

    while (block && block * block < nranks)
        block++;
    block = (int)env_int("EPX_BOOT_BLOCK", block, 0, RENDEZVOUS_MAX_RANKS);
    return block > 1 && block < nranks ? block : 0;
}

int tree_parent(int block, int rank)
{
    return block && rank % block ? rank - rank % block : 0;
}

static int is_relay(int block, int rank)
{
    return rank && rank % block == 0;
}

void tree_close(struct tree *tree)
{
    for (int i = 0; i < tree->count; i++)
        channel_close(&tree->children[i]);
    channel_close(&tree->parent);
    free(tree->children);
    free(tree->child_ranks);
    free(tree->served);
    *tree = TREE_NONE;
}

/* ---- Rank 0 --------------------------------------------------------------------------------------------------- */

struct message {
    struct wire_frame frame;
    union {
        struct conn_address address;
        struct wire_error error;
    };
};

struct root {
    const struct rendezvous_config *config;
    struct channel *channels;
    struct tree *tree;
    struct pollfd *polls;
    struct message *messages; /* of each rank */
    size_t *got;              /* bytes of it */
    unsigned char *present;   /* the message is complete, or none is expected */
    uint64_t deadline;
};

static epx_status check_message(const struct message *message, int rank, enum wire_op op)
{
    const struct wire_frame *frame = &message->frame;

    if (frame->magic == WIRE_FRAME_MAGIC && frame->op == WIRE_ERROR)
        return fail_with(&message->error);
    if (frame->magic != WIRE_FRAME_MAGIC || frame->op != (uint32_t)op)
        return fail(EPX_ERR_MISMATCH, "invalid message %u from rank %d, expected %d", frame->op, rank, op);
    return EPX_OK;
}

/* What follows the frame: an error, an address, or nothing. */
static size_t rest_of(const struct message *message, enum wire_op op)
{
    if (message->frame.magic != WIRE_FRAME_MAGIC)
        return 0;
    if (message->frame.op == WIRE_ERROR)
        return sizeof(message->error);
    return message->frame.op == (uint32_t)op && op == WIRE_PORT ? sizeof(message->address) : 0;
}

static epx_status recv_from(struct root *root, int rank, enum wire_op op)
{
    struct message *message = &root->messages[rank];

    for (;;) {
        const size_t head = sizeof(message->frame), bytes = root->got[rank] < head ? head : head + rest_of(message, op);
        struct transfer transfer = {.data = message, .bytes = bytes, .done = root->got[rank]};
        const int state = channel_receive(&root->channels[rank], &transfer);

        root->got[rank] = transfer.done;
        if (state < 0)
            return fail_to_meet(rank);
        if (state == 0)
            return EPX_OK;
        if (bytes == head && rest_of(message, op))
            continue;
        root->present[rank] = 1;
        root->polls[rank].fd = -1;
        return check_message(message, rank, op);
    }
}

/* Receives `op` from all relays, or from all their children. */
static epx_status collect(struct root *root, enum wire_op op, int of_relays)
{
    const int n = root->config->nranks, block = root->tree->block;
    char absent[128];
    epx_status status = EPX_OK;
    int ready = 1;

    for (int r = 0; r < n; r++) {
        root->present[r] = of_relays ? !is_relay(block, r) : !tree_parent(block, r);
        root->polls[r] = (struct pollfd){.fd = root->present[r] ? -1 : root->channels[r].fd, .events = POLLIN};
        root->got[r] = 0;
    }
    while (!status && ready && memchr(root->present, 0, (size_t)n)) {
        ready = poll_until(root->polls, (size_t)n, root->deadline);
        if (ready < 0)
            return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot wait for the other ranks");
        for (int r = 1; !status && r < n; r++)
            if (!root->present[r] && root->polls[r].revents)
                status = recv_from(root, r, op);
    }
    if (status || ready)
        return status;
    absent_ranks(root->present, n, absent, sizeof(absent));
    return fail(EPX_ERR_TIMEOUT, "%s did not %s within %d ms", absent,
                of_relays ? "say where it listens" : "connect to the rank that passes on rank 0's data",
                root->config->timeout_ms);
}

static epx_status send_to(struct root *root, int rank, const void *data, size_t bytes)
{
    if (!channel_send_all(&root->channels[rank], data, bytes, root->deadline))
        return EPX_OK;
    return fail_to_meet(rank);
}

static epx_status introduce(struct root *root)
{
    epx_status status = collect(root, WIRE_PORT, 1);

    for (int r = 1; !status && r < root->config->nranks; r++) {
        const int parent = tree_parent(root->tree->block, r);
        struct {
            struct wire_frame frame;
            struct conn_address address;
        } message = {.frame = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_PARENT, .bytes = sizeof(message.address)}};

        if (!parent)
            continue;
        message.frame.sequence = (uint64_t)parent;
        message.address = root->messages[parent].address;
        status = send_to(root, r, &message, sizeof(message));
    }
    return status;
}

static epx_status finish(struct root *root)
{
    const struct wire_frame go = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_GO};
    epx_status status = collect(root, WIRE_READY, 0);

    for (int r = 1; !status && r < root->config->nranks; r++) {
        root->tree->served[r] = tree_parent(root->tree->block, r) && root->messages[r].frame.sequence;
        if (is_relay(root->tree->block, r))
            status = send_to(root, r, &go, sizeof(go));
    }
    return status;
}

epx_status tree_open_root(const struct rendezvous_config *config, int block, struct channel *channels,
                          struct tree *tree)
{
    const size_t n = (size_t)config->nranks;
    struct root root = {.config = config, .channels = channels, .tree = tree};
    epx_status status = EPX_ERR_MEMORY;
    char text[WIRE_TEXT];

    *tree = TREE_NONE;
    tree->block = block;
    if (!block)
        return EPX_OK;
    root.deadline = deadline_in(config->timeout_ms);
    tree->served = calloc(n, 1);
    root.polls = calloc(n, sizeof(*root.polls));
    root.messages = calloc(n, sizeof(*root.messages));
    root.got = calloc(n, sizeof(*root.got));
    root.present = calloc(n, 1);
    if (tree->served && root.polls && root.messages && root.got && root.present)
        status = introduce(&root);
    else
        fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", config->nranks);
    if (!status)
        status = finish(&root);
    free(root.present);
    free(root.got);
    free(root.messages);
    free(root.polls);
    if (status) {
        snprintf(text, sizeof(text), "%s", epx_last_error());
        disconnect_all(channels, config->nranks, status, text);
        tree_close(tree);
    }
    return status;
}
