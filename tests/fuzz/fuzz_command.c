/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Commands that kernels push and immediates that arrive: one proxy of rank 0 of five, run step by step over a network
 * that the input plays.
 *
 *     kind (1): a raw command, a good command with bits changed, an arrival, a completion, a lost peer, a full queue,
 *               a step; then what it needs
 *
 * Whatever comes: puts stay inside both heaps, counters only grow and by no more than an immediate can say, and nobody
 * but the named peer is lost.
 */
#include <errno.h>

#include "fuzz.h"

#include "proxy/internal.h"
#include "proxy/proxy.h"

enum { RANKS = 5, KINDS = 4, SLOTS = 3, HEAP = 1 << 14, PEER_HEAP = 1 << 13, RING = 64, EVENTS = 64, STEPS = 400 };

struct world {
    struct net base;
    struct net_event events[EVENTS];
    int nevents, puts, room;
    uint64_t last_cookie;
    uint64_t now_ns;
};

static struct world world;
static uint8_t heap[HEAP] __attribute__((aligned(64)));

/* ---- The network ------------------------------------------------------------------------------------------------- */

static epx_status net_open(const struct net_options *options, struct net **net)
{
    (void)options;
    *net = &world.base;
    return EPX_OK;
}

static epx_status net_probe(const char *provider, char *text, size_t bytes)
{
    (void)provider;
    snprintf(text, bytes, "the input");
    return EPX_OK;
}

static unsigned net_caps(struct net *net)
{
    (void)net;
    return NET_KNOWN_SENDERS;
}

static epx_status net_address(struct net *net, struct net_address *address)
{
    (void)net;
    address->version = 1;
    return EPX_OK;
}

static epx_status net_add_region(struct net *net, const struct net_memory *memory, struct net_region *region)
{
    (void)net;
    region->bytes = memory->bytes;
    return EPX_OK;
}

static epx_status net_connect(struct net *net, int peer, const struct net_address *address,
                              const struct net_region *region)
{
    (void)net;
    (void)peer;
    (void)address;
    (void)region;
    return EPX_OK;
}

static int net_put(struct net *net, const struct net_put *put)
{
    (void)net;
    if (!world.room)
        return -EAGAIN;
    world.room--;
    FUZZ_REQUIRE(put->peer > 1 && put->peer < RANKS);
    FUZZ_REQUIRE(put->source <= HEAP && put->bytes <= HEAP - put->source);
    FUZZ_REQUIRE(put->target <= PEER_HEAP && put->bytes <= PEER_HEAP - put->target);
    FUZZ_REQUIRE(immediate_version(put->immediate) == IMMEDIATE_VERSION && immediate_rank(put->immediate) == 0);
    world.puts++;
    world.last_cookie = put->cookie;
    return 0;
}

static int net_flush(struct net *net)
{
    (void)net;
    return 0;
}

static int net_poll(struct net *net, struct net_event *events, int max)
{
    const int n = world.nevents < max ? world.nevents : max;

    (void)net;
    memcpy(events, world.events, (size_t)n * sizeof(*events));
    memmove(world.events, world.events + n, (size_t)(world.nevents - n) * sizeof(*events));
    world.nevents -= n;
    return n;
}

static int net_none(struct net *net)
{
    (void)net;
    return -1;
}

static void net_close(struct net *net)
{
    (void)net;
}

static const struct net_ops ops = {.name = "input",
                                   .probe = net_probe,
                                   .open = net_open,
                                   .caps = net_caps,
                                   .address = net_address,
                                   .add_region = net_add_region,
                                   .connect = net_connect,
                                   .put = net_put,
                                   .flush = net_flush,
                                   .poll = net_poll,
                                   .wait_fd = net_none,
                                   .arm = net_none,
                                   .close = net_close};

/* ---- The proxy --------------------------------------------------------------------------------------------------- */

