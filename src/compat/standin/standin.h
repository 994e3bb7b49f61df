/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of libepx_nccl.so share. */
#ifndef EPX_COMPAT_STANDIN_STANDIN_H
#define EPX_COMPAT_STANDIN_STANDIN_H

#include <nccl.h>

/* Remembers the sentence for ncclGetLastError on this thread, logs it at level "info", returns `result`. */
ncclResult_t standin_fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
int comm_known(const struct ncclComm *comm);

#endif
