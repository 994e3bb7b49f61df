/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TOOLS_BENCH_OFI_H
#define EPX_TOOLS_BENCH_OFI_H

#include <stdint.h>

/*
 * What libfabric itself does on this machine: `pairs` pairs of processes, `threads` threads in each, every thread with an
 * endpoint of its own that writes to the endpoint of the same number in the other process of the pair by plain fi_write,
 * both ways at once. Every process sends `bytes` in messages of `message_bytes` (rounded up to whole messages per
 * thread). *gbytes_per_s: bytes that all processes sent, by the time from the first write to the arrival of the last.
 * `provider` as in "ofi;tcp", "" = the one that the ofi network would take. 0, or -1 after a message on stderr.
 */
int ofi_baseline(const char *provider, uint64_t bytes, uint32_t message_bytes, int threads, int pairs,
                 double *gbytes_per_s);

#endif
