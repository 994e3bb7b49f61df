/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much may be in flight to a peer: a window in bytes and one in messages. Both adapt once per round; a round is the
 * time until a put posted at its start completes.
 *
 *   grow    by an eighth, when something waited for the window and the completions came in time
 *   shrink  by a quarter, when most completions were late: later than four times what the bytes ahead of them would
 *           take at the best rate seen. The own queue cannot cause that; a congested network can
 *   shrink  the messages to three quarters of those in flight, when the network had no room
 *
 * Best time and best rate decay slowly, so that completions over a path that has become slower do not count as late for
 * ever. The user's limits bound the windows and do not adapt. One put is always allowed when nothing is in flight,
 * however large. The code that every put runs is inline, in internal.h.
 */
#include <string.h>

#include "proxy/internal.h"

#define BYTES_START ((uint64_t)4 << 20)
#define BYTES_MIN ((uint64_t)256 << 10)
#define BYTES_MAX ((uint64_t)64 << 20)
#define MESSAGES_MIN 16u
#define LATE_FACTOR 4
#define LATE_GRACE_NS 100000u /* a proxy may lose its core for a moment */

void window_init(struct window *w, uint32_t depth)
{
    memset(w, 0, sizeof(*w));
    w->bytes_limit = BYTES_START;
    w->messages_max = depth;
    w->messages_limit = depth < 128 ? depth : 128;
}

void window_refused(struct window *w)
{
    const uint32_t less = w->messages * 3 / 4;

    if (w->refused)
        return;
    w->refused = 1;
    w->messages_limit = less > MESSAGES_MIN ? less : MESSAGES_MIN;
}

static void record_latency(struct window *w, const struct posted *posted, uint64_t now)
{
    const uint64_t took = now - posted->at_ns;
    uint64_t expected;

    if (w->best_ns == 0 || took < w->best_ns)
        w->best_ns = took ? took : 1;
    expected = w->best_ns + (w->best_rate ? ((uint64_t)posted->ahead_kib << 10) * 1000 / w->best_rate : 0);
    if (took > LATE_FACTOR * expected + LATE_GRACE_NS)
        w->late++;
    else
        w->timely++;
}

static void adapt(struct window *w)
{
    if (w->late > w->timely) {
        w->bytes_limit -= w->bytes_limit / 4;
        w->messages_limit -= w->messages_limit / 4;
    } else if (w->limited && !w->refused) {
        w->bytes_limit += w->bytes_limit / 8;
        w->messages_limit += w->messages_limit / 8 + 1;
    }
    w->bytes_limit = w->bytes_limit < BYTES_MIN ? BYTES_MIN : w->bytes_limit;
    w->bytes_limit = w->bytes_limit > BYTES_MAX ? BYTES_MAX : w->bytes_limit;
    w->messages_limit = w->messages_limit < MESSAGES_MIN ? MESSAGES_MIN : w->messages_limit;
    w->messages_limit = w->messages_limit > w->messages_max ? w->messages_max : w->messages_limit;
}

static void trace_window(const struct proxy_thread *t, const struct peer *peer, uint64_t now)
{
    const struct trace_event e = {.begin_ns = now,
                                  .category = "window",
                                  .name = "window to rank",
                                  .label = {"in flight", "limit"},
                                  .value = {peer->window.bytes, peer->window.bytes_limit},
                                  .rank = t->group->options.rank,
                                  .peer = peer->rank,
                                  .kind = TRACE_COUNTER};

    trace_add(&e);
}

static void trace_put(const struct proxy_thread *t, const struct peer *peer, const struct posted *posted, uint64_t now)
{
    const struct trace_event e = {.begin_ns = posted->at_ns,
                                  .end_ns = now,
                                  .category = "put",
                                  .name = posted->bytes ? "put" : "put without bytes",
                                  .label = {"bytes", "commands"},
                                  .value = {posted->bytes, posted->count},
                                  .rank = t->group->options.rank,
                                  .peer = peer->rank,
                                  .kind = TRACE_PUT};

    trace_add(&e);
}

static void end_round(struct window *w, uint64_t next, uint64_t now)
{
    const uint64_t us = (now - w->round_ns) / 1000;
    const uint64_t rate = us && w->limited ? w->round_bytes / us : 0; /* meaningful only while the path is kept full */

    adapt(w);
    w->best_ns += w->best_ns / 256 + 1;
    w->best_rate -= w->best_rate / 256;
    if (rate > w->best_rate)
        w->best_rate = rate;
    w->round_end = next;
    w->round_ns = now;
    w->round_bytes = 0;
    w->late = w->timely = 0;
    w->limited = w->refused = 0;
}

int window_completed(struct proxy_thread *t, struct peer *peer, uint64_t number, uint32_t count)
{
    struct window *w = &peer->window;
    const uint64_t first = number + 1 - count;
    uint64_t i, bytes = 0, commands = 0;
    uint32_t by_flow[PROXY_FLOWS] = {0}, completed = 0;

    if (count == 0 || (int64_t)(first - peer->oldest) < 0 || (int64_t)(peer->next - number) <= 0)
        return -1;
    for (i = first; i != number + 1; i++) {
        struct posted *posted = &peer->posted[i & (t->depth - 1)];

        if (!posted->open)
            continue;
        posted->open = 0;
        if (proxy_traces(t))
            trace_put(t, peer, posted, loop_now(t));
        bytes += posted->bytes;
        commands += posted->count;
        by_flow[posted->flow]++;
        completed++;
    }
    for (i = 0; i < PROXY_FLOWS; i++) {
        w->by_flow[i] -= by_flow[i];
        t->by_flow[i] -= by_flow[i];
    }
    count_sent(t, peer, commands);
    w->bytes -= bytes;
    w->round_bytes += bytes;
    w->messages -= completed;
    t->bytes_in_flight -= bytes;
    t->messages_in_flight -= completed;
    record_latency(w, &peer->posted[number & (t->depth - 1)], loop_now(t));
    while (peer->oldest != peer->next && !peer->posted[peer->oldest & (t->depth - 1)].open)
        peer->oldest++;
    if ((int64_t)(peer->oldest - w->round_end) >= 0)
        end_round(w, peer->next, loop_now(t));
    show_window(t, peer, 0);
    if (proxy_traces(t))
        trace_window(t, peer, loop_now(t));
    return completed == count ? 0 : -1;
}

/* Nothing is in flight, as far as windows and limits are concerned. */
static void window_release(struct proxy_thread *t, struct window *w)
{
    t->bytes_in_flight -= w->bytes;
    t->messages_in_flight -= w->messages;
    for (int i = 0; i < PROXY_FLOWS; i++)
        t->by_flow[i] -= w->by_flow[i];
    w->bytes = 0;
    w->messages = 0;
    memset(w->by_flow, 0, sizeof(w->by_flow));
}

void window_keep(struct proxy_thread *t, struct peer *peer)
{
    t->still_read += peer->window.bytes;
    window_release(t, &peer->window);
}

void window_forget(struct proxy_thread *t, struct peer *peer)
{
    uint64_t i, commands = 0;

    for (i = peer->oldest; i != peer->next; i++) {
        struct posted *posted = &peer->posted[i & (t->depth - 1)];

        commands += posted->open ? posted->count : 0;
        posted->open = 0;
    }
    count_sent(t, peer, commands);
    window_release(t, &peer->window);
    peer->oldest = peer->next;
}
