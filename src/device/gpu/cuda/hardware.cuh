/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is NVIDIA's alone: the width of a warp, and what needs PTX. device/gpu/hip/hardware.h has the same for AMD. All
 * other *.cuh files are made of these and of CUDA's functions over lanes, which hip/hardware.h maps to HIP's.
 *
 *   WARP, lanes_t, ALL_LANES             lanes of an agent, a set of them, all of them
 *   lanes_first, lanes_count             of a set that is not empty; of any
 *   words_begin                          by all threads of a block, before any of what follows
 *   word_relaxed, word_acquire           loads, system scope
 *   word_peek, word_peeked               load for an occasional look; acquire after one that saw what it needs
 *   word_poll                            load for polling, by one lane that acquires afterwards
 *   word_release[32]                     stores, system scope; word_release_device: device scope
 *   fence_system                         acquire and release, system scope
 *   fence_full                           sequentially consistent, system scope
 *   pair_store                           two words, by one store if there is one
 *   word_add, word_claim                 system scope: relaxed; compare and swap, acquire and release
 *   word_max_device64, word_claim_device64   the larger one; compare and swap: device scope, acquire and release
 *   word_add_device[64]                  acquire and release, device scope
 *   word_add_block                       acquire and release, in shared memory, among the agents of a block
 *   word_number                          relaxed add, device scope
 *   block_any(v)                         barrier of the threads of the block that have not ended; is v true for any?
 *   clock_global, nap                    nanoseconds; sleeps for about so many
 *   grid_wait, grid_next                 the launch before this one in the stream is done; the next may be prepared
 *   vec_load, vec_store                  16 bytes that pass once
 *   line_fetch                           prefetches a line of 128 bytes to the L2 cache
 *   ring_memory, ring_begin              the rings of the block's warps (launch.h); by one lane of each warp, first
 *   ring_fetch(ring, n, from, bytes)     by one lane: begins batch n, 16-byte vectors that go to slot n % RING_SLOTS
 *   ring_wait(ring, n)                   batch n is there
 *   ring_at, ring_u16, ring_u64, ring_u128   what is in a ring, by its address in shared memory
 *   ring_fence                           by all lanes, then a barrier: what they wrote is seen by batches begun later
 *   pack_bf16, pack_fp16                 two floats in one word
 *   max_u16x2, max_s16x2, min_u16x2      the larger, or the smaller, of 16-bit numbers, two at a time
 *   bytes_with_gap(a, b, i, j, k)        bytes i and j, a zero byte, byte k, of the eight of a and b; byte j is < 128
 *   rotate_left(v, n)                    0 < n < 32
 *   choose_bits(mask, a, b)              bits of a where the mask has ones, of b elsewhere
 *   opaque(v)                            v, which the compiler is not to know
 *   add_magic_down(v, magic)             v + magic, rounded down: |v| < 2^22, magic is 1.5 * 2^23
 *   fp8_pair                             where FP8_PAIR is defined: two floats as OCP e4m3; not NaN
 */
#ifndef EPX_DEVICE_GPU_CUDA_HARDWARE_CUH
#define EPX_DEVICE_GPU_CUDA_HARDWARE_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#define WARP 32
#define ALL_LANES 0xffffffffu
typedef uint32_t lanes_t;

KFN int lanes_first(lanes_t lanes)
{
    return __ffs((int)lanes) - 1;
}

KFN int lanes_count(lanes_t lanes)
{
    return __popc(lanes);
}

/* ---- Words that others read and write -------------------------------------------------------------------------- */

KFN uint64_t word_relaxed(const uint64_t *word)
{
    uint64_t v;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
    return v;
}

KFN uint64_t word_acquire(const uint64_t *word)
{
    uint64_t v;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
    return v;
}

KFN void words_begin(int relaxed)
{
    (void)relaxed;
}

KFN uint64_t word_peek(const uint64_t *word)
{
    return word_acquire(word);
}

KFN void word_peeked(void)
{
}

KFN uint64_t word_poll(const uint64_t *word)
{
    return word_relaxed(word);
}

KFN void fence_system(void)
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

KFN void fence_full(void)
{
    asm volatile("fence.sc.sys;" ::: "memory");
}

KFN void pair_store(void *to, uint64_t a, uint64_t b)
{
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}

KFN void word_release(uint64_t *word, uint64_t value)
{
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

KFN void word_release_device(uint64_t *word, uint64_t value)
{
    asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

KFN void word_release32(uint32_t *word, uint32_t value)
{
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

KFN void word_add(uint64_t *word, uint64_t n)
{
    asm volatile("red.relaxed.sys.add.u64 [%0], %1;" ::"l"(word), "l"(n) : "memory");
}

KFN uint32_t word_claim(uint32_t *word, uint32_t from, uint32_t to)
{
    uint32_t old;
    asm volatile("atom.acq_rel.sys.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(word), "r"(from), "r"(to) : "memory");
    return old;
}

KFN uint32_t word_add_device(uint32_t *word, uint32_t n)
{
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(n) : "memory");
    return old;
}

KFN uint64_t word_add_device64(uint64_t *word, uint64_t n)
{
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(n) : "memory");
    return old;
}

KFN uint64_t word_max_device64(uint64_t *word, uint64_t v)
{
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.max.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(v) : "memory");
    return old;
}

KFN uint64_t word_claim_device64(uint64_t *word, uint64_t from, uint64_t to)
{
    uint64_t old;
    asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;" : "=l"(old) : "l"(word), "l"(from), "l"(to) : "memory");
    return old;
}

KFN uint64_t word_number(uint64_t *word, uint64_t n)
{
    uint64_t old;
    asm volatile("atom.relaxed.gpu.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(word), "l"(n) : "memory");
    return old;
}

KFN uint32_t word_add_block(uint32_t *shared, uint32_t n)
{
    const uint32_t word = (uint32_t)__cvta_generic_to_shared(shared);
    uint32_t old;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(word), "r"(n) : "memory");
    return old;
}

/* With a number of threads it would wait for those that have ended, too. */
KFN int block_any(int v)
{
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; barrier.cta.red.or.pred q, 1, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"(v)
                 : "memory");
    return any;
}

