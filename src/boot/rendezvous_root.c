/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0 of the rendezvous (wire.h). A connection waits in the lobby until it has proved that it knows the secret. Then
 * it is PENDING until its rank has joined:
 *
 *   AWAIT_HELLO --valid hello--> AWAIT_ACK --ack--> joined: channels[rank]
 *        |   \--another connection of this rank is in AWAIT_ACK--> HELD (checked again when that one joins or closes)
 *        \--no hello or no ack in time, not EPX, or another job--> closed
 *
 * A wrong version, world size or rank in our own job fails the rendezvous on all ranks: waiting would not help. Only a
 * rank that knows the secret can say so.
 */
#include "boot/rendezvous.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "boot/listen.h"
#include "boot/lobby.h"
#include "util/build.h"
#include "util/files.h"
#include "util/status.h"

enum { SPARE_PENDING = 32, TICK_MS = 20 };

enum pending_state { AWAIT_HELLO, HELD, AWAIT_ACK };

struct pending {
    struct channel channel;
    enum pending_state state;
    uint64_t deadline; /* for the hello, or the ack */
    size_t got;
    union {
        struct wire_hello hello;
        struct wire_frame frame;
    } in;
    int rank;
};

struct root {
    const struct rendezvous_config *config;
    struct channel *channels;
    unsigned char *present;
    int joined;
    struct listeners listeners;
    struct lobby lobby;
    struct pending *pending;
    struct pollfd *polls;
    int pending_count, pending_limit;
    uint64_t deadline;
    unsigned greetings; /* EPX_SECRET=none here: connections that wanted to prove a secret */
    epx_status failed;  /* the rendezvous has failed: those who come late are told why */
    char reason[WIRE_TEXT];
    int told;
};

/* ---- Pending connections ------------------------------------------------------------------------------------ */

static int is_open(const struct pending *pending)
{
    return pending->channel.fd >= 0;
}

static struct pending *find_welcomed(struct root *root, int rank)
{
    for (int i = 0; i < root->pending_count; i++)
        if (is_open(&root->pending[i]) && root->pending[i].state == AWAIT_ACK && root->pending[i].rank == rank)
            return &root->pending[i];
    return NULL;
}

/* Sends the error to the pending rank, then returns it: the caller sends it to all ranks that have joined. */
static epx_status reject(struct pending *pending, epx_status status)
{
    send_error(&pending->channel, status, epx_last_error(), deadline_in(0));
    shutdown(pending->channel.fd, SHUT_WR);
    return status;
}

epx_status check_hello(const struct wire_hello *hello, int nranks, const unsigned char *present)
{
    char who[32];

    snprintf(who, sizeof(who), "rank %d", hello->rank);
    if (hello->build != build_number())
        return build_fail(who, hello->build, "rank 0", build_number());
    if (hello->nranks != nranks)
        return fail(EPX_ERR_MISMATCH, "rank %d has WORLD_SIZE %d, rank 0 has %d", hello->rank, hello->nranks, nranks);
    if (hello->rank < 1 || hello->rank >= nranks)
        return fail(EPX_ERR_MISMATCH, "a process has RANK %d, expected 1 to %d", hello->rank, nranks - 1);
    if (present[hello->rank])
        return fail(EPX_ERR_MISMATCH, "two processes have RANK %d", hello->rank);
    return EPX_OK;
}

/* A hello was received, or is checked again. */
static epx_status handle_hello(struct root *root, struct pending *pending)
{
    const struct wire_hello *hello = &pending->in.hello;
    epx_status status;

    if (hello->magic != WIRE_HELLO_MAGIC) {
        root->greetings += hello->magic == AUTH_MAGIC;
        channel_close(&pending->channel);
        return EPX_OK;
    }
    if (hello->job != root->config->job) {
        (void)send_frame(&pending->channel, WIRE_OTHER_JOB, deadline_in(0));
        channel_close(&pending->channel);
        return EPX_OK;
    }
    if (root->failed) {
        send_error(&pending->channel, root->failed, root->reason, deadline_in(0));
        shutdown(pending->channel.fd, SHUT_WR);
        pending->state = AWAIT_ACK; /* until it has read that and closes */
        pending->got = 0;
        root->told++;
        return EPX_OK;
    }
    status = check_hello(hello, root->config->nranks, root->present);
    if (status)
        return reject(pending, status);
    pending->state = HELD;
    if (find_welcomed(root, hello->rank))
        return EPX_OK;
    pending->rank = hello->rank;
    pending->state = AWAIT_ACK;
    pending->deadline = deadline_in(RENDEZVOUS_REPLY_MAX_MS);
    pending->got = 0;
    if (send_frame(&pending->channel, WIRE_WELCOME, deadline_in(0)))
        channel_close(&pending->channel);
    return EPX_OK;
}

static void join(struct root *root, struct pending *pending)
{
    if (root->failed || pending->in.frame.magic != WIRE_FRAME_MAGIC || pending->in.frame.op != WIRE_ACK) {
        channel_close(&pending->channel);
        return;
    }
    root->channels[pending->rank] = pending->channel;
    root->present[pending->rank] = 1;
    root->joined++;
    pending->channel = CHANNEL_CLOSED; /* channels[] owns it now */
}

