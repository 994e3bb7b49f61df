/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank 0 of the rendezvous (wire.h). Whoever connects is a VISITOR until it is a rank:
 *
 *   AWAIT_HELLO --hello is fine--> AWAIT_ACK --ack--> joined: fds[rank]
 *        |   \--its rank is in AWAIT_ACK--> HELD (looked at again: the other one joins, or is gone)
 *        \--silent, or not of EPX, or of another job--> closed
 *
 * A wrong version, world size or rank of our own job ends the rendezvous for all: waiting cannot mend it.
 */
#include "boot/meet.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "util/log.h"
#include "util/status.h"

enum { SPARE_VISITORS = 32, BACKLOG = 4096, TICK_MS = 50 };

enum visitor_state { AWAIT_HELLO, HELD, AWAIT_ACK };

struct visitor {
    int fd;
    enum visitor_state state;
    uint64_t deadline; /* for the hello */
    size_t got;
    union {
        struct wire_hello hello;
        struct wire_frame frame;
    } in;
    int rank;
};

struct root {
    const struct meeting *meeting;
    int *fds;
    unsigned char *present;
    int joined;
    int listeners[MEET_MAX_ADDRESSES];
    int listener_count;
    struct visitor *visitors;
    struct pollfd *polls;
    int visitor_count, visitor_limit;
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

static void warn_if_elsewhere(const struct meeting *meeting, const struct endpoint *own, int own_count,
                              const struct endpoint *master, int master_count)
{
    for (int i = 0; i < own_count; i++)
        for (int j = 0; j < master_count; j++)
            if (endpoint_same_host(&own[i], &master[j]))
                return;
    if (master_count)
        log_line(LOG_WARN, "MASTER_ADDR %s is no address of the interfaces that EPX_SOCKET_IFNAME \"%s\" picks",
                 meeting->host, meeting->interfaces);
}

/* Where to listen: everywhere; on the addresses of the interfaces asked for; or, where all ranks are on this machine,
 * on the loopback address that MASTER_ADDR is, out of reach for others. */
static epx_status choose_addresses(const struct root *root, struct endpoint *own, int *count)
{
    const struct meeting *meeting = root->meeting;
    struct endpoint master[MEET_MAX_ADDRESSES];
    int masters = 0;
    epx_status status;

    if (host_is_loopback(meeting->host))
        return resolve_host(meeting->host, root->deadline, own, MEET_MAX_ADDRESSES, count);
    *count = wildcard(own, AF_INET6);
    if (!meeting->interfaces)
        return EPX_OK;
    status = interface_addresses(meeting->interfaces, own, MEET_MAX_ADDRESSES / 2, count);
    if (status)
        return status;
    /* Debian gives a machine's own name a loopback address (127.0.1.1), and ranks of this machine will go there. That
     * the name cannot be resolved here need not trouble rank 0. */
    (void)resolve_host(meeting->host, deadline_in(MEET_HELLO_MS), master, MEET_MAX_ADDRESSES / 2, &masters);
    for (int i = 0; i < masters; i++)
        if (endpoint_is_loopback(&master[i]))
            own[(*count)++] = master[i];
    warn_if_elsewhere(meeting, own, *count, master, masters);
    return EPX_OK;
}

static void stop_listening(struct root *root)
{
    while (root->listener_count)
        close(root->listeners[--root->listener_count]);
}

/* All addresses on one port: 0, or -1 with errno. */
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
        } /* else one address of several that is not usable, say one still being probed for duplicates */
    }
    return root->listener_count ? 0 : -1;
}

static epx_status start_listening(struct root *root)
{
    struct endpoint own[MEET_MAX_ADDRESSES];
    int first = root->meeting->port, last = first + MEET_MORE_PORTS, count;
    epx_status status = choose_addresses(root, own, &count);

    if (status)
        return status;
    last = last > 65535 ? 65535 : last;
    for (int port = first; port <= last; port++) {
        if (!listen_on(root, own, count, port)) {
            log_line(LOG_INFO, "rank 0 listens on port %d for %d ranks", port, root->meeting->nranks - 1);
            return EPX_OK;
        }
        if (errno == EAFNOSUPPORT && count == 1 && is_wildcard(&own[0])) {
            count = wildcard(own, AF_INET); /* no IPv6 here: the same port again */
            port--;
        } else if (errno != EADDRINUSE && errno != EACCES) {
            break;
        }
    }
    return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot listen on any of the ports %d to %d", first, last);
}

/* ---- Visitors ----------------------------------------------------------------------------------------------- */

static void forget(struct visitor *visitor, int close_it)
{
    if (close_it)
        close(visitor->fd);
    visitor->fd = -1;
}

static struct visitor *welcomed(struct root *root, int rank)
{
    for (int i = 0; i < root->visitor_count; i++)
        if (root->visitors[i].fd >= 0 && root->visitors[i].state == AWAIT_ACK && root->visitors[i].rank == rank)
            return &root->visitors[i];
    return NULL;
}

