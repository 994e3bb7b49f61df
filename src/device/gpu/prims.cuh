/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The primitives that kernels are written in, for GPUs: an agent is a warp. The contract is in kernel/agent.h. What
 * only one maker's GPUs understand is in hardware.cuh, and in device/gpu/hip/hardware.h.
 *
 * What is the same for all lanes stays the same: whatever could differ from lane to lane (a clock, a word that somebody
 * changes meanwhile) is read by one lane and handed to the others. Functions that kernels also call from the leader
 * alone do so among the lanes that are there.
 */
#ifndef EPX_DEVICE_GPU_PRIMS_CUH
#define EPX_DEVICE_GPU_PRIMS_CUH

#define KFN static __device__ __forceinline__
#define KFN_STEP static __device__ __attribute__((noinline, unused)) /* registers of its own */
#define AG_UNROLL _Pragma("unroll")
#define AG_ROLLED _Pragma("unroll 1")
#define AG_PREFETCH(address) ((void)(address))
#define AG_ONE_LANE 0
#define AG_STAGED 1     /* kernel/stages.h */
#define AG_LOOK_AHEAD 0 /* other warps have their loads in flight meanwhile */
#ifndef FLAVOUR_MARKS   /* kernel/flavour.h */
#define FLAVOUR_MARKS 1
#endif
#ifndef FLAVOUR_ONE_NODE
#define FLAVOUR_ONE_NODE 0
#endif
#define COMMAND_FN static __host__ __device__ __forceinline__
#define TIMES_FN static __device__ __forceinline__
#define NUMERIC_FN static __device__ __forceinline__
#define NUMERIC_TABLE static __device__ const

#include "device/gpu/launch.h"

#if defined(EPX_HARDWARE) /* tests: lanes that a CPU emulates */
#include EPX_HARDWARE
#elif defined(__HIP__)
#include "device/gpu/hip/hardware.h"
#else
#include "device/gpu/cuda/hardware.cuh"
#endif

#include "kernel/command.h"
#include "kernel/params.h"
#include "util/numeric.h"

#define AG_POINTS 5
#define BLOCK_END AG_POINTS /* the point of ag_block_last */
#define BLOCK_POINTS (AG_POINTS + 1)
#define AG_GLANCES 64
#define AG_BELLS 0
#define AG_NODE_WORD(g) 0
#define AG_BLOCKS 1 /* the agents of a block */
#define ag_store_signal ag_store_release

/* One per warp, in shared memory: the same for all lanes, and written by lane 0. */
struct agent {
    int index, count, stage, narrow;
    uint64_t timeout_ns;
    const uint64_t *abort_word;
    char *scratch; /* of this agent */
    size_t scratch_bytes;
    uint64_t waits, wait_ns;
    uint64_t wait_left, wait_spent, wait_before; /* kernel/wait_word.h */
    uint32_t *arrived;     /* of the block, [BLOCK_POINTS]: its agents that have come to each point */
    uint32_t block_agents; /* agents of the block */
    int32_t *counts;       /* of the block: ROUTE_SMEM_KEYS words per agent for routing, or NULL */
    char *ring;            /* RING_BYTES of this agent, or NULL */
    unsigned ring_next;    /* the number of the next batch that is fetched to it */
#if FLAVOUR_MARKS          /* kernel/marks.h */
    uint64_t signal_ns;
    uint64_t wait_since_ns, wait_value; /* in the block that has agent 0, as the next line */
    int wait_phase, wait_peer, wait_kind, wait_slot;
#endif
};

KFN int lane_id(void)
{
    return (int)(threadIdx.x % WARP);
}

#define AG_LANES WARP
KFN int ag_lane(const struct agent *ag)
{
    (void)ag;
    return lane_id();
}

/* The lanes before this one. */
KFN lanes_t lanes_below(void)
{
    return ((lanes_t)1 << lane_id()) - 1;
}

/* Not unrolled: most of these loops have one round or two, and code that runs once comes from memory, line by line. */
#define ROLLED AG_ROLLED
#define AG_EACH(ag, type, i, n) \
    ROLLED                      \
    for (type i = ((void)(ag), (type)lane_id()); i < (type)(n); i += WARP)
#define AG_ROUNDS(ag, type, i, n) \
    ROLLED                        \
    for (type i = ((void)(ag), (type)lane_id()); i - lane_id() < (type)(n); i += WARP)
#define AG_EACH_ALL(ag, type, i, n)                                                             \
    ROLLED                                                                                      \
    for (type i = (type)(ag)->index * WARP + (type)lane_id(), i##_end = (type)(n); i < i##_end; \
         i += (type)(ag)->count * WARP)