/* A pending connection is readable. In both states that read, the message has 32 bytes. */
static epx_status recv_pending(struct root *root, struct pending *pending)
{
    struct transfer transfer = {.data = &pending->in, .bytes = sizeof(pending->in), .done = pending->got};
    int state = channel_receive(&pending->channel, &transfer);

    pending->got = transfer.done;
    if (state < 0) {
        channel_close(&pending->channel);
        return EPX_OK;
    }
    if (state == 0)
        return EPX_OK;
    if (pending->state == AWAIT_HELLO)
        return handle_hello(root, pending);
    join(root, pending);
    return EPX_OK;
}

/* Whoever knows the secret leaves the lobby. Without room, it connects again. */
static void admit(struct root *root)
{
    struct channel channel;

    while (lobby_next(&root->lobby, &channel)) {
        if (root->pending_count == root->pending_limit) {
            channel_close(&channel);
            continue;
        }
        root->pending[root->pending_count++] =
            (struct pending){.channel = channel, .state = AWAIT_HELLO, .deadline = deadline_in(RENDEZVOUS_HELLO_MS)};
    }
}

static epx_status accept_all(struct root *root, int listener)
{
    if (lobby_accept(&root->lobby, listener))
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot accept a connection (%d of %d ranks have connected)",
                          root->joined + 1, root->config->nranks);
    return EPX_OK;
}

/* Removes connections that are closed or late, and checks those in HELD again. */
static epx_status drop_stale(struct root *root)
{
    int kept = 0;

    for (int i = 0; i < root->pending_count; i++) {
        struct pending *pending = &root->pending[i];
        epx_status status = EPX_OK;
        if (is_open(pending) && pending->state != HELD && deadline_passed(pending->deadline))
            channel_close(&pending->channel);
        if (is_open(pending) && pending->state == HELD)
            status = handle_hello(root, pending);
        if (status)
            return status;
    }
    for (int i = 0; i < root->pending_count; i++)
        if (is_open(&root->pending[i]))
            root->pending[kept++] = root->pending[i];
    root->pending_count = kept;
    return EPX_OK;
}

/* ---- The rendezvous ----------------------------------------------------------------------------------------- */

static const char *other_build(const struct lobby *lobby, char text[100])
{
    char theirs[BUILD_TEXT], own[BUILD_TEXT];

    text[0] = 0;
    if (lobby->build)
        snprintf(text, 100, "; one was build %s of EPX, rank 0 is %s", build_text(lobby->build, theirs),
                 build_text(build_number(), own));
    return text;
}

/* Those who have said nothing until now, or not what rank 0 has waited for, may be ranks without a secret. */
static epx_status timed_out(const struct root *root)
{
    const unsigned unknown = root->lobby.strangers + (unsigned)lobby_count(&root->lobby);
    char absent[128], build[100], strangers[300] = "";

    absent_ranks(root->present, root->config->nranks, absent, sizeof(absent));
    if (!root->config->key && root->greetings)
        snprintf(strangers, sizeof(strangers), "; %u connections came with a secret, and rank 0 has EPX_SECRET=none",
                 root->greetings);
    else if (root->config->key && unknown)
        snprintf(strangers, sizeof(strangers), "; %u connections did not know rank 0's secret, which is from %.100s%s",
                 unknown, root->config->key_from, other_build(&root->lobby, build));
    return fail(EPX_ERR_TIMEOUT, "%s did not connect within %d ms (rank 0 listens at %s%s)", absent,
                root->config->timeout_ms, root->listeners.text, strangers);
}

/* A rank that has joined sends nothing before START except an error; otherwise it closed the connection. */
static epx_status recv_joined(const struct root *root, int rank)
{
    struct channel *channel = &root->channels[rank];
    struct wire_frame frame;
    uint64_t deadline = deadline_in(RENDEZVOUS_CLOSE_MS);

    errno = 0;
    if (!channel_receive_all(channel, &frame, sizeof(frame), deadline) && frame.magic == WIRE_FRAME_MAGIC &&
        frame.op == WIRE_ERROR)
        return receive_error(channel, &frame, deadline);
    return fail_to_meet(rank);
}

/* Order of `polls`: listeners, the lobby, pending connections, joined ranks (by rank; -1 where a rank is missing). */
static size_t fill_polls(struct root *root)
{
    const int room = lobby_has_room(&root->lobby);
    size_t count = 0;

    for (int i = 0; i < root->listeners.count; i++)
        root->polls[count++] = (struct pollfd){.fd = room ? root->listeners.fds[i] : -1, .events = POLLIN};
    lobby_polls(&root->lobby, root->polls + count);
    count += LOBBY_PLACES;
    for (int i = 0; i < root->pending_count; i++)
        root->polls[count++] =
            (struct pollfd){.fd = root->pending[i].state == HELD ? -1 : root->pending[i].channel.fd, .events = POLLIN};
    for (int i = 1; i < root->config->nranks; i++)
        root->polls[count++] = (struct pollfd){.fd = root->channels[i].fd, .events = POLLIN};
    return count;
}

