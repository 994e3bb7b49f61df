/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=notsan (a model on one thread) */
/*
 * The protocol of the command ring, explored exhaustively in small: a tiny ring, two or three producers, one consumer,
 * every interleaving of their single loads and stores (the steps P1..P3, C1..C3 of kernel/ring.h). In every state: no
 * command is torn, doubled, out of its place or overwritten; at every end: all have arrived. Counters start just before
 * they wrap at 2^64. The parity is the one of the code, ring_parity().
 *
 * A model that finds nothing proves little by itself: the same model with a step done wrong must find it.
 */
#include <stdio.h>
#include <string.h>

#include "kernel/command.h"
#include "tests/lib/unit.h"

enum { SLOTS_MOST = 4, PRODUCERS_MOST = 3, PUSHES_MOST = 3, PUSH_MOST = 2 };

enum bug {
    BUG_NONE,
    BUG_ONE_PARITY,    /* the consumer looks at one word's parity only */
    BUG_NO_WAIT,       /* slots are written whether there is room or not */
    BUG_ROOM_BY_ONE,   /* room is computed one slot too large */
    BUG_SAME_PARITY,   /* the parity does not change from lap to lap */
    BUG_EARLY_TAIL,    /* the tail is returned before the command's second word was read */
    BUG_PLAIN_COMPARE, /* counters are compared as numbers instead of by their difference */
    BUG_COUNT
};
static const char *const bug_names[BUG_COUNT] = {"none",        "one parity", "no wait",      "room by one",
                                                 "same parity", "early tail", "plain compare"};

struct config {
    int slots, producers;
    int push[PRODUCERS_MOST][PUSHES_MOST]; /* sizes of the pushes of each, 0 ends */
    uint64_t start;
    int a_first; /* the words of a command may be stored in either order */
    enum bug bug;
};

/* A command is its number: which claim index it was written for, from 1; in both words. */
struct slot {
    uint8_t parity_a, parity_b, a, b;
};

enum producer_at { P_LOOK, P_CLAIM, P_WAIT, P_REMEMBER, P_FIRST, P_SECOND, P_DONE };
enum consumer_at { C_LOOK, C_READ };

struct producer {
    uint8_t at, push, stored;
    uint8_t first; /* claim, relative to start */
    uint8_t tail;  /* what it read */
};

/* Counters are kept relative to the start: eight bits are plenty. No padding: states are compared as bytes. */
struct state {
    uint8_t head, tail, tail_seen, taken, returned;
    uint8_t consumer, read_a;
    struct producer producer[PRODUCERS_MOST];
    struct slot slot[SLOTS_MOST];
};

struct model {
    struct config config;
    struct state *states;
    size_t count, room;
    uint32_t *table; /* 1 + index in states, 0 = free */
    size_t table_mask;
    int total;
    const char *wrong;
};

/* ---- The set of states -------------------------------------------------------------------------------------- */

static uint64_t hash_of(const struct state *s)
{
    const uint8_t *byte = (const uint8_t *)s;
    uint64_t h = 0xcbf29ce484222325u;
    size_t i;

    for (i = 0; i < sizeof(*s); i++)
        h = (h ^ byte[i]) * 0x100000001b3u;
    return h ^ h >> 29;
}

static void add_state(struct model *m, const struct state *s)
{
    size_t at = hash_of(s) & m->table_mask;

    while (m->table[at]) {
        if (!memcmp(&m->states[m->table[at] - 1], s, sizeof(*s)))
            return;
        at = (at + 1) & m->table_mask;
    }
    if (m->count == m->room) {
        m->wrong = "more states than the test has room for";
        return;
    }
    m->states[m->count++] = *s;
    m->table[at] = (uint32_t)m->count;
}

/* ---- Steps -------------------------------------------------------------------------------------------------- */

static uint64_t absolute(const struct model *m, uint8_t relative)
{
    return m->config.start + relative;
}

static uint8_t parity_of(const struct model *m, uint8_t index)
{
    if (m->config.bug == BUG_SAME_PARITY)
        return 1;
    return (uint8_t)ring_parity((uint64_t)m->config.slots - 1, absolute(m, index));
}

