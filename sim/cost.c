/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/cost.h"

#include <stdlib.h>
#include <string.h>

#include "kernel/command.h"
#include "sim/cost_memory.h"

enum { LANES = 32, MAX_CARDS = 16 };

/* Does one thing after the other. Picoseconds: rows of many servers take less than a nanosecond of one. */
struct server {
    uint64_t free_ps;
};

struct gpu {
    struct server memory, link_out, link_in, bus_out, bus_in;
};

struct rank_cost {
    struct server sm, card_out[MAX_CARDS], card_in[MAX_CARDS];
    struct server engine_out[MAX_CARDS], engine_in[MAX_CARDS]; /* of a card: begins messages while bytes are sent */
    struct cost_traffic traffic;
};

struct node {
    struct server up, down;
};

static struct {
    int active;
    struct cost_setup setup;
    struct cost_machine m;
    uint64_t stands_for; /* agents of the GPU, each of the simulation's */
    struct gpu *gpus;
    struct rank_cost *ranks;
    struct node *nodes;
} cost;

const struct cost_setup *cost_model(void)
{
    return cost.active ? &cost.setup : NULL;
}

static int gpu_of(int rank)
{
    return rank / (int)cost.m.ranks_per_gpu;
}

static int node_of(int rank)
{
    return gpu_of(rank) / (int)cost.m.gpus_per_node;
}

int cost_begin(const struct cost_setup *setup)
{
    const size_t n = (size_t)setup->nranks;
    const uint64_t real = setup->machine->sms * setup->machine->warps_per_sm;

    memset(&cost, 0, sizeof(cost));
    cost.setup = *setup;
    cost.m = *setup->machine;
    if (cost.m.cards_per_rank > MAX_CARDS)
        cost.m.cards_per_rank = MAX_CARDS;
    cost.stands_for = real > (uint64_t)setup->agents ? real / (uint64_t)setup->agents : 1;
    cost.gpus = calloc(n, sizeof(*cost.gpus)); /* no more than ranks, of each */
    cost.ranks = calloc(n, sizeof(*cost.ranks));
    cost.nodes = calloc(n, sizeof(*cost.nodes));
    cost.active = 1;
    if (cost.gpus && cost.ranks && cost.nodes && cost_memory_begin(setup->nranks) == 0)
        return 0;
    cost_end();
    return -1;
}

void cost_end(void)
{
    if (!cost.active)
        return;
    cost_memory_end();
    free(cost.gpus);
    free(cost.ranks);
    free(cost.nodes);
    memset(&cost, 0, sizeof(cost));
}

void cost_traffic(int rank, struct cost_traffic *traffic)
{
    *traffic = cost.ranks[rank].traffic;
}

uint64_t cost_wake_ns(enum sim_kind from, int from_rank, enum sim_kind to, int to_rank)
{
    if (from == SIM_PROXY || to == SIM_PROXY)
        return from == to ? 0 : cost.m.bus_ns;
    if (from != SIM_AGENT && from != SIM_STREAM)
        return 0;
    if (to != SIM_AGENT && to != SIM_STREAM)
        return 0;
    return from_rank == to_rank ? cost.m.barrier_ns : cost.m.link_ns;
}

int cost_ready(const void *agent)
{
    const struct cost_agent *a = agent;

    return !a->word || (int64_t)(*a->word - a->target) >= 0 || (a->abort_word && *a->abort_word);
}

/* ---- Servers -------------------------------------------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t bytes_ps(uint64_t bytes, uint64_t rate)
{
    return rate ? bytes * 1000000u / rate : 0;
}

/* When the server, asked at now_ps, is done with so many bytes. */
static uint64_t serve(struct server *s, uint64_t now_ps, uint64_t bytes, uint64_t rate)
{
    s->free_ps = later(s->free_ps, now_ps) + bytes_ps(bytes, rate);
    return s->free_ps;
}

/* The same for bytes that stream through it and have all come by now_ps. Servers are asked in the order of time: one
 * that were asked for a later time would make those wait that come before. */
static uint64_t stream_through(struct server *s, uint64_t now_ps, uint64_t bytes, uint64_t rate)
{
    if (!rate)
        return now_ps;
    s->free_ps = later(s->free_ps + bytes_ps(bytes, rate), now_ps);
    return s->free_ps;
}

static uint64_t now_ps(void)
{
    return sim_now() * 1000;
}

