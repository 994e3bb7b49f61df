/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command that a kernel pushes to a CPU proxy, and the immediate that crosses the network: both versioned, both
 * checked in full by whoever takes them, in release builds too.
 *
 *   command, 128 bits in two words
 *     a:  0 parity | 1..2 version | 3..6 op | 7..22 rank | 23..34 counter | 35..54 units of 16 bytes | 55..63 target
 *     b:  0 parity | 1..36 source unit | 37..63 target unit, its lower 27 of 36 bits
 *
 * Both words carry the parity of the lap: whoever stores a command by one 16-byte store (a GPU) need not rely on its
 * arriving in one piece, as long as 8 bytes do.
 *
 *   immediate, 32 bits
 *     0..11 source rank | 12..23 counter | 24..30 count - 1 | 31 version
 *     0..11 source rank | 12..22 alarm, lower | 23 = 1 | 24..30 alarm, upper | 31 version
 *
 * The second form carries an alarm instead of a counter: kinds of counters are below 32, which leaves bit 23 to tell.
 * An alarm has 18 bits, culprit << 6 | cause, so that an abort is one message, which needs no memory and no order:
 *     cause below ALARM_STATUS   abort: a wait for the culprit expired in the phase `cause`
 *     ALARM_GOODBYE              no abort: the source ends its group in order. It has sent all that others need of it,
 *                                and needs nothing of them
 *     cause below ALARM_REPLY    abort: the culprit failed with the status cause - ALARM_STATUS
 *     others                     a reply: the source waits for the rank in the culprit's place, and the beat of
 *                                its word control.waits is cause - ALARM_REPLY, modulo ALARM_BEATS
 * A question, whom the peer waits for, is an ordinary signal of the kind SIG_ABORT. Its proxy answers by an alarm.
 * Aborts and questions do not pass through rings, which may be full, but through words beside them (struct ring_dev).
 *
 * PUT means: copy `units` of 16 bytes from this rank's heap to the target rank's heap, and add one to the counter there
 * once they have landed. Zero units is a pure signal. A proxy may merge neighbours that are contiguous on both sides
 * and name the same counter: the count of the immediate says how many.
 *
 * A counter is (kind, slot): COUNTER(kind, slot). Counters are kept per source rank, 64 bits, never reset.
 */
#ifndef EPX_KERNEL_COMMAND_H
#define EPX_KERNEL_COMMAND_H

#include "kernel/params.h"
#include "kernel/inject_bug.h"

#ifndef COMMAND_FN /* a device compiler may give the functions its own qualifiers */
#define COMMAND_FN static inline
#endif

struct command {
    uint64_t a, b;
};
EPX_STATIC_ASSERT(sizeof(struct command) == 16, "one aligned store");

enum { COMMAND_VERSION = 2, COMMAND_PUT = 1 };

/* Where the fields begin, and their widths. The target's upper bits are in word a, its lower ones in word b. */
enum {
    COMMAND_VERSION_AT = 1,
    COMMAND_OP_AT = 3,
    COMMAND_RANK_AT = 7,
    COMMAND_COUNTER_AT = 23,
    COMMAND_UNITS_AT = 35,
    COMMAND_TARGET_HIGH_AT = 55,
    COMMAND_SOURCE_AT = 1,
    COMMAND_TARGET_LOW_AT = 37,
    COMMAND_VERSION_BITS = COMMAND_OP_AT - COMMAND_VERSION_AT,
    COMMAND_OP_BITS = COMMAND_RANK_AT - COMMAND_OP_AT,
    COMMAND_RANK_BITS = COMMAND_COUNTER_AT - COMMAND_RANK_AT,
    COMMAND_COUNTER_BITS = COMMAND_UNITS_AT - COMMAND_COUNTER_AT,
    COMMAND_UNITS_BITS = COMMAND_TARGET_HIGH_AT - COMMAND_UNITS_AT,
    COMMAND_OFFSET_BITS = COMMAND_TARGET_LOW_AT - COMMAND_SOURCE_AT,
    COMMAND_TARGET_LOW_BITS = 64 - COMMAND_TARGET_LOW_AT
};
#define LOW_BITS(bits) (((uint64_t)1 << (bits)) - 1)
EPX_STATIC_ASSERT(COMMAND_OFFSET_BITS == COMMAND_TARGET_LOW_BITS + 64 - COMMAND_TARGET_HIGH_AT,
                  "source and target alike");

/* Version and operation, in place. */
#define COMMAND_HEAD ((uint64_t)COMMAND_VERSION << COMMAND_VERSION_AT | (uint64_t)COMMAND_PUT << COMMAND_OP_AT)
#define COMMAND_HEAD_MASK (LOW_BITS(COMMAND_VERSION_BITS + COMMAND_OP_BITS) << COMMAND_VERSION_AT)

