/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has connected before the door was closed (door.c)? libfabric does not say by which connection an arrival came,
 * and keeps the connections of strangers for ever. So ranks name theirs:
 *
 *      lower rank                                     higher rank
 *      hello                               ------>    the last one closes the door
 *      source: a mark of the address that
 *              its connection comes from   ------>    with the last one, shuts connections that nobody has named
 *
 * Both ends find the sockets among the descriptors of their process. Where a source is not found, or comes from another
 * address than the sender sees (translated addresses), or several ranks are threads of one process, nothing is shut: a
 * connection of a rank must never be. Children of fork() do not get those that were found (boot/fork.h): a rank that
 * was killed would look alive as long as a child of it is there.
 *
 * The connection of a peer that is lost because nothing moves is shut as well. libfabric would go on to send from the
 * memory of puts that are given up, when the peer moves again: it would take for good what is used again by then.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "boot/fork.h"
#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"

/* Between two looks for strangers: a tenth of the deadline, within these. A rank of a busy machine connects, and says
 * hello many turns of its scheduler later: with half a second one of some hundred groups was not created at load 40. */
#define LOOK_MIN_NS 500000000u
#define LOOK_MAX_NS 5000000000u

/* A connection of this process. */
struct link {
    int fd;
    uint64_t inode; /* read first: where another rank of this process closes it meanwhile, it is no other file's */
    struct sockaddr_storage own, other;
};

struct links {
    struct link *at;
    int count, room;
    int failed; /* some may be missing */
};

struct plain_address { /* without what differs between the two ends */
    uint32_t family, port;
    uint8_t bytes[16];
};

static struct plain_address plain(const struct sockaddr_storage *at)
{
    struct plain_address out = {.family = at->ss_family, .port = (uint32_t)ofi_port_of(at)};

    if (at->ss_family == AF_INET)
        memcpy(out.bytes, &((const struct sockaddr_in *)at)->sin_addr, 4);
    else if (at->ss_family == AF_INET6)
        memcpy(out.bytes, &((const struct sockaddr_in6 *)at)->sin6_addr, 16);
    return out;
}

static int same(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    const struct plain_address one = plain(a), other = plain(b);

    return !memcmp(&one, &other, sizeof(one));
}

static void add_link(struct links *links, int fd)
{
    struct link link = {.fd = fd, .inode = fork_inode(fd)};
    socklen_t own = sizeof(link.own), other = sizeof(link.other);
    struct link *more;

    if (getpeername(fd, (struct sockaddr *)&link.other, &other) ||
        getsockname(fd, (struct sockaddr *)&link.own, &own) || ofi_port_of(&link.own) <= 0)
        return;
    if (links->count == links->room) {
        more = realloc(links->at, (size_t)(links->room * 2 + 16) * sizeof(*more));
        if (!more) {
            links->failed = 1;
            return;
        }
        links->at = more;
        links->room = links->room * 2 + 16;
    }
    links->at[links->count++] = link;
}

/* To be freed: links.at. */
static struct links find_links(void)
{
    struct links links = {0};
    DIR *folder = fd_open_folder("/proc/self/fd");
    const struct dirent *entry;

    links.failed = !folder;
    while (folder && (entry = readdir(folder))) {
        char *end;
        const long fd = strtol(entry->d_name, &end, 10);
        if (end != entry->d_name && !*end)
            add_link(&links, (int)fd);
    }
    if (folder)
        closedir(folder);
    return links;
}

static uint32_t mark_of(const struct ofi_net *n, const struct sockaddr_storage *at)
{
    const struct plain_address from = plain(at);

    return ofi_token_mark(n, &from, sizeof(from));
}

/* ---- The lower rank ---------------------------------------------------------------------------------------------- */

static uint32_t source_of(const struct ofi_net *n, const struct links *links, int peer)
{
    struct sockaddr_storage at = {0};
    size_t bytes = sizeof(at);
    const struct link *found = NULL;

    if (links->failed || fi_av_lookup(n->av, n->peers[peer].address, &at, &bytes) || bytes > sizeof(at))
        return OFI_SOURCE;
    for (int i = 0; i < links->count; i++) {
        if (links->at[i].fd == n->peers[peer].reach_fd - 1 || !same(&links->at[i].other, &at))
            continue;
        if (found)
            return OFI_SOURCE;
        found = &links->at[i];
    }
    if (!found)
        return OFI_SOURCE;
    fork_hides_inode(found->fd, found->inode);
    return mark_of(n, &found->own);
}

void ofi_sources_find(struct ofi_net *n)
{
    const struct links links = find_links();

    for (int peer = n->rank + 1; peer < n->nranks; peer++)
        if (n->peers[peer].source_pending && !n->peers[peer].hello_pending && !n->peers[peer].source)
            n->peers[peer].source = source_of(n, &links, peer);
    free(links.at);
}

/* ---- The higher rank --------------------------------------------------------------------------------------------- */

/* Accepted by this endpoint, and not closed by the other end. */
static int came_here(const struct ofi_net *n, const struct link *link)
{
    const struct plain_address any = {0};
    struct sockaddr_storage own = {0};
    struct plain_address listens;
    struct tcp_info info = {0};
    socklen_t length = sizeof(own), size = sizeof(info);

    if (getsockname(n->listener, (struct sockaddr *)&own, &length) || ofi_port_of(&own) != ofi_port_of(&link->own))
        return 0;
    listens = plain(&own);
    if (memcmp(listens.bytes, any.bytes, sizeof(any.bytes)) && !same(&own, &link->own))
        return 0;
    return !getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &info, &size) && info.tcpi_state == TCP_ESTABLISHED;
}