struct rank {
    struct proxy_group *proxies;
    uint64_t counters[KINDS * SLOTS * RANKS], sent[RANKS], aggregates[KINDS * SLOTS], sent_all;
    uint8_t sums[KINDS];
    struct doorbell bell;
    uint64_t pushed;
    int lost[RANKS], alarms;
};

static void on_error(void *context, int status, int peer, int64_t expected, int64_t seen, const char *text)
{
    struct rank *rank = context;

    (void)expected;
    (void)seen;
    FUZZ_REQUIRE(status > EPX_OK && status <= EPX_ERR_INTERNAL && text[0]);
    FUZZ_REQUIRE(peer >= -1 && peer < RANKS);
    if (status == EPX_ERR_PEER && peer >= 0)
        rank->lost[peer]++;
}

static void on_alarm(void *context, int from, uint32_t alarm)
{
    FUZZ_REQUIRE(from > 1 && from < RANKS);
    FUZZ_REQUIRE(ALARM_CULPRIT(alarm) < RANKS && alarm < 1u << ALARM_BITS);
    ((struct rank *)context)->alarms++;
}

static uint32_t on_ask(void *context, int from)
{
    (void)context;
    FUZZ_REQUIRE(from > 1 && from < RANKS);
    return ALARM(from, ALARM_REPLY);
}

static uint64_t now(void *self)
{
    (void)self;
    return world.now_ns;
}

static void wake(void *self, struct doorbell *bell)
{
    (void)self;
    (void)bell;
}

static void open_rank(struct rank *rank, int aggregates)
{
    static const struct cpu_env env = {.now_ns = now, .wake = wake};
    static const uint8_t remote[RANKS] = {0, 0, 1, 1, 1};
    struct proxy_address addresses[RANKS];
    struct proxy_options o = {.nranks = RANKS,
                              .threads = 1,
                              .ring_slots = RING,
                              .manual = 1,
                              .timeout_ms = 200,
                              .net = &ops,
                              .provider = "",
                              .remote = remote,
                              .heap = heap,
                              .heap_bytes = HEAP,
                              .device_kind = EPX_DEVICE_CPU,
                              .counters = rank->counters,
                              .sent = rank->sent,
                              .kinds = KINDS,
                              .slots = SLOTS,
                              .alarm_kind = KINDS,
                              .bell = &rank->bell,
                              .env = &env,
                              .on_error = on_error,
                              .on_alarm = on_alarm,
                              .on_ask = on_ask,
                              .context = rank};

    if (aggregates) {
        rank->sums[1] = 1;
        o.aggregates = rank->aggregates;
        o.sent_all = &rank->sent_all;
        o.sums = rank->sums;
    }
    memset(addresses, 0, sizeof(addresses));
    FUZZ_REQUIRE(proxy_open(&o, &rank->proxies) == EPX_OK);
    FUZZ_REQUIRE(proxy_addresses(rank->proxies, addresses) == EPX_OK);
    for (int r = 1; r < RANKS; r++) {
        addresses[r] = addresses[0];
        addresses[r].region.bytes = PEER_HEAP;
    }
    FUZZ_REQUIRE(proxy_connect(rank->proxies, addresses) == EPX_OK);
}

/* As a kernel that may push anything, but knows when the ring is full. */
static void push(struct rank *rank, struct command c)
{
    const struct ring_dev *ring = proxy_ring(rank->proxies, 0);
    const uint64_t parity = ring_parity(ring->mask, rank->pushed);

    if (rank->pushed - *ring->tail > ring->mask)
        return;
    c.a = (c.a & ~RING_PARITY) | parity;
    c.b = (c.b & ~RING_PARITY) | parity;
    ring->slots[rank->pushed++ & ring->mask] = c;
}

static void add_event(struct net_event event)
{
    if (world.nevents < EVENTS)
        world.events[world.nevents++] = event;
}

