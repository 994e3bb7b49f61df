/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank other than 0 in the rendezvous (wire.h). It tries the ports on which rank 0 may listen, round after round,
 * until rank 0 of this job replies and proves that it knows the secret. Other services on these ports (a launcher's own
 * store, another job, somebody who waits for ranks) may send invalid data or nothing. So each port has a short time to
 * reply, which grows every round in case rank 0 is only slow.
 */
#include "boot/rendezvous.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "util/build.h"
#include "util/status.h"

enum { PAUSE_MS = 10, PAUSE_MAX_MS = 200 };

struct client {
    const struct rendezvous_config *config;
    struct endpoint masters[RENDEZVOUS_MAX_ADDRESSES];
    int master_count;
    struct endpoint sources[RENDEZVOUS_MAX_ADDRESSES];
    int source_count;
    int round;
    uint64_t deadline;
    char last[400]; /* result of the last attempt, for the message */
    char told[400]; /* of the last one that somebody accepted: rank 0 may be gone before this rank's deadline */
};

enum outcome { JOINED, RETRY, GIVE_UP };

/* ---- Addresses ---------------------------------------------------------------------------------------------- */

/* The source address for a destination: same family and scope; if there are several, a different one each round. */
static const struct endpoint *source_for(const struct client *client, const struct endpoint *to)
{
    const struct endpoint *fitting[RENDEZVOUS_MAX_ADDRESSES];
    int count = 0;

    if (endpoint_is_loopback(to))
        return NULL;
    for (int i = 0; i < client->source_count; i++) {
        const struct endpoint *from = &client->sources[i];
        if (from->address.ss_family == to->address.ss_family && !endpoint_is_loopback(from) &&
            endpoint_is_link_local(from) == endpoint_is_link_local(to))
            fitting[count++] = from;
    }
    return count ? fitting[client->round % count] : NULL;
}

/* A link-local destination without a scope is reached through the selected interface. */
static void copy_scope(struct endpoint *to, const struct endpoint *from)
{
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&to->address;

    if (to->address.ss_family == AF_INET6 && endpoint_is_link_local(to) && !in6->sin6_scope_id)
        in6->sin6_scope_id = ((const struct sockaddr_in6 *)&from->address)->sin6_scope_id;
}

/* A name may resolve only after some time, as names of containers do: a failure is retried in the next round. */
static int find_masters(struct client *client)
{
    if (client->master_count)
        return 1;
    if (!resolve_host(client->config->host, client->deadline, client->masters, RENDEZVOUS_MAX_ADDRESSES,
                      &client->master_count))
        return 1;
    snprintf(client->last, sizeof(client->last), "%s", epx_last_error());
    return 0;
}

/* ---- One port ----------------------------------------------------------------------------------------------- */

static int is_only_place(const struct client *client)
{
    return client->config->ports == 1 && client->master_count == 1;
}

/* Where there is one place to ask, there is nothing to hurry for: many ranks may ask rank 0 at once. */
static uint64_t reply_deadline(const struct client *client)
{
    int most =
        client->round < 4 && !is_only_place(client) ? RENDEZVOUS_REPLY_MS << client->round : RENDEZVOUS_REPLY_MAX_MS;
    uint64_t at = deadline_in(most < RENDEZVOUS_REPLY_MAX_MS ? most : RENDEZVOUS_REPLY_MAX_MS);

    return at < client->deadline ? at : client->deadline;
}

static enum outcome record(struct client *client, const struct endpoint *to, const char *what)
{
    char text[ENDPOINT_TEXT];

    snprintf(client->last, sizeof(client->last), "%s: %s", endpoint_text(to, text), what);
    memcpy(client->told, client->last, sizeof(client->told));
    return RETRY;
}

static enum outcome record_no_connection(struct client *client, const struct endpoint *to)
{
    char text[ENDPOINT_TEXT], what[64];

    snprintf(what, sizeof(what), "%m");
    snprintf(client->last, sizeof(client->last), "%s: %s", endpoint_text(to, text), what);
    return RETRY;
}

static enum outcome record_errno(struct client *client, const struct endpoint *to)
{
    char what[64];

