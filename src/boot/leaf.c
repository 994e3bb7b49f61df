/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank other than 0 in the rendezvous (wire.h). It walks the ports that rank 0 may have taken, round after round,
 * until one answers as rank 0 of this job does. What else listens there (a launcher's own store, another job) may
 * answer nonsense or nothing: each port gets a short while, longer in every round, for a rank 0 that is only slow.
 */
#include "boot/meet.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "util/status.h"

enum { PAUSE_MS = 10, PAUSE_MOST_MS = 200 };

struct leaf {
    const struct meeting *meeting;
    struct endpoint masters[MEET_MAX_ADDRESSES];
    int master_count;
    struct endpoint sources[MEET_MAX_ADDRESSES];
    int source_count;
    int round;
    uint64_t deadline;
    char last[160]; /* what the last port did, for the message */
};

enum outcome { JOINED, NEXT, GIVE_UP };

/* ---- Addresses ---------------------------------------------------------------------------------------------- */

/* The source address for a destination: of its family and scope; with several, another one each round. */
static const struct endpoint *source_for(const struct leaf *leaf, const struct endpoint *to)
{
    const struct endpoint *fitting[MEET_MAX_ADDRESSES];
    int count = 0;

    if (endpoint_is_loopback(to))
        return NULL;
    for (int i = 0; i < leaf->source_count; i++) {
        const struct endpoint *from = &leaf->sources[i];
        if (from->address.ss_family == to->address.ss_family && !endpoint_is_loopback(from) &&
            endpoint_is_link_local(from) == endpoint_is_link_local(to))
            fitting[count++] = from;
    }
    return count ? fitting[leaf->round % count] : NULL;
}

/* A link-local destination without a scope lies behind the interface that was asked for. */
static void lend_scope(struct endpoint *to, const struct endpoint *from)
{
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&to->address;

    if (to->address.ss_family == AF_INET6 && endpoint_is_link_local(to) && !in6->sin6_scope_id)
        in6->sin6_scope_id = ((const struct sockaddr_in6 *)&from->address)->sin6_scope_id;
}

/* Names may become known only after a while, as those of containers do: a failure is for the next round. */
static int find_masters(struct leaf *leaf)
{
    if (leaf->master_count)
        return 1;
    if (!resolve_host(leaf->meeting->host, leaf->deadline, leaf->masters, MEET_MAX_ADDRESSES, &leaf->master_count))
        return 1;
    snprintf(leaf->last, sizeof(leaf->last), "%s", epx_last_error());
    return 0;
}

/* ---- One port ----------------------------------------------------------------------------------------------- */

static uint64_t answer_deadline(const struct leaf *leaf)
{
    int most = leaf->round < 4 ? MEET_ANSWER_MS << leaf->round : MEET_ANSWER_MOST_MS;
    uint64_t at = deadline_in(most < MEET_ANSWER_MOST_MS ? most : MEET_ANSWER_MOST_MS);

    return at < leaf->deadline ? at : leaf->deadline;
}

static enum outcome note(struct leaf *leaf, const struct endpoint *to, const char *what)
{
    char text[ENDPOINT_TEXT];

    snprintf(leaf->last, sizeof(leaf->last), "%s: %s", endpoint_text(to, text), what);
    return NEXT;
}

static enum outcome note_errno(struct leaf *leaf, const struct endpoint *to)
{
    char what[64];

    if (errno == ENOTCONN)
        return note(leaf, to, "it closed the connection");
    snprintf(what, sizeof(what), "%m");
    return note(leaf, to, what);
}

static enum outcome shake_hands(struct leaf *leaf, int fd, const struct endpoint *to, epx_status *status)
{
    const struct meeting *meeting = leaf->meeting;
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC,
                               .version = WIRE_VERSION,
                               .job = meeting->job,
                               .rank = meeting->rank,
                               .nranks = meeting->nranks};
    struct wire_frame answer;
    uint64_t deadline = answer_deadline(leaf);

    if (send_all(fd, &hello, sizeof(hello), deadline) || receive_all(fd, &answer, sizeof(answer), deadline))
        return note_errno(leaf, to);
    if (answer.magic != WIRE_FRAME_MAGIC)
        return note(leaf, to, "something other than EPX answers there");
    switch (answer.op) {
    case WIRE_WELCOME:
        return send_frame(fd, WIRE_ACK, deadline) ? note_errno(leaf, to) : JOINED;
    case WIRE_OTHER_JOB:
        return note(leaf, to, "rank 0 of another job answers there");
    case WIRE_ERROR:
        *status = receive_error(fd, &answer, deadline_in(MEET_GOODBYE_MS));
        return GIVE_UP;
    default:
        return note(leaf, to, "it answers out of turn");
    }
}