static int has_room(const struct model *m, const struct producer *p, int n, uint8_t tail)
{
    const uint64_t need = absolute(m, p->first) + (uint64_t)n - (uint64_t)m->config.slots;

    switch (m->config.bug) {
    case BUG_NO_WAIT:
        return 1;
    case BUG_ROOM_BY_ONE:
        return (int64_t)(absolute(m, tail) + 1 - need) >= 0;
    case BUG_PLAIN_COMPARE:
        return absolute(m, tail) >= need;
    default:
        return (int64_t)(absolute(m, tail) - need) >= 0;
    }
}

/* Half a command: a word with the parity that makes it valid. */
static void store_half(const struct model *m, struct state *s, const struct producer *p, int second)
{
    const uint8_t index = (uint8_t)(p->first + p->stored);
    struct slot *slot = &s->slot[absolute(m, index) & (uint64_t)(m->config.slots - 1)];

    if (second != m->config.a_first) {
        slot->a = (uint8_t)(index + 1);
        slot->parity_a = parity_of(m, index);
    } else {
        slot->b = (uint8_t)(index + 1);
        slot->parity_b = parity_of(m, index);
    }
}

/* Each returns 0 when it cannot be taken now. */
static int step_producer(struct model *m, struct state s, int which)
{
    struct producer *p = &s.producer[which];
    const int *push = m->config.push[which];
    const int n = p->at == P_DONE ? 0 : push[p->push];

    switch (p->at) {
    case P_LOOK:
        p->tail = s.tail_seen;
        p->at = P_CLAIM;
        break;
    case P_CLAIM:
        p->first = s.head;
        s.head = (uint8_t)(s.head + n);
        p->at = has_room(m, p, n, p->tail) ? P_FIRST : P_WAIT;
        p->tail = 0;
        break;
    case P_WAIT:
        if (!has_room(m, p, n, s.tail))
            return 0; /* asleep */
        p->tail = s.tail;
        p->at = P_REMEMBER;
        break;
    case P_REMEMBER:
        s.tail_seen = p->tail;
        p->tail = 0;
        p->at = P_FIRST;
        break;
    case P_FIRST:
    case P_SECOND:
        store_half(m, &s, p, p->at == P_SECOND);
        p->stored = (uint8_t)(p->stored + (p->at == P_SECOND));
        p->at = p->at == P_FIRST ? P_SECOND : P_FIRST;
        if (p->stored == n) {
            p->first = p->stored = 0;
            p->push++;
            p->at = p->push < PUSHES_MOST && push[p->push] ? P_LOOK : P_DONE;
        }
        break;
    default:
        return 0;
    }
    add_state(m, &s);
    return 1;
}

static int step_return(struct model *m, struct state s)
{
    if (s.returned == s.taken && (m->config.bug != BUG_EARLY_TAIL || s.consumer != C_READ))
        return 0;
    s.tail = s.returned = s.taken;
    if (m->config.bug == BUG_EARLY_TAIL && s.consumer == C_READ)
        s.tail = s.returned = (uint8_t)(s.taken + 1);
    add_state(m, &s);
    return 1;
}

static int step_consumer(struct model *m, struct state s)
{
    const struct slot *slot = &s.slot[absolute(m, s.taken) & (uint64_t)(m->config.slots - 1)];

    if (s.consumer == C_LOOK) {
        if (slot->parity_a != parity_of(m, s.taken))
            return 0; /* nothing there */
        s.read_a = slot->a;
        s.consumer = C_READ;
    } else if (slot->parity_b != parity_of(m, s.taken) && m->config.bug != BUG_ONE_PARITY) {
        s.read_a = 0; /* half of it: looked at again later */
        s.consumer = C_LOOK;
    } else {
        if (slot->b != s.read_a)
            m->wrong = "a command is torn";
        else if (s.read_a != s.taken + 1)
            m->wrong = "a command is lost, doubled or out of its place";
        s.read_a = 0;
        s.taken++;
        s.consumer = C_LOOK;
    }
    add_state(m, &s);
    return 1;
}

/* ---- Exploring ---------------------------------------------------------------------------------------------- */

