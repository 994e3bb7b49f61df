/* SPDX-License-Identifier: Apache-2.0 */
#ifndef CALLS_DISPATCH_H
#define CALLS_DISPATCH_H

#include "calls.h"

/* The tokens of a dispatch, and their scales: `tensor` is NULL where there are none. */
struct payload {
    struct view tokens, scales;
    PyObject *pair[2]; /* references, if `x` was a pair */
};
int payload_read(PyObject *x, struct payload *payload);
void payload_end(struct payload *payload);

/* The routing of a handle, whose pool can transfer such rows; in the call. */
PyObject *routing_find(struct call *call, PyObject *handle, const struct view *rows);

#endif
