/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whose memory is it? Each rank has a range of addresses of its own, one half its GPU's and one half its host's.
 * Nothing is freed before the end: untouched pages cost nothing, and a run makes few allocations.
 */
#ifndef EPX_SIM_COST_MEMORY_H
#define EPX_SIM_COST_MEMORY_H

#include <stddef.h>

/* 0, or -1: no such range of addresses. */
int cost_memory_begin(int nranks);
void cost_memory_end(void);
/* Zeroed, aligned to 4096. NULL: the rank's range is used up. */
void *cost_memory(int rank, size_t bytes, int host);
/* Of its GPU, so far. */
size_t cost_memory_used(int rank);
/* The rank that it belongs to; `otherwise` for memory of nobody's. */
int cost_memory_owner(const void *at, int otherwise);
int cost_memory_is_host(const void *at);

#endif