#define AG_EACH_BLOCK(ag, type, i, n) \
    ROLLED                            \
    for (type i = (type)threadIdx.x, i##_end = (type)(n); i < i##_end; i += (type)(ag)->block_agents * WARP)

/* ---- Words that others read and write -------------------------------------------------------------------------- */

/* The value of the first of the lanes that are here. */
KFN uint64_t from_first(uint64_t v, lanes_t here)
{
    return __shfl_sync(here, v, lanes_first(here));
}

#if FLAVOUR_MARKS
#include "device/gpu/marks.cuh"
#define BLOCK_KEEPS_WAITS (block_marks.is_first)
#else
#define BLOCK_KEEPS_WAITS 0
#define mark_waited(ag, start_ns, is_over) ((void)(start_ns))
#endif

KFN void ag_begin(struct agent *ag, uint64_t timeout_ns, struct control *own)
{
    if (lane_id() == 0) {
        ag->timeout_ns = timeout_ns;
        ag->abort_word = &own->abort_word;
        ag->waits = 0;
        ag->wait_ns = 0;
    }
    __syncwarp();
}

KFN int ag_index(const struct agent *ag)
{
    return ag->index;
}

KFN int ag_count(const struct agent *ag)
{
    return ag->count;
}

KFN int ag_stage(const struct agent *ag)
{
    return ag->stage;
}

KFN int ag_block_index(const struct agent *ag)
{
    (void)ag;
    return (int)(threadIdx.x / WARP);
}

KFN int ag_block_number(const struct agent *ag)
{
    (void)ag;
    return (int)blockIdx.x;
}

KFN uint32_t ag_block_or(uint32_t *word, uint32_t bits)
{
    return atomicOr(word, bits);
}

KFN int ag_bits(uint32_t word)
{
    return __popc(word);
}

#define AG_LINE 128
KFN void ag_fetch(const void *ptr)
{
    line_fetch(ptr);
}

KFN int ag_block_count(const struct agent *ag)
{
    return (int)ag->block_agents;
}

KFN int ag_block_any(struct agent *ag, int v)
{
    (void)ag;
    return block_any(v);
}

KFN int ag_narrow(struct agent *ag, int blocks)
{
    const int all = ag->count, grid = (int)gridDim.x;
    int before = 0, count = 0; /* agents of earlier blocks, of all that stay */

    for (int b = 0; b < blocks && b < grid; b++) {
        const int agents = (all - b + grid - 1) / grid; /* as make_agent() has it */
        before += b < (int)blockIdx.x ? agents : 0;
        count += agents;
    }
    __syncwarp();
    if (lane_id() == 0) {
        ag->index = before + (int)(threadIdx.x / WARP);
        ag->count = count;
        ag->narrow = 1;
    }
    __syncwarp();
    return (int)blockIdx.x < blocks;
}

KFN int ag_is_narrow(const struct agent *ag)
{
    return ag->narrow;
}

KFN int ag_leader(const struct agent *ag)
{
    (void)ag;
    return lane_id() == 0;
}

KFN void ag_sync(struct agent *ag)
{
    (void)ag;
    __syncwarp();
}

KFN uint64_t ag_now(struct agent *ag)
{
    (void)ag;
    return from_first(clock_global(), __activemask());
}

KFN uint64_t ag_load_acquire(const uint64_t *word)
{
    return from_first(word_acquire(word), __activemask());
}

KFN uint64_t ag_peek(const uint64_t *word)
{
    return word_peek(word);
}

KFN void ag_peeked(struct agent *ag)
{
    (void)ag;
    word_peeked();
}

KFN void ag_store_release(uint64_t *word, uint64_t value)
{
    word_release(word, value);
}

KFN void ag_store_release_device(uint64_t *word, uint64_t value)
{
    word_release_device(word, value);
}

KFN void ag_store_release32(uint32_t *word, uint32_t value)
{
    word_release32(word, value);
}

KFN uint32_t ag_fetch_add(struct agent *ag, uint32_t *word, uint32_t n)
{
    uint32_t old = 0;

    (void)ag;
    __syncwarp(); /* the leader's release covers what the other lanes wrote */
    if (lane_id() == 0)
        old = word_add_device(word, n);
    __syncwarp(); /* and they see what its acquire saw */
    return __shfl_sync(ALL_LANES, old, 0);
}

KFN uint64_t ag_fetch_add64(struct agent *ag, uint64_t *word, uint64_t n)
{
    uint64_t old = 0;

    (void)ag;
    __syncwarp();
    if (lane_id() == 0)
        old = word_add_device64(word, n);
    __syncwarp();
    return __shfl_sync(ALL_LANES, old, 0);
}

KFN void ag_add_fenced(struct agent *ag, uint64_t *word, uint64_t n)
{
    (void)ag;
    __syncwarp(); /* the leader's release covers what the other lanes wrote */
    if (lane_id() == 0) {
        fence_system(); /* who waits for the word may be another GPU */
        word_add(word, n);
    }
    fence_full();
    __syncwarp();
}

/*
 * The two words are asked for and the fence is begun before the first answer is there: each takes as long as the
 * others. Release: the barrier hands the lanes' stores to each of them, and the fence of each passes them on with what
 * it stores later (ag_store_commands). Acquire: the load of tail_seen comes before the fence.
 */
KFN uint64_t ag_claim_slots(struct agent *ag, const struct ring_dev *ring, uint64_t n, uint64_t *seen)
{
    uint64_t old = 0, tail = 0;

    (void)ag;
    __syncwarp();
    if (lane_id() == 0) {
        tail = word_relaxed(ring->tail_seen);
        old = word_number(ring->head, n);
    }
    fence_system();
    *seen = __shfl_sync(ALL_LANES, tail, 0);
    old = __shfl_sync(ALL_LANES, old, 0);
    __syncwarp(); /* what lane 0 acquired, all have */
    return old;
}

KFN uint64_t ag_look(const uint64_t *word)
{
    return from_first(word_relaxed(word), __activemask());
}

/* A warp issues in order, and what used the value of a load waited for it: such loads are done when this one is
 * issued. */
KFN uint64_t ag_look_behind(const uint64_t *word)
{
    __syncwarp();
    return from_first(word_relaxed(word), __activemask());
}

/* First among the agents of the block, in shared memory, then one add per block. */
KFN_STEP int ag_last(struct agent *ag, uint32_t *word, int id)
{
    int last = 0;

    __syncwarp(); /* the leader's release covers what the other lanes wrote */
    if (lane_id() == 0) {
        const uint32_t block_agents = ag->block_agents;
        if (word_add_block(&ag->arrived[id], 1) == block_agents - 1) {
            ag->arrived[id] = 0;
            last = word_add_device(word, block_agents) + block_agents == (uint32_t)ag->count;
            if (last)
                *word = 0; /* nobody comes before the last one has let the others go on */
        }
    }
    __syncwarp(); /* and they see what its acquire saw */
    return __shfl_sync(ALL_LANES, last, 0);
}

KFN int ag_block_last(struct agent *ag)
{
    int last = 0;

    __syncwarp(); /* as in ag_last */
    if (lane_id() == 0)
        last = word_add_block(&ag->arrived[BLOCK_END], 1) == ag->block_agents - 1;
    __syncwarp();
    return __shfl_sync(ALL_LANES, last, 0);
}

KFN uint64_t ag_timeout(const struct agent *ag)
{
    return ag->timeout_ns;
}

KFN void ag_add_stat(uint64_t *word, uint64_t n)
{
    word_add(word, n);
}

KFN int ag_claim(uint32_t *word, uint32_t from, uint32_t to)
{
    return word_claim(word, from, to) == from;
}

KFN uint64_t ag_max_device(uint64_t *word, uint64_t v)
{
    return word_max_device64(word, v);
}

KFN uint64_t ag_claim_device(uint64_t *word, uint64_t from, uint64_t to)
{
    return word_claim_device64(word, from, to);
}

/* Nobody sleeps on a GPU; CPU threads that wait for it poll. */
KFN void ag_ring(struct agent *ag, struct doorbell *bell)
{
    (void)ag;
    (void)bell;
}

/* By each lane for itself: in memory of the block, or of the agent; in the device's memory. Neither is in any order. */
KFN void ag_table_add(int32_t *word, int32_t n)
{
    atomicAdd(word, n);
}

KFN void ag_add_device(int32_t *word, int32_t n)
{
    if (n)
        atomicAdd(word, n);
}

/* ---- Values of all lanes ---------------------------------------------------------------------------------------- */

KFN_STEP int64_t ag_sum(struct agent *ag, int64_t v)
{
    (void)ag;
    ROLLED
    for (int d = WARP / 2; d; d /= 2)
        v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}

KFN_STEP int64_t ag_scan(struct agent *ag, int64_t v)
{
    int64_t sum = v;

    (void)ag;
    ROLLED
    for (int d = 1; d < WARP; d *= 2) {
        const int64_t below = __shfl_up_sync(ALL_LANES, sum, d);
        sum += lane_id() >= d ? below : 0;
    }
    return sum - v;
}

KFN int ag_vote(struct agent *ag, int v, int *before)
{
    const lanes_t lanes = __ballot_sync(ALL_LANES, v);

    (void)ag;
    *before = lanes_count(lanes & lanes_below());
    return lanes_count(lanes);
}

KFN int ag_any(struct agent *ag, int v)
{
    (void)ag;
    return __any_sync(ALL_LANES, v);
}

/* ---- Waiting ---------------------------------------------------------------------------------------------------- */

/* Looks at the abort word and the clock now and then only: both cost as much as the word itself. */
#define WAIT_LOOKS 16
/* Agents but the first of a block mostly wait for agents of their own launch. The abort word may lie across a bus,
 * where the looks of hundreds of agents come one after the other: these look first after so long, then a quarter
 * later. */
#define WAIT_ABORT_NS 200000u

/* One lane. Polls relaxed: an acquire would throw the SM's first-level cache away with every look. */
KFN int wait_slow(const uint64_t *word, uint64_t target, uint64_t timeout_ns, const uint64_t *abort_word, int often)
{
    const uint64_t start = clock_global();
    uint64_t look_after = often ? 0 : WAIT_ABORT_NS;
    unsigned pause = 0;

    for (;;) {
        ROLLED
        for (int i = 0; i < WAIT_LOOKS; i++) {
            if ((int64_t)(word_poll(word) - target) >= 0)
                return WAIT_OK;
            if (pause)
                nap(pause);
        }
        const uint64_t spent = clock_global() - start;
        if (spent >= look_after || spent >= timeout_ns) {
            if (word_relaxed(abort_word))
                return WAIT_ABORTED;
            look_after = often ? 0 : spent + spent / 4;
        }
        if (spent >= timeout_ns)
            return (int64_t)(word_relaxed(word) - target) >= 0 ? WAIT_OK : WAIT_TIMEOUT;
        pause = spent > 100000 ? 1000 : spent > 10000 ? 100 : 20;
    }
}

KFN_STEP enum wait_result ag_wait_ge(struct agent *ag, const uint64_t *word, uint64_t target, uint64_t timeout_ns)
{
    int result = WAIT_OK;

    if (lane_id() == 0 && (int64_t)(word_relaxed(word) - target) < 0) {
        /* Only agent 0 keeps count: the others mostly wait for it, and their counts would be so many more words to add
         * up across the bus. */
        const uint64_t start = ag->index == 0 || BLOCK_KEEPS_WAITS ? clock_global() : 0;
        result = wait_slow(word, target, timeout_ns, ag->abort_word, ag_block_index(ag) == 0);
        if (ag->index == 0) {
            ag->waits++;
            ag->wait_ns += clock_global() - start;
        }
        if (BLOCK_KEEPS_WAITS)
            mark_waited(ag, start, result == WAIT_OK);
    }
    /* Acquire: pairs with the release of whoever advanced the word (also of the abort word, by its reader). */
    if (lane_id() == 0)
        word_acquire(word);
    __syncwarp();
    return (enum wait_result)__shfl_sync(ALL_LANES, result, 0);
}

/* ---- Commands for the proxies: lane i holds command i ----------------------------------------------------------- */

struct command_set {
    struct command own;
};

KFN void command_set_put(struct agent *ag, struct command_set *set, int i, struct command c)
{
    (void)ag;
    if (lane_id() == i)
        set->own = c;
}

KFN const struct command *command_set_list(const struct command_set *set)
{
    return &set->own;
}

/* A command is one 16-byte store: half as many pieces for the bus as two. Release: by the fence of ag_claim_slots,
 * pairs with the acquires of ring_peek (proxy/ring.h). Whether the two words arrive together is not promised; each says
 * by its parity that it is there. */
KFN void ag_store_commands(struct agent *ag, const struct ring_dev *ring, uint64_t first, const struct command *cmds,
                           int n)
{
    const uint64_t index = first + (uint64_t)lane_id();

    (void)ag;
    if (lane_id() < n) {
        const uint64_t parity = ring_parity(ring->mask, index);
        pair_store(&ring->slots[index & ring->mask], cmds->a | parity, cmds->b | parity);
    }
    __syncwarp();
}

KFN void *ag_scratch(struct agent *ag, size_t bytes)
{
    return bytes <= ag->scratch_bytes ? ag->scratch : NULL;
}

#include "device/gpu/copy.cuh"
#include "device/gpu/numbers.cuh"

#include "device/gpu/fp8.cuh"
#include "device/gpu/logfmt.cuh"
#include "device/gpu/nvfp4.cuh"

#include "device/gpu/reduce.cuh"
#include "device/gpu/reduce_mxfp8.cuh"
#include "device/gpu/reduce_rounded.cuh"
#include "device/gpu/reduce_logfmt.cuh"
#include "device/gpu/route.cuh"

#endif
