/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One iteration of a proxy thread. It takes no lock, allocates nothing and makes no system call of its own.
 *
 *   network --poll--> completions: windows open      arrivals: counters (count.c)      failures: peer is lost
 *
 *   ring --take, check--> peer's queue of pending puts --window, network--> posted puts --completion--> forgotten
 *              |              merge with one of the last MERGE_DEPTH                  one doorbell per iteration
 *              |              pending puts that touches on both sides
 *              `- bad: refused, counted, reported once
 *
 * Commands of one iteration are merged before the first is posted. Puts that wait for a window are still merged with. A
 * peer whose window is closed keeps its puts in its own queue while other peers post. Only when that queue is full does
 * the ring wait, at the first command for this peer.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kernel/inject_bug.h"
#include "proxy/internal.h"
#include "util/clock.h"
#include "util/trace.h"

uint64_t loop_now(struct proxy_thread *t)
{
    if (t->now_ns == 0)
        t->now_ns = t->group->env->now_ns(t->group->env->self);
    return t->now_ns;
}

/* ---- Network events ----------------------------------------------------------------------------------------- */

void commands_drop(struct proxy_thread *t, const struct peer *peer, uint64_t commands)
{
    stat_add(&t->stats.dropped, commands);
    count_sent(t, peer, commands);
}

/* A put to this peer is given up, of so many commands; an alarm has none. That a peer which has ended or was cut off
 * misses something those that wait for it find out. One that only sleeps may wait for it in vain. */
static void put_missed(const struct proxy_thread *t, struct peer *peer, uint32_t kind, uint32_t commands)
{
    const uint8_t *missable = t->group->options.missable;

    if (missable && commands && !missable[kind] && peer->error == ETIMEDOUT)
        peer->missed = INJECT_BUG(BUG_MISSED, 0, 1);
}

static void pending_missed(struct proxy_thread *t, struct peer *peer)
{
    uint32_t i;

    for (i = peer->head; i != peer->tail; i++) {
        const struct pending *p = &peer->queue[i & (t->depth - 1)];

        put_missed(t, peer, COUNTER_KIND(p->counter), p->count);
        commands_drop(t, peer, p->count);
    }
    peer->head = peer->tail;
}

static void posted_missed(const struct proxy_thread *t, struct peer *peer)
{
    uint64_t i;

    for (i = peer->oldest; i != peer->next; i++) {
        const struct posted *posted = &peer->posted[i & (t->depth - 1)];

        if (posted->open)
            put_missed(t, peer, posted->kind, posted->count);
    }
}

/* A command for a peer that is lost or has left, or after a stop. A loss that was none to others may be one now. */
static void command_missed(struct proxy_thread *t, struct peer *peer, uint32_t counter)
{
    const int before = peer->missed;

    commands_drop(t, peer, 1);
    if (peer->dead && !t->stopping)
        put_missed(t, peer, COUNTER_KIND(counter), 1);
    if (peer->missed && !before && !peer->unreported)
        report_loss(t, peer);
}

void peer_lost(struct proxy_thread *t, struct peer *peer, int error, int reads)
{
    if (peer->dead)
        return;
    peer->dead = 1;
    peer->error = error;
    pending_missed(t, peer);
    posted_missed(t, peer);
    if (reads)
        window_keep(t, peer);
    else
        window_forget(t, peer);
    if (t->group->options.grace_ms == 0) {
        report_loss(t, peer);
        return;
    }
    peer->lost_ns = loop_now(t);
    peer->unreported = 1;
    t->unreported++;
}

/* A card whose port is down, or whose completions cannot be read, may go on with what was posted. */
static void endpoint_lost(struct proxy_thread *t, int error)
{
    char text[256];
    int i;

    if (t->broken)
        return;
    t->broken = 1;
    snprintf(text, sizeof(text), "endpoint %d of the network (%s) failed: %s", t->index, t->ops->name,
             t->net && t->net->why ? t->net->why : strerror(error));
    proxy_fault(t, FAULT_ENDPOINT, EPX_ERR_SYSTEM, -1, 0, error, text);
    for (i = 0; i < t->npeers; i++)
        peer_lost(t, &t->peers[i], error, 1);
}

static struct peer *peer_of(const struct proxy_thread *t, int rank)
{
    if (rank < 0 || rank >= t->group->options.nranks || t->by_rank[rank] < 0)
        return NULL;
    return &t->peers[t->by_rank[rank]];
}

/* A cookie is rank << 48 | number of the put; numbers are compared modulo 2^48. */
static uint64_t cookie_of(const struct peer *peer)
{
    return (uint64_t)peer->rank << 48 | (peer->next & 0xffffffffffffu);
}

static void handle_completion(struct proxy_thread *t, const struct net_event *event)
{
    struct peer *peer = peer_of(t, (int)(event->cookie >> 48));
    uint64_t back;

    if (peer && peer->dead)
        return;
    if (peer) {
        back = (peer->next - event->cookie) & 0xffffffffffffu; /* 1 = the last one posted */
        if (window_completed(t, peer, peer->next - back, event->count) == 0)
            return;
    }
    proxy_fault(t, FAULT_COMPLETION, EPX_ERR_INTERNAL, event->peer, 1, event->count,
                "the network completed a put that was not posted");
}

static void handle_failed(struct proxy_thread *t, const struct net_event *event)
{
    struct peer *peer = peer_of(t, event->peer);

    if (peer)
        peer_lost(t, peer, event->error, INJECT_BUG(BUG_STILL_READ, 0, event->reads));
    else
        endpoint_lost(t, event->error);
}

/* Before counters announce to kernels what a card wrote into the device's memory. */
static void flush_arrivals(struct proxy_thread *t, const struct net_event *events, int n)
{
    struct device *device = t->group->options.device;
    int i = 0;

    while (i < n && events[i].kind != NET_ARRIVED)
        i++;
    set_state(t, STATE_ARRIVALS);
    if (i < n && device->ops->flush_arrivals(device) != EPX_OK)
        proxy_fault(t, FAULT_FLUSH, EPX_ERR_SYSTEM, -1, 0, 0, epx_last_error());
}

static int poll_net(struct proxy_thread *t)
{
    struct net_event events[POLL_MAX];
    int i, n;

    if (t->broken)
        return 0;
    set_state(t, STATE_POLL);
    n = t->ops->poll(t->net, events, POLL_MAX);
    if (n < 0) {
        if (n != -EAGAIN)
            endpoint_lost(t, -n);
        return n != -EAGAIN;
    }
    if (t->group->options.flush)
        flush_arrivals(t, events, n);
    for (i = 0; i < n; i++) {
        if (events[i].kind == NET_SENT)
            handle_completion(t, &events[i]);
        else if (events[i].kind == NET_ARRIVED)
            count_arrival(t, &events[i]);
        else if (events[i].kind == NET_REFUSED)
            stat_add(&t->stats.refused, events[i].count);
        else
            handle_failed(t, &events[i]);
    }
    return n;
}

/* ---- Taking and merging ------------------------------------------------------------------------------------- */

static void refuse(struct proxy_thread *t, enum fault fault, int peer, int64_t expected, int64_t seen, const char *text)
{
    stat_add(&t->stats.refused, 1);
    proxy_fault(t, fault, EPX_ERR_INTERNAL, peer, expected, seen, text);
}

/* Validates a command: returns its peer; NULL: refused. */
static struct peer *check(struct proxy_thread *t, struct command c, struct command_fields f)
{
    const struct proxy_options *o = &t->group->options;
    const uint64_t heap_units = o->heap_bytes / COMMAND_UNIT;
    struct peer *peer;

    if ((c.a & COMMAND_HEAD_MASK) != COMMAND_HEAD) {
        refuse(t, FAULT_COMMAND, -1, COMMAND_HEAD >> 1, (int64_t)(c.a & COMMAND_HEAD_MASK) >> 1,
               "a command has an unknown version or operation");
        return NULL;
    }
    peer = peer_of(t, (int)f.rank);
    if (!peer) {
        refuse(t, FAULT_RANK, -1, o->nranks, f.rank, "a command names a rank that does not belong to this ring");
        return NULL;
    }
    if (!counter_exists(o, f.counter) || is_alarm(o, f.counter)) {
        refuse(t, FAULT_COUNTER, peer->rank, COUNTER(o->kinds, 0), f.counter, "a command names an unknown counter");
        return NULL;
    }
    if (proxy_ring_of(t->group, peer->rank, f.counter) != t->index) {
        refuse(t, FAULT_RANK, peer->rank, proxy_ring_of(t->group, peer->rank, f.counter), t->index,
               "a command is in another ring than its rank and counter belong to");
        return NULL;
    }
    if (f.units > heap_units || f.source > heap_units - f.units) {
        refuse(t, FAULT_RANGE, peer->rank, (int64_t)heap_units, (int64_t)(f.source + f.units),
               "a command reads beyond the end of the heap (units of 16 bytes)");
        return NULL;
    }
    if (!peer->dead && f.target + f.units > peer->region_bytes / COMMAND_UNIT) {
        refuse(t, FAULT_RANGE, peer->rank, (int64_t)(peer->region_bytes / COMMAND_UNIT), (int64_t)(f.target + f.units),
               "a command writes beyond the end of the peer's heap (units of 16 bytes)");
        return NULL;
    }
    return peer;
}

static void fill_put(const struct proxy_options *o, struct command_fields f, struct pending *put)
{
    put->source = f.units ? f.source * COMMAND_UNIT : 0;
    put->target = f.units ? f.target * COMMAND_UNIT : 0;
    put->end = put->source + (uint64_t)f.units * COMMAND_UNIT;
    put->counter = (uint16_t)f.counter;
    put->count = 1;
    put->flow = o->flows ? o->flows[COUNTER_KIND(f.counter)] : PROXY_LOW_LATENCY;
    put->alarm = ALARM_NONE;
}

/* Merges b into a if they have the same counter and are contiguous on both sides, or one of them has no bytes. */
static int merge(struct pending *a, const struct pending *b, uint64_t most)
{
    const uint64_t a_bytes = a->end - a->source, b_bytes = b->end - b->source;

    if (a->counter != b->counter || a->alarm != b->alarm || a->count + b->count > IMMEDIATE_MAX_COUNT)
        return 0;
    if (a_bytes == 0 || b_bytes == 0) {
        if (a_bytes == 0) {
            a->source = b->source;
            a->end = b->end;
            a->target = b->target;
        }
    } else if (a_bytes + b_bytes > most) {
        return 0;
    } else if (a->end == b->source && a->target + a_bytes == b->target) {
        a->end = b->end;
    } else if (b->end == a->source && b->target + b_bytes == a->target) {
        a->source = b->source;
        a->target = b->target;
    } else {
        return 0;
    }
    a->count = (uint8_t)(a->count + b->count);
    return 1;
}

/* Keeps in mind where pending put i begins and ends. */
static void record_ends(struct peer *peer, uint32_t i, const struct pending *p)
{
    peer->first_unit[i % MERGE_DEPTH] = (uint32_t)(p->source / COMMAND_UNIT);
    peer->end_unit[i % MERGE_DEPTH] = (uint32_t)(p->end / COMMAND_UNIT);
}

/* 0: the put touches none of the last MERGE_DEPTH pending ones. A loop without branches: compilers make vectors of
 * it. */
static int may_touch(const struct peer *peer, const struct pending *put)
{
    const uint32_t first = (uint32_t)(put->source / COMMAND_UNIT), end = (uint32_t)(put->end / COMMAND_UNIT);
    uint32_t hits = 0;
    int i;

    if (peer->end_unit[(peer->tail - 1) % MERGE_DEPTH] == first) /* most that touch one touch the latest */
        return 1;
    for (i = 0; i < MERGE_DEPTH; i++)
        hits |= (uint32_t)(peer->end_unit[i] == first) | (uint32_t)(peer->first_unit[i] == end);
    return hits != 0;
}

/* A pending put that grew may now be contiguous with another one: the gap between the two was filled. */
static void close_gap(struct proxy_thread *t, struct peer *peer, uint32_t at, uint32_t from)
{
    const uint32_t mask = t->depth - 1;
    struct pending *grown = &peer->queue[at & mask];
    uint32_t i;

    for (i = from; i != peer->tail; i++) {
        struct pending *p = &peer->queue[i & mask];

        if (i == at || (p->source != grown->end && p->end != grown->source) || !merge(grown, p, t->merge_bytes))
            continue;
        *p = peer->queue[--peer->tail & mask];
        record_ends(peer, i, p);
        break;
    }
    record_ends(peer, at, grown);
}

/* Tries the last few pending puts, the latest first. Most are not contiguous: that is found first. */
static int merge_queued(struct proxy_thread *t, struct peer *peer, const struct pending *put)
{
    const uint32_t mask = t->depth - 1, queued = peer->tail - peer->head;
    const uint32_t from = queued > MERGE_DEPTH ? peer->tail - MERGE_DEPTH : peer->head;
    const int signal = put->end == put->source;
    uint32_t i;

    if (!signal && !may_touch(peer, put))
        return 0;
    for (i = peer->tail; i != from; i--) {
        struct pending *p = &peer->queue[(i - 1) & mask];

        if (p->end != put->source && p->source != put->end && !(signal && p->counter == put->counter))
            continue;
        if (!merge(p, put, t->merge_bytes))
            continue;
        close_gap(t, peer, i - 1, from);
        return 1;
    }
    return 0;
}

/* Where the next put of the peer's queue is made, so that nothing is copied; NULL: the queue is full. */
static struct pending *next_place(const struct proxy_thread *t, const struct peer *peer)
{
    return peer->tail - peer->head == t->depth ? NULL : &peer->queue[peer->tail & (t->depth - 1)];
}

/* The put lies in the peer's next place, or elsewhere if there is none. */
static int enqueue(struct proxy_thread *t, struct peer *peer, const struct pending *put)
{
    if (merge_queued(t, peer, put))
        return 1;
    if (put != next_place(t, peer))
        return 0;
    record_ends(peer, peer->tail++, put);
    if (!peer->listed) {
        peer->listed = 1;
        t->busy[t->nbusy++] = (int)(peer - t->peers);
    }
    return 1;
}

int put_enqueue(struct proxy_thread *t, struct peer *peer, const struct pending *put)
{
    struct pending *place = next_place(t, peer);

    if (!place)
        return enqueue(t, peer, put);
    *place = *put;
    return enqueue(t, peer, place);
}

static int enqueue_command(struct proxy_thread *t, struct peer *peer, struct command_fields f)
{
    struct pending *place = next_place(t, peer), elsewhere;

    if (!place)
        place = &elsewhere;
    fill_put(&t->group->options, f, place);
    return enqueue(t, peer, place);
}

/* The first command for this peer. Its loss may have been none before (was_only_asked()). */
static void peer_needed(struct proxy_thread *t, struct peer *peer)
{
    peer->needed = 1;
    if (peer->dead && peer->asked && !peer->unreported && !peer->heard)
        report_loss(t, peer);
}

static int take_commands(struct proxy_thread *t)
{
    struct command_fields f;
    struct command c;
    struct peer *peer;
    int n;

    t->blocked = 0;
    for (n = 0; n < TAKE_MAX && ring_peek(&t->ring, &c); n++) {
        f = command_unpack(c);
        peer = check(t, c, f);
        if (peer && !peer->needed)
            peer_needed(t, peer);
        if (peer && (peer->dead || peer->left || t->stopping)) {
            command_missed(t, peer, f.counter);
        } else if (peer && (t->blocked = !enqueue_command(t, peer, f))) {
            t->blocked_by = peer->rank;
            break;
        }
        ring_take(&t->ring);
    }
    if (n > 0)
        stat_add(&t->stats.commands, (uint64_t)n);
    /* The tail is returned to waiting producers an eighth of the ring at a time, or when the ring is empty. */
    if (n < TAKE_MAX || t->ring.taken - t->ring.returned > t->ring.dev.mask / 8)
        t->ring_bell |= ring_return(&t->ring);
    return n;
}

/* ---- Posting ------------------------------------------------------------------------------------------------ */

/* 1: posted; 0: not now, or never. */
static int post(struct proxy_thread *t, struct peer *peer, const struct pending *p)
{
    const uint32_t bytes = (uint32_t)(p->end - p->source), count = p->count ? p->count : 1; /* 0: a question */
    const struct net_put put = {
        .peer = peer->rank,
        .bytes = bytes,
        .source = p->source,
        .target = p->target,
        .immediate = p->alarm == ALARM_NONE ? immediate_pack((uint32_t)t->group->options.rank, p->counter, count)
                                            : immediate_pack_alarm((uint32_t)t->group->options.rank, p->alarm),
        .more = 1, /* flush rings the doorbell once per iteration */
        .cookie = cookie_of(peer),
    };
    int result;

    if (!window_open(&peer->window, bytes)) {
        peer->window.limited = 1;
        return 0;
    }
    /* What says that a rank has failed does not wait for puts to others, which a lost peer may keep in flight. */
    if (!posted_has_room(t, peer) || (!is_alarm(&t->group->options, p->counter) && !limits_allow(t, bytes, p->flow)))
        return 0;
    result = t->ops->put(t->net, &put);
    if (result < 0) {
        if (result == -EAGAIN)
            window_refused(&peer->window);
        else
            peer_lost(t, peer, -result, 0);
        return 0;
    }
    window_posted(t, peer, p);
    return 1;
}

static int post_peer(struct proxy_thread *t, struct peer *peer)
{
    uint64_t bytes = 0, signals = 0;
    int n;

    __atomic_store_n(&t->state_peer, peer->rank, __ATOMIC_RELAXED);
    for (n = 0; n < POST_MAX && peer->head != peer->tail; n++) {
        const struct pending *p = &peer->queue[peer->head & (t->depth - 1)];

        if (!post(t, peer, p)) {
            if (!peer->stalled && !peer->dead)
                stat_add(&t->stats.window_waits, 1);
            peer->stalled = 1;
            break;
        }
        bytes += p->end - p->source;
        signals += p->end == p->source;
        peer->head++;
    }
    if (n > 0) {
        stat_add(&t->stats.puts, (uint64_t)n);
        stat_add(&t->stats.bytes, bytes);
        stat_add(&t->stats.signals, signals);
    }
    if (peer->head == peer->tail)
        peer->stalled = 0;
    show_window(t, peer, bytes);
    return n;
}

/* Posts for every peer with pending puts. A different peer is first each time. */
static int post_all(struct proxy_thread *t)
{
    int i, n = 0, kept = 0;
    const int busy = t->nbusy;

    if (busy == 0)
        return 0;
    loop_now(t);
    set_state(t, STATE_PUT);
    if (++t->first_busy >= busy)
        t->first_busy = 0;
    for (i = 0; i < busy; i++)
        n += post_peer(t, &t->peers[t->busy[(t->first_busy + i) % busy]]);
    for (i = 0; i < busy; i++) {
        struct peer *peer = &t->peers[t->busy[i]];

        if (peer->head != peer->tail)
            t->busy[kept++] = t->busy[i];
        else
            peer->listed = 0;
    }
    t->nbusy = kept;
    return n;
}

static void flush_net(struct proxy_thread *t)
{
    int result;

    set_state(t, STATE_FLUSH);
    result = t->broken ? 0 : t->ops->flush(t->net);
    t->unflushed = result == -EAGAIN;
    if (result < 0 && result != -EAGAIN)
        endpoint_lost(t, -result);
}

/* ---- One iteration ------------------------------------------------------------------------------------------ */

/* For proxy_quiet: nothing in the ring, nothing pending, nothing in flight; or which peer has puts in flight. */
static void report_quiet(struct proxy_thread *t, uint64_t asked, int taken)
{
    int i, waiting_for = -1;

    if (asked == t->quiet)
        return;
    for (i = 0; i < t->npeers && waiting_for < 0; i++)
        if ((t->peers[i].head != t->peers[i].tail || t->peers[i].window.messages > 0) && !t->peers[i].left &&
            !t->peers[i].dead)
            waiting_for = t->peers[i].rank;
    __atomic_store_n(&t->waiting_for, waiting_for, __ATOMIC_RELAXED);
    if (waiting_for < 0 && taken == 0)
        __atomic_store_n(&t->quiet, asked, __ATOMIC_RELEASE); /* pairs with the acquire in proxy_quiet */
}

/* An iteration that did something, as a span of the trace. */
static void trace_batch(const struct proxy_thread *t, uint64_t began, int taken, int posted)
{
    const struct trace_event e = {.begin_ns = began,
                                  .end_ns = clock_ns(),
                                  .category = "proxy",
                                  .name = "proxy batch",
                                  .label = {"commands", "puts"},
                                  .value = {(uint64_t)taken, (uint64_t)posted},
                                  .rank = t->group->options.rank,
                                  .peer = -1,
                                  .kind = TRACE_SPAN};

    trace_add(&e);
}

int proxy_progress(struct proxy_thread *t)
{
    /* Acquire: pairs with the add in proxy_quiet; commands pushed before it are then seen below. */
    const uint64_t asked = __atomic_load_n(&t->asked, __ATOMIC_ACQUIRE);
    const uint64_t began = proxy_traces(t) ? clock_ns() : 0;
    int taken, posted;

    stat_add(&t->iterations, 1);
    t->now_ns = 0;
    t->ring_bell = 0;
    t->events = poll_net(t);
    if (t->unreported)
        report_losses(t);
    if (stop_asked(t))
        stop_begin(t);
    taken = take_commands(t);
    if (alarm_waits(t))
        taken |= alarm_progress(t);
    if (asked != t->quiet && is_leaving(t))
        taken |= goodbye_progress(t);
    if (t->blocked || t->blocked_ns)
        report_blocked(t);
    posted = post_all(t);
    if (posted || t->unflushed)
        flush_net(t);
    if (t->stopping) {
        stop_progress(t);
        alarm_report(t);
    }
    if (t->ring_bell && t->group->options.bell)
        cpu_env_ring(t->group->env, t->group->options.bell); /* C4 of kernel/ring.h, and for arrivals */
    if (began && (t->events | taken | posted))
        trace_batch(t, began, taken, posted);
    report_quiet(t, asked, taken);
    set_state(t, STATE_BETWEEN_CALLS);
    return t->events | taken | posted;
}
