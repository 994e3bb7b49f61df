/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/cost_memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* 2048 ranks need 2^44 bytes of addresses, an eighth of what a process has. */
#define RANGE_BITS 33
#define HALF_BITS (RANGE_BITS - 1)

static struct {
    char *base;
    int nranks;
    uint64_t (*used)[2];
} all;

int cost_memory_begin(int nranks)
{
    const size_t bytes = (size_t)nranks << RANGE_BITS;
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (map == MAP_FAILED)
        return -1;
    /* Rows are far apart: a huge page for each would be memory for nothing. */
    (void)madvise(map, bytes, MADV_NOHUGEPAGE);
    (void)madvise(map, bytes, MADV_DONTDUMP);
    all.base = map;
    all.nranks = nranks;
    all.used = calloc((size_t)nranks, sizeof(*all.used));
    if (all.used)
        return 0;
    cost_memory_end();
    return -1;
}

void cost_memory_end(void)
{
    if (all.base)
        munmap(all.base, (size_t)all.nranks << RANGE_BITS);
    free(all.used);
    memset(&all, 0, sizeof(all));
}

void *cost_memory(int rank, size_t bytes, int host)
{
    uint64_t *used = &all.used[rank][host];
    const uint64_t at = *used, size = ((uint64_t)bytes + 4095) & ~(uint64_t)4095;

    if (size > ((uint64_t)1 << HALF_BITS) - at)
        return NULL;
    *used += size;
    return all.base + ((uint64_t)rank << RANGE_BITS) + ((uint64_t)host << HALF_BITS) + at;
}

size_t cost_memory_used(int rank)
{
    return (size_t)all.used[rank][0];
}

int cost_memory_owner(const void *at, int otherwise)
{
    const uint64_t offset = (uint64_t)((uintptr_t)at - (uintptr_t)all.base);

    return offset < (uint64_t)all.nranks << RANGE_BITS ? (int)(offset >> RANGE_BITS) : otherwise;
}

int cost_memory_is_host(const void *at)
{
    const uint64_t offset = (uint64_t)((uintptr_t)at - (uintptr_t)all.base);

    return offset < (uint64_t)all.nranks << RANGE_BITS && offset >> HALF_BITS & 1;
}
