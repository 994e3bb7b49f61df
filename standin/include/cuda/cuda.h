/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for CUDA's cuda.h on machines without CUDA: nccl_ep.h includes it and needs nothing of it. */
#ifndef EPX_STANDIN_CUDA_H
#define EPX_STANDIN_CUDA_H

typedef struct CUstream_st *CUstream;

#endif