static void model_open(struct model *m, const struct config *config)
{
    struct state first;
    int p, k;
    uint64_t i;

    memset(m, 0, sizeof(*m));
    m->config = *config;
    m->room = (size_t)1 << 21;
    m->table_mask = ((size_t)1 << 22) - 1;
    m->states = malloc(m->room * sizeof(*m->states));
    m->table = calloc(m->table_mask + 1, sizeof(*m->table));
    assert_non_null(m->states);
    assert_non_null(m->table);
    memset(&first, 0, sizeof(first));
    for (p = 0; p < PRODUCERS_MOST; p++) {
        for (k = 0; k < PUSHES_MOST; k++)
            m->total += p < config->producers ? config->push[p][k] : 0;
        if (p >= config->producers)
            first.producer[p].at = P_DONE;
    }
    for (i = 0; i < (uint64_t)config->slots; i++) { /* what was there in the lap before */
        struct slot *slot = &first.slot[(config->start + i) & (uint64_t)(config->slots - 1)];
        slot->parity_a = slot->parity_b =
            (uint8_t)ring_parity((uint64_t)config->slots - 1, config->start + i - (uint64_t)config->slots);
    }
    add_state(m, &first);
}

/* A state that no step leaves: fine if everything has arrived. */
static void check_end(struct model *m, const struct state *s)
{
    if (s->taken != m->total)
        m->wrong = "the ring stops before all commands have arrived";
}

static void explore(struct model *m)
{
    size_t at;
    int p;

    for (at = 0; at < m->count && !m->wrong; at++) {
        const struct state s = m->states[at];
        int moves = step_return(m, s) + step_consumer(m, s);

        for (p = 0; p < m->config.producers; p++)
            moves += step_producer(m, s, p);
        if (moves == 0 && !m->wrong)
            check_end(m, &s);
    }
}

static size_t run(const struct config *config, const char **wrong)
{
    struct model m;
    size_t count;

    model_open(&m, config);
    explore(&m);
    *wrong = m.wrong;
    count = m.count;
    free(m.states);
    free(m.table);
    return count;
}

static const struct config configs[] = {
    {.slots = 2, .producers = 2, .push = {{1, 2, 1}, {2, 1, 1}}},
    {.slots = 2, .producers = 3, .push = {{1, 1}, {2}, {1, 1}}},
    {.slots = 4, .producers = 2, .push = {{2, 2, 1}, {1, 2, 2}}},
    {.slots = 4, .producers = 3, .push = {{2, 1}, {1, 2}, {2}}},
};
static const uint64_t starts[] = {0, 1, UINT64_MAX - 4, UINT64_MAX - 1, UINT64_MAX};
enum { CONFIGS = (int)(sizeof(configs) / sizeof(configs[0])), STARTS = (int)(sizeof(starts) / sizeof(starts[0])) };

static void every_interleaving_delivers_every_command_once_and_whole(void **state)
{
    size_t states = 0;
    const char *wrong;
    int c, s;

    (void)state;
    for (c = 0; c < 2 * CONFIGS; c++)
        for (s = 0; s < STARTS; s++) {
            struct config config = configs[c / 2];

            config.a_first = c % 2;
            config.start = starts[s];
            states += run(&config, &wrong);
            if (wrong)
                fail_msg("config %d, start %llu: %s", c, (unsigned long long)starts[s], wrong);
        }
    print_message("%zu states explored\n", states);
    assert_true(states > 10000);
}

static int finds(enum bug bug)
{
    const char *wrong = NULL;
    int c, s;

    for (c = 0; c < CONFIGS && !wrong; c++)
        for (s = 0; s < STARTS && !wrong; s++) {
            struct config config = configs[c];

            config.start = starts[s];
            config.bug = bug;
            config.a_first = bug == BUG_ONE_PARITY;
            run(&config, &wrong);
        }
    print_message("%s: %s\n", bug_names[bug], wrong ? wrong : "not found");
    return wrong != NULL;
}

static void a_step_done_wrong_is_found(void **state)
{
    int bug;

    (void)state;
    for (bug = BUG_NONE + 1; bug < BUG_COUNT; bug++)
        assert_true(finds((enum bug)bug));
}

UNIT_TESTS(every_interleaving_delivers_every_command_once_and_whole, a_step_done_wrong_is_found)
