/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is AMD's alone: the counterpart of device/gpu/cuda/hardware.cuh, which says what each of these is. An agent is a
 * wavefront of 64 lanes, which run in lockstep: where CUDA names the lanes that take part, the mask is dropped.
 *
 * Words are reached by acquire and release operations, or (relaxed_words) by relaxed ones between explicit fences: the
 * caches are then written back and thrown away once per fence, not with every look at a word that somebody polls.
 */
#ifndef EPX_DEVICE_GPU_HIP_HARDWARE_H
#define EPX_DEVICE_GPU_HIP_HARDWARE_H

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#include <stdint.h>

#include "device/gpu/hip/fnuz.h"

#define __grid_constant__ /* parameters are constant memory as it is */

/* ---- Lanes ------------------------------------------------------------------------------------------------------ */

#define WARP 64
#define ALL_LANES (~(lanes_t)0)
typedef uint64_t lanes_t;

#define __shfl_sync(lanes, value, from) __shfl(value, from)
#define __shfl_xor_sync(lanes, value, with) __shfl_xor(value, with)
#define __shfl_up_sync(lanes, value, by) __shfl_up(value, by)
#define __shfl_down_sync(lanes, value, by) __shfl_down(value, by)
#define __ballot_sync(lanes, yes) ((lanes_t)__ballot(yes))
#define __any_sync(lanes, yes) __any(yes)
#define __activemask() ((lanes_t)__ballot(1))
#define __syncwarp() lanes_meet()

KFN int lanes_first(lanes_t lanes)
{
    return __ffsll((unsigned long long)lanes) - 1;
}

KFN int lanes_count(lanes_t lanes)
{
    return __popcll(lanes);
}

