/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GPU memory that the GPUs of other hosts map: by the driver's functions alone, which are looked up at run time.
 *
 *   owner                                                     peer, maybe on another host of the rack
 *   cuMemCreate (may be exported by a fabric handle)
 *   cuMemAddressReserve, cuMemMap, cuMemSetAccess
 *   cuMemExportToShareableHandle -> 64 bytes  -- bootstrap -->  cuMemImportFromShareableHandle, then as the owner
 *
 * The driver refuses to make or to import such memory where the process has no IMEX channel. Two GPUs reach each other
 * where NVML says that both have registered with the same cluster and clique. A file descriptor in the place of a
 * fabric handle (EPX_FABRIC=files) takes the same way on one host: for tests where there is no rack.
 */
#ifndef EPX_DEVICE_GPU_FABRIC_H
#define EPX_DEVICE_GPU_FABRIC_H

#include "device/module.h"

extern const struct device_host *gpu_host; /* what the library gave the module */

/* 64 bytes that are equal where GPUs can map each other's memory so. `host` is the identity of this machine. Makes and
 * exports a piece of memory first: what the driver only says that it can is not enough. */
epx_status fabric_identity(int index, const uint8_t host[64], uint8_t id[64]);
/* Not cleared. heap->export says how peers map it. */
epx_status fabric_heap_create(int index, uint64_t bytes, struct heap *heap);
/* May wait for the device. */
void fabric_heap_free(const struct heap *heap);
/* Memory of this process is used at its own address. */
epx_status fabric_heap_open(int index, const struct heap_export *peer, void **base);
/* 1: `base` was mapped by fabric_heap_open(), and fabric_heap_unmap() ends that. */
int fabric_heap_is_mapped(const struct heap_export *peer);
void fabric_heap_unmap(void *base, uint64_t bytes);

#endif