static epx_status progress(struct root *root)
{
    size_t count = fill_polls(root), at = 0;
    const int pending = root->pending_count;
    uint64_t tick = deadline_in(TICK_MS);
    epx_status status = EPX_OK;

    if (poll_until(root->polls, count, tick < root->deadline ? tick : root->deadline) < 0)
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot wait for the other ranks");
    for (int i = 0; !status && i < root->listeners.count; i++, at++)
        if (root->polls[at].revents)
            status = accept_all(root, root->listeners.fds[i]);
    at += LOBBY_PLACES;
    admit(root);
    /* Newcomers too: their hello often comes with the proof, in what was read already. */
    for (int i = 0; !status && i < root->pending_count; i++, at += i <= pending)
        if (is_open(&root->pending[i]) && root->pending[i].state != HELD && (i >= pending || root->polls[at].revents))
            status = recv_pending(root, &root->pending[i]);
    for (int i = 1; !status && i < root->config->nranks; i++, at++)
        if (root->polls[at].revents)
            status = recv_joined(root, i);
    return status ? status : drop_stale(root);
}

static epx_status wait_for_ranks(struct root *root)
{
    const struct wire_frame start = {
        .magic = WIRE_FRAME_MAGIC, .op = WIRE_START, .sequence = (uint64_t)root->config->block};
    epx_status status = EPX_OK;

    while (!status && root->joined < root->config->nranks - 1) {
        status = progress(root);
        if (!status && root->joined < root->config->nranks - 1 && deadline_passed(root->deadline))
            status = timed_out(root);
    }
    for (int i = 1; !status && i < root->config->nranks; i++)
        if (channel_send_all(&root->channels[i], &start, sizeof(start), root->deadline))
            status = fail_to_meet(i);
    return status;
}

/* Ranks that are still in the handshake get the error too. */
static void reject_pending(struct root *root, epx_status status)
{
    char text[WIRE_TEXT];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    for (int i = 0; i < root->pending_count; i++)
        if (is_open(&root->pending[i])) {
            if (status && root->pending[i].state == AWAIT_ACK)
                send_error(&root->pending[i].channel, status, text, deadline_in(0));
            channel_close(&root->pending[i].channel);
        }
    root->pending_count = 0;
    if (status)
        disconnect_all(root->channels, root->config->nranks, status, text);
}

/* Ranks that connect a moment after the failure get its reason too, and not a closed port. */
static void tell_late_ranks(struct root *root, epx_status status, const char *text)
{
    root->failed = status;
    snprintf(root->reason, sizeof(root->reason), "%s", text);
    root->deadline = deadline_in(RENDEZVOUS_CLOSE_MS);
    while (root->joined + root->told < root->config->nranks - 1 && !deadline_passed(root->deadline))
        if (progress(root))
            break;
    for (int i = 0; i < root->pending_count; i++)
        channel_close(&root->pending[i].channel);
}

/* One for each rank; poll() counts entries without a descriptor too. */
static epx_status reserve_files(const struct root *root)
{
    char who[64];

    snprintf(who, sizeof(who), "rank 0 of %d ranks", root->config->nranks);
    return files_need(who, root->pending_limit + root->config->nranks + RENDEZVOUS_MAX_ADDRESSES + LOBBY_PLACES);
}

epx_status rendezvous_root(const struct rendezvous_config *config, struct channel *channels)
{
    const size_t nranks = (size_t)config->nranks;
    struct root root = {.config = config, .channels = channels, .pending_limit = config->nranks + SPARE_PENDING};
    char text[WIRE_TEXT];
    epx_status status = EPX_ERR_MEMORY;

    for (int i = 0; i < config->nranks; i++)
        channels[i] = CHANNEL_CLOSED;
    root.deadline = deadline_in(config->timeout_ms);
    lobby_open(&root.lobby, config->key, AUTH_RENDEZVOUS);
    root.present = calloc(nranks, 1);
    root.pending = calloc((size_t)root.pending_limit, sizeof(*root.pending));
    root.polls =
        calloc((size_t)root.pending_limit + nranks + RENDEZVOUS_MAX_ADDRESSES + LOBBY_PLACES, sizeof(*root.polls));
    if (!root.present || !root.pending || !root.polls) {
        fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", config->nranks);
        goto free_all;
    }
    root.present[0] = 1;
    status = reserve_files(&root);
    if (status)
        goto free_all;
    status = listeners_open(config, root.deadline, &root.listeners);
    if (status)
        goto free_all;
    status = wait_for_ranks(&root);
    if (status)
        snprintf(text, sizeof(text), "%s", epx_last_error());
    reject_pending(&root, status);
    if (status == EPX_ERR_PEER || status == EPX_ERR_MISMATCH)
        tell_late_ranks(&root, status, text);
    listeners_close(&root.listeners);
    lobby_close(&root.lobby);
    if (status)
        fail(status, "%s", text);

free_all:
    free(root.polls);
    free(root.pending);
    free(root.present);
    return status;
}
