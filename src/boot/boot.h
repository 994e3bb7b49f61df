/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap: how ranks meet. One object answers "who am I" and "all-gather these bytes", whether the caller gave a
 * callback or the ranks meet over TCP (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
 */
#ifndef EPX_BOOT_BOOT_H
#define EPX_BOOT_BOOT_H

#include "epx/epx.h"

struct boot;

/* `user` NULL = from the environment: the process has ONE TCP rendezvous, shared by all its groups and counted. */
epx_status boot_open(const epx_bootstrap *user, int timeout_ms, struct boot **boot);
void boot_close(struct boot *boot);
int boot_rank(const struct boot *boot);
int boot_nranks(const struct boot *boot);
/* Every rank gives `bytes`, receives nranks * bytes in rank order. Bounded by timeout_ms; the message of a failure
 * names the missing ranks. */
epx_status boot_allgather(struct boot *boot, const void *send, void *recv, size_t bytes);

#endif
