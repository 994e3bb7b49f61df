/* SPDX-License-Identifier: Apache-2.0 */
/*
 * LogFMT rows by emulated lanes against the CPU device, bit for bit: the bytes of encoded rows, and weighted sums of
 * rows whose blocks are of every kind, encoded or rounded when they are read. lanes.sh builds and runs it.
 */
#include "device/gpu/prims.cuh"

#include <stdio.h>
#include <stdlib.h>

#include "lanes.h"

extern "C" {
size_t math_logfmt_encode(void *to, const uint16_t *x, int hidden);
void math_logfmt_decode(float *to, const void *from, int hidden);
}

enum { MOST_HIDDEN = 5000, MOST_ROWS = 36, PITCH = 2 * MOST_HIDDEN + 512 };

static struct {
    int hidden, rows, topk, rings;
    int rounded; /* one of so many rows is read as it is; 0: none */
} now;
alignas(64) static uint16_t given[MOST_ROWS * MOST_HIDDEN];
alignas(64) static char coded[MOST_ROWS * PITCH], expected[MOST_ROWS * PITCH];
alignas(64) static uint16_t sums[MOST_ROWS * MOST_HIDDEN];
static float decoded[MOST_ROWS * MOST_HIDDEN];

/* Zero, too small and too large for the short way among them. */
static float weight_of(int r)
{
    return r == 3 ? 3e-20f : r == 5 ? 0.0f : r == 6 ? 1e30f : 0.11f * (float)(r + 1);
}

static int weighted(int token)
{
    return token % 3 != 1;
}

static void sum_token(struct agent *ag, int t)
{
    const int middle = (now.hidden / 2 + 255) / 256 * 256, first = middle < now.hidden ? middle : now.hidden;
    char *out = (char *)(sums + (size_t)t * now.hidden);
    struct sum_set set;

    sum_set_begin(&set);
    if (lane_id() < now.topk) {
        const int rounded = now.rounded && lane_id() % now.rounded == 0;
        const size_t row = (size_t)t * now.topk + lane_id();
        const char *data = rounded ? (const char *)(given + row * now.hidden) : coded + row * PITCH;
        sum_set_put(ag, &set, lane_id(), data, weight_of(lane_id()), rounded ? ROWS_ROUNDED : ROWS_LOGFMT);
    }
    ag_reduce_logfmt(ag, out, now.hidden, 0, first, &set, now.topk, weighted(t), NULL, NULL);
    if (first < now.hidden)
        ag_reduce_logfmt(ag, out + first * 2, now.hidden, first, now.hidden, &set, now.topk, weighted(t), NULL, NULL);
}

/* Two agents. */
static void kernel(const void *, const void *)
{
    static thread_local struct agent agents[2];
    struct agent *ag = &agents[threadIdx.x / WARP];

    if (lane_id() == 0) {
        ag->index = (int)threadIdx.x / WARP;
        ag->count = 2;
        ag->block_agents = 2;
        ag->ring = now.rings ? ring_memory() + ag->index * RING_BYTES : NULL;
        ag->ring_next = 0;
        if (ag->ring)
            ring_begin(ag->ring);
    }
    ag_block_any(ag, 0);
    ag_logfmt_begin(ag);
    for (int r = ag->index; r < now.rows; r += 2)
        ag_logfmt_encode(ag, coded + (size_t)r * PITCH, given + (size_t)r * now.hidden, now.hidden);
    ag_block_any(ag, 0);
    for (int t = ag->index; t < now.rows / now.topk; t += 2)
        sum_token(ag, t);
}

static uint16_t bf16_of(float f)
{
    const uint32_t bits = float_bits(f);
    return f == f ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}

/* Blocks of any patterns, large, with zeros, subnormal, far below 1, equal, of two neighbours, of narrow ranges; half
 * of them ordinary. */
static uint16_t value_of(int kind, uint64_t noise, int i)
{
    const float g = (float)((int)(noise >> 33 & 0xffff) + (int)(noise >> 49) - 49152) / 65536.0f;
    const uint16_t any = (uint16_t)(noise >> 40);
    const uint16_t kinds[] = {any,
                              bf16_of(g * 40),
                              i % 3 ? bf16_of(g / 16) : (uint16_t)0,
                              (uint16_t)(any & 0x80ff),
                              bf16_of(g * 1e-12f * (i % 5 ? 1.0f : 1e9f)),
                              0x3c01,
                              (uint16_t)(0x3c01 + (any & 1)),
                              (uint16_t)((any & 0x807f) | (noise >> 50 & 1) << 13),
                              (uint16_t)(any & 0x81ff),
                              (uint16_t)(any & 0x8fff),
                              (uint16_t)(any & 0xbfff)};
    const uint16_t v = kind < (int)(sizeof(kinds) / sizeof(kinds[0])) ? kinds[kind] : bf16_of(g / 16);
    return (v & 0x7f80) == 0x7f80 ? v & 0xbfff : v;
}

static void draw(void)
{
    static uint64_t noise = 7;

    for (int r = 0; r < now.rows; r++)
        for (int i = 0; i < now.hidden; i++) {
            noise = noise * 6364136223846793005u + 1442695040888963407u;
            given[(size_t)r * now.hidden + i] = value_of(r % 2 ? (r * 56 + i / 128) % 20 : 20, noise, i);
        }
}

static int sums_differ(void)
{
    int differ = 0;

    for (int t = 0; t < now.rows / now.topk; t++)
        for (int i = 0; i < now.hidden; i++) {
            volatile float sum = 0.0f;
            for (int k = 0; k < now.topk; k++) {
                const float x = decoded[((size_t)t * now.topk + k) * now.hidden + i];
                sum = weighted(t) ? fmaf(weight_of(k), x, sum) : sum + x;
            }
            differ += bf16_of(sum) != sums[(size_t)t * now.hidden + i];
        }
    return differ;
}

static int case_fails(void)
{
    const struct lanes_launch launch = {kernel, NULL, NULL, WARP, 2 * WARP, 1};
    int bytes = 0;

    draw();
    memset(coded, 0xcc, sizeof(coded));
    memset(expected, 0xcc, sizeof(expected));
    lanes_run_block(&launch, 0);
    for (int r = 0; r < now.rows; r++) {
        math_logfmt_encode(expected + (size_t)r * PITCH, given + (size_t)r * now.hidden, now.hidden);
        math_logfmt_decode(decoded + (size_t)r * now.hidden, expected + (size_t)r * PITCH, now.hidden);
    }
    for (size_t i = 0; i < (size_t)now.rows * PITCH; i++)
        bytes += coded[i] != expected[i];
    const int differ = sums_differ();
    if (bytes || differ)
        printf("hidden %d, top-%d, ring %d, rounded %d: %d bytes of rows and %d sums differ from the CPU's\n",
               now.hidden, now.topk, now.rings, now.rounded, bytes, differ);
    return bytes || differ;
}

int main(void)
{
    static const int hidden[] = {128, 1400, MOST_HIDDEN, 515}, topk[] = {1, 8, 18};
    int failures = 0;

    for (now.rings = 0; now.rings <= (RING ? 1 : 0); now.rings++)
        for (int c = 0; c < 4 * 3 * 3; c++) {
            now.hidden = hidden[c % 4];
            now.topk = topk[c / 4 % 3];
            now.rows = 2 * now.topk;
            now.rounded = c / 12;
            failures += case_fails();
        }
    printf("%d failures\n", failures);
    return failures != 0;
}
