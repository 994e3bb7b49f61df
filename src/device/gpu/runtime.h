/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's runtime, and what HIP's does in another way (device/gpu/hip/runtime.h). */
#ifndef EPX_DEVICE_GPU_RUNTIME_H
#define EPX_DEVICE_GPU_RUNTIME_H

#include <cuda_runtime_api.h>

#define GPU_NAME "cuda"
#define GPU_KIND EPX_DEVICE_CUDA
#define GPU_EXPORTS_REGIONS DEVICE_EXPORTS_REGIONS

/* Memory that other GPUs and processes read and write while kernels run. */
#define gpuMallocShared cudaMalloc

#endif
