/* SPDX-License-Identifier: Apache-2.0 */
/* The tree of results (tree.h): how relays and their children find each other. */
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <unistd.h>

#include "boot/conn.h"
#include "boot/lobby.h"
#include "boot/tree.h"
#include "util/build.h"
#include "util/log.h"
#include "util/status.h"

static int own_address(const struct channel *channel, struct endpoint *at)
{
    at->length = sizeof(at->address);
    return getsockname(channel->fd, (struct sockaddr *)&at->address, &at->length);
}

static epx_status lost_root(const struct rendezvous_config *config)
{
    if (errno == ETIMEDOUT)
        return fail(EPX_ERR_TIMEOUT, "rank 0 did not confirm within %d ms that all ranks have connected",
                    config->timeout_ms + RENDEZVOUS_SLACK_MS);
    return fail_to_meet(0);
}

/* The next message of rank 0, which must be `op`. */
static epx_status recv_op(const struct rendezvous_config *config, struct channel *channel, enum wire_op op,
                          struct wire_frame *frame, uint64_t deadline)
{
    if (channel_receive_all(channel, frame, sizeof(*frame), deadline))
        return lost_root(config);
    if (frame->magic == WIRE_FRAME_MAGIC && frame->op == WIRE_ERROR)
        return receive_error(channel, frame, deadline_in(RENDEZVOUS_CLOSE_MS));
    if (frame->magic != WIRE_FRAME_MAGIC || frame->op != (uint32_t)op)
        return fail(EPX_ERR_MISMATCH, "invalid message %u from rank 0, expected %d", frame->op, op);
    return EPX_OK;
}

/* ---- Relay ---------------------------------------------------------------------------------------------------- */

/* A connection whose other end knows the secret and has not said yet which rank it is. */
struct guest {
    struct channel channel;
    struct wire_hello hello;
    size_t got;
    uint64_t deadline;
};

enum { GUESTS = LOBBY_PLACES, POLLS = 2 + LOBBY_PLACES + GUESTS, TICK_MS = 20, BACKLOG = 4096 };

struct relay {
    const struct rendezvous_config *config;
    struct tree *tree;
    struct channel *root;
    int listener, expected;
    unsigned refused; /* connections whose other end knows the secret and is no child of this rank */
    struct lobby lobby;
    struct guest guests[GUESTS];
    struct pollfd polls[POLLS];
};

static int is_child(const struct relay *relay, const struct wire_hello *hello)
{
    const struct rendezvous_config *config = relay->config;

    if (hello->magic != WIRE_HELLO_MAGIC || hello->build != build_number() || hello->job != config->job ||
        hello->nranks != config->nranks || hello->rank <= config->rank || hello->rank >= config->nranks ||
        tree_parent(relay->tree->block, hello->rank) != config->rank)
        return 0;
    for (int i = 0; i < relay->tree->count; i++)
        if (relay->tree->child_ranks[i] == hello->rank)
            return 0;
    return 1;
}

static void take_guest(struct relay *relay, struct guest *guest)
{
    struct transfer transfer = {.data = &guest->hello, .bytes = sizeof(guest->hello), .done = guest->got};
    const int state = channel_receive(&guest->channel, &transfer);

    guest->got = transfer.done;
    if (state == 0 && !deadline_passed(guest->deadline))
        return;
    if (state > 0 && is_child(relay, &guest->hello) && !send_frame(&guest->channel, WIRE_WELCOME, deadline_in(0))) {
        relay->tree->child_ranks[relay->tree->count] = guest->hello.rank;
        relay->tree->children[relay->tree->count++] = guest->channel;
        guest->channel = CHANNEL_CLOSED;
    } else if (state > 0 && !relay->refused++) {
        log_line(LOG_WARN, "a connection was refused that says it is rank %d of %d: this port is for ranks %d to %d",
                 guest->hello.rank, guest->hello.nranks, relay->config->rank + 1,
                 relay->config->rank + relay->expected);
    }
    channel_close(&guest->channel);
}

