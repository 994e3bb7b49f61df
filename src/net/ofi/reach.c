/* SPDX-License-Identifier: Apache-2.0 */
#include "net/ofi/ofi.h"
#include "util/descriptor.h"

#if EPX_HAVE_OFI

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REACH_EVERY_MS = 500 };

void ofi_reach_end(struct ofi_peer *peer)
{
    if (peer->reach_fd)
        close(peer->reach_fd - 1);
    peer->reach_fd = 0;
}

/* Errors that mean that nobody listens; others say nothing about the peer. */
static int means_absent(int error)
{
    return error == ECONNREFUSED || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN ? error : 0;
}

/* Starts to connect; a listener sees a connection that ends without data. */
static int ask(struct ofi_net *n, struct ofi_peer *p)
{
    struct sockaddr_storage address;
    size_t bytes = sizeof(address);
    int fd;

    if (fi_av_lookup(n->av, p->address, &address, &bytes) || bytes > sizeof(address))
        return 0;
    fd = fd_own(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0)
        return 0;
    p->reach_fd = fd + 1;
    if (!connect(fd, (struct sockaddr *)&address, (socklen_t)bytes))
        ofi_reach_end(p);
    else if (errno != EINPROGRESS)
        return errno;
    return 0;
}

/* The provider listens at a TCP port: "tcp" with and without a layer, "net" (choose.c). verbs has a port space of its
 * own. */
static int listens_by_tcp(const struct ofi_net *n)
{
    const char *provider = n->info->fabric_attr->prov_name;

    return !strncmp(provider, "tcp", 3) || !strncmp(provider, "net", 3);
}

int ofi_reach(struct ofi_net *n, int peer, uint64_t now)
{
    struct ofi_peer *p = &n->peers[peer];
    struct pollfd fd = {.fd = p->reach_fd - 1, .events = POLLOUT};
    socklen_t length = sizeof(int);
    int error = 0;

    if (!listens_by_tcp(n))
        return 0;
    if (p->reach_fd) {
        if (poll(&fd, 1, 0) != 1) {
            /* A closed door drops packets (door.c). A new attempt asks again sooner than TCP repeats one. */
            if (now - p->reach_ns >= REACH_EVERY_MS * 1000000u)
                ofi_reach_end(p);
            return 0;
        }
        getsockopt(fd.fd, SOL_SOCKET, SO_ERROR, &error, &length);
        ofi_reach_end(p);
    } else if (now - p->reach_ns >= REACH_EVERY_MS * 1000000u) {
        p->reach_ns = now;
        error = ask(n, p);
    }
    return means_absent(error);
}

#endif
