/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0 of the rendezvous (wire.h). A connection is PENDING until its rank has joined:
 *
 *   AWAIT_HELLO --valid hello--> AWAIT_ACK --ack--> joined: fds[rank]
 *        |   \--another connection of this rank is in AWAIT_ACK--> HELD (checked again when that one joins or closes)
 *        \--no hello in time, not EPX, or another job--> closed
 *
 * A wrong version, world size or rank in our own job fails the rendezvous on all ranks: waiting would not help.
 */
#include "boot/rendezvous.h"

#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "util/log.h"
#include "util/status.h"

enum { SPARE_PENDING = 32, BACKLOG = 4096, TICK_MS = 50 };

enum pending_state { AWAIT_HELLO, HELD, AWAIT_ACK };

struct pending {
    int fd;
    enum pending_state state;
    uint64_t deadline; /* for the hello */
    size_t got;
    union {
        struct wire_hello hello;
        struct wire_frame frame;
    } in;
    int rank;
};

struct root {
    const struct rendezvous_config *config;
    int *fds;
    unsigned char *present;
    int joined;
    int listeners[RENDEZVOUS_MAX_ADDRESSES];
    int listener_count;
    struct pending *pending;
    struct pollfd *polls;
    int pending_count, pending_limit;
    uint64_t deadline;
};

/* ---- Listening ---------------------------------------------------------------------------------------------- */

static int wildcard(struct endpoint *out, int family)
{
    memset(out, 0, sizeof(*out));
    out->address.ss_family = (sa_family_t)family;
    out->length = family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    return 1;
}

static int is_wildcard(const struct endpoint *endpoint)
{
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&endpoint->address;

    return endpoint->address.ss_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr);
}

static void warn_if_unlisted(const struct rendezvous_config *config, const struct endpoint *own, int own_count,
                             const struct endpoint *master, int master_count)
{
    for (int i = 0; i < own_count; i++)
        for (int j = 0; j < master_count; j++)
            if (endpoint_same_host(&own[i], &master[j]))
                return;
    if (master_count)
        log_line(LOG_WARN, "MASTER_ADDR %s is not an address of the interfaces that EPX_SOCKET_IFNAME \"%s\" selects",
                 config->host, config->interfaces);
}

/* Addresses to listen on: all; those of the selected interfaces; or, when MASTER_ADDR is a loopback address, that one
 * only, which other machines cannot reach. */
static epx_status choose_addresses(const struct root *root, struct endpoint *own, int *count)
{
    const struct rendezvous_config *config = root->config;
    struct endpoint master[RENDEZVOUS_MAX_ADDRESSES];
    int masters = 0;
    epx_status status;

    if (host_is_loopback(config->host))
        return resolve_host(config->host, root->deadline, own, RENDEZVOUS_MAX_ADDRESSES, count);
    *count = wildcard(own, AF_INET6);
    if (!config->interfaces)
        return EPX_OK;
    status = interface_addresses(config->interfaces, own, RENDEZVOUS_MAX_ADDRESSES / 2, count);
    if (status)
        return status;
    /* Debian resolves a machine's own name to a loopback address (127.0.1.1), and ranks on this machine connect to it.
     * Rank 0 works even if it cannot resolve the name, so a failure is ignored. */
    (void)resolve_host(config->host, deadline_in(RENDEZVOUS_HELLO_MS), master, RENDEZVOUS_MAX_ADDRESSES / 2, &masters);
    for (int i = 0; i < masters; i++)
        if (endpoint_is_loopback(&master[i]))
            own[(*count)++] = master[i];
    warn_if_unlisted(config, own, *count, master, masters);
    return EPX_OK;
}

/* Without MASTER_ADDR the launcher's variables were only a guess: rank 0 may run on another machine, where no other
 * rank would find it. A name that cannot be resolved here proves nothing. */
