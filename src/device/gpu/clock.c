/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How far the GPU's clock is ahead of the host's. The host asks, and a kernel replies with its time:
 *
 *      host    before -- asks                    sees the reply -- after
 *      GPU                    replies: time                                    ahead <= time - before
 *                                                                              ahead >= time - after
 *
 * Of several rounds the shortest counts; the middle is taken, and half the round is the error.
 */
#include "device/gpu/gpu.h"
#include "device/gpu/launch.h"
#include "util/clock.h"

enum { ROUNDS = 32, FIRST_REPLY = 8 /* words: another cache line than the question */ };
#define LIMIT_NS 200000000u

void epx_clock(const uint64_t *asked, uint64_t *replies, int rounds); /* clock.cu; its address */

/* The reply, or 0 if none came. */
static uint64_t ask(uint64_t *words, int round, uint64_t *before, uint64_t *after)
{
    uint64_t reply;

    *before = clock_ns();
    __atomic_store_n(&words[0], (uint64_t)round + 1, __ATOMIC_RELEASE);
    do {
        reply = __atomic_load_n(&words[FIRST_REPLY + round], __ATOMIC_ACQUIRE); /* pairs with the kernel's release */
        *after = clock_ns();
    } while (reply == 0 && *after - *before < LIMIT_NS);
    return reply;
}

static epx_status launch_clock(const struct gpu_device *gpu, uint64_t *words)
{
    static void (*const kernel)(const uint64_t *, uint64_t *, int) = epx_clock;
    const dim3 one = {1, 1, 1}, block = {LAUNCH_LANES, 1, 1};
    uint64_t *replies = words + FIRST_REPLY;
    int rounds = ROUNDS;
    void *arguments[] = {&words, &replies, &rounds};

    return gpu_check(cudaLaunchKernel(*(const void *const *)&kernel, one, block, arguments, 0, gpu->side),
                     "launching the clock");
}

epx_status gpu_clock(struct device *device, int64_t *ahead_ns, uint64_t *error_ns)
{
    const struct gpu_device *gpu = (const struct gpu_device *)device;
    uint64_t best = UINT64_MAX, before, after;
    void *words;
    epx_status status = gpu_host_alloc(device, (FIRST_REPLY + ROUNDS) * sizeof(uint64_t), &words);

    if (status != EPX_OK)
        return status;
    status = launch_clock(gpu, words);
    for (int i = 0; status == EPX_OK && i < ROUNDS; i++) {
        const uint64_t reply = ask(words, i, &before, &after);
        if (!reply)
            break;
        if (after - before >= best)
            continue;
        best = after - before;
        *ahead_ns = (int64_t)(reply - before - best / 2);
        *error_ns = best / 2 + 1;
    }
    if (status == EPX_OK)
        status = gpu_check(cudaStreamSynchronize(gpu->side), "the clock");
    gpu_host_free(device, words);
    if (status == EPX_OK && best == UINT64_MAX)
        return fail(EPX_ERR_TIMEOUT, "device " GPU_NAME ": its clock does not answer");
    return status;
}
