/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for nccl_device.h: the teams of a communicator, which the host may ask for (nccl.h). There are no kernels
 * that could ask for more. */
#ifndef EPX_STANDIN_NCCL_DEVICE_H
#define EPX_STANDIN_NCCL_DEVICE_H

#include <nccl.h>

#endif
