/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A block of a GPU's threads, emulated by one thread of the CPU: each is a fiber, and a warp's lanes synchronize where
 * the GPU's do. That all lanes reach the same barrier is checked: a GPU would compute garbage, or hang.
 */
#ifndef EPX_TESTS_GPU_LANES_LANES_H
#define EPX_TESTS_GPU_LANES_LANES_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { LANES_MOST = 64, THREADS_MOST = 1024 };

enum lane_sync { SYNC_WARP = 1, SYNC_SHUFFLE, SYNC_VOTE, SYNC_BLOCK };

struct index3 {
    unsigned x, y, z;
};

/* Of the thread that runs. */
struct index3 lanes_thread(void);
struct index3 lanes_block(void);
struct index3 lanes_block_size(void);
struct index3 lanes_grid_size(void);

/* All lanes of the warp call it: each gives a value and gets those of all. The array is valid until the next
 * barrier. */
const uint64_t *lanes_exchange(enum lane_sync what, uint64_t value);
/* The lanes that are here together: those that call it before all the others wait elsewhere, have ended, or call it
 * too. *lanes gets their set. */
const uint64_t *lanes_gather(uint64_t value, uint64_t *lanes);
/* All threads of the block. */
void lanes_block_meet(void);
/* All threads of the block that have not ended; is v true for any of them? */
int lanes_block_any(int v);
/* Others may run now: of a thread that polls. */
void lanes_pause(void);

struct lanes_launch {
    void (*kernel)(const void *params, const void *info);
    const void *params, *info;
    unsigned lanes, threads, blocks; /* of a warp, of a block, of the launch */
};

/* Runs one block on the calling thread, to its end. */
void lanes_run_block(const struct lanes_launch *launch, unsigned block);

#ifdef __cplusplus
}
#endif

#endif