#define COMMAND_UNIT 16u
#define COMMAND_MAX_UNITS ((uint32_t)LOW_BITS(COMMAND_UNITS_BITS))
#define COMMAND_MAX_OFFSET (((uint64_t)1 << COMMAND_OFFSET_BITS) * COMMAND_UNIT) /* 1 TiB of heap */
#define COMMAND_COUNTERS (1 << COMMAND_COUNTER_BITS)

/* At most 64 kinds and 64 slots. */
enum { COUNTER_SLOT_BITS = 6, COUNTER_SLOTS = 1 << COUNTER_SLOT_BITS };
#define COUNTER(kind, slot) ((uint32_t)(kind) << COUNTER_SLOT_BITS | (uint32_t)(slot))
#define COUNTER_KIND(counter) ((counter) >> COUNTER_SLOT_BITS)
#define COUNTER_SLOT(counter) ((counter) & (uint32_t)(COUNTER_SLOTS - 1))

/*
 * Which ring, and so which proxy thread of both ranks, carries a put: it depends on the pair of ranks and, where the
 * pair has ROUTE_SPREAD and the slot of the counter is a round of rows, on the slot too. So each counter of each source
 * has one writer. Both ranks of a pair compute the same route (group/nodes.c). All is modulo the number of rings.
 *
 *   0..15 the pair's ring | 16 ROUTE_SPREAD | 17.. what the ring of slot 0 is ahead of the pair's
 */
enum { ROUTE_SPREAD = 1 << 16, ROUTE_SHIFT = 17 };
#define SPREAD_SIGNALS \
    (1u << SIG_HD_ROWS | 1u << SIG_HD_BLOCK | 1u << SIG_HD_FREE | 1u << SIG_HC_BLOCK | 1u << SIG_HC_ROWS)
#define ROUTE_IS_SPREAD(route, counter) ((route)&ROUTE_SPREAD && SPREAD_SIGNALS >> COUNTER_KIND(counter) & 1u)
#define ROUTE_RING(route, counter, rings)                                                                          \
    ((int)((((uint32_t)(route) & (uint32_t)(ROUTE_SPREAD - 1)) +                                                   \
            (ROUTE_IS_SPREAD(route, counter) ? ((uint32_t)(route) >> ROUTE_SHIFT) + COUNTER_SLOT(counter) : 0u)) % \
           (uint32_t)(rings)))
EPX_STATIC_ASSERT(SIG_COUNT <= 32, "SPREAD_SIGNALS has a bit for each");
EPX_STATIC_ASSERT(SIG_COUNT *COUNTER_SLOTS <= COMMAND_COUNTERS / 2, "every (kind, slot) is a counter, see alarms");

enum {
    ALARM_CAUSE_BITS = 6,
    ALARM_STATUS = 35,
    ALARM_GOODBYE = ALARM_STATUS,             /* status 0 is no failure */
    ALARM_LOST = ALARM_STATUS + KSTATUS_PEER, /* as a reply: the own proxy says that the network has lost the rank */
    ALARM_REPLY = 48,
    ALARM_BEATS = 16,
    ALARM_LOW_BITS = 11, /* in the place of the counter, its highest bit excepted */
    ALARM_BITS = 18
};
#define ALARM(culprit, cause) ((uint32_t)(culprit) << ALARM_CAUSE_BITS | (uint32_t)(cause))
#define ALARM_CULPRIT(alarm) ((int)((alarm) >> ALARM_CAUSE_BITS))
#define ALARM_CAUSE(alarm) ((int)((alarm) & ((1u << ALARM_CAUSE_BITS) - 1)))
#define ALARM_NONE ((uint32_t)-1) /* no alarm */
EPX_STATIC_ASSERT((int)PHASE_COUNT <= (int)ALARM_STATUS, "every phase is a cause");
EPX_STATIC_ASSERT((int)ALARM_STATUS + (int)KSTATUS_LAST < (int)ALARM_REPLY, "every status is a cause");
EPX_STATIC_ASSERT(ALARM_REPLY + ALARM_BEATS == 1 << ALARM_CAUSE_BITS, "replies are the rest");

/* What is stored in the place of a rank's reply: does none follow? */
COMMAND_FN int is_gone(uint32_t reply)
{
    return ALARM_CAUSE(reply) == ALARM_GOODBYE || ALARM_CAUSE(reply) == ALARM_LOST;
}

