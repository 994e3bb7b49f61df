/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that includes this, in one file, has its own malloc: the n-th allocation of EPX in a process fails.
 * AddressSanitizer and ThreadSanitizer have allocators of their own: no such program runs there.
 */
#ifndef EPX_TESTS_LIB_FAILING_MALLOC_H
#define EPX_TESTS_LIB_FAILING_MALLOC_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "util/clock.h"

/* glibc's own names. */
extern char __executable_start, etext;
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);

struct countdown {
    atomic_int made; /* allocations so far */
    int target;      /* the one that fails, from 1 on */
    int last;        /* those up to it fail too; 0: one fails */
    uintptr_t caller;
    uint64_t when_ns; /* 0: there was no such allocation */
};
static struct countdown *countdown; /* NULL: nothing fails in this process now */

/* Only what EPX asks for, which is linked into this program: other libraries have their own ways to fail. */
static int fails(const void *caller)
{
    const uintptr_t at = (uintptr_t)caller, begin = (uintptr_t)&__executable_start, end = (uintptr_t)&etext;
    int n;

    if (!countdown || at < begin || at >= end)
        return 0;
    n = atomic_fetch_add(&countdown->made, 1) + 1;
    if (n == countdown->target) {
        countdown->caller = at - begin;
        countdown->when_ns = clock_ns();
    }
    return n == countdown->target || (n > countdown->target && n <= countdown->last);
}

void *malloc(size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}

#endif
