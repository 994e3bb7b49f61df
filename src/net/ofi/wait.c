/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sleeping on a completion queue's descriptor.
 *
 *      wait_fd: ours, edge-triggered --> cq_fd: libfabric's epoll --> its signal (completions written by a thread)
 *                                                                 `-> sockets, or what else there is to progress
 *
 * libfabric's tcp provider before 1.18.1 sets the signal with every completion and never clears it (its issue 8947):
 * cq_fd stays readable for good, and a thread that sleeps on it spins. So the descriptor to sleep on reports edges of
 * cq_fd, and arm() asks cq_fd which of its entries are ready besides the signal. The signal is recognised by its epoll
 * data, which are read at the beginning, when fi_cq_signal sets it and nothing else can be ready.
 *
 * No wake-up is lost: arm() consumes past edges, then reads the levels; anything later is a new edge. Where cq_fd is no
 * epoll descriptor, or the signal cannot be recognised, cq_fd is used as it is.
 */
#include "net/ofi/ofi.h"
#include "util/descriptor.h"

#if EPX_HAVE_OFI

#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { READY_MAX = 16 };

/* Reads the epoll data of the signal. 0, or -1 if it cannot be recognised. */
static int find_signal_entry(struct ofi_net *n)
{
    struct epoll_event events[READY_MAX];

    if (epoll_wait(n->cq_fd, events, READY_MAX, 0) != 0 || fi_cq_signal(n->cq))
        return -1;
    if (epoll_wait(n->cq_fd, events, READY_MAX, 0) != 1)
        return -1;
    n->signal_data = events[0].data.u64;
    return 0;
}

void ofi_wait_open(struct ofi_net *n)
{
    struct epoll_event watch = {.events = EPOLLIN | EPOLLET};
    int fd;

    n->wait_fd = n->cq_fd;
    if (find_signal_entry(n))
        return;
    fd = fd_own(epoll_create1(EPOLL_CLOEXEC));
    if (fd < 0)
        return;
    if (epoll_ctl(fd, EPOLL_CTL_ADD, n->cq_fd, &watch))
        close(fd);
    else
        n->wait_fd = fd;
}

void ofi_wait_close(struct ofi_net *n)
{
    if (n->wait_fd >= 0 && n->wait_fd != n->cq_fd)
        close(n->wait_fd);
    n->wait_fd = n->cq_fd = -1;
}

int ofi_wait_fd(struct net *net)
{
    return ((struct ofi_net *)net)->wait_fd;
}

/* Is there an entry that is ready and not the signal? */
static int something_ready(const struct ofi_net *n)
{
    struct epoll_event events[READY_MAX];
    const int count = epoll_wait(n->cq_fd, events, READY_MAX, 0);

    for (int i = 0; i < count; i++)
        if (events[i].data.u64 != n->signal_data)
            return 1;
    return 0;
}

int ofi_arm(struct net *net)
{
    struct ofi_net *n = (struct ofi_net *)net;
    struct fid *fids[1] = {&n->cq->fid};
    struct epoll_event edge;
    const int pause = ofi_hello_pause(n);

    if (n->inflight)
        (void)ofi_polled_now(n); /* poll looks at the deadlines, once in 64 of these sleeps */
    if (n->nheld || n->unreported || pause < 0)
        return -EAGAIN;
    if (n->wait_fd < 0)
        return -ENOSYS;
    if (n->wait_fd != n->cq_fd && epoll_wait(n->wait_fd, &edge, 1, 0) < 0 && errno != EINTR)
        return -ENOSYS;
    if (fi_trywait(n->fabric, fids, 1))
        return -EAGAIN;
    return n->wait_fd != n->cq_fd && something_ready(n) ? -EAGAIN : pause;
}

#endif