/* What an abort word says to ranks of other nodes. */
COMMAND_FN uint32_t alarm_of_abort(uint64_t word)
{
    const int timeout = ABORT_STATUS(word) == KSTATUS_TIMEOUT;
    return ALARM(ABORT_CULPRIT(word), timeout ? ABORT_PHASE(word) : ALARM_STATUS + ABORT_STATUS(word));
}

/* The abort word that an alarm of `rank` means. */
COMMAND_FN uint64_t abort_of_alarm(int rank, uint32_t alarm)
{
    const int cause = ALARM_CAUSE(alarm), culprit = ALARM_CULPRIT(alarm);
    return cause < ALARM_STATUS ? ABORT_CAUSED(KSTATUS_TIMEOUT, cause, rank, culprit)
                                : ABORT_CAUSED(cause - ALARM_STATUS, PHASE_NONE, rank, culprit);
}

struct command_fields {
    uint32_t op, version, rank, counter, units;
    uint64_t source, target; /* in units */
};

/* The parity bits are the ring's business: they are zero here. */
COMMAND_FN struct command command_pack(uint32_t rank, uint32_t counter, uint64_t source_offset, uint64_t target_offset,
                                       uint32_t bytes)
{
    const uint64_t source = source_offset / COMMAND_UNIT, target = target_offset / COMMAND_UNIT;
    struct command c;
    c.a = COMMAND_HEAD | (rank & LOW_BITS(COMMAND_RANK_BITS)) << COMMAND_RANK_AT |
          (counter & LOW_BITS(COMMAND_COUNTER_BITS)) << COMMAND_COUNTER_AT |
          (bytes / COMMAND_UNIT & LOW_BITS(COMMAND_UNITS_BITS)) << COMMAND_UNITS_AT |
          (target >> COMMAND_TARGET_LOW_BITS) << COMMAND_TARGET_HIGH_AT;
    c.b = (source & LOW_BITS(COMMAND_OFFSET_BITS)) << COMMAND_SOURCE_AT | (target & LOW_BITS(COMMAND_TARGET_LOW_BITS))
                                                                              << COMMAND_TARGET_LOW_AT;
    return c;
}

COMMAND_FN struct command_fields command_unpack(struct command c)
{
    struct command_fields f;
    f.version = (uint32_t)(c.a >> COMMAND_VERSION_AT & LOW_BITS(COMMAND_VERSION_BITS));
    f.op = (uint32_t)(c.a >> COMMAND_OP_AT & LOW_BITS(COMMAND_OP_BITS));
    f.rank = (uint32_t)(c.a >> COMMAND_RANK_AT & LOW_BITS(COMMAND_RANK_BITS));
    f.counter = (uint32_t)(c.a >> COMMAND_COUNTER_AT & LOW_BITS(COMMAND_COUNTER_BITS));
    f.units = (uint32_t)(c.a >> COMMAND_UNITS_AT & LOW_BITS(COMMAND_UNITS_BITS));
    f.source = c.b >> COMMAND_SOURCE_AT & LOW_BITS(COMMAND_OFFSET_BITS);
    f.target = c.a >> COMMAND_TARGET_HIGH_AT << COMMAND_TARGET_LOW_BITS | c.b >> COMMAND_TARGET_LOW_AT;
    return f;
}

enum {
    IMMEDIATE_COUNTER_AT = 12,
    IMMEDIATE_COUNT_AT = 24,
    IMMEDIATE_VERSION_AT = 31,
    IMMEDIATE_RANK_BITS = IMMEDIATE_COUNTER_AT,
    IMMEDIATE_COUNT_BITS = IMMEDIATE_VERSION_AT - IMMEDIATE_COUNT_AT,
    IMMEDIATE_VERSION = 1,
    IMMEDIATE_MAX_COUNT = 1 << IMMEDIATE_COUNT_BITS,
    IMMEDIATE_MAX_RANKS = 1 << IMMEDIATE_RANK_BITS
};
EPX_STATIC_ASSERT(IMMEDIATE_COUNT_AT - IMMEDIATE_COUNTER_AT == COMMAND_COUNTER_BITS, "the counter of a command fits");
EPX_STATIC_ASSERT(KERNEL_MAX_RANKS <= IMMEDIATE_MAX_RANKS, "every rank fits");

COMMAND_FN uint32_t immediate_pack(uint32_t rank, uint32_t counter, uint32_t count)
{
    return (rank & (IMMEDIATE_MAX_RANKS - 1)) | (counter & (COMMAND_COUNTERS - 1)) << IMMEDIATE_COUNTER_AT |
           ((count - 1) & INJECT_BUG(BUG_IMMEDIATE, IMMEDIATE_MAX_COUNT / 2 - 1, IMMEDIATE_MAX_COUNT - 1))
               << IMMEDIATE_COUNT_AT |
           (uint32_t)IMMEDIATE_VERSION << IMMEDIATE_VERSION_AT;
}