static void step(struct rank *rank)
{
    uint64_t before[KINDS * SLOTS * RANKS];
    const int arrivals = world.nevents;

    memcpy(before, rank->counters, sizeof(before));
    world.now_ns += 100000;
    proxy_step(rank->proxies, 0);
    for (int i = 0; i < KINDS * SLOTS * RANKS; i++) {
        FUZZ_REQUIRE(rank->counters[i] - before[i] <= (uint64_t)arrivals * IMMEDIATE_MAX_COUNT);
        FUZZ_REQUIRE(i % RANKS > 1 || rank->counters[i] == 0); /* node mates do not come over the network */
    }
}

/* Mostly one that is fine; now and then a little too far, or of a rank or counter that is not there. */
static struct command draw_command(struct fuzz *f)
{
    const int far = fuzz_below(f, 8) == 0;
    const uint32_t rank = far ? fuzz_below(f, RANKS + 1) : 2 + fuzz_below(f, RANKS - 2);
    const uint32_t counter = COUNTER(fuzz_below(f, KINDS + (unsigned)far), fuzz_below(f, SLOTS + (unsigned)far));
    const uint64_t source = 16 * (fuzz_int(f, 2) % (far ? HEAP / 8 : HEAP / 32));
    const uint64_t target = 16 * (fuzz_int(f, 2) % (far ? HEAP / 8 : PEER_HEAP / 32));

    return command_pack(rank, counter, source, target, 16 * (uint32_t)(far ? fuzz_int(f, 2) : fuzz_below(f, 64)));
}

static void one_thing(struct rank *rank, struct fuzz *f)
{
    struct command c;
    uint32_t imm;

    switch (fuzz_below(f, 8)) {
    case 0:
        fuzz_fill(f, &c, sizeof(c));
        push(rank, c);
        break;
    case 1:
        c = draw_command(f);
        push(rank, c);
        break;
    case 2:
        c = draw_command(f);
        c.a ^= (uint64_t)fuzz_int(f, 1) << fuzz_below(f, 57);
        push(rank, c);
        break;
    case 3:
        add_event((struct net_event){
            .kind = NET_ARRIVED, .peer = (int)fuzz_below(f, RANKS + 1) - 1, .immediate = (uint32_t)fuzz_int(f, 4)});
        break;
    case 4:
        imm = immediate_pack(fuzz_below(f, RANKS + 1), COUNTER(fuzz_below(f, KINDS + 1), fuzz_below(f, SLOTS + 1)),
                             1 + fuzz_below(f, IMMEDIATE_MAX_COUNT));
        add_event((struct net_event){.kind = NET_ARRIVED, .peer = -1, .immediate = imm});
        break;
    case 5:
        add_event(
            (struct net_event){.kind = NET_SENT,
                               .peer = (int)fuzz_below(f, RANKS),
                               .count = (uint32_t)fuzz_int(f, 1),
                               .cookie = fuzz_below(f, 4) ? world.last_cookie - fuzz_below(f, 8) : fuzz_int(f, 8)});
        break;
    case 6:
        if (!fuzz_below(f, 8))
            add_event(
                (struct net_event){.kind = NET_FAILED, .peer = (int)fuzz_below(f, RANKS + 1) - 1, .error = ECONNRESET});
        else
            world.room = (int)fuzz_int(f, 1);
        break;
    default:
        step(rank);
        break;
    }
}

FUZZ_BEGIN(fuzz_quiet)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    struct rank *rank = calloc(1, sizeof(*rank));
    struct proxy_stats stats;

    FUZZ_REQUIRE(rank);
    memset(&world, 0, sizeof(world));
    world.base.ops = &ops;
    world.room = 64;
    world.now_ns = 1000;
    open_rank(rank, (int)fuzz_int(&f, 1) & 1);
    for (int i = 0; i < STEPS && f.left; i++)
        one_thing(rank, &f);
    for (int i = 0; i < 4; i++)
        step(rank);
    proxy_stats_read(rank->proxies, &stats);
    FUZZ_REQUIRE(stats.puts == (uint64_t)world.puts);
    FUZZ_REQUIRE(stats.commands <= rank->pushed);
    FUZZ_REQUIRE(proxy_close(rank->proxies) == EPX_OK);
    free(rank);
    return 0;
}
