/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What device/gpu/cuda/hardware.cuh and device/gpu/hip/hardware.h are for GPUs, for lanes that a CPU emulates
 * (lanes.h). With EPX_HIP a warp has 64 lanes, and e4m3 comes out of a FNUZ cast, all as on an AMD GPU.
 */
#ifndef EPX_TESTS_GPU_LANES_HARDWARE_H
#define EPX_TESTS_GPU_LANES_HARDWARE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bus.h"
#include "lanes.h"

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __shared__ thread_local /* a thread emulates a block */
#define __forceinline__ inline
#define __noinline__
#define threadIdx lanes_thread()
#define blockIdx lanes_block()
#define blockDim lanes_block_size()
#define gridDim lanes_grid_size()
#define __syncthreads() lanes_block_meet()

#include "device/gpu/hip/fnuz.h"
#include "device/gpu/launch.h"
#include "util/numeric.h"

struct uint4 {
    uint32_t x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};

/* ---- Lanes ------------------------------------------------------------------------------------------------------ */

#ifdef EPX_HIP
#define WARP 64
typedef uint64_t lanes_t;
#else
#define WARP 32
typedef uint32_t lanes_t;
#endif
#define ALL_LANES ((lanes_t) ~(lanes_t)0)

KFN int lanes_first(lanes_t lanes)
{
    return __builtin_ctzll(lanes);
}

KFN int lanes_count(lanes_t lanes)
{
    return __builtin_popcountll(lanes);
}

template <typename T> KFN const uint64_t *values_of(T value)
{
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    return lanes_exchange(SYNC_SHUFFLE, bits);
}

template <typename T> KFN T value_at(const uint64_t *values, unsigned lane)
{
    T value;
    memcpy(&value, &values[lane % WARP], sizeof(value));
    return value;
}

/* Of all lanes, or of those that __activemask() has just found together. */
template <typename T> KFN T __shfl_sync(lanes_t lanes, T value, int from)
{
    uint64_t bits = 0, here;
    if (lanes == ALL_LANES)
        return value_at<T>(values_of(value), (unsigned)from);
    memcpy(&bits, &value, sizeof(value));
    return value_at<T>(lanes_gather(bits, &here), (unsigned)from);
}

template <typename T> KFN T __shfl_xor_sync(lanes_t, T value, int with)
{
    return value_at<T>(values_of(value), threadIdx.x % WARP ^ (unsigned)with);
}

template <typename T> KFN T __shfl_up_sync(lanes_t, T value, int by)
{
    const int from = (int)(threadIdx.x % WARP) - by;
    return value_at<T>(values_of(value), from < 0 ? threadIdx.x : (unsigned)from);
}

template <typename T> KFN T __shfl_down_sync(lanes_t, T value, int by)
{
    const unsigned from = threadIdx.x % WARP + (unsigned)by;
    return value_at<T>(values_of(value), from < WARP ? from : threadIdx.x);
}

KFN lanes_t __ballot_sync(lanes_t, int yes)
{
    const uint64_t *values = lanes_exchange(SYNC_VOTE, yes != 0);
    lanes_t lanes = 0;
    for (int i = 0; i < WARP; i++)
        lanes |= (lanes_t)values[i] << i;
    return lanes;
}

KFN int __any_sync(lanes_t lanes, int yes)
{
    return __ballot_sync(lanes, yes) != 0;
}

KFN void __syncwarp(void)
{
    lanes_exchange(SYNC_WARP, 0);
}

KFN lanes_t __activemask(void)
{
    uint64_t lanes;
    lanes_gather(0, &lanes);
    return (lanes_t)lanes;
}

/* ---- Words that others read and write -------------------------------------------------------------------------- */

KFN void words_begin(int)
{
}