static epx_status check_guess(const struct root *root)
{
    const struct rendezvous_config *config = root->config;
    struct endpoint master[RENDEZVOUS_MAX_ADDRESSES];
    char name[HOST_NAME_MAX + 1] = "HOST";
    int masters = 0;

    if (!config->host_from)
        return EPX_OK;
    (void)resolve_host(config->host, deadline_in(RENDEZVOUS_HELLO_MS), master, RENDEZVOUS_MAX_ADDRESSES, &masters);
    for (int i = 0; i < masters; i++)
        if (endpoint_is_local(&master[i]))
            return EPX_OK;
    if (!masters)
        return EPX_OK;
    gethostname(name, HOST_NAME_MAX);
    return fail(
        EPX_ERR_USAGE,
        "rank 0 runs on %s, but the other ranks will connect to %s (%s): set MASTER_ADDR and MASTER_PORT, as in "
        "%s (HOST: %s)",
        name, config->host, config->host_from, config->host_hint, name);
}

static void stop_listening(struct root *root)
{
    while (root->listener_count)
        close(root->listeners[--root->listener_count]);
}

/* Listens on all addresses with one port: 0, or -1 with errno. */
static int listen_on(struct root *root, struct endpoint *own, int count, int port)
{
    for (int i = 0; i < count; i++) {
        int fd;
        endpoint_set_port(&own[i], port);
        fd = socket_listen(&own[i], BACKLOG);
        if (fd >= 0) {
            root->listeners[root->listener_count++] = fd;
        } else if (errno == EADDRINUSE || errno == EACCES || count == 1) {
            int saved = errno;
            stop_listening(root);
            errno = saved;
            return -1;
        } /* else one of several addresses is not usable, for example while duplicate address detection runs */
    }
    return root->listener_count ? 0 : -1;
}

static epx_status start_listening(struct root *root)
{
    struct endpoint own[RENDEZVOUS_MAX_ADDRESSES];
    int first = root->config->port, last = first + RENDEZVOUS_MORE_PORTS, count;
    epx_status status = check_guess(root);

    if (!status)
        status = choose_addresses(root, own, &count);
    if (status)
        return status;
    last = last > 65535 ? 65535 : last;
    for (int port = first; port <= last; port++) {
        if (!listen_on(root, own, count, port)) {
            log_line(LOG_INFO, "rank 0 listens on port %d for %d ranks", port, root->config->nranks - 1);
            return EPX_OK;
        }
        if (errno == EAFNOSUPPORT && count == 1 && is_wildcard(&own[0])) {
            count = wildcard(own, AF_INET); /* no IPv6 on this machine: try the same port again */
            port--;
        } else if (errno != EADDRINUSE && errno != EACCES) {
            break;
        }
    }
    return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot listen on any of the ports %d to %d", first, last);
}

/* ---- Pending connections ------------------------------------------------------------------------------------ */

static void close_pending(struct pending *pending)
{
    close(pending->fd);
    pending->fd = -1;
}

static struct pending *find_welcomed(struct root *root, int rank)
{
    for (int i = 0; i < root->pending_count; i++)
        if (root->pending[i].fd >= 0 && root->pending[i].state == AWAIT_ACK && root->pending[i].rank == rank)
            return &root->pending[i];
    return NULL;
}

/* Sends the error to the pending rank, then returns it: the caller sends it to all ranks that have joined. */
static epx_status reject(struct pending *pending, epx_status status)
{
    send_error(pending->fd, status, epx_last_error(), deadline_in(0));
    shutdown(pending->fd, SHUT_WR);
    return status;
}

static epx_status check_hello(struct root *root, struct pending *pending)
{
    const struct wire_hello *hello = &pending->in.hello;
    int nranks = root->config->nranks;

    if (hello->version != WIRE_VERSION)
        return reject(pending, fail(EPX_ERR_MISMATCH,
                                    "a rank uses version %u of the bootstrap protocol, rank 0 version %d: use the "
                                    "same version of EPX on all ranks",
                                    hello->version, WIRE_VERSION));
    if (hello->nranks != nranks)
        return reject(pending, fail(EPX_ERR_MISMATCH, "rank %d has WORLD_SIZE %d, rank 0 has %d", hello->rank,
                                    hello->nranks, nranks));
    if (hello->rank < 1 || hello->rank >= nranks)
        return reject(pending,
                      fail(EPX_ERR_MISMATCH, "a process has RANK %d, expected 1 to %d", hello->rank, nranks - 1));
    if (root->present[hello->rank])
        return reject(pending, fail(EPX_ERR_MISMATCH, "two processes have RANK %d", hello->rank));
    return EPX_OK;
}

