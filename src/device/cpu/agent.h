/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CPU's agent: a thread (or, in simulation, a fiber) that runs a kernel. `env` is the seam between the two: the
 * thread environment sleeps on a futex and reads the monotonic clock; a simulation switches fibers and advances a
 * virtual clock. Kernels reach it through the primitives only (prims.h).
 */
#ifndef EPX_DEVICE_CPU_AGENT_H
#define EPX_DEVICE_CPU_AGENT_H

#include "kernel/params.h"

struct agent;

struct cpu_env {
    uint64_t (*now_ns)(void *self);
    /* Give way until the bell's seq differs from `seen`, or `until_ns` passes, or for no reason at all. */
    void (*sleep)(void *self, struct agent *agent, struct doorbell *bell, uint32_t seen, uint64_t until_ns);
    /* The bell's seq was bumped and someone sleeps on it. */
    void (*wake)(void *self, struct doorbell *bell);
    void *self;
};

struct agent {
    int index, count; /* this agent and how many the launch has */
    const struct cpu_env *env;
    uint64_t timeout_ns;   /* set by the kernel's prologue from its parameters */
    struct doorbell *bell; /* this rank's, likewise */
    const uint64_t *abort_word;
    int past_cache; /* rows are written past the cache: AG_WILL_WRITE */
    void *scratch;  /* agent_scratch() */
    size_t scratch_bytes;
    uint64_t waits, wait_ns;                     /* statistics, collected by the kernel's epilogue */
    uint64_t wait_left, wait_spent, wait_before; /* kernel/wait_word.h */
    /* Tracing (util/trace.h); `traced` NULL: off, and nothing else of this counts. */
    const char *traced; /* the kernel */
    uint64_t mark_ns;   /* when its last phase ended */
    int rank;
    uint64_t wait_what; /* TRACE_WHAT */
    /* What this agent waits for, also for epx top. */
    int wait_phase, wait_peer;
    uint64_t wait_since_ns; /* 0: it does not */
    struct watch *watch;
};

extern const struct cpu_env cpu_thread_env;
/* The simulation's while it runs (util/runtime.h), else cpu_thread_env. */
const struct cpu_env *cpu_env_current(void);

/*
 * Waits until *word >= target (acquire; pairs with the release of whoever advances it). Words count modulo 2^64: they
 * are compared by their difference. Spins briefly, then sleeps on the agent's bell through env. Looks at *abort_word
 * only when about to sleep.
 */
enum wait_result cpu_wait_ge(struct agent *agent, const uint64_t *word, uint64_t target, uint64_t timeout_ns);
/* After a release store to a word that an agent behind `bell` may wait for. */
void cpu_ring_bell(struct agent *agent, struct doorbell *bell);
/* The same for a thread that is no agent. */
void cpu_env_ring(const struct cpu_env *env, struct doorbell *bell);
/* Per-agent memory of at least `bytes`, 64-byte aligned, content undefined, kept between launches; NULL if none. */
void *agent_scratch(struct agent *agent, size_t bytes);

/* Tracing: a phase of the kernel ended just now; ranks signal each other (cpu/marks.c). */
void cpu_mark(struct agent *agent, int name); /* enum phase_mark */
void cpu_trace_signal(const struct agent *agent, int nranks, int kind, int slot, uint64_t value);

/* The kernels, by kernel_id (kernels.c). */
typedef void (*cpu_kernel_fn)(struct agent *agent, const void *params);
extern const cpu_kernel_fn cpu_kernels[KERNEL_COUNT];

#endif
