/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The timed loop, written once for EPX's ranks and the MPI baseline's, so that both are measured in the same way:
 *
 *      updates     barrier | update | barrier = end           (high throughput)
 *      exchanges   barrier | dispatch | barrier = end | combine | barrier = end
 */
#ifndef EPX_TESTS_LIB_PLAYER_H
#define EPX_TESTS_LIB_PLAYER_H

#include "bench_work.h"
#include "board.h"

/* Each returns 0, or -1 after it has told the board what is wrong. */
struct player {
    const char *name; /* of the team, for messages */
    void *self;
    int (*update)(void *self); /* NULL: routing comes with each dispatch */
    int (*dispatch)(void *self, int variant);
    int (*combine)(void *self, int variant);
    /* All ranks have finished a timed operation, or (-1) something that does not count. NULL: no interest. */
    void (*finished)(void *self, int op);
    int corrupt_dispatch, corrupt_combine; /* spoil this team's results before the check */
};

/* Follows the conductor until it says quit (0) or something fails (-1). */
int player_run(const struct player *player, struct board_seat *seat, struct bench_work *work);

#endif
