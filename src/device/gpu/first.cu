/* SPDX-License-Identifier: Apache-2.0 */
/* The first kernel of a stream, which does nothing (gpu_stream_create). */
#include "device/gpu/launch.h"

#ifdef EPX_HIP
#include <hip/hip_runtime.h>
#endif

extern "C" __global__ void __launch_bounds__(LAUNCH_LANES) epx_first(void)
{
}