static void spend_until(uint64_t ps)
{
    if (ps > now_ps())
        sim_spend((ps - now_ps() + 999) / 1000);
}

/* ---- Agents --------------------------------------------------------------------------------------------------- */

void cost_begins(struct cost_agent *a, int rank)
{
    memset(a, 0, sizeof(*a));
    a->rank = rank;
    sim_set_data(a);
}

void cost_ends(struct cost_agent *a)
{
    spend_until(a->drain_ps);
}

void cost_launch(void)
{
    sim_spend(cost.m.launch_ns);
}

static uint64_t as_large(uint64_t bytes)
{
    return bytes * cost.setup.hidden_large / cost.setup.hidden_small;
}

uint64_t cost_row_bytes(uint64_t bytes)
{
    return as_large(bytes);
}

/* One place of a row, loaded (out = 0) or stored. Returns when this agent may go on. */
static uint64_t touch(struct cost_agent *a, const void *at, uint64_t bytes, int store)
{
    const int mine = gpu_of(a->rank), owner = cost_memory_owner(at, a->rank);
    const uint64_t now = now_ps();
    struct gpu *own = &cost.gpus[mine], *theirs = &cost.gpus[gpu_of(owner)];
    uint64_t go = serve(&theirs->memory, now, bytes, cost.m.memory_rate);

    if (own == theirs)
        return go;
    a->drain_ps = later(a->drain_ps, go);
    a->drain_ps = later(a->drain_ps, serve(store ? &theirs->link_in : &theirs->link_out, now, bytes, cost.m.link_rate));
    go = serve(store ? &own->link_out : &own->link_in, now, bytes, cost.m.link_rate);
    cost.ranks[store ? a->rank : owner].traffic.link_bytes += bytes;
    return go;
}

/* Is this step one of those that are charged in full? */
static int counts(uint32_t *steps)
{
    return (*steps)++ % cost.stands_for == 0;
}

static void move(struct cost_agent *a, const void *const *from, int nfrom, uint64_t read_bytes, void *const *to,
                 int nto, uint64_t write_bytes)
{
    const uint64_t all = (uint64_t)nfrom * read_bytes + (uint64_t)nto * write_bytes;
    uint64_t go = serve(&cost.ranks[a->rank].sm, now_ps(), all, cost.m.sms * cost.m.sm_rate);

    for (int i = 0; i < nfrom; i++)
        go = later(go, touch(a, from[i], read_bytes, 0));
    for (int i = 0; i < nto; i++)
        go = later(go, touch(a, to[i], write_bytes, 1));
    if (counts(&a->items))
        sim_spend(cost.m.item_ns);
    spend_until(go);
    sim_point();
}

void cost_move(struct cost_agent *a, const void *const *from, int nfrom, uint64_t read_bytes, void *const *to, int nto,
               uint64_t write_bytes)
{
    move(a, from, nfrom, as_large(read_bytes), to, nto, as_large(write_bytes));
}

/* A row has as many bytes as channels (fp8), or twice as many. */
static int is_row(uint64_t bytes)
{
    return bytes == cost.setup.hidden_small || bytes == 2 * cost.setup.hidden_small;
}

void cost_copy(struct cost_agent *a, const void *from, void *to, uint64_t bytes)
{
    const uint64_t charged = is_row(bytes) ? as_large(bytes) : bytes;

    move(a, &from, 1, charged, &to, 1, charged);
}

void cost_loop(struct cost_agent *a, uint64_t n, uint64_t lanes)
{
    if (n > 0 && counts(&a->loops))
        sim_spend((n + lanes - 1) / lanes * cost.m.loop_ns);
}

void cost_route(struct cost_agent *a, uint64_t pairs)
{
    if (pairs > 0 && counts(&a->loops))
        sim_spend((pairs + LANES - 1) / LANES * cost.m.route_ns);
}

void cost_word(const void *word)
{
    cost.ranks[sim_rank()].traffic.looks++;
    sim_spend(cost_memory_is_host(word) ? cost.m.bus_ns : cost.m.word_ns);
}

void cost_peek(const void *word)
{
    cost.ranks[sim_rank()].traffic.looks++;
    if (cost_memory_is_host(word))
        sim_spend(cost.m.bus_ns / LANES);
}

void cost_release(int other)
{
    struct cost_agent *a = sim_data();

    spend_until(a->drain_ps);
    sim_spend(other ? cost.m.fence_ns : cost.m.word_ns);
    a->items = a->loops = 0;
}

