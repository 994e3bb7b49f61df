/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections that were accepted and have not proved yet that they know the key. There are at most LOBBY_PLACES, for at
 * most LOBBY_MS each, of a few hundred bytes. When all places are taken, a new connection replaces the one that has
 * waited longest; connections that have not sent a whole greeting are replaced first, and one whose greeting lacks the
 * mark of the key is closed at once. So a rank gets a place however many strangers connect and stay. A connection is
 * not replaced before it had LOBBY_SILENT_MS to send its greeting, and LOBBY_SPOKEN_MS for its proof; until then new
 * ones wait in the listener's queue. Without these times, a hundred ranks that connected at once replaced each other
 * until each had tried many times.
 * Who reads the network can send a greeting again that a rank has sent. A greeting that was heard here before counts as
 * none: it gets LOBBY_SILENT_MS for its proof, and no more.
 */
#ifndef EPX_BOOT_LOBBY_H
#define EPX_BOOT_LOBBY_H

#include "boot/channel.h"

enum {
    LOBBY_PLACES = 64,
    LOBBY_MS = 2000,
    LOBBY_KNOWN = 1024,   /* greetings that are remembered */
    LOBBY_SILENT_MS = 20, /* a place is kept at least so long for a connection that has sent no whole greeting, */
    LOBBY_SPOKEN_MS = 200 /* and so long for one that has */
};

struct lobby {
    const uint8_t *key; /* NULL = everybody is let in */
    enum auth_purpose purpose;
    struct {
        struct channel channel;
        uint64_t since_ns;
        int greeted; /* with the mark of the key, and not as somebody before it */
    } place[LOBBY_PLACES];
    uint64_t known[LOBBY_KNOWN]; /* by one half of their random numbers: the other half */
    int next;                    /* the place that lobby_next looks at next */
    unsigned strangers;          /* connections that were closed because they did not know the key */
    char last[ENDPOINT_TEXT];    /* where the last of them came from */
    uint64_t build;              /* of the last of them that said to be another build; 0 = none has */
};

void lobby_open(struct lobby *lobby, const uint8_t *key, enum auth_purpose purpose);
/* Accepts the connections that wait at `listener`, as far as there are places. 0, or -1 with errno: the listener
 * failed. */
int lobby_accept(struct lobby *lobby, int listener);
/* Whether lobby_accept could accept one now. */
int lobby_has_room(const struct lobby *lobby);
/* Continues the handshakes, one after the other until it returns 0. 1: `out` is a connection whose peer knows the key;
 * 0: there is none now. */
int lobby_next(struct lobby *lobby, struct channel *out);
/* Right after lobby_next(): it keeps its place until the next call. */
void lobby_return(struct lobby *lobby, const struct channel *channel);
/* Connections that wait here. */
int lobby_count(const struct lobby *lobby);
/* LOBBY_PLACES entries. */
void lobby_polls(const struct lobby *lobby, struct pollfd *polls);
/* Whoever is left counts as a stranger. */
void lobby_close(struct lobby *lobby);

#endif