KFN uint64_t word_relaxed(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

KFN uint64_t word_acquire(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Looks that are repeated until a word is there are not counted. */
KFN uint64_t word_quiet(const uint64_t *word)
{
    uint64_t v;

    bus_quiet(1);
    v = word_relaxed(word);
    bus_quiet(0);
    return v;
}

KFN uint64_t word_peek(const uint64_t *word)
{
    return word_quiet(word);
}

KFN void word_peeked(void)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

KFN uint64_t word_poll(const uint64_t *word)
{
    lanes_pause();
    return word_quiet(word);
}

KFN void fence_system(void)
{
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

KFN void fence_full(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

KFN void pair_store(void *to, uint64_t a, uint64_t b)
{
    __atomic_store_n((uint64_t *)to + 1, b, __ATOMIC_RELAXED);
    __atomic_store_n((uint64_t *)to, a, __ATOMIC_RELAXED);
}

KFN void word_release(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN void word_release_device(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN void word_release32(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

KFN void word_add(uint64_t *word, uint64_t n)
{
    __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

KFN uint32_t word_claim(uint32_t *word, uint32_t from, uint32_t to)
{
    __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return from;
}

KFN uint32_t word_add_device(uint32_t *word, uint32_t n)
{
    return __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL);
}

KFN uint64_t word_add_device64(uint64_t *word, uint64_t n)
{
    return __atomic_fetch_add(word, n, __ATOMIC_ACQ_REL);
}

KFN uint64_t word_max_device64(uint64_t *word, uint64_t v)
{
    uint64_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(word, &old, old > v ? old : v, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        continue;
    return old;
}

KFN uint64_t word_claim_device64(uint64_t *word, uint64_t from, uint64_t to)
{
    __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return from;
}

KFN uint64_t word_number(uint64_t *word, uint64_t n)
{
    return __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

KFN uint32_t word_add_block(uint32_t *shared, uint32_t n)
{
    return __atomic_fetch_add(shared, n, __ATOMIC_ACQ_REL);
}

KFN int block_any(int v)
{
    return lanes_block_any(v);
}

KFN uint64_t clock_global(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* A launch begins when the one before it has ended. */
KFN void grid_wait(void)
{
}

KFN void grid_next(void)
{
}

KFN void nap(unsigned)
{
    lanes_pause();
}

/* ---- Vectors and numbers ---------------------------------------------------------------------------------------- */

KFN uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return uint4{x, y, z, w};
}

KFN uint2 make_uint2(uint32_t x, uint32_t y)
{
    return uint2{x, y};
}

/* Copies arrive as late as they may: when a wait asks for their batch. */
#define RING (RING_SLOTS > 0)
#if RING
struct ring_slot {
    const void *from;
    unsigned bytes, fetched; /* of batch `fetched` - 1; no bytes: they are there */
};

KFN char *ring_memory(void)
{
    alignas(128) static thread_local char rings[LAUNCH_WARPS * RING_BYTES];
    return rings;
}

KFN struct ring_slot *ring_slot(unsigned n)
{
    static thread_local struct ring_slot slots[LAUNCH_WARPS][RING_SLOTS];
    return &slots[threadIdx.x / WARP][n % RING_SLOTS];
}

KFN void ring_begin(char *ring)
{
    memset(ring, 0x5a, RING_BYTES);
    for (unsigned n = 0; n < RING_SLOTS; n++)
        *ring_slot(n) = {NULL, 0, 0};
}

KFN void ring_fetch(char *ring, unsigned n, const void *from, unsigned bytes)
{
    if (ring_slot(n)->bytes) {
        fprintf(stderr, "a slot of a ring is filled again before anybody waited for it\n");
        abort();
    }
    memset(ring + n % RING_SLOTS * RING_SLOT_BYTES, 0x5a, RING_SLOT_BYTES);
    *ring_slot(n) = {from, bytes, n + 1};
}

KFN void ring_fence(void)
{
}

KFN void ring_wait(char *ring, unsigned n)
{
    struct ring_slot *slot = ring_slot(n);

    while (slot->fetched != n + 1) /* the lane that fetches it has not come so far */
        lanes_pause();
    if (slot->bytes)
        memcpy(ring + n % RING_SLOTS * RING_SLOT_BYTES, slot->from, slot->bytes);
    slot->bytes = 0;
}
typedef const char *ring_address;

KFN ring_address ring_at(const char *ring)
{
    return ring;
}

KFN uint32_t ring_u16(ring_address at)
{
    return *(const uint16_t *)at;
}

KFN uint2 ring_u64(ring_address at)
{
    return *(const uint2 *)at;
}

KFN uint4 ring_u128(ring_address at)
{
    return *(const uint4 *)at;
}

#else
KFN char *ring_memory(void)
{
    return NULL;
}

KFN void ring_begin(char *)
{
}
#endif

KFN uint4 vec_load(const void *from)
{
    uint4 v;

    bus_quiet(1);
    v = *(const uint4 *)__builtin_assume_aligned(from, 16);
    bus_quiet(0);
    bus_vector(from);
    return v;
}

KFN void vec_store(void *to, uint4 v)
{
    *(uint4 *)__builtin_assume_aligned(to, 16) = v;
}

KFN void line_fetch(const void *from)
{
    __builtin_prefetch(from);
}

KFN uint32_t atomicOr(uint32_t *word, uint32_t bits)
{
    return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}

KFN int32_t atomicAdd(int32_t *word, int32_t n)
{
    return __atomic_fetch_add(word, n, __ATOMIC_RELAXED);
}

KFN uint32_t max_u16x2(uint32_t a, uint32_t b)
{
    const uint32_t high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return high << 16 | low;
}

KFN uint32_t max_s16x2(uint32_t a, uint32_t b)
{
    return max_u16x2(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}

KFN uint32_t min_u16x2(uint32_t a, uint32_t b)
{
    return ~max_u16x2(~a, ~b);
}

KFN uint32_t rotate_left(uint32_t v, int n)
{
    return v << n | v >> (32 - n);
}

KFN uint32_t umax(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

KFN uint32_t umin(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

KFN uint32_t choose_bits(uint32_t mask, uint32_t a, uint32_t b)
{
    return (mask & a) | (~mask & b);
}

KFN uint32_t opaque(uint32_t v)
{
    return v;
}

KFN float add_magic_down(float v, float magic)
{
    const float sum = v + magic;
    return sum - magic > v ? sum - 1.0f : sum;
}

KFN uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;

    for (int i = 0; i < 4; i++)
        result |= (uint32_t)(bytes >> (selector >> i * 4 & 7) * 8 & 0xffu) << i * 8;
    return result;
}

KFN uint32_t bytes_with_gap(uint32_t a, uint32_t b, int i, int j, int k)
{
    return __byte_perm(a, b, (uint32_t)(i | j << 4 | k << 12)) & 0xff00ffffu;
}

#define __popc __builtin_popcount
#define __clz __builtin_clz
#define __uint_as_float float_from_bits
#define __float_as_uint float_bits
#define __fadd_rn(a, b) ((float)(a) + (float)(b))
#define __fsub_rn(a, b) ((float)(a) - (float)(b))
#define __fmul_rn(a, b) ((float)(a) * (float)(b))
#define __fdiv_rn(a, b) ((float)(a) / (float)(b))
#define __frcp_rn(a) (1.0f / (float)(a))
#define __fmaf_rn fmaf
#define __ushort_as_half(h) (h)
#define __half2float fp16_to_float

KFN uint32_t pack_bf16(float low, float high)
{
    return (uint32_t)(low == low ? float_to_bf16(low) : 0x7fc0u) | (high == high ? float_to_bf16(high) : 0x7fc0u) << 16;
}

KFN uint32_t pack_fp16(float low, float high)
{
    return (uint32_t)(low == low ? float_to_fp16(low) : 0x7e00u) | (high == high ? float_to_fp16(high) : 0x7e00u) << 16;
}

#ifdef EPX_HIP
#define FP8_PAIR
/* Test code of tests/gpu_lanes/fnuz_cast.h takes the place of the instruction. */
#include "fnuz_cast.h"

KFN uint32_t fp8_pair(float low, float high)
{
    return fnuz_result(fnuz_cast(fnuz_question(low)), low) | (uint32_t)fnuz_result(fnuz_cast(fnuz_question(high)), high)
                                                                 << 8;
}
#endif

#endif
