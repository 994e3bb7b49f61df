/* SPDX-License-Identifier: Apache-2.0 */
/* ctest: labels=notsan (a model on one thread) */
/*
 * How blocks agree whether all go on or few (kernel/ll_verdict.h): the code itself, on fibers that leave before every
 * load and every atomic operation, in every order of these. In each: all blocks learn the same; all go on only if a
 * block has the signals; a block of an older epoch never goes on.
 *
 * A model that finds nothing proves little by itself: with an operation done wrong it must find that.
 */
#include <string.h>

#include "sim/fiber.h"
#include "tests/lib/unit.h"

enum bug {
    BUG_NONE,
    BUG_MAX_IN_TWO,   /* the maximum is a load and a store */
    BUG_CLAIM_IN_TWO, /* so is the compare and swap */
    BUG_CLAIM_ALWAYS, /* it stores without comparing */
    BUG_COUNT
};
static enum bug bug;

static uint64_t ag_peek(const uint64_t *word)
{
    fiber_leave(0);
    return *word;
}

static uint64_t ag_max_device(uint64_t *word, uint64_t v)
{
    fiber_leave(0);
    const uint64_t old = *word;
    if (bug == BUG_MAX_IN_TWO)
        fiber_leave(0);
    if (old < v)
        *word = v;
    return old;
}

static uint64_t ag_claim_device(uint64_t *word, uint64_t from, uint64_t to)
{
    fiber_leave(0);
    const uint64_t old = *word;
    if (bug == BUG_CLAIM_IN_TWO)
        fiber_leave(0);
    if (old == from || bug == BUG_CLAIM_ALWAYS)
        *word = to;
    return bug == BUG_CLAIM_ALWAYS ? from : old;
}

#define KFN static
#define AG_BLOCKS 1
#include "kernel/ll_verdict.h"

enum { BLOCKS = 3, STEPS_MOST = 32, EPOCH = 7 };

struct block {
    uint64_t *word, epoch;
    int has, few, ended;
    struct fiber *fiber;
};

static void run_block(void *arg)
{
    struct block *b = arg;

    b->few = b->has ? verdict_with_signals(b->word, b->epoch) : verdict_without(b->word, b->epoch);
    b->ended = 1;
    fiber_leave(1);
}

/* The choices of one run: which of the blocks that have not ended goes on, and of how many. */
struct order {
    int chosen[STEPS_MOST], of[STEPS_MOST], steps;
};

static int next_order(struct order *o)
{
    while (o->steps > 0) {
        if (++o->chosen[o->steps - 1] < o->of[o->steps - 1])
            return 1;
        o->steps--;
    }
    return 0;
}

/* Runs the blocks in this order, and on in the first one behind it. Non-zero: they do not agree. */
static int run_order(struct order *o, unsigned with_signals, uint64_t before)
{
    uint64_t word = before;
    struct block blocks[BLOCKS];
    int left = BLOCKS, step = 0, odd = 0;

    for (int b = 0; b < BLOCKS; b++) {
        blocks[b] = (struct block){.word = &word, .epoch = EPOCH, .has = with_signals >> b & 1};
        blocks[b].fiber = fiber_new(run_block, &blocks[b]);
        assert_non_null(blocks[b].fiber);
    }
    while (left) {
        assert_true(step < STEPS_MOST);
        if (step == o->steps) {
            o->chosen[step] = 0;
            o->steps++;
        }
        o->of[step] = left;
        int n = o->chosen[step++], b = 0;
        while (blocks[b].ended || n-- > 0)
            b++;
        fiber_enter(blocks[b].fiber);
        left -= blocks[b].ended;
    }
    for (int b = 0; b < BLOCKS; b++) {
        odd |= blocks[b].few != blocks[0].few || (!blocks[b].few && (!with_signals || before > 2 * EPOCH));
        fiber_free(blocks[b].fiber);
    }
    return odd;
}

/* All orders; how many disagree. */
static int explore(uint64_t before)
{
    int odd = 0;

    for (unsigned with_signals = 0; with_signals < 1u << BLOCKS; with_signals++) {
        struct order order = {.steps = 0};
        do
            odd += run_order(&order, with_signals, before);
        while (next_order(&order));
    }
    return odd;
}

static void blocks_agree_in_every_order(void **state)
{
    /* The word never used; of the last operation, as it may have ended; of the next one: a block that comes late. */
    static const uint64_t before[] = {0, 2 * (EPOCH - 1), 2 * (EPOCH - 1) + 1, 2 * (EPOCH + 1), 2 * (EPOCH + 1) + 1};

    (void)state;
    bug = BUG_NONE;
    for (size_t i = 0; i < UNIT_COUNT(before); i++)
        assert_int_equal(explore(before[i]), 0);
}

static void wrong_operations_are_found(void **state)
{
    (void)state;
    for (bug = BUG_NONE + 1; bug < BUG_COUNT; bug++)
        assert_true(explore(0) > 0);
}

UNIT_TESTS(blocks_agree_in_every_order, wrong_operations_are_found)
