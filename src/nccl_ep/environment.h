/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_NCCL_EP_ENVIRONMENT_H
#define EPX_NCCL_EP_ENVIRONMENT_H

struct environment {
    int debug, verbose;
    int local_dup, nvlink_dup;
    int timeout_ms, comm_sms, dispatch_sms, combine_sms; /* 0: not set */
};

void environment_read(struct environment *env, int rank);

#endif
