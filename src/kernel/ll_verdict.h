/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the blocks of a launch agree whether all of them go on or only the first ones (ll_wide_wait.h): the first block
 * that knows decides, by one word of the rank.
 *
 *   block that has all signals                       block that has waited enough
 *   old = word; word = max(old, 2 * epoch)           old = word; if (old < 2 * epoch) word = 2 * epoch + 1
 *   old <= 2 * epoch: all go on                      old == 2 * epoch: all go on; it waits for the signals
 *   otherwise only the first ones                    otherwise only the first ones
 *
 * Each is one atomic change, and those of one word come one after the other. The first of an epoch stores 2 * epoch or
 * 2 * epoch + 1, and no later one of that epoch changes it: all blocks learn the same, and no time is part of it.
 * Epochs never come back: nothing is reset. A block that comes when the others have ended the operation finds a later
 * epoch: it leaves, for without it they cannot all have gone on. tests/unit/test_verdict_model.c tries every order.
 *
 * One lane of one agent of each block, once per epoch.
 */
#ifndef EPX_KERNEL_LL_VERDICT_H
#define EPX_KERNEL_LL_VERDICT_H

#if AG_BLOCKS
/* This block has all signals. Non-zero: only the first blocks go on. */
KFN int verdict_with_signals(uint64_t *word, uint64_t epoch)
{
    return ag_max_device(word, 2 * epoch) > 2 * epoch;
}

/* This block has waited enough. Likewise. */
KFN int verdict_without(uint64_t *word, uint64_t epoch)
{
    uint64_t old, seen = ag_peek(word);

    do {
        old = seen;
        if (old >= 2 * epoch)
            return old > 2 * epoch;
        seen = ag_claim_device(word, old, 2 * epoch + 1);
    } while (seen != old);
    return 1;
}
#endif

#endif
