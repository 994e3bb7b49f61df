/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TOOLS_BENCH_OFI_H
#define EPX_TOOLS_BENCH_OFI_H

#include <stdint.h>

#define OFI_BASELINE_MAX_REPEATS 1024

/*
 * What libfabric itself does on this machine: `pairs` pairs of processes, `threads` threads in each, every thread with
 * an endpoint of its own that writes to the endpoint of the same number in the other process of the pair by plain
 * fi_write, both ways at once. Every process sends `bytes` in messages of `message_bytes` (rounded up to whole messages
 * per thread), once without being timed and then `repeats` times. gbytes_per_s[repeats]: bytes that all processes sent,
 * by the time from the first write to the arrival of the last.
 * `provider` as in "ofi:tcp", "" = the one that the ofi network would take. 0, or -1 after a message on stderr.
 */
int ofi_baseline(const char *provider, uint64_t bytes, uint32_t message_bytes, int threads, int pairs, int repeats,
                 double *gbytes_per_s);

#endif