/* Says the same to the visitor, then fails: the caller tells all ranks that have joined. */
static epx_status refuse(struct visitor *visitor, epx_status status)
{
    send_error(visitor->fd, status, epx_last_error(), deadline_in(0));
    shutdown(visitor->fd, SHUT_WR);
    return status;
}

static epx_status check_hello(struct root *root, struct visitor *visitor)
{
    const struct wire_hello *hello = &visitor->in.hello;
    int nranks = root->meeting->nranks;

    if (hello->version != WIRE_VERSION)
        return refuse(visitor, fail(EPX_ERR_MISMATCH,
                                    "a rank speaks version %u of the bootstrap protocol, rank 0 version %d: use one "
                                    "version of EPX in all ranks",
                                    hello->version, WIRE_VERSION));
    if (hello->nranks != nranks)
        return refuse(visitor, fail(EPX_ERR_MISMATCH, "rank %d has WORLD_SIZE %d, rank 0 has %d", hello->rank,
                                    hello->nranks, nranks));
    if (hello->rank < 1 || hello->rank >= nranks)
        return refuse(visitor,
                      fail(EPX_ERR_MISMATCH, "a rank says it is rank %d, expected 1 to %d", hello->rank, nranks - 1));
    if (root->present[hello->rank])
        return refuse(visitor, fail(EPX_ERR_MISMATCH, "two processes say they are rank %d", hello->rank));
    return EPX_OK;
}

/* The hello has come, or is looked at again. */
static epx_status greet(struct root *root, struct visitor *visitor)
{
    const struct wire_hello *hello = &visitor->in.hello;
    epx_status status;

    if (hello->magic != WIRE_HELLO_MAGIC) {
        forget(visitor, 1);
        return EPX_OK;
    }
    if (hello->job != root->meeting->job) {
        (void)send_frame(visitor->fd, WIRE_OTHER_JOB, deadline_in(0));
        forget(visitor, 1);
        return EPX_OK;
    }
    status = check_hello(root, visitor);
    if (status)
        return status;
    visitor->state = HELD;
    if (welcomed(root, hello->rank))
        return EPX_OK;
    visitor->rank = hello->rank;
    visitor->state = AWAIT_ACK;
    visitor->got = 0;
    if (send_frame(visitor->fd, WIRE_WELCOME, deadline_in(0)))
        forget(visitor, 1);
    return EPX_OK;
}

static void join(struct root *root, struct visitor *visitor)
{
    if (visitor->in.frame.magic != WIRE_FRAME_MAGIC || visitor->in.frame.op != WIRE_ACK) {
        forget(visitor, 1);
        return;
    }
    root->fds[visitor->rank] = visitor->fd;
    root->present[visitor->rank] = 1;
    root->joined++;
    forget(visitor, 0);
}

/* Something came from a visitor. Its message is 32 bytes long in both states that read. */
static epx_status hear(struct root *root, struct visitor *visitor)
{
    struct transfer transfer = {.data = &visitor->in, .bytes = sizeof(visitor->in), .done = visitor->got};
    int state = transfer_receive(visitor->fd, &transfer);

    visitor->got = transfer.done;
    if (state < 0) {
        forget(visitor, 1);
        return EPX_OK;
    }
    if (state == 0)
        return EPX_OK;
    if (visitor->state == AWAIT_HELLO)
        return greet(root, visitor);
    join(root, visitor);
    return EPX_OK;
}

static epx_status admit(struct root *root, int listener)
{
    while (root->visitor_count < root->visitor_limit) {
        int fd = socket_accept(listener);
        if (fd < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return EPX_OK;
        if (fd < 0)
            return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot accept a connection (%d of %d ranks have arrived)",
                              root->joined + 1, root->meeting->nranks);
        root->visitors[root->visitor_count++] =
            (struct visitor){.fd = fd, .state = AWAIT_HELLO, .deadline = deadline_in(MEET_HELLO_MS)};
    }
    return EPX_OK;
}

/* Drops those that are gone or silent, and looks again at those that were held back. */
static epx_status tidy(struct root *root)
{
    int kept = 0;

    for (int i = 0; i < root->visitor_count; i++) {
        struct visitor *visitor = &root->visitors[i];
        epx_status status = EPX_OK;
        if (visitor->fd >= 0 && visitor->state == AWAIT_HELLO && deadline_passed(visitor->deadline))
            forget(visitor, 1);
        if (visitor->fd >= 0 && visitor->state == HELD)
            status = greet(root, visitor);
        if (status)
            return status;
    }
    for (int i = 0; i < root->visitor_count; i++)
        if (root->visitors[i].fd >= 0)
            root->visitors[kept++] = root->visitors[i];
    root->visitor_count = kept;
    return EPX_OK;
}

/* ---- The rendezvous ----------------------------------------------------------------------------------------- */