void cost_push(void)
{
    spend_until(((struct cost_agent *)sim_data())->drain_ps);
    sim_spend(cost.m.word_ns);
}

uint64_t cost_agents(void)
{
    return cost.m.sms * cost.m.warps_per_sm;
}

/* ---- Proxies -------------------------------------------------------------------------------------------------- */

void cost_commands(uint64_t n)
{
    cost.ranks[sim_rank()].traffic.commands += n;
    sim_spend(n * cost.m.command_ns + 1);
}

void cost_put(void)
{
    sim_spend(cost.m.put_ns);
}

void cost_events(int n)
{
    sim_spend((uint64_t)n * cost.m.event_ns);
}

/* ---- The network ---------------------------------------------------------------------------------------------- */

/* Rows of a put: as many as its immediate counts, if its counter counts rows. */
static const struct cost_row *row_of(uint32_t kind)
{
    if (kind == SIG_LL_ROWS || kind == SIG_HD_ROWS)
        return &cost.setup.dispatch;
    return kind == SIG_LC_ROWS || kind == SIG_HC_ROWS ? &cost.setup.combine : NULL;
}

/* Of `pieces` pieces of so many bytes here, those that the model has more. */
static uint64_t more_bytes(uint64_t pieces, const struct cost_row *row)
{
    return pieces * (row->large - row->small);
}

/* Bytes of a put as charged; *header gets those that are not of rows. */
static uint64_t put_bytes(const struct net_put *put, uint64_t *header)
{
    const uint32_t kind = COUNTER_KIND(immediate_counter(put->immediate));
    const struct cost_row *row = row_of(kind), *scales = &cost.setup.scales;
    uint64_t rows = row ? immediate_count(put->immediate) : 0, of_row = row ? row->small : 0, bytes = put->bytes;

    if (rows && rows * row->small > bytes)
        rows = bytes / row->small;
    if (kind == SIG_HD_DATA && scales->small && cost.setup.extras)
        bytes += more_bytes(put->bytes / cost.setup.extras, scales);
    if (rows)
        bytes += more_bytes(rows, row);
    if (rows && row == &cost.setup.dispatch && scales->small && put->bytes >= rows * (of_row + scales->small)) {
        bytes += more_bytes(rows, scales);
        of_row += scales->small;
    }
    *header = rows ? put->bytes - rows * of_row : bytes;
    return bytes;
}

uint64_t cost_depart(int from, int endpoint, int to, const struct net_put *put, uint64_t now_ns)
{
    struct rank_cost *rank = &cost.ranks[from];
    const int card = endpoint % (int)cost.m.cards_per_rank;
    const uint64_t now = now_ns * 1000;
    uint64_t header, at = now;
    const uint64_t bytes = put_bytes(put, &header);

    (void)to;
    rank->traffic.messages++;
    rank->traffic.signals += put->bytes == 0;
    rank->traffic.bytes += bytes;
    rank->traffic.header_bytes += header;
    if (bytes)
        at = stream_through(&cost.gpus[gpu_of(from)].bus_out, at, bytes, cost.m.bus_rate);
    at = serve(&rank->engine_out[card], at, cost.m.message_ns, 1000);
    at = serve(&rank->card_out[card], at, bytes, cost.m.card_rate);
    at = later(at, stream_through(&cost.nodes[node_of(from)].up, now, bytes, cost.m.uplink_rate));
    return at / 1000 + cost.m.wire_ns;
}

uint64_t cost_land(int from, int to, int endpoint, const struct net_put *put, uint64_t now_ns)
{
    struct rank_cost *rank = &cost.ranks[to];
    const int card = endpoint % (int)cost.m.cards_per_rank;
    const uint64_t now = now_ns * 1000;
    uint64_t header, at;
    const uint64_t bytes = put_bytes(put, &header);

    (void)from;
    at = stream_through(&cost.nodes[node_of(to)].down, now, bytes, cost.m.uplink_rate);
    at = later(at, stream_through(&rank->card_in[card], now, bytes, cost.m.card_rate));
    at = later(at, stream_through(&rank->engine_in[card], now, cost.m.message_ns, 1000));
    if (bytes)
        at = later(at, stream_through(&cost.gpus[gpu_of(to)].bus_in, now, bytes, cost.m.bus_rate));
    return at / 1000;
}