static enum outcome try_port(struct leaf *leaf, struct endpoint *to, int port, int *fd, epx_status *status)
{
    const struct endpoint *from = source_for(leaf, to);
    enum outcome outcome;

    endpoint_set_port(to, port);
    if (from)
        lend_scope(to, from);
    *fd = socket_connect(to, from, answer_deadline(leaf));
    if (*fd < 0)
        return note_errno(leaf, to);
    outcome = shake_hands(leaf, *fd, to, status);
    if (outcome != JOINED) {
        close(*fd);
        *fd = -1;
    }
    return outcome;
}

/* ---- The rendezvous ----------------------------------------------------------------------------------------- */

static enum outcome walk_ports(struct leaf *leaf, int *fd, epx_status *status)
{
    int first = leaf->meeting->port, last = first + MEET_MORE_PORTS;

    for (int port = first; port <= last && port <= 65535; port++)
        for (int i = 0; i < leaf->master_count; i++) {
            enum outcome outcome = try_port(leaf, &leaf->masters[i], port, fd, status);
            if (outcome != NEXT || deadline_passed(leaf->deadline))
                return outcome;
        }
    return NEXT;
}

static void pause_after(const struct leaf *leaf)
{
    int ms = leaf->round < 5 ? PAUSE_MS << leaf->round : PAUSE_MOST_MS;
    uint64_t until = deadline_in(ms < PAUSE_MOST_MS ? ms : PAUSE_MOST_MS);

    poll_until(NULL, 0, until < leaf->deadline ? until : leaf->deadline);
}

static epx_status find_root(struct leaf *leaf, int *fd)
{
    const struct meeting *meeting = leaf->meeting;
    epx_status status = EPX_ERR_INTERNAL;

    for (; !deadline_passed(leaf->deadline); leaf->round++) {
        enum outcome outcome = find_masters(leaf) ? walk_ports(leaf, fd, &status) : NEXT;
        if (outcome == JOINED)
            return EPX_OK;
        if (outcome == GIVE_UP)
            return status;
        pause_after(leaf);
    }
    return fail(EPX_ERR_TIMEOUT, "rank 0 did not answer at %s, ports %d to %d, within %d ms (last: %s)", meeting->host,
                meeting->port, meeting->port + MEET_MORE_PORTS, meeting->timeout_ms, leaf->last);
}

/* Rank 0's own deadline began at the latest when it answered, so it has spoken before this one passes. */
static epx_status await_start(const struct meeting *meeting, int fd)
{
    uint64_t deadline = deadline_in(meeting->timeout_ms + MEET_SLACK_MS);
    struct wire_frame frame;

    if (receive_all(fd, &frame, sizeof(frame), deadline)) {
        if (errno == ETIMEDOUT)
            return fail(EPX_ERR_TIMEOUT, "rank 0 did not say within %d ms that all ranks have arrived",
                        meeting->timeout_ms + MEET_SLACK_MS);
        return fail(EPX_ERR_PEER, "rank 0 ended before all ranks had arrived");
    }
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_START)
        return EPX_OK;
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(fd, &frame, deadline_in(MEET_GOODBYE_MS));
    return fail(EPX_ERR_INTERNAL, "rank 0 said %u where %d, all ranks have arrived, was due", frame.op, WIRE_START);
}

epx_status meet_as_leaf(const struct meeting *meeting, int *fd)
{
    struct leaf leaf = {.meeting = meeting, .last = "no attempt yet"};
    epx_status status = EPX_OK;

    *fd = -1;
    leaf.deadline = deadline_in(meeting->timeout_ms);
    if (meeting->interfaces && !host_is_loopback(meeting->host))
        status = interface_addresses(meeting->interfaces, leaf.sources, MEET_MAX_ADDRESSES, &leaf.source_count);
    if (!status)
        status = find_root(&leaf, fd);
    if (status)
        return status;
    status = await_start(meeting, *fd);
    if (status) {
        close(*fd);
        *fd = -1;
    }
    return status;
}