/* Whoever finds no place connects again, or gets results from rank 0. */
static void admit(struct relay *relay)
{
    struct channel channel;

    while (lobby_next(&relay->lobby, &channel)) {
        int at = 0;

        while (at < GUESTS && relay->guests[at].channel.fd >= 0)
            at++;
        if (at < GUESTS)
            relay->guests[at] = (struct guest){.channel = channel, .deadline = deadline_in(RENDEZVOUS_HELLO_MS)};
        else
            channel_close(&channel);
    }
    for (int i = 0; i < GUESTS; i++)
        if (relay->guests[i].channel.fd >= 0)
            take_guest(relay, &relay->guests[i]);
}

/* Accepts children until rank 0 says that all have found their relay, or fails. */
static epx_status serve(struct relay *relay, uint64_t deadline)
{
    struct wire_frame frame;

    for (;;) {
        const int whole = relay->tree->count == relay->expected;
        const uint64_t tick = whole ? deadline : deadline_in(TICK_MS);

        relay->polls[0] = (struct pollfd){.fd = relay->root->fd, .events = POLLIN};
        relay->polls[1] =
            (struct pollfd){.fd = !whole && lobby_has_room(&relay->lobby) ? relay->listener : -1, .events = POLLIN};
        lobby_polls(&relay->lobby, relay->polls + 2);
        for (int i = 0; i < GUESTS; i++)
            relay->polls[2 + LOBBY_PLACES + i] = (struct pollfd){.fd = relay->guests[i].channel.fd, .events = POLLIN};
        if (poll_until(relay->polls, POLLS, tick < deadline ? tick : deadline) < 0)
            return fail_errno(EPX_ERR_SYSTEM, "rank %d cannot wait for the other ranks", relay->config->rank);
        if (relay->polls[0].revents || deadline_passed(deadline))
            return recv_op(relay->config, relay->root, WIRE_GO, &frame, deadline);
        if (relay->polls[1].revents)
            (void)lobby_accept(&relay->lobby, relay->listener);
        admit(relay);
    }
}

static void send_port(struct relay *relay, uint64_t deadline)
{
    struct {
        struct wire_frame frame;
        struct conn_address address;
    } message = {.frame = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_PORT, .bytes = sizeof(message.address)}};
    struct endpoint at;

    if (!own_address(relay->root, &at)) {
        endpoint_set_port(&at, 0);
        relay->listener = socket_listen(&at, BACKLOG);
    }
    at.length = sizeof(at.address);
    /* Without a listener the address is empty, and the children get results from rank 0. */
    if (relay->listener >= 0 && !getsockname(relay->listener, (struct sockaddr *)&at.address, &at.length))
        conn_address_put(&message.address, &at);
    (void)channel_send_all(relay->root, &message, sizeof(message), deadline);
}

static epx_status be_relay(struct relay *relay, uint64_t deadline)
{
    const size_t n = (size_t)relay->expected + 1;
    epx_status status;

    relay->tree->children = calloc(n, sizeof(*relay->tree->children));
    relay->tree->child_ranks = calloc(n, sizeof(*relay->tree->child_ranks));
    if (!relay->tree->children || !relay->tree->child_ranks)
        return fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", relay->config->nranks);
    for (int i = 0; i < GUESTS; i++)
        relay->guests[i].channel = CHANNEL_CLOSED;
    lobby_open(&relay->lobby, relay->config->key, AUTH_TREE);
    /* After a failed send, rank 0's error may still be in the receive buffer: serve() reads it. */
    send_port(relay, deadline);
    status = serve(relay, deadline);
    for (int i = 0; i < GUESTS; i++)
        channel_close(&relay->guests[i].channel);
    lobby_close(&relay->lobby);
    if (relay->lobby.strangers)
        log_line(LOG_WARN,
                 "%u connections to the port for ranks %d to %d were closed: they did not prove in time that they know "
                 "the secret of this job; the last came from %s",
                 relay->lobby.strangers, relay->config->rank + 1, relay->config->rank + relay->expected,
                 relay->lobby.last);
    if (relay->listener >= 0)
        close(relay->listener);
    return status;
}

