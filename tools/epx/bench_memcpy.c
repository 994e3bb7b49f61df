/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ceilings: what every core moves when all copy at once. One process per core, pinned, with buffers of its own; all
 * start together and count the bytes that they wrote in the same span of time. The best of several spans counts: a
 * ceiling is what the machine can do undisturbed. The driver asks for one before each round, so that the ceiling has
 * the same chances as the operations that are compared with it.
 *
 *      memcpy    every byte written was read; no cache holds the buffers
 *      bound     a row is read once and written to several places, as dispatch does it, over as much memory as one
 *                operation has: it bounds dispatch, which passes memcpy by the reads that it saves
 */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "device/cpu/math.h"
#include "util/clock.h"

#define BUFFER_BYTES ((size_t)96 << 20)
#define CHUNK_BYTES ((size_t)1 << 20)
#define SPANS 4 /* the first warms up, the last is the bound's, the others are memcpy's */
#define MOST_PLACES 32
#define SPAN_NS 40000000u
#define START_NS 1000000000u
#define CHILD_MS 30000 /* a process that is stopped does not hang the benchmark */

struct copies {
    uint32_t ready;
    uint64_t start_ns; /* 0 until everybody is ready */
    struct {
        double GBps[SPANS];
        uint8_t pad[16];
    } process[];
};

/* Rows that are read once and written to every place in turn, over as much memory as one operation has for each core:
 * what fits into a cache there fits here. Places do not begin at the same offset in a page, nor do tensors. */
static double spread_span(char *to, const char *from, const struct bench_ceiling *c, uint64_t until)
{
    enum { ROWS_PER_LOOK = 8, SKEW = 4096 + 64 };
    const size_t row = ((size_t)c->row_bytes + 15) / 16 * 16, most = BUFFER_BYTES / (size_t)c->places - SKEW;
    const size_t wanted = (size_t)c->place_bytes / row * row, part = wanted < row ? row : wanted < most ? wanted : most;
    uint64_t start = clock_ns(), now = start;
    void *places[MOST_PLACES];
    size_t bytes = 0, at = 0;

    while (now < until) {
        for (int n = 0; n < ROWS_PER_LOOK; n++) {
            for (int i = 0; i < c->places; i++)
                places[i] = to + (size_t)i * (part + SKEW) / 64 * 64 + at;
            math_copy_many(places, c->places, from + at, row);
            at = at + 2 * row <= part ? at + row : 0;
        }
        bytes += ROWS_PER_LOOK * row * (size_t)c->places;
        now = clock_ns();
    }
    return now > start ? (double)bytes / (double)(now - start) : 0;
}

static double copy_span(char *to, const char *from, size_t *at, uint64_t until)
{
    uint64_t start = clock_ns(), now = start;
    size_t bytes = 0;

    while (now < until) {
        memcpy(to + *at, from + *at, CHUNK_BYTES);
        *at = (*at + CHUNK_BYTES) % BUFFER_BYTES;
        bytes += CHUNK_BYTES;
        now = clock_ns();
    }
    return now > start ? (double)bytes / (double)(now - start) : 0;
}

static void copy_process(struct copies *shared, int index, int cpu, const struct bench_ceiling *c)
{
    cpu_set_t set;
    char *from = malloc(BUFFER_BYTES), *to = malloc(BUFFER_BYTES);
    uint64_t give_up = clock_ns() + 20 * (uint64_t)START_NS, start;
    size_t at = 0;
    int i;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof(set), &set);
    if (from == NULL || to == NULL)
        _exit(1);
    madvise(from, BUFFER_BYTES, MADV_HUGEPAGE);
    madvise(to, BUFFER_BYTES, MADV_HUGEPAGE);
    memset(from, 1, BUFFER_BYTES);
    memset(to, 2, BUFFER_BYTES);
    __atomic_fetch_add(&shared->ready, 1, __ATOMIC_RELEASE); /* pairs with the acquire in release_all */
    /* pairs with the release in release_all */
    while ((start = __atomic_load_n(&shared->start_ns, __ATOMIC_ACQUIRE)) == 0) {
        if (clock_ns() > give_up)
            _exit(1);
        usleep(500);
    }
    for (i = 0; i < SPANS - 1; i++)
        shared->process[index].GBps[i] = copy_span(to, from, &at, start + (uint64_t)(i + 1) * SPAN_NS);
    shared->process[index].GBps[i] = spread_span(to, from, c, start + (uint64_t)SPANS * SPAN_NS);
    _exit(0);
}

/* Lets all start once all are ready; 0, or -1 when they do not come. */
static int release_all(struct copies *shared, int n)
{
    uint64_t give_up = clock_ns() + 15 * (uint64_t)START_NS;

    while (__atomic_load_n(&shared->ready, __ATOMIC_ACQUIRE) < (uint32_t)n) {
        if (clock_ns() > give_up)
            return -1;
        usleep(500);
    }
    __atomic_store_n(&shared->start_ns, clock_ns(), __ATOMIC_RELEASE);
    return 0;
}

static double best_sum(const struct copies *shared, int n, int first, int end)
{
    double best = 0;
    int i, p;

    for (i = first; i < end; i++) {
        double sum = 0;

        for (p = 0; p < n; p++)
            sum += shared->process[p].GBps[i];
        best = sum > best ? sum : best;
    }
    return best;
}

static int start_copies(struct copies *shared, pid_t *pids, int limit, const struct bench_ceiling *c)
{
    cpu_set_t set;
    int cpu, n = 0;

    if (sched_getaffinity(0, sizeof(set), &set) != 0)
        return 0;
    for (cpu = 0; cpu < CPU_SETSIZE && n < limit; cpu++) {
        if (!CPU_ISSET(cpu, &set))
            continue;
        pids[n] = fork();
        if (pids[n] < 0)
            break;
        if (pids[n] == 0)
            copy_process(shared, n, cpu, c);
        n++;
    }
    return n;
}

static void keep_best(struct bench_ceiling *c, const struct copies *shared, int n)
{
    const double copied = best_sum(shared, n, 1, SPANS - 1), spread = best_sum(shared, n, SPANS - 1, SPANS);

    c->memcpy_GBps = copied > c->memcpy_GBps ? copied : c->memcpy_GBps;
    c->bound_GBps = spread > c->bound_GBps ? spread : c->bound_GBps;
    c->processes = n;
}

void bench_ceiling_measure(struct bench_ceiling *c)
{
    enum { LIMIT = 256 };
    size_t bytes = sizeof(struct copies) + LIMIT * sizeof(((struct copies *)0)->process[0]);
    struct copies *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[LIMIT];
    int i, n, good = 1;

    if (shared == MAP_FAILED)
        return;
    c->places = c->places < 1 ? 1 : c->places > MOST_PLACES ? MOST_PLACES : c->places;
    n = start_copies(shared, pids, LIMIT, c);
    if (n > 0 && release_all(shared, n) != 0)
        good = 0;
    for (i = 0; i < n; i++) {
        if (!good)
            kill(pids[i], SIGKILL);
        if (bench_wait_child(pids[i], CHILD_MS) != 0)
            good = 0;
    }
    if (good && n > 0)
        keep_best(c, shared, n);
    munmap(shared, bytes);
}
