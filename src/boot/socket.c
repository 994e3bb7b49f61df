/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/socket.h"

#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "boot/fork.h"
#include "util/clock.h"
#include "util/descriptor.h"

uint64_t deadline_in(int timeout_ms)
{
    return clock_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
}

int deadline_left(uint64_t deadline)
{
    uint64_t now = clock_ns();
    uint64_t left = deadline > now ? (deadline - now + 999999u) / 1000000u : 0;

    return left > INT_MAX ? INT_MAX : (int)left;
}

int deadline_passed(uint64_t deadline)
{
    return clock_ns() >= deadline;
}

int poll_until(struct pollfd *fds, size_t count, uint64_t deadline)
{
    for (;;) {
        int ready = poll(fds, (nfds_t)count, deadline_left(deadline));
        if (ready >= 0 || errno != EINTR)
            return ready;
    }
}

int socket_wait(int fd, short events, uint64_t deadline)
{
    struct pollfd entry = {.fd = fd, .events = events};

    return poll_until(&entry, 1, deadline);
}

static void close_keeping_errno(int fd)
{
    int saved = errno;

    close(fd);
    errno = saved;
}

static void set_option(int fd, int level, int name, int value)
{
    /* These options are optional: a failure is ignored. */
    (void)setsockopt(fd, level, name, &value, sizeof(value));
}

/* Messages are small and latency matters, so Nagle is off; keepalive detects a machine that is gone. */
static void tune(int fd)
{
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
}

/* The kernel looks at its clock when a probe is due: probes begin early, and the last one is not far behind. */
void socket_set_silence(int fd, int ms)
{
    const int probe = ms / 6000 > 1 ? ms / 6000 : 1;

    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 2 * probe);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, probe);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, ms);
}

static int open_stream(const struct endpoint *at)
{
    return fork_hides(fd_own(socket(at->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)));
}

int socket_listen(const struct endpoint *at, int backlog)
{
    int fd = open_stream(at);

    if (fd < 0)
        return -1;
    /* Connections of an earlier run in TIME_WAIT must not prevent listening. */
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (at->address.ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)&at->address;
        set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, !IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr));
    }
    if (bind(fd, (const struct sockaddr *)&at->address, at->length) || listen(fd, backlog)) {
        close_keeping_errno(fd);
        return -1;
    }
    return fd;
}

int socket_accept(int listener)
{
    for (;;) {
        int fd = fork_hides(fd_own(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)));
        if (fd >= 0) {
            tune(fd);
            return fd;
        }
        /* A client that closed before it was accepted is not an error of the listener. */
        if (errno != EINTR && errno != ECONNABORTED)
            return -1;
    }
}

static int finish_connect(int fd, uint64_t deadline)
{
    int error = 0;
    socklen_t length = sizeof(error);
    int ready = socket_wait(fd, POLLOUT, deadline);

    if (ready < 0)
        return -1;
    if (ready == 0) {
        errno = ETIMEDOUT;
        return -1;
    }
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length))
        return -1;
    errno = error;
    return error ? -1 : 0;
}

int socket_connect_start(const struct endpoint *to)
{
    int fd = open_stream(to);

    if (fd < 0)
        return -1;
    tune(fd);
    if (!connect(fd, (const struct sockaddr *)&to->address, to->length) || errno == EINPROGRESS || errno == EINTR)
        return fd;
    close_keeping_errno(fd);
    return -1;
}

int socket_connect(const struct endpoint *to, const struct endpoint *from, uint64_t deadline)
{
    int fd = open_stream(to);

    if (fd < 0)
        return -1;
    tune(fd);
    if (from && bind(fd, (const struct sockaddr *)&from->address, from->length))
        goto close_fd;
    if (connect(fd, (const struct sockaddr *)&to->address, to->length)) {
        /* An interrupted connect continues by itself, as one in progress does. */
        if (errno != EINPROGRESS && errno != EINTR)
            goto close_fd;
        if (finish_connect(fd, deadline))
            goto close_fd;
    }
    return fd;

close_fd:
    close_keeping_errno(fd);
    return -1;
}

static int would_block(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

/* ETIMEDOUT is the passing of a deadline. The kernel's means that the other machine does not reply. */
static int failed(void)
{
    if (errno == ETIMEDOUT)
        errno = EHOSTUNREACH;
    return -1;
}

int transfer_receive(int fd, struct transfer *transfer)
{
    while (transfer->done < transfer->bytes) {
        ssize_t got = recv(fd, (char *)transfer->data + transfer->done, transfer->bytes - transfer->done, 0);
        if (got > 0) {
            transfer->done += (size_t)got;
        } else if (got == 0) {
            errno = ENOTCONN;
            return -1;
        } else if (errno != EINTR) {
            return would_block() ? 0 : failed();
        }
    }
    return 1;
}

int transfer_send(int fd, struct transfer *transfer)
{
    while (transfer->done < transfer->bytes) {
        ssize_t sent =
            send(fd, (const char *)transfer->data + transfer->done, transfer->bytes - transfer->done, MSG_NOSIGNAL);
        if (sent >= 0)
            transfer->done += (size_t)sent;
        else if (errno != EINTR)
            return would_block() ? 0 : failed();
    }
    return 1;
}

void endpoint_set_port(struct endpoint *endpoint, int port)
{
    if (endpoint->address.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&endpoint->address)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)&endpoint->address)->sin_port = htons((uint16_t)port);
}

static const struct in6_addr *in6_of(const struct endpoint *endpoint)
{
    return &((const struct sockaddr_in6 *)&endpoint->address)->sin6_addr;
}

static uint32_t in4_of(const struct endpoint *endpoint)
{
    return ntohl(((const struct sockaddr_in *)&endpoint->address)->sin_addr.s_addr);
}

int endpoint_is_loopback(const struct endpoint *endpoint)
{
    if (endpoint->address.ss_family == AF_INET6) {
        const struct in6_addr *in6 = in6_of(endpoint);
        return IN6_IS_ADDR_LOOPBACK(in6) || (IN6_IS_ADDR_V4MAPPED(in6) && in6->s6_addr[12] == 127);
    }
    return in4_of(endpoint) >> 24 == 127;
}

int endpoint_is_link_local(const struct endpoint *endpoint)
{
    if (endpoint->address.ss_family == AF_INET6)
        return !!IN6_IS_ADDR_LINKLOCAL(in6_of(endpoint));
    return in4_of(endpoint) >> 16 == 0xa9fe;
}

int endpoint_is_local(const struct endpoint *endpoint)
{
    struct endpoint at = *endpoint;
    int fd = fd_own(socket(at.address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0)), local;

    if (fd < 0)
        return 0;
    endpoint_set_port(&at, 0);
    local = !bind(fd, (struct sockaddr *)&at.address, at.length); /* only a machine's own addresses can be bound */
    close(fd);
    return local;
}

int endpoint_same_host(const struct endpoint *a, const struct endpoint *b)
{
    if (a->address.ss_family != b->address.ss_family)
        return 0;
    if (a->address.ss_family == AF_INET6)
        return !memcmp(in6_of(a), in6_of(b), sizeof(struct in6_addr));
    return in4_of(a) == in4_of(b);
}

const char *endpoint_text(const struct endpoint *endpoint, char text[ENDPOINT_TEXT])
{
    char host[ENDPOINT_TEXT - 12], port[8];

    if (getnameinfo((const struct sockaddr *)&endpoint->address, endpoint->length, host, sizeof(host), port,
                    sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(text, ENDPOINT_TEXT, "(unprintable address)");
    else
        snprintf(text, ENDPOINT_TEXT, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
    return text;
}
