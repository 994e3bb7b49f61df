/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of the simulated network. The states of a put:
 *
 *   posted -> [PIECE_LANDS ...] PUT_ARRIVES at the receiver's card -> PUT_LANDS (bytes, then immediate) ->
 *   PUT_COMPLETES
 *          `-> PUT_FAILS (lost, or no such endpoint): the sender loses the peer, and all puts behind this one
 *
 * Where a receiver must run (struct sim_net_options), the first three are held while it does not.
 */
#include "sim/net_world.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/params.h"
#include "util/status.h"

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t world_draw(struct sim_net *w, uint64_t n)
{
    w->rng += 0x9e3779b97f4a7c15u;
    return n > 1 ? mix(w->rng) % n : 0;
}

uint64_t world_now(struct sim_net *w)
{
    if (w->o.clock)
        w->now = w->o.clock(w->o.context);
    return w->now;
}

/* ---- The heap of events ------------------------------------------------------------------------------------- */

static int before(const struct sim_event *a, const struct sim_event *b)
{
    return a->at != b->at ? a->at < b->at : a->number < b->number;
}

static int reserve(struct sim_net *w, int more)
{
    int room = w->events_room ? w->events_room : 64;
    struct sim_event *events;

    while (room < w->nevents + more)
        room *= 2;
    if (room == w->events_room)
        return 0;
    events = realloc(w->events, (size_t)room * sizeof(*events));
    if (!events)
        return -ENOMEM;
    w->events = events;
    w->events_room = room;
    return 0;
}

/* After reserve(). */
static void add_event(struct sim_net *w, struct sim_event event)
{
    int i = w->nevents++;

    event.number = w->numbers++;
    while (i > 0 && before(&event, &w->events[(i - 1) / 2])) {
        w->events[i] = w->events[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->events[i] = event;
}

static struct sim_event take_event(struct sim_net *w)
{
    struct sim_event first = w->events[0], moved = w->events[--w->nevents];
    int i = 0, child;

    while ((child = 2 * i + 1) < w->nevents) {
        if (child + 1 < w->nevents && before(&w->events[child + 1], &w->events[child]))
            child++;
        if (!before(&w->events[child], &moved))
            break;
        w->events[i] = w->events[child];
        i = child;
    }
    w->events[i] = moved;
    return first;
}

uint64_t sim_net_next(struct sim_net *w)
{
    return w->nevents ? w->events[0].at : SIM_NET_NEVER;
}

/* ---- Endpoints ---------------------------------------------------------------------------------------------- */

uint32_t world_add(struct sim_net *w, struct sim_endpoint *e)
{
    if (w->nendpoints == w->endpoints_room) {
        const uint32_t room = w->endpoints_room ? w->endpoints_room * 2 : 16;
        struct sim_endpoint **endpoints = realloc(w->endpoints, room * sizeof(*endpoints));

        if (!endpoints)
            return 0;
        w->endpoints = endpoints;
        w->endpoints_room = room;
        if (w->nendpoints == 0)
            w->endpoints[w->nendpoints++] = NULL; /* id 0 means none */
    }
    w->endpoints[w->nendpoints] = e;
    return w->nendpoints++;
}

static struct sim_endpoint *endpoint_at(const struct sim_net *w, uint32_t id)
{
    return id < w->nendpoints ? w->endpoints[id] : NULL;
}

/* The endpoint, if it is open and its rank is alive. */
static struct sim_endpoint *living(const struct sim_net *w, uint32_t id)
{
    struct sim_endpoint *e = endpoint_at(w, id);

    return e && !w->dead[e->process] ? e : NULL;
}

static void cancel(struct sim_event *events, int n, const struct flight *f)
{
    for (int i = 0; i < n; i++)
        if (events[i].flight == f)
            events[i].flight = NULL;
}

static void cancel_all(struct sim_net *w, const struct flight *f)
{
    cancel(w->events, w->nevents, f);
    cancel(w->held, w->nheld, f);
}

static void flights_free(struct sim_net *w, struct flight *first)
{
    while (first) {
        struct flight *f = first;

        first = f->next;
        cancel_all(w, f);
        free(f);
    }
}

void world_remove(struct sim_net *w, struct sim_endpoint *e)
{
    w->endpoints[e->id] = NULL;
    for (int p = 0; p < e->nranks; p++)
        flights_free(w, e->peers[p].first);
}

static void tell(struct sim_net *w, struct sim_endpoint *e, struct net_event event)
{
    struct queued_event *q = malloc(sizeof(*q));

    if (!q)
        return; /* the simulation will find that something is missing */
    q->event = event;
    q->next = NULL;
    if (e->head)
        e->tail->next = q;
    else
        e->head = q;
    e->tail = q;
    w->totals.hash = mix(w->totals.hash * 31 + (w->now ^ (uint64_t)e->id << 48 ^ (uint64_t)event.kind << 40));
    if (w->o.notify)
        w->o.notify(w->o.context, e->process, e->index);
}

/* ---- Posting ------------------------------------------------------------------------------------------------ */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t busy_ns(const struct sim_net *w, uint32_t bytes)
{
    return w->o.message_ns + (w->o.bytes_per_us ? (uint64_t)bytes * 1000 / w->o.bytes_per_us : 0);
}

/* Up to SIM_NET_PIECES - 1 parts of the put land before the rest of it. */
static void tear(struct sim_net *w, struct flight *f, uint64_t start, uint64_t arrival)
{
    const int pieces = 1 + (int)world_draw(w, SIM_NET_PIECES - 1);

    for (int i = 0; i < pieces; i++) {
        const uint32_t offset = (uint32_t)world_draw(w, f->put.bytes);
        add_event(w, (struct sim_event){.at = start + world_draw(w, arrival - start + 1),
                                        .kind = PIECE_LANDS,
                                        .endpoint = f->from,
                                        .offset = offset,
                                        .bytes = 1 + (uint32_t)world_draw(w, f->put.bytes - offset),
                                        .flight = f});
    }
}

int world_post(struct sim_net *w, struct sim_endpoint *e, const struct net_put *put)
{
    struct sim_peer *peer = &e->peers[put->peer];
    struct flight *f;
    uint64_t start, arrival;

    f = reserve(w, SIM_NET_PIECES + 2) == 0 ? calloc(1, sizeof(*f)) : NULL;
    if (!f)
        return -ENOMEM;
    *f = (struct flight){.from = e->id, .to = peer->endpoint, .put = *put};
    start = later(world_now(w), e->send_free);
    if (peer->first) {
        peer->last->next = f;
    } else {
        peer->first = f;
        peer->moved = w->now;
    }
    peer->last = f;
    e->in_flight++;
    w->totals.puts++;
    w->totals.bytes += put->bytes;

    if (w->o.costs) {
        arrival = w->o.costs->depart(e->rank, e->index, put->peer, put, start);
    } else {
        e->send_free = start + busy_ns(w, put->bytes);
        arrival = e->send_free + w->o.latency_ns + world_draw(w, w->o.jitter_ns + 1);
    }
    if (w->o.ordered)
        arrival = later(arrival, peer->last_arrival);
    peer->last_arrival = arrival;
    if (w->o.lose_one_in && world_draw(w, w->o.lose_one_in) == 0) {
        w->totals.lost++;
        add_event(w,
                  (struct sim_event){.at = arrival, .kind = PUT_FAILS, .endpoint = e->id, .error = EIO, .flight = f});
        return 0;
    }
    if (put->bytes > 1 && world_draw(w, 100) < (uint64_t)w->o.torn_percent)
        tear(w, f, start, arrival);
    add_event(w, (struct sim_event){.at = arrival, .kind = PUT_ARRIVES, .endpoint = e->id, .flight = f});
    return 0;
}

/* ---- Happening ---------------------------------------------------------------------------------------------- */

/* From now on the peer is lost to this endpoint: what is in flight between them neither lands nor completes. */
static void lose_peer(struct sim_net *w, struct sim_endpoint *e, int rank, int error)
{
    struct sim_peer *peer = &e->peers[rank];

    if (peer->lost)
        return;
    peer->lost = 1;
    for (struct flight *f = peer->first; f; f = f->next)
        e->in_flight--;
    flights_free(w, peer->first);
    peer->first = peer->last = NULL;
    tell(w, e, (struct net_event){.kind = NET_FAILED, .peer = rank, .error = error});
}

/* Of a connection that is shut both ends lose what is in flight; who has nothing there does not see it, and connects
 * anew. */
static void shut(struct sim_net *w, const struct sim_endpoint *e, int rank)
{
    const struct sim_endpoint *to = living(w, e->peers[rank].endpoint);

    if (to && to->peers[e->rank].endpoint == e->id && to->peers[e->rank].first && reserve(w, 1) == 0)
        add_event(w, (struct sim_event){.at = w->now + w->o.latency_ns,
                                        .kind = PEER_LOST,
                                        .endpoint = to->id,
                                        .peer = e->rank,
                                        .error = ECONNRESET});
}

/* Nothing was heard of it. What is in flight stays there where its connection cannot be shut. */
static void lose_silent(struct sim_net *w, struct sim_endpoint *e, int rank)
{
    struct sim_peer *peer = &e->peers[rank];

    w->totals.silent++;
    if (w->o.stopped == SIM_NET_SHUTS) {
        shut(w, e, rank);
        lose_peer(w, e, rank, ETIMEDOUT);
        return;
    }
    peer->lost = 1;
    for (const struct flight *f = peer->first; f; f = f->next)
        e->in_flight--;
    tell(w, e, (struct net_event){.kind = NET_FAILED, .peer = rank, .error = ETIMEDOUT, .reads = 1});
}

void world_lose_silent(struct sim_net *w, struct sim_endpoint *e)
{
    const uint64_t now = world_now(w);

    for (int r = 0; r < e->nranks && w->o.stopped != SIM_NET_TAKES; r++) {
        const struct sim_peer *peer = &e->peers[r];

        if (peer->first && !peer->lost && now - peer->moved > e->timeout_ns)
            lose_silent(w, e, r);
    }
}

static int inside(const struct sim_endpoint *e, uint64_t at, uint32_t bytes)
{
    return bytes <= e->heap_bytes && at <= e->heap_bytes - bytes;
}

static int is_heap(const struct sim_endpoint *e)
{
    const struct control *c = (const struct control *)e->heap;

    return e->heap_bytes >= sizeof(*c) && c->magic == CONTROL_MAGIC;
}

static int has_given_up(const struct sim_net *w, const struct sim_endpoint *e)
{
    const struct control *c = is_heap(e)     ? (const struct control *)e->heap
                              : w->o.control ? w->o.control(w->o.context, e->heap)
                                             : NULL;

    return c && c->gave_up;
}

static void copy_bytes(struct sim_net *w, const struct sim_endpoint *from, const struct sim_endpoint *to,
                       const struct net_put *put, uint32_t offset, uint32_t bytes)
{
    w->totals.pieces++;
    if (bytes && has_given_up(w, from) && !w->totals.late_reads++) {
        w->totals.late_from = from->rank;
        w->totals.late_to = to->rank;
    }
    if (bytes)
        memcpy(to->heap + put->target + offset, from->heap + put->source + offset, bytes);
    if (bytes && w->o.landed)
        w->o.landed(w->o.context, from->rank, to->rank, !is_heap(to), put->target + offset, bytes);
}

/* The receiver's card handles one after the other, in the order of arrival. */
static void put_arrives(struct sim_net *w, struct sim_endpoint *from, struct flight *f)
{
    struct sim_endpoint *to = endpoint_at(w, f->to);
    uint64_t arrival = w->now;

    if (to && w->o.costs)
        arrival = w->o.costs->land(from->rank, to->rank, to->index, &f->put, arrival);
    else if (to)
        arrival = to->receive_free = later(arrival, to->receive_free) + busy_ns(w, f->put.bytes);
    if (reserve(w, 1) == 0)
        add_event(w, (struct sim_event){.at = arrival, .kind = PUT_LANDS, .endpoint = from->id, .flight = f});
}

static void put_lands(struct sim_net *w, struct sim_endpoint *from, struct sim_event *event)
{
    struct flight *f = event->flight;
    struct sim_endpoint *to = living(w, f->to);
    const int source = w->o.anonymous ? -1 : from->rank;

    if (!to && endpoint_at(w, f->to))
        return; /* its rank is dead: no completion follows */
    if (!to || !inside(to, f->put.target, f->put.bytes)) {
        lose_peer(w, from, f->put.peer, to ? EREMOTEIO : ECONNRESET);
        return;
    }
    if (event->kind == PIECE_LANDS) {
        copy_bytes(w, from, to, &f->put, event->offset, event->bytes);
        return;
    }
    copy_bytes(w, from, to, &f->put, 0, f->put.bytes);
    if (f->held_until) /* a piece of it may be later now than it is itself */
        cancel_all(w, f);
    tell(w, to, (struct net_event){.kind = NET_ARRIVED, .peer = source, .immediate = f->put.immediate});
    if (reserve(w, 1) == 0)
        add_event(w, (struct sim_event){.at = w->now + w->o.latency_ns / 2 + world_draw(w, w->o.jitter_ns + 1),
                                        .kind = PUT_COMPLETES,
                                        .endpoint = from->id,
                                        .flight = f});
}

/* Completions are reported in the order of posting; sometimes several by one event. */
static void put_completes(struct sim_net *w, struct sim_endpoint *e, struct flight *f)
{
    struct sim_peer *peer = &e->peers[f->put.peer];
    struct net_event event = {.kind = NET_SENT, .peer = f->put.peer};

    f->completed = 1;
    if (peer->lost) /* nobody waits for it any more */
        return;
    peer->moved = w->now;
    while (peer->first && peer->first->completed) {
        f = peer->first;
        peer->first = f->next;
        event.count++;
        event.cookie = f->put.cookie;
        e->in_flight--;
        free(f);
        if (world_draw(w, 2) && peer->first && peer->first->completed)
            continue;
        tell(w, e, event);
        event.count = 0;
    }
}

static int needs_receiver(enum sim_event_kind kind)
{
    return kind == PUT_ARRIVES || kind == PIECE_LANDS || kind == PUT_LANDS;
}

static int receiver_is_stopped(const struct sim_net *w, const struct flight *f)
{
    const struct sim_endpoint *to = w->o.stopped != SIM_NET_TAKES && w->o.is_stopped ? living(w, f->to) : NULL;

    return to && w->o.is_stopped(w->o.context, to->process);
}

static void hold(struct sim_net *w, const struct sim_event *event)
{
    if (w->nheld == w->held_room) {
        const int room = w->held_room ? w->held_room * 2 : 64;
        struct sim_event *held = realloc(w->held, (size_t)room * sizeof(*held));

        if (!held)
            return; /* the simulation will find that something is missing */
        w->held = held;
        w->held_room = room;
    }
    w->held[w->nheld++] = *event;
    w->totals.held++;
}

/* The events of one put keep their order. How long its sender needs to see that there is room again is drawn: at most
 * a quarter of a second, most often much less. */
static void release(struct sim_net *w, struct sim_event event)
{
    struct flight *f = event.flight;

    if (f->held_until < w->now)
        f->held_until = w->now + world_draw(w, (uint64_t)1 << world_draw(w, 28));
    event.at = f->held_until;
    add_event(w, event);
}

void sim_net_runs(struct sim_net *w, int process)
{
    int kept = 0;

    world_now(w);
    if (!w->nheld || reserve(w, w->nheld) != 0)
        return;
    for (int i = 0; i < w->nheld; i++) {
        const struct flight *f = w->held[i].flight;
        const struct sim_endpoint *to = f ? endpoint_at(w, f->to) : NULL;

        if (to && to->process != process)
            w->held[kept++] = w->held[i];
        else if (f)
            release(w, w->held[i]);
    }
    w->nheld = kept;
}

static void happen(struct sim_net *w, struct sim_event *event)
{
    struct sim_endpoint *e = living(w, event->endpoint);

    if (!e || (event->kind != PEER_LOST && !event->flight))
        return;
    if (needs_receiver(event->kind) && receiver_is_stopped(w, event->flight)) {
        hold(w, event);
        return;
    }
    switch (event->kind) {
    case PUT_ARRIVES:
        put_arrives(w, e, event->flight);
        break;
    case PIECE_LANDS:
    case PUT_LANDS:
        put_lands(w, e, event);
        break;
    case PUT_COMPLETES:
        put_completes(w, e, event->flight);
        break;
    case PUT_FAILS:
        lose_peer(w, e, event->flight->put.peer, event->error);
        break;
    case PEER_LOST:
        lose_peer(w, e, event->peer, event->error);
        break;
    }
}

void sim_net_advance(struct sim_net *w, uint64_t now_ns)
{
    while (w->nevents && w->events[0].at <= now_ns) {
        struct sim_event event = take_event(w);

        w->now = event.at; /* several may be due, each at its own time */
        happen(w, &event);
    }
    w->now = now_ns;
}

/* The rank that this process has. */
static int rank_of(const struct sim_net *w, int process)
{
    for (uint32_t i = 1; i < w->nendpoints; i++)
        if (w->endpoints[i] && w->endpoints[i]->process == process)
            return w->endpoints[i]->rank;
    return process;
}

void sim_net_kill(struct sim_net *w, int process)
{
    const uint64_t now = world_now(w);
    const int rank = rank_of(w, process);

    if (process < 0 || process >= w->o.nranks || w->dead[process])
        return;
    w->dead[process] = 1;
    if (w->o.death_ns == SIM_NET_NEVER)
        return;
    for (uint32_t i = 1; i < w->nendpoints; i++) {
        struct sim_endpoint *e = w->endpoints[i];

        if (!e || e->process == process || e->rank == rank || rank >= e->nranks || !e->peers[rank].endpoint ||
            reserve(w, 1) != 0)
            continue;
        add_event(w, (struct sim_event){.at = now + w->o.death_ns + world_draw(w, w->o.death_ns + 1),
                                        .kind = PEER_LOST,
                                        .endpoint = i,
                                        .peer = rank,
                                        .error = EHOSTDOWN});
    }
}

/* ---- Worlds ------------------------------------------------------------------------------------------------- */

struct sim_net *sim_net_create(const struct sim_net_options *options)
{
    struct sim_net *w = calloc(1, sizeof(*w));

    if (!w)
        return NULL;
    w->o = *options;
    w->rng = mix(options->seed + 0x4e37u);
    w->dead = calloc((size_t)options->nranks, 1);
    if (!w->dead) {
        free(w);
        return NULL;
    }
    return w;
}

void sim_net_destroy(struct sim_net *w)
{
    if (!w)
        return;
    free(w->endpoints);
    free(w->events);
    free(w->held);
    free(w->dead);
    free(w);
}

void sim_net_totals(const struct sim_net *w, struct sim_net_totals *totals)
{
    *totals = w->totals;
}
