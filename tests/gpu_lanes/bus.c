/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts how often kernels wait for a bus: loads from memory that a GPU has across one, the heaps of ranks (where they
 * lie in host memory) and what proxies write for kernels. Kernels are compiled with -fsanitize=thread, which makes a
 * call of every access, and these are the functions that it calls: no sanitizer is linked. Stores are posted, and cost
 * nothing here. Polls do not count: they take as long as what they wait for.
 *
 * The chain of a launch is that of its slowest lane: its loads, where CHAIN_BULK loads of 16 bytes, which copies have
 * in flight together, are one. Without the instrumentation nothing is counted.
 */
#include "bus.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel/params.h"
#include "lanes.h"

enum { RANGES_MOST = 256, CHAIN_BULK = 8, STAGES = 8, SITES = 1 << 12 };

static struct range {
    const char *begin, *end;
} ranges[RANGES_MOST];
static int range_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    uint64_t launches, chain;
} totals[KERNEL_COUNT][STAGES];

/* Where lanes load, by address of the code; for a look by hand (LANES_SITES). */
static struct {
    const void *pc;
    uint64_t n;
} sites[SITES];

static _Thread_local uint32_t loads[THREADS_MOST]; /* times CHAIN_BULK, of the block that this thread runs */
static _Thread_local int quiet;

void bus_add(const void *memory, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    if (range_count < RANGES_MOST) {
        ranges[range_count] = (struct range){memory, (const char *)memory + bytes};
        __atomic_store_n(&range_count, range_count + 1, __ATOMIC_RELEASE); /* pairs with count() */
    }
    pthread_mutex_unlock(&lock);
}

void bus_quiet(int on)
{
    quiet = on;
}

uint64_t bus_chain(unsigned threads)
{
    uint32_t most = 0;

    for (unsigned i = 0; i < threads; i++)
        most = loads[i] > most ? loads[i] : most;
    memset(loads, 0, sizeof(loads));
    return most;
}

void bus_launched(int kernel, int stage, uint64_t chain)
{
    pthread_mutex_lock(&lock);
    totals[kernel][stage % STAGES].launches++;
    totals[kernel][stage % STAGES].chain += chain;
    pthread_mutex_unlock(&lock);
}

static void count_site(const void *pc)
{
    const size_t at = ((uintptr_t)pc >> 2) % SITES;

    sites[at].pc = pc;
    __atomic_fetch_add(&sites[at].n, 1, __ATOMIC_RELAXED);
}

/* Of each site its place in this library, as addr2line -e takes it, and how often it was there. */
static void write_sites(const char *path)
{
    FILE *out = path ? fopen(path, "a") : NULL;
    Dl_info info;

    for (int i = 0; out && i < SITES; i++)
        if (sites[i].n && dladdr(sites[i].pc, &info))
            fprintf(out, "%#zx %llu\n", (size_t)((const char *)sites[i].pc - (const char *)info.dli_fbase) - 1,
                    (unsigned long long)sites[i].n);
    if (out)
        fclose(out);
}

/* One line for each stage of each kernel: kernel, stage, launches, chain of all of them together. */
__attribute__((destructor)) static void write_totals(void)
{
    const char *path = getenv("LANES_BUS");
    FILE *out = path ? fopen(path, "a") : NULL;

    for (int k = 0; out && k < KERNEL_COUNT; k++)
        for (int s = 0; s < STAGES; s++)
            if (totals[k][s].launches)
                fprintf(out, "%d %d %llu %.1f\n", k, s, (unsigned long long)totals[k][s].launches,
                        (double)totals[k][s].chain / CHAIN_BULK);
    if (out)
        fclose(out);
    write_sites(getenv("LANES_SITES"));
}

__attribute__((noinline)) static void count(const volatile void *address, uint32_t cost, const void *pc)
{
    const int n = __atomic_load_n(&range_count, __ATOMIC_ACQUIRE); /* pairs with bus_add() */

    for (int i = 0; i < n && !quiet; i++) {
        if ((const char *)address >= ranges[i].begin && (const char *)address < ranges[i].end) {
            loads[lanes_thread().x] += cost;
            count_site(pc);
            return;
        }
    }
}

