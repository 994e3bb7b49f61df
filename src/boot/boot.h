/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap: how ranks find each other. One object has the rank, the number of ranks and an all-gather, whether the
 * caller gave a callback or the ranks connect over TCP as their launcher's variables say (launcher.h).
 */
#ifndef EPX_BOOT_BOOT_H
#define EPX_BOOT_BOOT_H

#include "epx/epx.h"

struct boot;

/* `user` NULL = from the environment: the process has ONE TCP rendezvous, which all its groups share. A failure ends
 * the one that there is (boot_abandon). */
epx_status boot_open(const epx_bootstrap *user, int timeout_ms, struct boot **boot);
/* Its group is there, and uses it until boot_close(). Until then a boot_open() of another thread that finds their
 * rendezvous failed waits for the end of this creation, for its timeout at the most, and meets then. */
void boot_created(struct boot *boot);
void boot_close(struct boot *boot);
int boot_rank(const struct boot *boot);
int boot_nranks(const struct boot *boot);
/* 32 bytes, made from the secret that the ranks share (secret.h); zeros where the caller's all-gather is all there is;
 * NULL: EPX_SECRET=none. */
const uint8_t *boot_key(const struct boot *boot);
/* Whether the secret may be in this user's file (secret_read). */
int boot_own_secret(const struct boot *boot);
/* Every rank sends `bytes` and receives nranks * bytes in rank order, within timeout_ms. The message of a timeout names
 * the missing ranks. */
epx_status boot_allgather(struct boot *boot, const void *send, void *recv, size_t bytes);
/* Before the first all-gather of a call on a group that exists, collective as that one is: where the connections were
 * lost, ranks meet again, for timeout_ms at the most. All-gathers of calls that have begun before fail then. */
epx_status boot_begin(struct boot *boot);
/* The last all-gather has failed, and boot_begin() would let ranks meet again. */
int boot_is_lost(const struct boot *boot);
/* This rank cannot take part in the next all-gather: the others fail with its last error, and the rendezvous is over. A
 * caller's all-gather has no way to tell them. `boot` NULL: there is none yet; the ranks may have connected for an
 * earlier one. Returns `status`, with the same last error. */
epx_status boot_abandon(const struct boot *boot, epx_status status);

#endif
