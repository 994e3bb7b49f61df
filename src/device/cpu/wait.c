/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How an agent waits for a word that another thread or process advances, and gives up the core meanwhile.
 *
 *   waiter (behind bell)                         whoever advances a word
 *   --------------------                         -----------------------
 *   W1 seen = bell.seq                           R1 word = v            (release, by the caller)
 *   W2 bell.waiters = 1     (exchange)           R2 bell.waiters = 0    (exchange, returns what was there)
 *   W3 word >= target? done (acquire)            R3 if it was 1: bell.seq++, futex wake all
 *   W4 futex wait while bell.seq == seen
 *
 * No wake-up is lost. W2 and R2 are read-modify-writes of one word, so one of them comes first:
 *  - R2 before W2: W2 acquires what R2 released, so that W3 sees the new word and does not sleep.
 *  - W2 before R2: R2 finds 1, or another ringer took that 1 between W2 and R2; either way someone runs R3 after W2 and
 *    hence after W1: the kernel compares seq with `seen` under the lock that R3's wake takes, so the waiter either does
 *    not sleep or is woken. (Were seq read after W2, a ringer could take the 1, bump seq before W1 and wake nobody yet;
 *    the next ringer would find 0, and nothing would end the sleep.)
 * `waiters` is a flag rather than a count: a ring costs a system call only once for each time that someone went to
 * sleep, although a woken waiter may need long to get a core; and a process killed in its sleep leaves nothing wrong.
 * A waiter that leaves without sleeping leaves the flag, which costs one needless wake.
 *
 * Each sleep is short all the same (SLEEP_MAX_NS): words that something without a bell advances, such as a network
 * card, are then seen late but seen, as is the word of a process killed between R2 and R3.
 */
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "device/cpu/cpu.h"
#include "util/clock.h"
#include "util/runtime.h"
#include "util/watch.h"

