/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop of a proxy thread. A busy thread makes no system call. An idle thread spins for a moment, then yields its
 * core between iterations, then sleeps on two descriptors: the network's, and an eventfd that producers write.
 *
 *   proxy thread                                  producer on the CPU (kernel/ring.h)
 *   S1 bell.waiters = 1      (exchange)           P3 slots                (release)
 *   S2 ring empty? network says sleep?            P4 bell.waiters = 0     (exchange); it was 1: write the eventfd
 *   S3 poll(eventfd, network's fd), bounded
 *
 * S1 and P4 are read-modify-writes of one word: if P4 comes first, S2 sees the slots; if S1 does, P4 (or another
 * producer that took the 1 after S1) writes the eventfd, which stays readable until the proxy reads it. No wake-up is
 * lost.
 *
 * A descriptor that wakes the thread again and again although the network has nothing to report (libfabric 1.17's over
 * tcp does, once data has moved) is not polled until the network reports something again, or for LEFT_OUT_SLEEPS. A
 * wake-up after SLEEP_MAX_NS is no reason for that: without the descriptor, sleeps would be shorter.
 *
 * How long a sleep may last: where producers cannot ring (a GPU), where the network has no descriptor, or while
 * something is in flight, SLEEP_MIN_NS, doubled up to SLEEP_MAX_NS; otherwise SLEEP_IDLE_NS, which only bounds the harm
 * of a network that forgets to wake.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "proxy/internal.h"
#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"
#include "util/runtime.h"
#include "util/status.h"

#define SLEEP_MIN_NS 20000u
#define SLEEP_MAX_NS 1000000u
#define SLEEP_IDLE_NS 100000000u
#define SPURIOUS_MAX 8       /* spurious wake-ups in a row: partly received data also causes some */
#define LEFT_OUT_SLEEPS 128  /* without the descriptor, before it is tried again */
#define CONNECT_WAKES 16     /* per peer, not counted as spurious while the network connects */
#define SPIN_NS 3000u        /* before it yields its core: agents on the CPU may need it */
#define ALONE_ITERATIONS 256 /* likewise, where the agents are on a GPU and the thread has a core of its own */

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* ---- Sleeping ----------------------------------------------------------------------------------------------- */

static uint64_t sleep_length(struct proxy_thread *t, int net_fd)
{
    const int waits = t->messages_in_flight > 0 || t->nbusy > 0 || t->unreported > 0;

    if (!waits && net_fd >= 0 && t->group->options.device_kind == EPX_DEVICE_CPU)
        return SLEEP_IDLE_NS;
    t->sleep_ns = t->sleep_ns == 0 ? SLEEP_MIN_NS : t->sleep_ns * 2 < SLEEP_MAX_NS ? t->sleep_ns * 2 : SLEEP_MAX_NS;
    return t->sleep_ns;
}

static int ask_fd(struct proxy_thread *t)
{
    set_state(t, STATE_ARM);
    return t->ops->wait_fd(t->net);
}

static void sleep_on_fds(struct proxy_thread *t)
{
    const int net_fd = t->broken || t->spurious_wakes >= SPURIOUS_MAX ? -1 : ask_fd(t);
    struct pollfd fds[2] = {{.fd = t->wake_fd, .events = POLLIN}, {.fd = net_fd, .events = POLLIN}};
    struct timespec limit = {.tv_nsec = (long)sleep_length(t, net_fd)};
    struct command c;
    uint64_t count, before;
    int safe = 0;

    /* S1: pairs with the exchange of cpu_env_ring, which producers call. */
    __atomic_exchange_n(&t->ring.dev.bell->waiters, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&t->called, __ATOMIC_ACQUIRE)) /* pairs with call_thread */
        return;
    if (stop_asked(t) && !t->stopping)
        return;
    if ((!t->blocked && ring_peek(&t->ring, &c)) || alarm_waits(t))
        return;
    if (net_fd >= 0)
        safe = t->ops->arm(t->net);
    if (safe == -EAGAIN)
        return;
    if (safe > 0 && safe < limit.tv_nsec)
        limit.tv_nsec = safe;
    stat_add(&t->stats.sleeps, 1);
    set_state(t, STATE_SLEEP);
    before = clock_ns();
    if (ppoll(fds, 2, &limit, NULL) > 0)
        stat_add(&t->stats.wakes, 1);
    t->net_woke = fds[1].revents && clock_ns() - before < SLEEP_MAX_NS;
    if (t->spurious_wakes >= SPURIOUS_MAX && ++t->spurious_wakes >= SPURIOUS_MAX + LEFT_OUT_SLEEPS)
        t->spurious_wakes = 0;
    if (safe > 0 && t->net_woke && t->connect_wakes < CONNECT_WAKES * t->group->options.nranks) {
        t->connect_wakes++;
        t->net_woke = 0;
    }
    if ((fds[0].revents & POLLIN) && read(t->wake_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "proxy %d: cannot read its eventfd: %s", t->index, strerror(errno));
}

/* ---- The loop ----------------------------------------------------------------------------------------------- */

/* Pins thread i of rank r to core r * threads + i, counted from the last core that the process may use. */
void thread_pin(const struct proxy_thread *t)
{
    const struct proxy_options *o = &t->group->options;
    const int wanted = o->rank * o->threads + t->index;
    cpu_set_t may, one;
    int cpu, seen = 0, n;

    if (sched_getaffinity(0, sizeof(may), &may) != 0 || (n = CPU_COUNT(&may)) == 0)
        return;
    CPU_ZERO(&one);
    for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &may) && seen++ == n - 1 - wanted % n)
            CPU_SET(cpu, &one);
    if (pthread_setaffinity_np(pthread_self(), sizeof(one), &one) != 0)
        log_line(LOG_WARN, "proxy %d: cannot pin the thread to a core", t->index);
}