/* A hello was received, or is checked again. */
static epx_status handle_hello(struct root *root, struct pending *pending)
{
    const struct wire_hello *hello = &pending->in.hello;
    epx_status status;

    if (hello->magic != WIRE_HELLO_MAGIC) {
        close_pending(pending);
        return EPX_OK;
    }
    if (hello->job != root->config->job) {
        (void)send_frame(pending->fd, WIRE_OTHER_JOB, deadline_in(0));
        close_pending(pending);
        return EPX_OK;
    }
    status = check_hello(root, pending);
    if (status)
        return status;
    pending->state = HELD;
    if (find_welcomed(root, hello->rank))
        return EPX_OK;
    pending->rank = hello->rank;
    pending->state = AWAIT_ACK;
    pending->got = 0;
    if (send_frame(pending->fd, WIRE_WELCOME, deadline_in(0)))
        close_pending(pending);
    return EPX_OK;
}

static void join(struct root *root, struct pending *pending)
{
    if (pending->in.frame.magic != WIRE_FRAME_MAGIC || pending->in.frame.op != WIRE_ACK) {
        close_pending(pending);
        return;
    }
    root->fds[pending->rank] = pending->fd;
    root->present[pending->rank] = 1;
    root->joined++;
    pending->fd = -1; /* fds[] owns it now */
}

/* A pending connection is readable. In both states that read, the message has 32 bytes. */
static epx_status recv_pending(struct root *root, struct pending *pending)
{
    struct transfer transfer = {.data = &pending->in, .bytes = sizeof(pending->in), .done = pending->got};
    int state = transfer_receive(pending->fd, &transfer);

    pending->got = transfer.done;
    if (state < 0) {
        close_pending(pending);
        return EPX_OK;
    }
    if (state == 0)
        return EPX_OK;
    if (pending->state == AWAIT_HELLO)
        return handle_hello(root, pending);
    join(root, pending);
    return EPX_OK;
}

static epx_status accept_pending(struct root *root, int listener)
{
    while (root->pending_count < root->pending_limit) {
        int fd = socket_accept(listener);
        if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return EPX_OK;
        if (fd < 0)
            return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot accept a connection (%d of %d ranks have connected)",
                              root->joined + 1, root->config->nranks);
        root->pending[root->pending_count++] =
            (struct pending){.fd = fd, .state = AWAIT_HELLO, .deadline = deadline_in(RENDEZVOUS_HELLO_MS)};
    }
    return EPX_OK;
}

/* Removes connections that are closed or sent no hello in time, and checks those in HELD again. */
static epx_status drop_stale(struct root *root)
{
    int kept = 0;

    for (int i = 0; i < root->pending_count; i++) {
        struct pending *pending = &root->pending[i];
        epx_status status = EPX_OK;
        if (pending->fd >= 0 && pending->state == AWAIT_HELLO && deadline_passed(pending->deadline))
            close_pending(pending);
        if (pending->fd >= 0 && pending->state == HELD)
            status = handle_hello(root, pending);
        if (status)
            return status;
    }
    for (int i = 0; i < root->pending_count; i++)
        if (root->pending[i].fd >= 0)
            root->pending[kept++] = root->pending[i];
    root->pending_count = kept;
    return EPX_OK;
}

/* ---- The rendezvous ----------------------------------------------------------------------------------------- */

static epx_status timed_out(const struct root *root)
{
    char absent[128];

    absent_ranks(root->present, root->config->nranks, absent, sizeof(absent));
    return fail(EPX_ERR_TIMEOUT, "%s did not connect within %d ms (rank 0 listens at %s, first port %d)", absent,
                root->config->timeout_ms, root->config->host, root->config->port);
}

/* A rank that has joined sends nothing before START except an error; otherwise it closed the connection. */
static epx_status recv_joined(const struct root *root, int rank)
{
    struct wire_frame frame;
    uint64_t deadline = deadline_in(RENDEZVOUS_CLOSE_MS);

    if (!receive_all(root->fds[rank], &frame, sizeof(frame), deadline) && frame.magic == WIRE_FRAME_MAGIC &&
        frame.op == WIRE_ERROR)
        return receive_error(root->fds[rank], &frame, deadline);
    return fail(EPX_ERR_PEER, "rank %d ended before all ranks had connected", rank);
}

