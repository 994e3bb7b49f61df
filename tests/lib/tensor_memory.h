/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for the tensors of tests: what the group's device reaches, and the host too. On a GPU that is pinned
 * memory. */
#ifndef EPX_TESTS_LIB_TENSOR_MEMORY_H
#define EPX_TESTS_LIB_TENSOR_MEMORY_H

#include "epx/epx.h"

/* The device that tests run on: EPX_TEST_DEVICE, "cpu", "cuda" or "hip"; the CPU where it is not set. */
epx_device test_device(void);
/* 64-byte aligned; NULL without memory. */
void *tensor_memory(epx_group *group, size_t bytes);
void tensor_memory_free(epx_group *group, void *ptr);

#endif
