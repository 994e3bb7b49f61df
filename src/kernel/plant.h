/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bugs on purpose, for the test that shows that simulation finds them (tests/unit/test_sim_planted.c). Only files that this
 * test compiles anew, with EPX_PLANT_BUGS, know any of them; everywhere else PLANT is its right side and nothing more.
 */
#ifndef EPX_KERNEL_PLANT_H
#define EPX_KERNEL_PLANT_H

enum planted { PLANT_SLOT = 1, PLANT_EPOCH = 2, PLANT_IMMEDIATE = 3 };

#ifdef EPX_PLANT_BUGS
extern int planted_bug; /* one of them, or 0 */
#define PLANT(bug, wrong, right) (planted_bug == (bug) ? (wrong) : (right))
#else
#define PLANT(bug, wrong, right) (right)
#endif

#endif
