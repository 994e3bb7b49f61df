/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/lobby.h"

#include <errno.h>
#include <string.h>

#include "util/build.h"
#include "util/clock.h"
#include "util/log.h"

enum { ACCEPT_AT_ONCE = 1024 };

void lobby_open(struct lobby *lobby, const uint8_t *key, enum auth_purpose purpose)
{
    *lobby = (struct lobby){.key = key, .purpose = purpose, .last = "an unknown address"};
    for (int i = 0; i < LOBBY_PLACES; i++)
        lobby->place[i].channel = CHANNEL_CLOSED;
}

/* One that has not greeted counts as having waited longer than any that has. */
static uint64_t rank_of(const struct lobby *lobby, int i)
{
    const uint64_t greeted = (uint64_t)1 << 63;

    return lobby->place[i].since_ns | (lobby->place[i].greeted ? greeted : 0);
}

/* A free place, or that of the longest waiting connection if it has had its time, or -1. */
static int find_place(const struct lobby *lobby)
{
    int oldest = 0;
    uint64_t least;

    for (int i = 0; i < LOBBY_PLACES; i++) {
        if (lobby->place[i].channel.fd < 0)
            return i;
        if (rank_of(lobby, i) < rank_of(lobby, oldest))
            oldest = i;
    }
    least = lobby->place[oldest].greeted ? LOBBY_SPOKEN_MS : LOBBY_SILENT_MS;
    return clock_ns() - lobby->place[oldest].since_ns >= least * 1000000ull ? oldest : -1;
}

int lobby_has_room(const struct lobby *lobby)
{
    return find_place(lobby) >= 0;
}

int lobby_count(const struct lobby *lobby)
{
    int count = 0;

    for (int i = 0; i < LOBBY_PLACES; i++)
        count += lobby->place[i].channel.fd >= 0;
    return count;
}

/* Where no descriptor is free, the connections that wait here are closed for the new one. */
static int accept_one(struct lobby *lobby, int listener)
{
    int fd = socket_accept(listener);

    if (fd < 0 && (errno == EMFILE || errno == ENFILE) && lobby_count(lobby)) {
        for (int i = 0; i < LOBBY_PLACES; i++)
            channel_close(&lobby->place[i].channel);
        fd = socket_accept(listener);
    }
    return fd;
}

/* Remembers the greeting. Only those with the key's mark are: others cannot make them forgotten. */
static int known_greeting(struct lobby *lobby, const uint8_t nonce[AUTH_NONCE])
{
    uint64_t half[2], *known;

    static_assert(sizeof(half) == AUTH_NONCE, "a nonce has two halves");
    memcpy(half, nonce, sizeof(half));
    known = &lobby->known[half[0] % LOBBY_KNOWN];
    if (*known == half[1])
        return 1;
    *known = half[1];
    return 0;
}

/* As channel_handshake(). */
static int continue_handshake(struct lobby *lobby, int i)
{
    struct channel *channel = &lobby->place[i].channel;
    const int silent = !channel_nonce(channel);
    const int state = channel_handshake(channel);

    if (silent && state >= 0 && channel_nonce(channel))
        lobby->place[i].greeted = !known_greeting(lobby, channel_nonce(channel));
    return state;
}

static void turn_away(struct lobby *lobby, struct channel *channel)
{
    struct endpoint from = {.length = sizeof(from.address)};

    if (!getpeername(channel->fd, (struct sockaddr *)&from.address, &from.length))
        endpoint_text(&from, lobby->last);
    if (channel_build(channel) && channel_build(channel) != build_number())
        lobby->build = channel_build(channel);
    if (!lobby->strangers++)
        log_line(LOG_INFO, "a connection from %s was closed: it did not prove that it knows the secret of this job",
                 lobby->last);
    channel_close(channel);
}

void lobby_close(struct lobby *lobby)
{
    for (int i = 0; i < LOBBY_PLACES; i++)
        if (lobby->place[i].channel.fd >= 0)
            turn_away(lobby, &lobby->place[i].channel);
}

int lobby_accept(struct lobby *lobby, int listener)
{
    for (int i = 0; i < ACCEPT_AT_ONCE; i++) {
        const int at = find_place(lobby);
        const int fd = at < 0 ? -1 : accept_one(lobby, listener);

        if (at < 0)
            return 0;
        if (fd < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
        if (lobby->place[at].channel.fd >= 0)
            turn_away(lobby, &lobby->place[at].channel);
        lobby->place[at].since_ns = clock_ns();
        lobby->place[at].greeted = !lobby->key;
        /* It has most likely sent something already: then it is not among the first to be replaced. */
        if (!channel_start(&lobby->place[at].channel, fd, lobby->key, lobby->purpose, 1) &&
            continue_handshake(lobby, at) < 0 && errno != ENOMEM)
            turn_away(lobby, &lobby->place[at].channel);
    }
    return 0;
}

int lobby_next(struct lobby *lobby, struct channel *out)
{
    const uint64_t now = clock_ns();

    while (lobby->next < LOBBY_PLACES) {
        const int i = lobby->next++;
        struct channel *channel = &lobby->place[i].channel;
        const int state = channel->fd < 0 ? 0 : continue_handshake(lobby, i);

        if (state > 0) {
            *out = *channel;
            *channel = CHANNEL_CLOSED;
            return 1;
        }
        if ((state < 0 && errno != ENOMEM) ||
            (channel->fd >= 0 && now - lobby->place[i].since_ns > LOBBY_MS * 1000000ull))
            turn_away(lobby, channel);
    }
    lobby->next = 0;
    return 0;
}

void lobby_return(struct lobby *lobby, const struct channel *channel)
{
    lobby->place[lobby->next - 1].channel = *channel;
}

void lobby_polls(const struct lobby *lobby, struct pollfd *polls)
{
    for (int i = 0; i < LOBBY_PLACES; i++) {
        const struct channel *channel = &lobby->place[i].channel;
        polls[i] = (struct pollfd){.fd = channel->fd, .events = channel_events(channel)};
    }
}