static int name(struct ofi_net *n, const struct link *link)
{
    const uint32_t mark = mark_of(n, &link->other);
    int found = 0;

    for (int peer = 0; peer < n->rank; peer++)
        if (n->peers[peer].source == mark && mark != OFI_SOURCE)
            found = n->peers[peer].named = 1;
    if (found)
        fork_hides_inode(link->fd, link->inode);
    return found;
}

/* The connections that nobody has named, at the beginning of the list. */
static int keep_strangers(struct ofi_net *n, struct links *links)
{
    int count = 0;

    for (int peer = 0; peer < n->rank; peer++)
        n->peers[peer].named = 0;
    for (int i = 0; i < links->count; i++)
        if (came_here(n, &links->at[i]) && !name(n, &links->at[i]))
            links->at[count++] = links->at[i];
    return count;
}

static int is_here(const struct ofi_peer *p)
{
    return p->state == OFI_CONNECTED && p->hello_received;
}

static int all_are_named(const struct ofi_net *n)
{
    for (int peer = 0; peer < n->rank; peer++)
        if (is_here(&n->peers[peer]) && !n->peers[peer].named)
            return 0;
    return 1;
}

static int all_have_told(const struct ofi_net *n)
{
    for (int peer = 0; peer < n->rank; peer++)
        if (is_here(&n->peers[peer]) && !n->peers[peer].source)
            return 0;
    return 1;
}

static int is_suspect(const struct ofi_net *n, uint32_t mark)
{
    for (int i = 0; mark != OFI_SOURCE && i < n->nsuspects; i++)
        if (n->suspects[i] == mark)
            return 1;
    return 0;
}

static void remember(struct ofi_net *n, const struct links *strangers, int count)
{
    free(n->suspects);
    n->nsuspects = 0;
    n->suspects = calloc((size_t)count + 1, sizeof(*n->suspects));
    for (int i = 0; n->suspects && i < count; i++)
        n->suspects[n->nsuspects++] = mark_of(n, &strangers->at[i].other);
}

/* How many. The provider sees a peer that has gone. */
static int shut(struct ofi_net *n, const struct links *strangers, int count, int all)
{
    int done = 0;

    for (int i = 0; i < count; i++)
        if (all || is_suspect(n, mark_of(n, &strangers->at[i].other)))
            done += !shutdown(strangers->at[i].fd, SHUT_RDWR);
    if (done)
        log_line(LOG_WARN, "ofi: %d connections to this rank were not made by ranks of this group, and are shut", done);
    n->refused_news += (uint32_t)done;
    return done;
}

int ofi_shut_strangers(struct ofi_net *n, int all)
{
    struct pollfd waiting = {.fd = ofi_listener(n), .events = POLLIN};
    struct links links;
    int strangers;

    if (waiting.fd < 0)
        return 1;
    if (!all_have_told(n))
        return 0;
    /* Who waits to be accepted would not be seen. Where the door is open somebody may always wait; the next look is
     * for them. */
    if (all && n->door == OFI_DOOR_CLOSED && poll(&waiting, 1, 0))
        return 0;
    links = find_links();
    strangers = keep_strangers(n, &links);
    if (!links.failed && all_are_named(n)) {
        shut(n, &links, strangers, all);
        remember(n, &links, strangers);
    } else if (strangers) {
        log_line(LOG_INFO, "ofi: of %d connections to this rank it is not known whose they are: they stay", strangers);
    }
    free(links.at);
    return 1;
}

/* ---- A peer that is lost ----------------------------------------------------------------------------------------- */

/* Both ends know the mark of the address that the connection of the lower rank comes from. */
static int is_of(const struct ofi_net *n, int peer, const struct link *link)
{
    const struct sockaddr_storage *from = peer > n->rank ? &link->own : &link->other;

    return link->fd != n->peers[peer].reach_fd - 1 && mark_of(n, from) == n->peers[peer].source;
}

int ofi_shut_peer(struct ofi_net *n, int peer)
{
    const uint32_t source = n->peers[peer].source;
    struct links links = {0};
    int done = 0;

    if (n->tokens && source && source != OFI_SOURCE)
        links = find_links();
    for (int i = 0; i < links.count; i++)
        if (is_of(n, peer, &links.at[i]))
            done += !shutdown(links.at[i].fd, SHUT_RDWR);
    if (!done)
        log_line(LOG_INFO, "ofi: the connection to rank %d was not found, and stays", peer);
    free(links.at);
    return done > 0;
}

/* A stranger can say that it is the rank that is awaited, and libfabric then lets that one in no more. So connections
 * that stay and say no hello are shut. A rank that has connected says hello at once; a busy machine is given time. */
void ofi_look_around(struct ofi_net *n)
{
    const uint64_t now = clock_ns(), tenth = n->timeout_ns / 10, most = tenth < LOOK_MAX_NS ? tenth : LOOK_MAX_NS;

    if (now < n->look_at)
        return;
    if (n->look_at)
        (void)ofi_shut_strangers(n, 0);
    n->look_at = now + (most > LOOK_MIN_NS ? most : LOOK_MIN_NS);
}

#endif