/* Lanes run in lockstep, and a wavefront's accesses keep their order; this is for the compiler. */
KFN void lanes_meet(void)
{
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

KFN uint32_t umax(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

KFN uint32_t umin(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

KFN uint32_t max_u16x2(uint32_t a, uint32_t b)
{
    return umax(a & 0xffff0000u, b & 0xffff0000u) | umax(a & 0xffffu, b & 0xffffu);
}

KFN uint32_t max_s16x2(uint32_t a, uint32_t b)
{
    return max_u16x2(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
}

KFN uint32_t min_u16x2(uint32_t a, uint32_t b)
{
    return ~max_u16x2(~a, ~b);
}

KFN uint32_t bytes_with_gap(uint32_t a, uint32_t b, int i, int j, int k)
{
    return __byte_perm(a, b, (uint32_t)(i | j << 4 | k << 12)) & 0xff00ffffu;
}

KFN uint32_t rotate_left(uint32_t v, int n)
{
    return v << n | v >> (32 - n);
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

/* ---- Words that others read and write -------------------------------------------------------------------------- */

/* Of the launch; the same for all of the block. */
static __shared__ int relaxed_words;

KFN void words_begin(int relaxed)
{
    if (threadIdx.x == 0)
        relaxed_words = relaxed;
}

#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define BEFORE_SYSTEM() __builtin_amdgcn_fence(__ATOMIC_RELEASE, "")
#define AFTER_SYSTEM() __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "")
#define BEFORE_AGENT() __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent")
#define AFTER_AGENT() __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent")

KFN uint64_t word_relaxed(const uint64_t *word)
{
    return __hip_atomic_load(word, __ATOMIC_RELAXED, SYSTEM);
}

KFN uint64_t word_acquire(const uint64_t *word)
{
    if (!relaxed_words)
        return __hip_atomic_load(word, __ATOMIC_ACQUIRE, SYSTEM);
    const uint64_t v = word_relaxed(word);
    AFTER_SYSTEM();
    return v;
}

KFN uint64_t word_peek(const uint64_t *word)
{
    return relaxed_words ? word_relaxed(word) : word_acquire(word);
}

KFN void word_peeked(void)
{
    if (relaxed_words)
        AFTER_SYSTEM();
}

KFN uint64_t word_poll(const uint64_t *word)
{
    return word_peek(word);
}

KFN void fence_system(void)
{
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
}

KFN void fence_full(void)
{
    __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}

KFN void pair_store(void *to, uint64_t a, uint64_t b)
{
    __hip_atomic_store((uint64_t *)to + 1, b, __ATOMIC_RELAXED, SYSTEM);
    __hip_atomic_store((uint64_t *)to, a, __ATOMIC_RELAXED, SYSTEM);
}

KFN void word_release(uint64_t *word, uint64_t value)
{
    if (!relaxed_words) {
        __hip_atomic_store(word, value, __ATOMIC_RELEASE, SYSTEM);
        return;
    }
    BEFORE_SYSTEM();
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, SYSTEM);
}

KFN void word_release32(uint32_t *word, uint32_t value)
{
    if (!relaxed_words) {
        __hip_atomic_store(word, value, __ATOMIC_RELEASE, SYSTEM);
        return;
    }
    BEFORE_SYSTEM();
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, SYSTEM);
}

KFN void word_release_device(uint64_t *word, uint64_t value)
{
    if (!relaxed_words) {
        __hip_atomic_store(word, value, __ATOMIC_RELEASE, AGENT);
        return;
    }
    BEFORE_AGENT();
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, AGENT);
}

KFN void word_add(uint64_t *word, uint64_t n)
{
    (void)__hip_atomic_fetch_add(word, n, __ATOMIC_RELAXED, SYSTEM);
}

KFN uint32_t word_claim(uint32_t *word, uint32_t from, uint32_t to)
{
    uint32_t old = from;
    if (!relaxed_words) {
        (void)__hip_atomic_compare_exchange_strong(word, &old, to, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE, SYSTEM);
        return old;
    }
    BEFORE_SYSTEM();
    (void)__hip_atomic_compare_exchange_strong(word, &old, to, __ATOMIC_RELAXED, __ATOMIC_RELAXED, SYSTEM);
    AFTER_SYSTEM();
    return old;
}

KFN uint32_t word_add_device(uint32_t *word, uint32_t n)
{
    if (!relaxed_words)
        return __hip_atomic_fetch_add(word, n, __ATOMIC_ACQ_REL, AGENT);
    BEFORE_AGENT();
    const uint32_t old = __hip_atomic_fetch_add(word, n, __ATOMIC_RELAXED, AGENT);
    AFTER_AGENT();
    return old;
}

KFN uint64_t word_add_device64(uint64_t *word, uint64_t n)
{
    if (!relaxed_words)
        return __hip_atomic_fetch_add(word, n, __ATOMIC_ACQ_REL, AGENT);
    BEFORE_AGENT();
    const uint64_t old = __hip_atomic_fetch_add(word, n, __ATOMIC_RELAXED, AGENT);
    AFTER_AGENT();
    return old;
}

KFN uint64_t word_max_device64(uint64_t *word, uint64_t v)
{
    if (!relaxed_words)
        return __hip_atomic_fetch_max(word, v, __ATOMIC_ACQ_REL, AGENT);
    BEFORE_AGENT();
    const uint64_t old = __hip_atomic_fetch_max(word, v, __ATOMIC_RELAXED, AGENT);
    AFTER_AGENT();
    return old;
}

KFN uint64_t word_claim_device64(uint64_t *word, uint64_t from, uint64_t to)
{
    uint64_t old = from;
    if (!relaxed_words) {
        (void)__hip_atomic_compare_exchange_strong(word, &old, to, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE, AGENT);
        return old;
    }
    BEFORE_AGENT();
    (void)__hip_atomic_compare_exchange_strong(word, &old, to, __ATOMIC_RELAXED, __ATOMIC_RELAXED, AGENT);
    AFTER_AGENT();
    return old;
}

KFN uint64_t word_number(uint64_t *word, uint64_t n)
{
    return __hip_atomic_fetch_add(word, n, __ATOMIC_RELAXED, AGENT);
}

/*
 * The last of a block releases for all of it, at device scope. A release at block scope does not wait until this
 * wavefront's stores have left the first-level cache, and the last one's own wait is for its own stores alone: wait
 * here.
 */
KFN uint32_t word_add_block(uint32_t *shared, uint32_t n)
{
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    return __hip_atomic_fetch_add(shared, n, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_WORKGROUP);
}

/* Waves that have ended are not waited for. Once the first one has, it may be true though v is for none: some wave has
 * failed then. */
KFN int block_any(int v)
{
    return __syncthreads_or(v);
}

/* The counter runs at 100 MHz on every GPU that this is built for. */
KFN uint64_t clock_global(void)
{
    return __builtin_amdgcn_s_memrealtime() * 10;
}

/* In steps of 64 cycles, which the instruction wants as constants. */
/* A launch begins when the one before it has ended. */
KFN void grid_wait(void)
{
}

KFN void grid_next(void)
{
}

KFN void nap(unsigned ns)
{
    if (ns >= 1000)
        __builtin_amdgcn_s_sleep(27);
    else if (ns >= 100)
        __builtin_amdgcn_s_sleep(3);
    else
        __builtin_amdgcn_s_sleep(1);
}

/* ---- Vectors ---------------------------------------------------------------------------------------------------- */

typedef uint32_t vec4 __attribute__((ext_vector_type(4)));

/* Rows never lie in shared memory: saying so saves looking there. */
#define IN_MEMORY __attribute__((address_space(1)))

KFN uint4 vec_load(const void *from)
{
    const vec4 v = __builtin_nontemporal_load((const IN_MEMORY vec4 *)from);
    return make_uint4(v.x, v.y, v.z, v.w);
}

KFN void vec_store(void *to, uint4 v)
{
    const vec4 w = {v.x, v.y, v.z, v.w};
    __builtin_nontemporal_store(w, (IN_MEMORY vec4 *)to);
}

/* Other wavefronts' work hides the way. */
KFN void line_fetch(const void *from)
{
    (void)from;
}

#define RING 0
KFN char *ring_memory(void)
{
    return NULL;
}

KFN void ring_begin(char *)
{
}

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

KFN uint32_t canonical_bf16(float x)
{
    return x == x ? float_to_bf16(x) : 0x7fc0u;
}

KFN uint32_t canonical_fp16(float x)
{
    return x == x ? (uint32_t)__half_as_ushort(__float2half_rn(x)) : 0x7e00u;
}

KFN uint32_t pack_bf16(float low, float high)
{
    return canonical_bf16(low) | canonical_bf16(high) << 16;
}

KFN uint32_t pack_fp16(float low, float high)
{
    return canonical_fp16(low) | canonical_fp16(high) << 16;
}

#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)
#define FP8_PAIR
KFN uint32_t fp8_pair(float low, float high)
{
    const int pair = __builtin_amdgcn_cvt_pk_fp8_f32(fnuz_question(low), fnuz_question(high), 0, false);
    return fnuz_result((uint8_t)pair, low) | (uint32_t)fnuz_result((uint8_t)(pair >> 8), high) << 8;
}
#elif defined(__gfx950__) || defined(__gfx1200__) || defined(__gfx1201__)
#define FP8_PAIR
KFN uint32_t fp8_pair(float low, float high)
{
    return (uint32_t)__builtin_amdgcn_cvt_pk_fp8_f32(e4m3_clip(low), e4m3_clip(high), 0, false) & 0xffffu;
}
#endif

#endif
