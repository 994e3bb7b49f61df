/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges for NVIDIA's profilers (nsys, ncu): one around each call of EPX. Without a profiler a range is one load. */
#ifndef EPX_GROUP_NVTX_H
#define EPX_GROUP_NVTX_H

void nvtx_push(const char *name);
void nvtx_pop(void);

#endif