static epx_status timed_out(const struct root *root)
{
    char absent[128];

    absent_ranks(root->present, root->meeting->nranks, absent, sizeof(absent));
    return fail(EPX_ERR_TIMEOUT, "%s did not arrive within %d ms (rank 0 waits on port %d of %s)", absent,
                root->meeting->timeout_ms, root->meeting->port, root->meeting->host);
}

/* A rank that has joined says nothing before START: what comes is its end, or why it gives up. */
static epx_status hear_joined(const struct root *root, int rank)
{
    struct wire_frame frame;
    uint64_t deadline = deadline_in(MEET_GOODBYE_MS);

    if (!receive_all(root->fds[rank], &frame, sizeof(frame), deadline) && frame.magic == WIRE_FRAME_MAGIC &&
        frame.op == WIRE_ERROR)
        return receive_error(root->fds[rank], &frame, deadline);
    return fail(EPX_ERR_PEER, "rank %d ended before all ranks had arrived", rank);
}

/* The order in `polls`: listeners, visitors, ranks that have joined (by rank, absent ones -1). */
static size_t fill_polls(struct root *root)
{
    size_t count = 0;
    int room = root->visitor_count < root->visitor_limit;

    for (int i = 0; i < root->listener_count; i++)
        root->polls[count++] = (struct pollfd){.fd = room ? root->listeners[i] : -1, .events = POLLIN};
    for (int i = 0; i < root->visitor_count; i++)
        root->polls[count++] =
            (struct pollfd){.fd = root->visitors[i].state == HELD ? -1 : root->visitors[i].fd, .events = POLLIN};
    for (int i = 1; i < root->meeting->nranks; i++)
        root->polls[count++] = (struct pollfd){.fd = root->fds[i], .events = POLLIN};
    return count;
}

static epx_status turn(struct root *root)
{
    size_t count = fill_polls(root), at = 0;
    int visitors = root->visitor_count, ready;
    uint64_t tick = deadline_in(TICK_MS);
    epx_status status = EPX_OK;

    ready = poll_until(root->polls, count, tick < root->deadline ? tick : root->deadline);
    if (ready < 0)
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot wait for the other ranks");
    for (int i = 0; !status && i < root->listener_count; i++, at++)
        if (root->polls[at].revents)
            status = admit(root, root->listeners[i]);
    for (int i = 0; !status && i < visitors; i++, at++)
        if (root->polls[at].revents && root->visitors[i].fd >= 0)
            status = hear(root, &root->visitors[i]);
    for (int i = 1; !status && i < root->meeting->nranks; i++, at++)
        if (root->polls[at].revents)
            status = hear_joined(root, i);
    return status ? status : tidy(root);
}

static epx_status gather_ranks(struct root *root)
{
    epx_status status = EPX_OK;

    while (!status && root->joined < root->meeting->nranks - 1) {
        status = turn(root);
        if (!status && root->joined < root->meeting->nranks - 1 && deadline_passed(root->deadline))
            status = timed_out(root);
    }
    for (int i = 1; !status && i < root->meeting->nranks; i++)
        if (send_frame(root->fds[i], WIRE_START, root->deadline))
            status = fail_errno(EPX_ERR_PEER, "rank %d ended before all ranks had arrived", i);
    return status;
}

/* Visitors still in the handshake are told as well: they are ranks that the failure concerns. */
static void send_away(struct root *root, epx_status status)
{
    char text[WIRE_TEXT];

    snprintf(text, sizeof(text), "%s", epx_last_error());
    for (int i = 0; i < root->visitor_count; i++)
        if (root->visitors[i].fd >= 0) {
            if (status && root->visitors[i].state == AWAIT_ACK)
                send_error(root->visitors[i].fd, status, text, deadline_in(0));
            forget(&root->visitors[i], 1);
        }
    if (status)
        dismiss(root->fds, root->meeting->nranks, status, text);
}

epx_status meet_as_root(const struct meeting *meeting, int *fds)
{
    size_t nranks = (size_t)meeting->nranks;
    struct root root = {.meeting = meeting, .fds = fds, .visitor_limit = meeting->nranks + SPARE_VISITORS};
    epx_status status = EPX_ERR_MEMORY;

    for (int i = 0; i < meeting->nranks; i++)
        fds[i] = -1;
    root.deadline = deadline_in(meeting->timeout_ms);
    root.present = calloc(nranks, 1);
    root.visitors = calloc((size_t)root.visitor_limit, sizeof(*root.visitors));
    root.polls = calloc((size_t)root.visitor_limit + nranks + MEET_MAX_ADDRESSES, sizeof(*root.polls));
    if (!root.present || !root.visitors || !root.polls) {
        fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", meeting->nranks);
        goto free_all;
    }
    root.present[0] = 1;
    status = start_listening(&root);
    if (status)
        goto free_all;
    status = gather_ranks(&root);
    stop_listening(&root);
    send_away(&root, status);

free_all:
    free(root.polls);
    free(root.visitors);
    free(root.present);
    return status;
}