enum { IMMEDIATE_ALARM_AT = IMMEDIATE_COUNT_AT - 1 };
EPX_STATIC_ASSERT(ALARM_BITS == ALARM_LOW_BITS + IMMEDIATE_COUNT_BITS, "an alarm fills counter and count");
EPX_STATIC_ASSERT(ALARM_BITS == IMMEDIATE_RANK_BITS + ALARM_CAUSE_BITS, "every rank may be the culprit");

COMMAND_FN uint32_t immediate_pack_alarm(uint32_t rank, uint32_t alarm)
{
    return (rank & (IMMEDIATE_MAX_RANKS - 1)) | (alarm & (uint32_t)LOW_BITS(ALARM_LOW_BITS)) << IMMEDIATE_COUNTER_AT |
           1u << IMMEDIATE_ALARM_AT | (alarm >> ALARM_LOW_BITS & (IMMEDIATE_MAX_COUNT - 1)) << IMMEDIATE_COUNT_AT |
           (uint32_t)IMMEDIATE_VERSION << IMMEDIATE_VERSION_AT;
}

/* ALARM_NONE: the immediate has a counter. */
COMMAND_FN uint32_t immediate_alarm(uint32_t imm)
{
    if (!(imm >> IMMEDIATE_ALARM_AT & 1))
        return ALARM_NONE;
    return (imm >> IMMEDIATE_COUNTER_AT & (uint32_t)LOW_BITS(ALARM_LOW_BITS)) |
           (imm >> IMMEDIATE_COUNT_AT & (IMMEDIATE_MAX_COUNT - 1)) << ALARM_LOW_BITS;
}

COMMAND_FN uint32_t immediate_rank(uint32_t imm)
{
    return imm & (IMMEDIATE_MAX_RANKS - 1);
}

COMMAND_FN uint32_t immediate_counter(uint32_t imm)
{
    return imm >> IMMEDIATE_COUNTER_AT & (COMMAND_COUNTERS - 1);
}

COMMAND_FN uint32_t immediate_count(uint32_t imm)
{
    return (imm >> IMMEDIATE_COUNT_AT & (IMMEDIATE_MAX_COUNT - 1)) + 1;
}

COMMAND_FN uint32_t immediate_version(uint32_t imm)
{
    return imm >> IMMEDIATE_VERSION_AT;
}

/*
 * A ring of commands from the agents of one rank to one proxy thread. `slots` (power of two) lie in host memory. The
 * producers claim by adding to `head` (device memory); slot i % capacity of lap i / capacity is valid when its parity
 * bits equal (lap + 1) & 1, so nothing is ever cleared. The consumer returns `tail` now and then; producers read it
 * only when their remembered tail says that the ring may be full. head, tail and tail_seen count commands modulo 2^64
 * and are compared by their difference. kernel/ring.h has the producers' side, proxy/ring.c the consumer's.
 */
struct ring_dev {
    struct command *slots;
    uint64_t mask;         /* capacity - 1 */
    uint64_t *head;        /* claimed so far; device memory */
    uint64_t *tail;        /* consumed so far, written by the proxy; host memory */
    uint64_t *tail_seen;   /* the producers' copy of it; device memory */
    struct doorbell *bell; /* wakes a sleeping proxy (CPU producers) */
    uint64_t *stop;        /* 1: this rank has given up: the proxy drops what it has not posted; host memory */
    uint64_t *stopped;     /* 1: and the network reads this rank's memory no more; written by the proxy, host memory.
                              2: the proxy is stuck, and kernels do not wait for it again; written by them */
    uint64_t *alarm;       /* 0, or ALARM_SET | an alarm for peers of this ring; the first one stays; host memory */
    uint64_t *ask;         /* WAITS_WORD: a question to this peer; a new beat is a new question; host memory */
    uint64_t *asked;       /* the last question that the proxy has taken; written by it, host memory */
    uint64_t *blocked;     /* 0, or 1 + the peer whose queue must empty first; written by the proxy, host memory */
};

#define ALARM_SET ((uint64_t)1 << 32)
#define ALARM_ALL ((uint64_t)1 << 33) /* for all peers; otherwise for those that proxy_options.relays names */

#define RING_MAX_PUSH 32
#define RING_PARITY ((uint64_t)1) /* in both words */

/* The parity that makes slot `index` valid. The lap is index / capacity, hence odd when this bit is set. */
COMMAND_FN uint64_t ring_parity(uint64_t mask, uint64_t index)
{
    return index & (mask + 1) ? 0 : RING_PARITY;
}

#endif
