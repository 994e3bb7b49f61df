/* SPDX-License-Identifier: Apache-2.0 */
/* Which level of the math is used (math_levels.h), and the functions of math.h, which call it. */
#include "device/cpu/math.h"

#include <string.h>
#include <unistd.h>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#include "device/cpu/math_levels.h"
#include "util/env.h"
#include "util/log.h"

enum { LEVELS_MOST = 4 };

static const struct math_ops *used; /* shared; whoever finds NULL stores what everybody else would */

/* ---- Which levels the machine has --------------------------------------------------------------------------- */

#if defined(__x86_64__)
static int has_avx2(void)
{
    unsigned a, b, c = 0, d;

    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c >> 29 & 1); /* F16C */
}

static int has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static int has_avx512bf16(void)
{
    unsigned a = 0, b, c, d;

    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

static int list_levels(const struct math_ops **list)
{
    int n = 1;

    if (math_level_avx2 && has_avx2())
        list[n++] = math_level_avx2;
    if (math_level_avx512 && has_avx512())
        list[n++] = math_level_avx512;
    if (math_level_avx512bf16 && has_avx512bf16())
        list[n++] = math_level_avx512bf16;
    return n;
}
#elif defined(__aarch64__) && defined(__linux__)
static int list_levels(const struct math_ops **list)
{
    if (!math_level_bf16 || !(getauxval(AT_HWCAP2) >> 14 & 1)) /* HWCAP2_BF16 */
        return 1;
    list[1] = math_level_bf16;
    return 2;
}
#else
static int list_levels(const struct math_ops **list)
{
    (void)list;
    return 1;
}
#endif

const struct math_ops *math_level(int i)
{
    const struct math_ops *list[LEVELS_MOST] = {math_level_base};
    const int n = list_levels(list);

    return i < n ? list[i] : NULL;
}

/* ---- Choice ------------------------------------------------------------------------------------------------- */

/* The level of this name, or the highest. */
static const struct math_ops *choose(const char *wanted)
{
    const struct math_ops *best = NULL, *next;

    for (int i = 0; (next = math_level(i)); i++) {
        best = next;
        if (wanted && !strcmp(best->name, wanted))
            return best;
    }
    if (wanted)
        log_line(LOG_WARN, "EPX_CPU_LEVEL is %s, which this machine or this build does not have: %s is used", wanted,
                 best->name);
    return best;
}

const struct math_ops *math_level_used(void)
{
    /* Relaxed: the tables are constants, and every thread chooses the same. */
    const struct math_ops *level = __atomic_load_n(&used, __ATOMIC_RELAXED);

    if (!level) {
        level = choose(env_string("EPX_CPU_LEVEL"));
        __atomic_store_n(&used, level, __ATOMIC_RELAXED);
    }
    return level;
}

void math_level_use(const struct math_ops *level)
{
    __atomic_store_n(&used, level, __ATOMIC_RELAXED);
}

/* ---- math.h ------------------------------------------------------------------------------------------------- */

void math_copy(void *to, const void *from, size_t bytes)
{
    if (bytes)
        memcpy(to, from, bytes); /* the C library chooses its own instructions */
}

void math_fill_zero(void *to, size_t bytes)
{
    if (bytes)
        memset(to, 0, bytes);
}

void math_copy_many(void *const *to, int n, const void *from, size_t bytes)
{
    math_level_used()->copy_many(to, n, from, bytes);
}

void math_copy_many_past(void *const *to, int n, const void *from, size_t bytes)
{
    math_level_used()->copy_many_past(to, n, from, bytes);
}

/* Half of the last cache, which others use too; EPX_CPU_CACHE_BYTES says another one. */
static uint64_t cache_bytes(void)
{
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);

    return (uint64_t)env_int("EPX_CPU_CACHE_BYTES", bytes > 0 ? bytes / 2 : INT64_MAX, 0, INT64_MAX);
}

int math_past_cache(uint64_t bytes)
{
    static uint64_t room; /* shared; whoever finds 0 stores what everybody else would, and 1 more */
    uint64_t most = __atomic_load_n(&room, __ATOMIC_RELAXED);

    if (!most) {
        most = cache_bytes() + 1;
        __atomic_store_n(&room, most, __ATOMIC_RELAXED);
    }
    return bytes >= most;
}

void math_cast_fp8(uint8_t *q, void *scales, enum scale_kind kind, int round_scale, const void *x, int dtype,
                   int hidden)
{
    math_level_used()->cast_fp8(q, scales, kind, round_scale, x, dtype, hidden);
}

size_t math_logfmt_bound(int hidden)
{
    return math_level_used()->logfmt_bound(hidden);
}

size_t math_logfmt_encode(void *to, const uint16_t *x, int hidden)
{
    return math_level_used()->logfmt_encode(to, x, hidden);
}

void math_logfmt_decode(float *to, const void *from, int hidden)
{
    math_level_used()->logfmt_decode(to, from, hidden);
}

size_t math_nvfp4_encode(void *to, const uint16_t *x, int hidden, float row_scale)
{
    return math_level_used()->nvfp4_encode(to, x, hidden, row_scale);
}

void math_reduce(void *out, int dtype, int hidden, const struct reduce_row *rows, int n, int weighted,
                 const void *bias0, const void *bias1)
{
    math_level_used()->reduce(out, dtype, hidden, rows, n, weighted, bias0, bias1);
}
