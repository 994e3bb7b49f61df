/* SPDX-License-Identifier: Apache-2.0 */
/* Commands and immediates: every field comes back as it was put in, whatever its neighbours hold.
 * ctest: labels=notsan (one thread) */
#include "kernel/command.h"
#include "tests/lib/unit.h"

enum { FIELDS = 5 };

/* Largest values: rank, counter, source, target, bytes. */
static const uint64_t most[FIELDS] = {0xffff, COMMAND_COUNTERS - 1, COMMAND_MAX_OFFSET - COMMAND_UNIT,
                                      COMMAND_MAX_OFFSET - COMMAND_UNIT, (uint64_t)COMMAND_MAX_UNITS *COMMAND_UNIT};

static void check_command(const uint64_t v[FIELDS])
{
    const struct command c = command_pack((uint32_t)v[0], (uint32_t)v[1], v[2], v[3], (uint32_t)v[4]);
    const struct command_fields f = command_unpack(c);

    assert_int_equal(f.version, COMMAND_VERSION);
    assert_int_equal(f.op, COMMAND_PUT);
    assert_int_equal(f.rank, v[0]);
    assert_int_equal(f.counter, v[1]);
    assert_int_equal(f.source * COMMAND_UNIT, v[2]);
    assert_int_equal(f.target * COMMAND_UNIT, v[3]);
    assert_int_equal(f.units * COMMAND_UNIT, v[4]);
    assert_int_equal(c.a & RING_PARITY, 0);
    assert_int_equal(c.b & RING_PARITY, 0);
    assert_int_equal(c.a & COMMAND_HEAD_MASK, COMMAND_HEAD);
}

static void fields_hold_their_largest_values_in_every_combination(void **state)
{
    uint64_t v[FIELDS];
    int which, i;

    (void)state;
    for (which = 0; which < 1 << FIELDS; which++) {
        for (i = 0; i < FIELDS; i++)
            v[i] = which >> i & 1 ? most[i] : 0;
        check_command(v);
    }
}

static void every_single_bit_of_a_field_survives(void **state)
{
    uint64_t v[FIELDS], unit;
    int field, i;

    (void)state;
    for (field = 0; field < FIELDS; field++)
        for (unit = field < 2 ? 1 : COMMAND_UNIT; unit <= most[field]; unit <<= 1) {
            for (i = 0; i < FIELDS; i++)
                v[i] = i == field ? unit : 0;
            check_command(v);
            for (i = 0; i < FIELDS; i++)
                v[i] = i == field ? most[i] & ~unit : most[i];
            check_command(v);
        }
}

/* Distinct bits: a set bit of the command belongs to one field only, and all 128 are used but those of no meaning. */
static void fields_do_not_overlap(void **state)
{
    const struct command none = command_pack(0, 0, 0, 0, 0);
    uint64_t a = none.a | RING_PARITY, b = none.b | RING_PARITY;
    int field;

    (void)state;
    for (field = 0; field < FIELDS; field++) {
        uint64_t v[FIELDS] = {0};
        struct command c;

        v[field] = most[field];
        c = command_pack((uint32_t)v[0], (uint32_t)v[1], v[2], v[3], (uint32_t)v[4]);
        c.a ^= none.a;
        assert_int_equal(a & c.a, 0);
        assert_int_equal(b & c.b, 0);
        a |= c.a;
        b |= c.b;
    }
    assert_int_equal(a | COMMAND_HEAD_MASK, UINT64_MAX);
    assert_int_equal(b, UINT64_MAX);
}

static void counters_are_kind_and_slot(void **state)
{
    uint32_t kind, slot;

    (void)state;
    for (kind = 0; kind < 64; kind++)
        for (slot = 0; slot < 64; slot++) {
            const uint32_t counter = COUNTER(kind, slot);

            assert_true(counter < COMMAND_COUNTERS);
            assert_int_equal(COUNTER_KIND(counter), kind);
            assert_int_equal(COUNTER_SLOT(counter), slot);
        }
}

