/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping until a completion, and asynchronous events of the card. */
#include "net/verbs/verbs.h"

#if EPX_HAVE_VERBS

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"
#include "util/status.h"

static int watch(int epoll, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return -1;
    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

epx_status verbs_event_open(struct verbs_net *net)
{
    net->channel = net->lib->create_comp_channel(net->context);
    if (!net->channel)
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: cannot create a completion channel", net->card.device);
    net->wait_fd = fd_own(epoll_create1(EPOLL_CLOEXEC));
    if (net->wait_fd < 0 || watch(net->wait_fd, net->channel->fd) || watch(net->wait_fd, net->context->async_fd))
        return fail_errno(EPX_ERR_SYSTEM, "verbs: %s: cannot wait for its events", net->card.device);
    return EPX_OK;
}

/* A port may come up again: the card retransmits for grace_ns. */
static void port_event(struct verbs_net *net, const struct ibv_async_event *event)
{
    if (event->element.port_num != net->card.port)
        return;
    if (event->event_type == IBV_EVENT_PORT_ACTIVE) {
        if (net->port_down_ns)
            log_line(LOG_WARN, "verbs: %s:%d is up again", net->card.device, net->card.port);
        net->port_down_ns = 0;
    } else if (!net->port_down_ns) {
        net->port_down_ns = clock_ns();
        log_line(LOG_WARN, "verbs: %s:%d is down", net->card.device, net->card.port);
    }
}

static void take_event(struct verbs_net *net, const struct ibv_async_event *event)
{
    const char *text = net->lib->event_type_str(event->event_type);

    switch (event->event_type) {
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
        verbs_break(net, EIO, text);
        break;
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
        port_event(net, event);
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        /* The context of a peer's queue pair is that peer; the failure of any other fails the endpoint. */
        if (event->element.qp->qp_context)
            verbs_peer_lost(net, (int)((struct verbs_peer *)event->element.qp->qp_context - net->peers), EIO, text);
        else
            verbs_break(net, EIO, text);
        break;
    default:
        log_line(LOG_DEBUG, "verbs: %s: %s", net->card.device, text);
    }
}

void verbs_event_check(struct verbs_net *net)
{
    struct ibv_async_event event;

    while (!net->lib->get_async_event(net->context, &event)) {
        take_event(net, &event);
        net->lib->ack_async_event(&event);
    }
    if (net->port_down_ns && clock_ns() - net->port_down_ns > net->grace_ns)
        verbs_break(net, ENETDOWN, "its port is down");
}

/* Events must be consumed and, before the queue is destroyed, acknowledged. They carry no more information. */
static void drain_channel(struct verbs_net *net)
{
    struct ibv_cq *cq;
    void *context;

    while (!net->lib->get_cq_event(net->channel, &cq, &context))
        net->unacknowledged++;
    if (net->unacknowledged >= 1024) { /* acknowledging takes a lock */
        net->lib->ack_cq_events(net->cq, net->unacknowledged);
        net->unacknowledged = 0;
    }
}

int verbs_event_arm(struct verbs_net *net)
{
    drain_channel(net);
    if (ibv_req_notify_cq(net->cq, 0)) {
        verbs_break(net, EIO, "the completion queue cannot be armed");
        return -EAGAIN;
    }
    /* A completion from before the queue was armed makes no event: poll once more, and keep what is found for poll. */
    if (!net->stashed && ibv_poll_cq(net->cq, 1, &net->stash) == 1)
        net->stashed = 1;
    return net->stashed ? -EAGAIN : 0;
}

void verbs_event_close(struct verbs_net *net)
{
    if (net->cq && net->channel) {
        drain_channel(net);
        if (net->unacknowledged)
            net->lib->ack_cq_events(net->cq, net->unacknowledged);
    }
    if (net->wait_fd >= 0)
        close(net->wait_fd);
}

#endif
