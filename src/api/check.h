/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of callers' tensors. Each message names the call, the argument, what was expected and what was given. */
#ifndef EPX_API_CHECK_H
#define EPX_API_CHECK_H

#include "epx/epx.h"

#define DTYPE_BIT(dtype) (1u << (dtype))
#define DTYPES_PAYLOAD (DTYPE_BIT(EPX_BF16) | DTYPE_BIT(EPX_FP16) | DTYPE_BIT(EPX_FP32))
#define DTYPES_INDEX (DTYPE_BIT(EPX_INT32) | DTYPE_BIT(EPX_INT64))
#define DTYPES_SCALE (DTYPE_BIT(EPX_FP32) | DTYPE_BIT(EPX_INT32))

enum strides {
    STRIDES_NONE, /* contiguous */
    STRIDES_ROWS, /* the last dimension is contiguous, rows do not overlap */
    STRIDES_ANY   /* positive */
};

struct want {
    const char *call, *name;
    unsigned dtypes; /* DTYPE_BITs */
    int ndim;
    int64_t shape[EPX_MAX_NDIM]; /* -1 = any */
    enum strides strides;
};

/* Checks `given` (not NULL) and fills *out with a copy whose strides are explicit. */
epx_status check_tensor(const epx_tensor *given, const struct want *want, epx_tensor *out);
/* The same, but NULL is fine: out->data is then NULL and *out otherwise zero. */
epx_status check_optional(const epx_tensor *given, const struct want *want, epx_tensor *out);
const char *dtype_name(int dtype);

#endif