    if (errno == ENOTCONN)
        return record(client, to, "connection closed");
    snprintf(what, sizeof(what), "%m");
    return record(client, to, what);
}

/* It cannot prove anything to this rank. Where rank 0 can be nowhere else, there is nothing to wait for. */
static enum outcome refuse_build(struct client *client, const struct endpoint *to, uint64_t build, epx_status *status)
{
    char who[ENDPOINT_TEXT + 16], text[ENDPOINT_TEXT];

    snprintf(who, sizeof(who), "rank 0 at %s", endpoint_text(to, text));
    *status = build_fail(who, build, "this rank", build_number());
    return is_only_place(client) ? GIVE_UP : record(client, to, epx_last_error());
}

/* Both sides prove that they know the secret. Until rank 0 has, it gets the number of this build and random bytes. */
static enum outcome authenticate(struct client *client, struct channel *channel, const struct endpoint *to,
                                 uint64_t deadline, epx_status *status)
{
    char what[320], other[100] = "", theirs[BUILD_TEXT], own[BUILD_TEXT];

    if (!channel_handshake_all(channel, deadline))
        return JOINED;
    if (errno == EPROTO && channel_build(channel))
        return refuse_build(client, to, channel_build(channel), status);
    if (errno == EPROTO)
        return record(client, to, "a service other than EPX replied");
    if (errno == ENOTCONN || errno == ECONNRESET)
        return record(client, to,
                      "connection closed without a proof: not EPX, an older one, or it has EPX_SECRET=none");
    if (errno != EACCES)
        return record_errno(client, to);
    if (channel_build(channel) != build_number())
        snprintf(other, sizeof(other), " of another build (%s, this rank has %s)",
                 build_text(channel_build(channel), theirs), build_text(build_number(), own));
    snprintf(what, sizeof(what), "EPX%s replied, but it does not know this rank's secret, which is from %.100s", other,
             client->config->key_from);
    return record(client, to, what);
}

/* Rank 0 waits for a greeting that a rank without a secret does not send, and closes the connection then. */
static enum outcome no_reply(struct client *client, const struct endpoint *to)
{
    if (!client->config->key && (errno == ENOTCONN || errno == ECONNRESET || errno == ETIMEDOUT))
        return record(client, to, "no reply: not EPX, or it has a secret, and this rank has EPX_SECRET=none");
    return record_errno(client, to);
}

static enum outcome handshake(struct client *client, struct channel *channel, const struct endpoint *to,
                              epx_status *status)
{
    const struct rendezvous_config *config = client->config;
    struct wire_hello hello = {.magic = WIRE_HELLO_MAGIC,
                               .version = WIRE_VERSION,
                               .job = config->job,
                               .rank = config->rank,
                               .nranks = config->nranks,
                               .build = build_number()};
    struct wire_frame reply;
    uint64_t deadline = reply_deadline(client);
    enum outcome outcome;

    outcome = authenticate(client, channel, to, deadline, status);
    if (outcome != JOINED)
        return outcome;
    if (channel_send_all(channel, &hello, sizeof(hello), deadline) ||
        channel_receive_all(channel, &reply, sizeof(reply), deadline))
        return no_reply(client, to);
    if (reply.magic != WIRE_FRAME_MAGIC)
        return record(client, to, "a service other than EPX replied");
    switch (reply.op) {
    case WIRE_WELCOME:
        return send_frame(channel, WIRE_ACK, deadline) ? record_errno(client, to) : JOINED;
    case WIRE_OTHER_JOB:
        return record(client, to, "rank 0 of another job replied");
    case WIRE_ERROR:
        *status = receive_error(channel, &reply, deadline_in(RENDEZVOUS_CLOSE_MS));
        return GIVE_UP;
    default:
        return record(client, to, "unexpected reply");
    }
}

static enum outcome try_port(struct client *client, struct endpoint *to, int port, struct channel *channel,
                             epx_status *status)
{
    const struct endpoint *from = source_for(client, to);
    enum outcome outcome;
    int fd;

    endpoint_set_port(to, port);
    if (from)
        copy_scope(to, from);
    fd = socket_connect(to, from, reply_deadline(client));
    if (fd < 0)
        return record_no_connection(client, to);
    if (channel_start(channel, fd, client->config->key, AUTH_RENDEZVOUS, 0))
        return record_errno(client, to);
    outcome = handshake(client, channel, to, status);
    if (outcome != JOINED)
        channel_close(channel);
    return outcome;
}

