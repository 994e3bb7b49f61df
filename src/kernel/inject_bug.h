/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Injected bugs, for the test that shows that simulation finds them (tests/unit/test_sim_inject.c). Only the files that
 * this test compiles again with EPX_INJECT_BUGS contain them; everywhere else INJECT_BUG is its right side.
 */
#ifndef EPX_KERNEL_INJECT_BUG_H
#define EPX_KERNEL_INJECT_BUG_H

enum injected_bug {
    BUG_SLOT = 1,
    BUG_EPOCH = 2,
    BUG_IMMEDIATE = 3,
    BUG_NO_TELL = 4,       /* a rank that gives up does not tell its node */
    BUG_NO_RECHECK = 5,    /* the abort word is not looked at behind the last read */
    BUG_NO_STOP = 6,       /* a rank that gives up does not wait for the network */
    BUG_EARLY_CREDIT = 7,  /* a relay gives the credit for a slot before it has forwarded the rows in it */
    BUG_ROUND_TWICE = 8,   /* rows of a slot's earlier round are counted again for a later one */
    BUG_AGGREGATE = 9,     /* an aggregate misses a peer */
    BUG_OLD_HEAP = 10,     /* the heap of a process that was replaced stays mapped */
    BUG_ROW_PLACE = 11,    /* rows for another node land by their number in the stage, with gaps */
    BUG_HEADER_PLACE = 12, /* a header says where another rank's rows return to */
    BUG_EARLY_WINDOW = 13, /* a rank gives the credit for a window of its node before it has summed the rows there */
    BUG_LATE_WRITES = 14,  /* a rank that wakes up writes rows without a look at its abort word */
    BUG_RECV_HALF = 15,    /* rows return to where a rank that was masked may still put some */
    BUG_FAILS_ALONE = 16,  /* a rank whose operation is not good tells nobody, and goes on by itself */
    BUG_EARLY_PULL = 17,   /* a relay gives the credit for a slot before its node has taken the rows in it */
    BUG_STILL_THERE = 18,  /* a place is given to another process before the one that has it has ended */
    BUG_OWN_CHOICE = 19,   /* each member prefers, of two processes for one place, the one that itself has met */
    BUG_NOT_TOLD = 20,     /* a rank that was masked by ranks of other nodes is not told */
    BUG_NODE_WORD = 21,    /* the word of a node misses one of its ranks */
    BUG_WORD_FIRST = 22,   /* a rank's own word is stored before it has added to the count of its node */
    BUG_UNTOLD = 23,       /* a rank that does not hear how a recovery ended leaves those that do alone */
    BUG_NO_GOODBYE = 24,   /* a rank that ends its group in order does not say so */
    BUG_EARLY_STEP = 25,   /* the last step of a recovery begins before all have reset their state */
    BUG_SECOND_SET = 26,   /* a rank that was told that it is left out forgets it, and recovers with others */
    BUG_NO_FOLLOW = 27,    /* a rank is named although it says that it waits for another one */
    BUG_OTHER_WRITES = 28, /* an agent that may not write rows any more is taken for another one that still does */
    BUG_OWN_WORD = 29,     /* a rank that recovers does not look whether its own abort word says that it was late */
    BUG_SELF_NAMED = 30,   /* a rank that cannot go on because of another one is named for it */
    BUG_HALF_ROWS = 31,    /* the halves of receive rows are apart for rows of one size only */
    BUG_STILL_READ = 32,   /* puts to a peer that is lost in silence count as sent, and the network still reads them */
    BUG_GOES_ON = 33,      /* a rank goes on without another one although the network still reads puts to that one */
    BUG_MISSED = 34,       /* a rank that gives up puts of high throughput, with masks, tells nobody */
    BUG_EARLY_TAKEN = 35   /* a rank says that it has its rows before it has taken them from where others have them */
};

#ifdef EPX_INJECT_BUGS
extern int injected_bug; /* one of them, or 0 */
#define INJECT_BUG(bug, wrong, right) (injected_bug == (bug) ? (wrong) : (right))
#else
#define INJECT_BUG(bug, wrong, right) (right)
#endif

#endif