static void immediates_hold_rank_counter_and_count(void **state)
{
    static const uint32_t ranks[] = {0, 1, 2047, 2048, IMMEDIATE_MAX_RANKS - 1};
    static const uint32_t counters[] = {0, 1, 63, 64, COMMAND_COUNTERS - 1};
    size_t r, k;
    uint32_t count;

    (void)state;
    for (r = 0; r < sizeof(ranks) / sizeof(ranks[0]); r++)
        for (k = 0; k < sizeof(counters) / sizeof(counters[0]); k++)
            for (count = 1; count <= IMMEDIATE_MAX_COUNT; count++) {
                const uint32_t imm = immediate_pack(ranks[r], counters[k], count);

                assert_int_equal(immediate_rank(imm), ranks[r]);
                assert_int_equal(immediate_counter(imm), counters[k]);
                assert_int_equal(immediate_count(imm), count);
                assert_int_equal(immediate_version(imm), IMMEDIATE_VERSION);
            }
}

static void alarms_hold_culprit_and_cause_and_are_told_from_counters(void **state)
{
    static const int culprits[] = {0, 1, 31, 32, 2048, IMMEDIATE_MAX_RANKS - 1};
    uint32_t kind;

    (void)state;
    for (size_t i = 0; i < sizeof(culprits) / sizeof(*culprits); i++)
        for (int cause = 0; cause < 1 << ALARM_CAUSE_BITS; cause++) {
            const uint32_t imm = immediate_pack_alarm(4095, ALARM(culprits[i], cause)), alarm = immediate_alarm(imm);

            assert_int_equal(ALARM_CULPRIT(alarm), culprits[i]);
            assert_int_equal(ALARM_CAUSE(alarm), cause);
            assert_int_equal(immediate_rank(imm), 4095);
            assert_int_equal(immediate_version(imm), IMMEDIATE_VERSION);
        }
    for (kind = 0; kind < 32; kind++)
        assert_int_equal(immediate_alarm(immediate_pack(4095, COUNTER(kind, 63), IMMEDIATE_MAX_COUNT)), ALARM_NONE);
}

/* Everything that the word of an abort says reaches other nodes, but for the phase of what is no timeout. */
static void an_abort_word_survives_its_alarm(void **state)
{
    (void)state;
    for (int phase = 0; phase < PHASE_COUNT; phase++) {
        const uint64_t word = ABORT_CAUSED(KSTATUS_TIMEOUT, phase, 7, 4095);

        assert_int_equal(abort_of_alarm(7, alarm_of_abort(word)), word);
    }
    for (int status = 1; status <= KSTATUS_LAST; status++) {
        const uint64_t word = abort_of_alarm(7, alarm_of_abort(ABORT_CAUSED(status, PHASE_NONE, 7, 3)));

        assert_int_equal(ABORT_STATUS(word), status);
        assert_int_equal(ABORT_CULPRIT(word), 3);
        assert_int_equal(ABORT_RANK(word), 7);
        assert_true(ALARM_CAUSE(alarm_of_abort(word)) < ALARM_REPLY);
    }
}

static void parity_changes_with_every_lap_and_across_the_wrap(void **state)
{
    const uint64_t capacity = 64, mask = capacity - 1;
    uint64_t i, index = (uint64_t)0 - 3 * capacity;

    (void)state;
    assert_int_equal(ring_parity(mask, 0), 1); /* slots start as zeros: lap 0 must differ */
    for (i = 0; i < 6 * capacity; i++, index++) {
        assert_int_equal(ring_parity(mask, index), (index / capacity + 1) & 1);
        assert_int_not_equal(ring_parity(mask, index), ring_parity(mask, index + capacity));
    }
}

UNIT_TESTS(fields_hold_their_largest_values_in_every_combination, every_single_bit_of_a_field_survives,
           fields_do_not_overlap, counters_are_kind_and_slot, immediates_hold_rank_counter_and_count,
           alarms_hold_culprit_and_cause_and_are_told_from_counters, an_abort_word_survives_its_alarm,
           parity_changes_with_every_lap_and_across_the_wrap)
