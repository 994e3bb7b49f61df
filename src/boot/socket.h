/* SPDX-License-Identifier: Apache-2.0 */
/* Nonblocking TCP sockets with deadlines. Functions return -1 with errno set; nothing here raises SIGPIPE. */
#ifndef EPX_BOOT_SOCKET_H
#define EPX_BOOT_SOCKET_H

#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

struct endpoint {
    struct sockaddr_storage address;
    socklen_t length;
};

enum { ENDPOINT_TEXT = 80 };

/* Deadlines are points of clock_ns(). */
uint64_t deadline_in(int timeout_ms);
/* Milliseconds left, rounded up, as poll wants them; 0 = expired. */
int deadline_left(uint64_t deadline);
int deadline_passed(uint64_t deadline);
/* poll() until the deadline; continues after signals. */
int poll_until(struct pollfd *fds, size_t count, uint64_t deadline);
/* Waits for events of one socket: 1 = ready, 0 = deadline, -1 = errno. */
int socket_wait(int fd, short events, uint64_t deadline);

/* A listening socket; an IPv6 wildcard accepts IPv4 as well. */
int socket_listen(const struct endpoint *at, int backlog);
/* -1 with EAGAIN when no connection is pending. */
int socket_accept(int listener);
/* Starts to connect and does not wait: the first transfer returns the result (-1 and ECONNREFUSED, or would block). */
int socket_connect_start(const struct endpoint *to);
/* Connects to `to`, from `from` unless that is NULL. ETIMEDOUT when the deadline passes first. */
int socket_connect(const struct endpoint *to, const struct endpoint *from, uint64_t deadline);

/* A connection ends with EHOSTUNREACH once the other machine's kernel has not replied for so long, whatever its process
 * does; whole seconds, 2 at least. */
void socket_set_silence(int fd, int ms);

/* A partly transferred message; the next call continues it. */
struct transfer {
    void *data;
    size_t bytes;
    size_t done;
};

/* 1 = complete, 0 = would block, -1 = errno; end of file is -1 with errno ENOTCONN. */
int transfer_receive(int fd, struct transfer *transfer);
int transfer_send(int fd, struct transfer *transfer);

void endpoint_set_port(struct endpoint *endpoint, int port);
int endpoint_is_loopback(const struct endpoint *endpoint);
int endpoint_is_link_local(const struct endpoint *endpoint);
/* An address of this machine. */
int endpoint_is_local(const struct endpoint *endpoint);
/* The same address, ports not compared. */
int endpoint_same_host(const struct endpoint *a, const struct endpoint *b);
/* Numeric, "10.0.0.1:29500" or "[fe80::1%eth0]:29500". */
const char *endpoint_text(const struct endpoint *endpoint, char text[ENDPOINT_TEXT]);

#endif
