/* SPDX-License-Identifier: Apache-2.0 */
/* Loads across a bus, counted (bus.c). */
#ifndef EPX_TESTS_GPU_LANES_BUS_H
#define EPX_TESTS_GPU_LANES_BUS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels reach this memory across the bus. */
void bus_add(const void *memory, uint64_t bytes);
/* Of the calling thread: loads do not count while it is on. */
void bus_quiet(int on);
/* A load of 16 bytes, of several in flight. */
void bus_vector(const void *from);
/* The longest chain of a lane since the last call, of the block that this thread has run; in units of 1 / 8 load. */
uint64_t bus_chain(unsigned threads);
/* A launch has ended. */
void bus_launched(int kernel, int stage, uint64_t chain);

#ifdef __cplusplus
}
#endif

#endif