/* ---- The rendezvous ----------------------------------------------------------------------------------------- */

static int last_port(const struct rendezvous_config *config)
{
    const int last = config->port + config->ports - 1;

    return last > 65535 ? 65535 : last;
}

static enum outcome try_ports(struct client *client, struct channel *channel, epx_status *status)
{
    for (int port = client->config->port; port <= last_port(client->config); port++)
        for (int i = 0; i < client->master_count; i++) {
            enum outcome outcome = try_port(client, &client->masters[i], port, channel, status);
            if (outcome != RETRY || deadline_passed(client->deadline))
                return outcome;
        }
    return RETRY;
}

static void pause_after(const struct client *client)
{
    int ms = client->round < 5 ? PAUSE_MS << client->round : PAUSE_MAX_MS;
    uint64_t until = deadline_in(ms < PAUSE_MAX_MS ? ms : PAUSE_MAX_MS);

    poll_until(NULL, 0, until < client->deadline ? until : client->deadline);
}

static epx_status no_root(const struct client *client)
{
    const struct rendezvous_config *config = client->config;
    const int before = client->told[0] && strcmp(client->told, client->last) != 0;
    char ports[32];

    snprintf(ports, sizeof(ports), config->ports > 1 ? "ports %d to %d" : "port %d", config->port, last_port(config));
    return fail(EPX_ERR_TIMEOUT, "rank 0 did not reply at %s, %s, within %d ms (last attempt: %s%s%s)%s%s",
                config->host, ports, config->timeout_ms, client->last, before ? "; before it " : "",
                before ? client->told : "", config->host_from ? "; to set another address: " : "",
                config->host_from ? config->host_hint : "");
}

static epx_status find_root(struct client *client, struct channel *channel)
{
    epx_status status = EPX_ERR_INTERNAL;

    for (; !deadline_passed(client->deadline); client->round++) {
        enum outcome outcome = find_masters(client) ? try_ports(client, channel, &status) : RETRY;
        if (outcome == JOINED)
            return EPX_OK;
        if (outcome == GIVE_UP)
            return status;
        pause_after(client);
    }
    return no_root(client);
}

/* Rank 0's deadline began before it replied, so START or an error arrives before this deadline. */
static epx_status await_start(const struct rendezvous_config *config, struct channel *channel, int *block)
{
    uint64_t deadline = deadline_in(config->timeout_ms + RENDEZVOUS_SLACK_MS);
    struct wire_frame frame;

    if (channel_receive_all(channel, &frame, sizeof(frame), deadline)) {
        if (errno == ETIMEDOUT)
            return fail(EPX_ERR_TIMEOUT, "rank 0 did not confirm within %d ms that all ranks have connected",
                        config->timeout_ms + RENDEZVOUS_SLACK_MS);
        return fail_to_meet(0);
    }
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_START && frame.sequence < (uint64_t)config->nranks) {
        *block = (int)frame.sequence;
        return EPX_OK;
    }
    if (frame.magic == WIRE_FRAME_MAGIC && frame.op == WIRE_ERROR)
        return receive_error(channel, &frame, deadline_in(RENDEZVOUS_CLOSE_MS));
    return fail(EPX_ERR_MISMATCH, "invalid message %u from rank 0, expected START (%d)", frame.op, WIRE_START);
}

epx_status rendezvous_client(const struct rendezvous_config *config, struct channel *channel, int *block)
{
    struct client client = {.config = config, .last = "no attempt yet"};
    epx_status status = EPX_OK;

    *channel = CHANNEL_CLOSED;
    client.deadline = deadline_in(config->timeout_ms);
    if (config->interfaces && !host_is_loopback(config->host))
        status =
            interface_addresses(config->interfaces, client.sources, RENDEZVOUS_MAX_ADDRESSES, &client.source_count);
    if (!status)
        status = find_root(&client, channel);
    if (status)
        return status;
    status = await_start(config, channel, block);
    if (status)
        channel_close(channel);
    return status;
}