static epx_status open_relay(const struct rendezvous_config *config, struct channel *channel, struct tree *tree,
                             uint64_t deadline)
{
    const int left = config->nranks - config->rank;
    struct relay *relay = calloc(1, sizeof(*relay));
    epx_status status;

    if (!relay)
        return fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", config->nranks);
    relay->config = config;
    relay->tree = tree;
    relay->root = channel;
    relay->listener = -1;
    relay->expected = (left < tree->block ? left : tree->block) - 1;
    status = be_relay(relay, deadline);
    free(relay);
    return status;
}

/* ---- Child ---------------------------------------------------------------------------------------------------- */

static uint64_t sooner(int ms, uint64_t deadline)
{
    const uint64_t at = deadline_in(ms);

    return at < deadline ? at : deadline;
}

/* The relay's address as this machine must use it: 0, or -1 with errno. */
static int find_relay(const struct conn_address *address, const struct channel *root, struct endpoint *to)
{
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&to->address;
    struct endpoint own;

    errno = EADDRNOTAVAIL;
    if (conn_address_get(address, to) || own_address(root, &own) ||
        endpoint_is_loopback(to) != endpoint_is_loopback(&own))
        return -1;
    if (to->address.ss_family == AF_INET6 && endpoint_is_link_local(to))
        in6->sin6_scope_id = ((const struct sockaddr_in6 *)&own.address)->sin6_scope_id;
    return 0;
}

static int connect_relay(const struct rendezvous_config *config, const struct endpoint *to, struct channel *parent,
                         uint64_t deadline)
{
    const struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC,
                                     .version = WIRE_VERSION,
                                     .build = build_number(),
                                     .job = config->job,
                                     .rank = config->rank,
                                     .nranks = config->nranks};
    const uint64_t reply = sooner(TREE_REPLY_MS, deadline);
    const int fd = socket_connect(to, NULL, sooner(TREE_CONNECT_MS, deadline));
    struct wire_frame welcome;

    if (fd < 0 || channel_start(parent, fd, config->key, AUTH_TREE, 0))
        return -1;
    if (!channel_handshake_all(parent, reply) && !channel_send_all(parent, &hello, sizeof(hello), reply) &&
        !channel_receive_all(parent, &welcome, sizeof(welcome), reply)) {
        errno = EPROTO;
        if (welcome.magic == WIRE_FRAME_MAGIC && welcome.op == WIRE_WELCOME)
            return 0;
    }
    return -1;
}

static epx_status open_child(const struct rendezvous_config *config, struct channel *channel, struct tree *tree,
                             uint64_t deadline)
{
    struct wire_frame frame, ready = {.magic = WIRE_FRAME_MAGIC, .op = WIRE_READY, .sequence = 1};
    struct conn_address address;
    struct endpoint to;
    epx_status status = recv_op(config, channel, WIRE_PARENT, &frame, deadline);

    if (status)
        return status;
    if (channel_receive_all(channel, &address, sizeof(address), deadline))
        return lost_root(config);
    tree->parent_rank = tree_parent(tree->block, config->rank);
    if (find_relay(&address, channel, &to) || connect_relay(config, &to, &tree->parent, deadline)) {
        log_line(LOG_INFO, "rank %d cannot be reached (%m): rank 0 sends what it would pass on", tree->parent_rank);
        channel_close(&tree->parent);
        ready.sequence = 0;
    }
    if (!channel_send_all(channel, &ready, sizeof(ready), deadline))
        return EPX_OK;
    status = recv_op(config, channel, WIRE_GO, &frame, deadline); /* rank 0's error, if it has sent one */
    return status ? status : lost_root(config);
}

epx_status tree_open_client(const struct rendezvous_config *config, int block, struct channel *channel,
                            struct tree *tree)
{
    const uint64_t deadline = deadline_in(config->timeout_ms + RENDEZVOUS_SLACK_MS);
    epx_status status;

    *tree = TREE_NONE;
    tree->block = block;
    if (!block || config->rank < block)
        return EPX_OK;
    if (tree_parent(block, config->rank))
        status = open_child(config, channel, tree, deadline);
    else
        status = open_relay(config, channel, tree, deadline);
    if (status) {
        tree_close(tree);
        channel_close(channel);
    }
    return status;
}
