/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every core copies with memcpy when all copy at once. One process per core, pinned, with buffers of its own that
 * no cache holds; all start together and count the bytes that they wrote in the same span of time. The best of several
 * spans counts. It is no ceiling of a dispatch, which reads a row once and writes it several times: bench_bound.c is.
 */
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "util/clock.h"

#define BUFFER_BYTES ((size_t)96 << 20)
#define CHUNK_BYTES ((size_t)1 << 20)
#define SPANS 3 /* the first warms up */
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

static char *map_buffer(void)
{
    void *map = mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (map == MAP_FAILED)
        return NULL;
    (void)madvise(map, BUFFER_BYTES, MADV_HUGEPAGE);
    return map;
}

static void copy_process(struct copies *shared, int index, int cpu)
{
    cpu_set_t set;
    char *from = map_buffer(), *to = map_buffer();
    uint64_t give_up = clock_ns() + 20 * (uint64_t)START_NS, start;
    size_t at = 0;
    int i;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof(set), &set);
    if (from == NULL || to == NULL)
        _exit(1);
    memset(from, 1, BUFFER_BYTES);
    memset(to, 2, BUFFER_BYTES);
    __atomic_fetch_add(&shared->ready, 1, __ATOMIC_RELEASE); /* pairs with the acquire in release_all */
    /* pairs with the release in release_all */
    while ((start = __atomic_load_n(&shared->start_ns, __ATOMIC_ACQUIRE)) == 0) {
        if (clock_ns() > give_up)
            _exit(1);
        usleep(500);
    }
    for (i = 0; i < SPANS; i++)
        shared->process[index].GBps[i] = copy_span(to, from, &at, start + (uint64_t)(i + 1) * SPAN_NS);
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

static double best_sum(const struct copies *shared, int n)
{
    double best = 0;
    int i, p;

    for (i = 1; i < SPANS; i++) {
        double sum = 0;

        for (p = 0; p < n; p++)
            sum += shared->process[p].GBps[i];
        best = sum > best ? sum : best;
    }
    return best;
}

static int start_copies(struct copies *shared, pid_t *pids, int limit)
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
            copy_process(shared, n, cpu);
        n++;
    }
    return n;
}

void bench_memcpy_measure(struct bench_ceiling *c)
{
    enum { LIMIT = 256 };
    size_t bytes = sizeof(struct copies) + LIMIT * sizeof(((struct copies *)0)->process[0]);
    struct copies *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[LIMIT];
    int i, n, good = 1;

    if (shared == MAP_FAILED)
        return;
    n = start_copies(shared, pids, LIMIT);
    if (n > 0 && release_all(shared, n) != 0)
        good = 0;
    for (i = 0; i < n; i++) {
        if (!good)
            kill(pids[i], SIGKILL);
        if (bench_wait_child(pids[i], CHILD_MS) != 0)
            good = 0;
    }
    if (good && n > 0) {
        c->memcpy_GBps = best_sum(shared, n) > c->memcpy_GBps ? best_sum(shared, n) : c->memcpy_GBps;
        c->processes = n;
    }
    munmap(shared, bytes);
}