/* Order of `polls`: listeners, pending connections, joined ranks (by rank; -1 where a rank is missing). */
static size_t fill_polls(struct root *root)
{
    size_t count = 0;
    int room = root->pending_count < root->pending_limit;

    for (int i = 0; i < root->listener_count; i++)
        root->polls[count++] = (struct pollfd){.fd = room ? root->listeners[i] : -1, .events = POLLIN};
    for (int i = 0; i < root->pending_count; i++)
        root->polls[count++] =
            (struct pollfd){.fd = root->pending[i].state == HELD ? -1 : root->pending[i].fd, .events = POLLIN};
    for (int i = 1; i < root->config->nranks; i++)
        root->polls[count++] = (struct pollfd){.fd = root->fds[i], .events = POLLIN};
    return count;
}

static epx_status progress(struct root *root)
{
    size_t count = fill_polls(root), at = 0;
    int pending = root->pending_count, ready;
    uint64_t tick = deadline_in(TICK_MS);
    epx_status status = EPX_OK;

    ready = poll_until(root->polls, count, tick < root->deadline ? tick : root->deadline);
    if (ready < 0)
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot wait for the other ranks");
    for (int i = 0; !status && i < root->listener_count; i++, at++)
        if (root->polls[at].revents)
            status = accept_pending(root, root->listeners[i]);
    for (int i = 0; !status && i < pending; i++, at++)
        if (root->polls[at].revents && root->pending[i].fd >= 0)
            status = recv_pending(root, &root->pending[i]);
    for (int i = 1; !status && i < root->config->nranks; i++, at++)
        if (root->polls[at].revents)
            status = recv_joined(root, i);
    return status ? status : drop_stale(root);
}

static epx_status wait_for_ranks(struct root *root)
{
    epx_status status = EPX_OK;

    while (!status && root->joined < root->config->nranks - 1) {
        status = progress(root);
        if (!status && root->joined < root->config->nranks - 1 && deadline_passed(root->deadline))
            status = timed_out(root);
    }
    for (int i = 1; !status && i < root->config->nranks; i++)
        if (send_frame(root->fds[i], WIRE_START, root->deadline))
            status = fail_errno(EPX_ERR_PEER, "rank %d ended before all ranks had connected", i);
    return status;
}

/* Ranks that are still in the handshake get the error too. */
static void reject_pending(struct root *root, epx_status status)
{
    char text[WIRE_TEXT];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    for (int i = 0; i < root->pending_count; i++)
        if (root->pending[i].fd >= 0) {
            if (status && root->pending[i].state == AWAIT_ACK)
                send_error(root->pending[i].fd, status, text, deadline_in(0));
            close_pending(&root->pending[i]);
        }
    if (status)
        disconnect_all(root->fds, root->config->nranks, status, text);
}

epx_status rendezvous_root(const struct rendezvous_config *config, int *fds)
{
    size_t nranks = (size_t)config->nranks;
    struct root root = {.config = config, .fds = fds, .pending_limit = config->nranks + SPARE_PENDING};
    epx_status status = EPX_ERR_MEMORY;

    for (int i = 0; i < config->nranks; i++)
        fds[i] = -1;
    root.deadline = deadline_in(config->timeout_ms);
    root.present = calloc(nranks, 1);
    root.pending = calloc((size_t)root.pending_limit, sizeof(*root.pending));
    root.polls = calloc((size_t)root.pending_limit + nranks + RENDEZVOUS_MAX_ADDRESSES, sizeof(*root.polls));
    if (!root.present || !root.pending || !root.polls) {
        fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", config->nranks);
        goto free_all;
    }
    root.present[0] = 1;
    status = start_listening(&root);
    if (status)
        goto free_all;
    status = wait_for_ranks(&root);
    stop_listening(&root);
    reject_pending(&root, status);

free_all:
    free(root.polls);
    free(root.pending);
    free(root.present);
    return status;
}
