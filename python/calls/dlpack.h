/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack 1.3's structs, as far as they are used: https://dmlc.github.io/dlpack. */
#ifndef CALLS_DLPACK_H
#define CALLS_DLPACK_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_ROCM = 10, DL_MAJOR = 1 };

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
};

/* The capsule torch.Tensor.__dlpack_c_exchange_api__, "dlpack_exchange_api". */
struct dl_exchange {
    struct {
        uint32_t major, minor;
        void *previous;
    } header;
    void *allocate, *managed_from, *managed_to;
    int (*tensor_from)(void *object, struct dl_tensor *tensor);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
};

_Static_assert(sizeof(struct dl_tensor) == 48, "DLTensor");

#endif