void bus_vector(const void *from)
{
    count(from, 1, __builtin_return_address(0));
}

/* ---- What instrumented code calls ------------------------------------------------------------------------------- */

#define READ(name, cost)                                   \
    void __tsan_##name(void *address);                     \
    void __tsan_##name(void *address)                      \
    {                                                      \
        count(address, cost, __builtin_return_address(0)); \
    }
READ(read1, CHAIN_BULK)
READ(read2, CHAIN_BULK)
READ(read4, CHAIN_BULK)
READ(read8, CHAIN_BULK)
READ(read16, 1)
READ(unaligned_read2, CHAIN_BULK)
READ(unaligned_read4, CHAIN_BULK)
READ(unaligned_read8, CHAIN_BULK)
READ(unaligned_read16, 1)

#define NOTHING(name)                  \
    void __tsan_##name(void *address); \
    void __tsan_##name(void *address)  \
    {                                  \
        (void)address;                 \
    }
NOTHING(write1)
NOTHING(write2)
NOTHING(write4)
NOTHING(write8)
NOTHING(write16)
NOTHING(unaligned_write2)
NOTHING(unaligned_write4)
NOTHING(unaligned_write8)
NOTHING(unaligned_write16)
NOTHING(func_entry)

void __tsan_read_range(void *address, uint64_t bytes);
void __tsan_read_range(void *address, uint64_t bytes)
{
    count(address, (uint32_t)((bytes + 15) / 16), __builtin_return_address(0));
}

void __tsan_write_range(void *address, uint64_t bytes);
void __tsan_write_range(void *address, uint64_t bytes)
{
    (void)address;
    (void)bytes;
}

void __tsan_func_exit(void);
void __tsan_func_exit(void)
{
}

void __tsan_init(void);
void __tsan_init(void)
{
}

#define ATOMICS(bits)                                                                                          \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order);                    \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t *p, int order)                     \
    {                                                                                                          \
        (void)order;                                                                                           \
        count(p, CHAIN_BULK, __builtin_return_address(0));                                                     \
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);                                                           \
    }                                                                                                          \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t v, int order);                 \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t *p, uint##bits##_t v, int order)                  \
    {                                                                                                          \
        (void)order;                                                                                           \
        __atomic_store_n(p, v, __ATOMIC_RELEASE);                                                              \
    }                                                                                                          \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t *p, uint##bits##_t v, int order);   \
    uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t *p, uint##bits##_t v, int order)    \
    {                                                                                                          \
        (void)order;                                                                                           \
        return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);                                                     \
    }                                                                                                          \
    uint##bits##_t __tsan_atomic##bits##_fetch_or(volatile uint##bits##_t *p, uint##bits##_t v, int order);    \
    uint##bits##_t __tsan_atomic##bits##_fetch_or(volatile uint##bits##_t *p, uint##bits##_t v, int order)     \
    {                                                                                                          \
        (void)order;                                                                                           \
        return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL);                                                      \
    }                                                                                                          \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t *p, uint##bits##_t *from,        \
                                                      uint##bits##_t to, int order, int fail);                 \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t *p, uint##bits##_t *from,        \
                                                      uint##bits##_t to, int order, int fail)                  \
    {                                                                                                          \
        (void)order;                                                                                           \
        (void)fail;                                                                                            \
        return __atomic_compare_exchange_n(p, from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);                \
    }                                                                                                          \
    uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t *p, uint##bits##_t from, \
                                                              uint##bits##_t to, int order, int fail);         \
    uint##bits##_t __tsan_atomic##bits##_compare_exchange_val(volatile uint##bits##_t *p, uint##bits##_t from, \
                                                              uint##bits##_t to, int order, int fail)          \
    {                                                                                                          \
        __tsan_atomic##bits##_compare_exchange_strong(p, &from, to, order, fail);                              \
        return from;                                                                                           \
    }
ATOMICS(32)
ATOMICS(64)

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
    (void)order;
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}
