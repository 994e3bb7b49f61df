/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The socket that a provider over TCP listens on. The provider accepts whoever connects, keeps the connection for ever,
 * and takes a descriptor for each: 1500 connections leave the process none. Once every peer has connected, nobody else
 * has a reason to, so the door is closed: a packet filter on the listening socket drops every packet. Connections that
 * are there keep their own sockets and do not notice (source.c shuts those of strangers); the provider does not either.
 * libfabric does not tell the descriptor, so it is found by the port. Where that, or the filter, is not to be had, the
 * door stays open.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <dirent.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "boot/fork.h"
#include "util/descriptor.h"
#include "util/log.h"

enum { LOW_DESCRIPTORS = 128 };

int ofi_port_of(const struct sockaddr_storage *at)
{
    switch (at->ss_family) {
    case AF_INET:
        return ntohs(((const struct sockaddr_in *)at)->sin_port);
    case AF_INET6:
        return ntohs(((const struct sockaddr_in6 *)at)->sin6_port);
    default:
        return -1;
    }
}

static int listens_at(int fd, int port)
{
    struct sockaddr_storage at = {0};
    socklen_t length = sizeof(at), size = sizeof(int);
    int listens = 0;

    return !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens &&
           !getsockname(fd, (struct sockaddr *)&at, &length) && ofi_port_of(&at) == port;
}

/* The descriptor of this process that listens at `port`, or -1. It is older than the connections, so most likely among
 * the lowest; the folder takes as long as hundreds of these questions. */
static int find_listener(int port)
{
    const struct dirent *entry;
    DIR *folder;
    int found = -1;

    for (int fd = 0; fd < LOW_DESCRIPTORS; fd++)
        if (listens_at(fd, port))
            return fd;
    folder = fd_open_folder("/proc/self/fd");
    while (folder && found < 0 && (entry = readdir(folder))) {
        char *end;
        const long fd = strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && !*end && listens_at((int)fd, port))
            found = (int)fd;
    }
    if (folder)
        closedir(folder);
    return found;
}

int ofi_listener(struct ofi_net *n)
{
    struct sockaddr_storage own = {0};
    size_t bytes = sizeof(own);

    if (n->listener < 0 && !fi_getname(&n->ep->fid, &own, &bytes) && ofi_port_of(&own) > 0)
        n->listener = fork_hides(find_listener(ofi_port_of(&own)));
    return n->listener;
}

void ofi_door_set(struct ofi_net *n, enum ofi_door door)
{
    struct sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog program = {.len = 1, .filter = &drop};
    int fd, none = 0, rc = -1;

    n->door = door;
    if (!n->tokens)
        return;
    fd = ofi_listener(n);
    n->shut_due = door == OFI_DOOR_CLOSED;
    if (fd >= 0 && door == OFI_DOOR_CLOSED)
        rc = setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
    else if (fd >= 0)
        rc = setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none));
    log_line(LOG_DEBUG, "ofi: the socket %d %s new connections%s", fd, door == OFI_DOOR_CLOSED ? "takes no" : "takes",
             rc && door == OFI_DOOR_CLOSED ? ", or should: it cannot be told so" : "");
}

#endif
