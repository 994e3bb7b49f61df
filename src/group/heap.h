/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_GROUP_HEAP_H
#define EPX_GROUP_HEAP_H

#include "group/objects.h"

/* EPX_GPU_HEAP=host. */
int heap_asked_for_host(void);
/* EPX_GPU_HEAP as a number, which ranks compare, and its word. */
int32_t heap_asked(void);
const char *heap_asked_word(int32_t asked);
/* Sets where heaps are placed, once the device is open. */
epx_status heap_place(struct epx_group *group);
/* Collective, once the nodes are known: all ranks place their heaps in host memory if one has to. */
epx_status heap_place_agree(struct epx_group *group);
/* The offset of [data, data + bytes) in this rank's heap, 0 if it is not (wholly) there. */
uint64_t heap_offset(const struct epx_group *group, const void *data, uint64_t bytes);

#endif