#define SLEEP_MAX_NS 20000000u
/* Some hundred nanoseconds: enough for a peer that runs just now on another core, little to lose when none does. */
#define SPINS 32

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` does nothing on most cores; this takes as long as x86's pause */
#endif
}

/* ---- The thread environment --------------------------------------------------------------------------------- */

static uint64_t thread_now_ns(void *self)
{
    (void)self;
    return clock_ns();
}

static void thread_sleep(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};

    (void)self;
    (void)agent;
    /* Not PRIVATE: ringers are other processes. BITSET: the time is absolute, on the monotonic clock. Whatever it
     * returns (woken, seq changed, time over, a signal), the caller looks again. */
    syscall(SYS_futex, &bell->seq, FUTEX_WAIT_BITSET, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void thread_wake(void *self, struct doorbell *bell)
{
    const uint64_t one = 1;

    (void)self;
    if (bell->wake_fd > 0) {
        /* Fails only when the count is full, and then the descriptor is readable anyway. */
        if (write(bell->wake_fd, &one, sizeof(one)) < 0)
            return;
        return;
    }
    syscall(SYS_futex, &bell->seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

const struct cpu_env cpu_thread_env = {.now_ns = thread_now_ns, .sleep = thread_sleep, .wake = thread_wake};

const struct cpu_env *cpu_env_current(void)
{
    return runtime()->env ? runtime()->env : &cpu_thread_env;
}

/* ---- Waiting and ringing ------------------------------------------------------------------------------------ */

static inline int word_ready(const uint64_t *word, uint64_t target)
{
    /* Acquire: pairs with the release store or add of whoever advances the word. */
    return (int64_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - target) >= 0;
}

static int spin(const uint64_t *word, uint64_t target)
{
    int i;

    for (i = 0; i < SPINS; i++) {
        cpu_relax();
        if (word_ready(word, target))
            return 1;
    }
    return 0;
}

static int aborted(const struct agent *agent)
{
    /* Acquire: pairs with the release of the rank that failed, whose reason the caller reads next. */
    return agent->abort_word && __atomic_load_n(agent->abort_word, __ATOMIC_ACQUIRE) != 0;
}

static enum wait_result wait_asleep(struct agent *agent, const uint64_t *word, uint64_t target, uint64_t now,
                                    uint64_t deadline)
{
    const struct cpu_env *env = agent->env;
    struct doorbell *bell = agent->bell;

    for (;;) {
        /* W1: acquire keeps it before W2; its value is compared again by the kernel in W4. */
        uint32_t seen = __atomic_load_n(&bell->seq, __ATOMIC_ACQUIRE);
        uint64_t until = now + SLEEP_MAX_NS < deadline ? now + SLEEP_MAX_NS : deadline;

        /* W2: acquire pairs with the release of R2 in cpu_ring_bell, release with its acquire. */
        __atomic_exchange_n(&bell->waiters, 1, __ATOMIC_SEQ_CST);
        if (word_ready(word, target)) /* W3 */
            return WAIT_OK;
        if (aborted(agent))
            return WAIT_ABORTED;
        if (now >= deadline)
            return WAIT_TIMEOUT;
        env->sleep(env->self, agent, bell, seen, until); /* W4 */
        if (word_ready(word, target))
            return WAIT_OK;
        now = env->now_ns(env->self);
    }
}

/* For epx top; slices of one wait count as one (kernel/waiting_for.h). */
static void show_wait(struct agent *agent, uint64_t now)
{
    struct watch_wait *wait;

    if (!agent->watch || agent->index >= WATCH_AGENTS)
        return;
    wait = &agent->watch->waits[agent->index];
    agent->wait_since_ns = agent->wait_since_ns ? agent->wait_since_ns : now;
    __atomic_store_n(&wait->peer, agent->wait_peer, __ATOMIC_RELAXED);
    __atomic_store_n(&wait->phase, agent->wait_phase, __ATOMIC_RELAXED);
    __atomic_store_n(&wait->since_ns, agent->wait_since_ns, __ATOMIC_RELAXED);
}

enum wait_result cpu_wait_ge(struct agent *agent, const uint64_t *word, uint64_t target, uint64_t timeout_ns)
{
    const struct cpu_env *env = agent->env;
    enum wait_result result;
    uint64_t start, now;

    if (word_ready(word, target))
        return WAIT_OK;
    /* In a simulation nothing else runs while this agent spins. */
    if (env == &cpu_thread_env && spin(word, target))
        return WAIT_OK;
    start = env->now_ns(env->self);
    show_wait(agent, start);
    result = wait_asleep(agent, word, target, start, timeout_ns < UINT64_MAX - start ? start + timeout_ns : UINT64_MAX);
    if (result == WAIT_OK)
        cpu_watch_clear(agent);
    agent->waits++;
    now = env->now_ns(env->self);
    agent->wait_ns += now - start;
    if (agent->traced)
        cpu_trace_wait(agent, start, now, result == WAIT_OK);
    return result;
}

void cpu_ring_bell(struct agent *agent, struct doorbell *bell)
{
    cpu_env_ring(agent->env, bell);
}

void cpu_env_ring(const struct cpu_env *env, struct doorbell *bell)
{
    /* R2: release pairs with the acquire of W2 in wait_asleep (and hands on the word stored before), acquire with its
     * release. A plain load will not do: it could be served before the store to the word is visible. */
    if (__atomic_exchange_n(&bell->waiters, 0, __ATOMIC_SEQ_CST) == 0)
        return;
    __atomic_fetch_add(&bell->seq, 1, __ATOMIC_SEQ_CST); /* R3 */
    env->wake(env->self, bell);
}

/* ---- Scratch ------------------------------------------------------------------------------------------------ */

void *agent_scratch(struct agent *agent, size_t bytes)
{
    size_t size = 4096;
    void *block;

    if (bytes <= agent->scratch_bytes)
        return agent->scratch;
    while (size < bytes && size <= SIZE_MAX / 4)
        size *= 2;
    block = size >= bytes ? aligned_alloc(64, size) : NULL;
    if (!block)
        return NULL;
    free(agent->scratch); /* content is undefined between calls: nothing to copy */
    agent->scratch = block;
    agent->scratch_bytes = size;
    return block;
}

void agent_scratch_free(struct agent *agent)
{
    free(agent->scratch);
    agent->scratch = NULL;
    agent->scratch_bytes = 0;
}
