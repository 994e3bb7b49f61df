/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TESTS_LIB_NET_SUITE_CASES_H
#define EPX_TESTS_LIB_NET_SUITE_CASES_H

#include "tests/lib/net_suite_rank.h"

/* net_suite_faults.c */
int case_open_and_close_often(struct suite_rank *self);
int case_reopened_pairs_work(struct suite_rank *self);
int case_own_bounds(struct suite_rank *self);
int case_remote_bounds(struct suite_rank *self);
int case_wrong_version(struct suite_rank *self);
int case_peer_never_there(struct suite_rank *self);
int case_sleeper_wakes(struct suite_rank *self);
int case_sleeper_sleeps(struct suite_rank *self);
int case_death_is_told(struct suite_rank *self);
int case_survivors_go_on(struct suite_rank *self);

#endif