KFN uint64_t clock_global(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Of launches that may begin before the one before them has ended (launch.c). Pairs with its end. */
KFN void grid_wait(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

KFN void grid_next(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

KFN void nap(unsigned ns)
{
    __nanosleep(ns);
}

/* ---- Vectors ---------------------------------------------------------------------------------------------------- */

#ifndef STORE_KIND
#define STORE_KIND 0
#endif
#if STORE_KIND == 0
#define STORE_HOW "st.global.L1::no_allocate.v4.u32"
#elif STORE_KIND == 1
#define STORE_HOW "st.global.cs.v4.u32"
#else
#define STORE_HOW "st.global.v4.u32"
#endif

/* Not .nc: peers and other warps write what is read here while the kernel runs. */
KFN uint4 vec_load(const void *from)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

KFN void vec_store(void *to, uint4 v)
{
    asm volatile(STORE_HOW " [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

KFN void line_fetch(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/* ---- Rings ------------------------------------------------------------------------------------------------------- */

KFN char *ring_memory(void)
{
    extern __shared__ __align__(128) char rings[];
    return rings;
}

#if __CUDA_ARCH__ >= 900 && RING_SLOTS
KFN uint32_t ring_word(const char *ring, unsigned slot)
{
    return (uint32_t)__cvta_generic_to_shared(ring + RING_SLOTS * RING_SLOT_BYTES) + slot * 8;
}

KFN void ring_begin(char *ring)
{
    for (unsigned slot = 0; slot < RING_SLOTS; slot++)
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(ring_word(ring, slot)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); /* before copies that complete on them */
}

KFN void ring_fetch(char *ring, unsigned n, const void *from, unsigned bytes)
{
    const unsigned slot = n % RING_SLOTS;
    const uint32_t word = ring_word(ring, slot), to = (uint32_t)__cvta_generic_to_shared(ring + slot * RING_SLOT_BYTES);

    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(word), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(word)
                 : "memory");
}

/* Copies read by another path than loads. */
KFN void ring_fence(void)
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

KFN void ring_wait(char *ring, unsigned n)
{
    const uint32_t word = ring_word(ring, n % RING_SLOTS), phase = n / RING_SLOTS & 1;
    uint32_t there;

    do
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(there)
                     : "r"(word), "r"(phase)
                     : "memory");
    while (!there);
}
typedef uint32_t ring_address;

KFN ring_address ring_at(const char *ring)
{
    return (uint32_t)__cvta_generic_to_shared(ring);
}

KFN uint32_t ring_u16(ring_address at)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

KFN uint2 ring_u64(ring_address at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

KFN uint4 ring_u128(ring_address at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
#define RING 1
#else
KFN void ring_begin(char *)
{
}
#define RING 0
#endif

/* ---- Numbers ---------------------------------------------------------------------------------------------------- */

/* The hardware's NaN becomes the canonical one of docs/formats.md. */
KFN uint32_t pack_bf16(float low, float high)
{
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w ^ (__vcmpeq2(w, 0x7fff7fffu) & 0x003f003fu);
}

KFN uint32_t pack_fp16(float low, float high)
{
    const __half2 h = __floats2half2_rn(low, high);
    const uint32_t w = *(const uint32_t *)&h;
    return w ^ (__vcmpeq2(w, 0x7fff7fffu) & 0x01ff01ffu);
}

KFN uint32_t max_u16x2(uint32_t a, uint32_t b)
{
    return __vmaxu2(a, b);
}

KFN uint32_t max_s16x2(uint32_t a, uint32_t b)
{
    return __vmaxs2(a, b);
}

KFN uint32_t min_u16x2(uint32_t a, uint32_t b)
{
    return __vminu2(a, b);
}

/* A byte's highest bit, eight times, is the byte 0. */
KFN uint32_t bytes_with_gap(uint32_t a, uint32_t b, int i, int j, int k)
{
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(i | j << 4 | (j | 8) << 8 | k << 12));
    return v;
}

KFN uint32_t rotate_left(uint32_t v, int n)
{
    return __funnelshift_l(v, v, (unsigned)n);
}

KFN uint32_t choose_bits(uint32_t mask, uint32_t a, uint32_t b)
{
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(v) : "r"(mask), "r"(a), "r"(b));
    return v;
}

KFN uint32_t opaque(uint32_t v)
{
    asm volatile("" : "+r"(v));
    return v;
}

KFN float add_magic_down(float v, float magic)
{
    return __fadd_rd(v, magic);
}

#if __CUDA_ARCH__ >= 890
#define FP8_PAIR
KFN uint32_t fp8_pair(float low, float high)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

#endif