void thread_loop(struct proxy_thread *t)
{
    const struct cpu_env *env = t->group->env;
    /* A proxy of a GPU has a core of its own: it polls all the time, and yields now and then. */
    const int alone = t->group->options.device_kind != EPX_DEVICE_CPU;
    uint64_t idle_since = 0, now;
    int idle = 0;

    while (!__atomic_load_n(&t->called, __ATOMIC_ACQUIRE)) { /* pairs with call_thread */
        const int busy = proxy_progress(t);

        t->spurious_wakes = t->events ? 0 : t->spurious_wakes + t->net_woke;
        t->net_woke = 0;
        if (busy) {
            idle = 0;
            idle_since = 0;
            t->sleep_ns = 0;
            continue;
        }
        if (alone && idle++ < ALONE_ITERATIONS)
            continue;
        idle = 0;
        now = env->now_ns(env->self);
        if (!idle_since)
            idle_since = now;
        /* By the clock: an iteration takes 50 ns, or ten times that where the network makes a system call in it. */
        if (!alone && now - idle_since < SPIN_NS)
            cpu_relax();
        else if (now - idle_since >= t->group->spin_ns + (alone ? 0 : SPIN_NS))
            sleep_on_fds(t);
        else
            sched_yield();
    }
}

epx_status thread_open(struct proxy_thread *t)
{
    const int fd = fd_own(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); /* 0 means none in a doorbell */

    if (fd < 0)
        return fail_errno(EPX_ERR_SYSTEM, "proxy %d: cannot create an eventfd", t->index);
    t->wake_fd = fd;
    t->ring.dev.bell->wake_fd = fd;
    return EPX_OK;
}

void thread_wake(struct proxy_thread *t)
{
    const uint64_t one = 1;

    if (runtime()->proxies)
        runtime()->proxies->wake(t->group, t->index);
    else if (t->wake_fd > 0 && write(t->wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
        log_line(LOG_WARN, "proxy %d: cannot write its eventfd: %s", t->index, strerror(errno));
}

void thread_close(struct proxy_thread *t)
{
    if (t->wake_fd > 0)
        close(t->wake_fd);
    t->wake_fd = 0;
}
