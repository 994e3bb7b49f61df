/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of whole calls: what each mode and layout expects of its tensors. */
#ifndef EPX_API_ARGS_H
#define EPX_API_ARGS_H

#include "modes/modes.h"

epx_status layout_tensors_check(struct epx_handle *handle, const epx_layout_info *info, const char *call,
                                struct layout_tensors *out);
/* Where the host can read the indices now (host memory, idle stream), looks for ids out of range; otherwise the kernel
 * finds them, drops them and reports. */
epx_status indices_check(struct epx_handle *handle, const epx_tensor *topk, epx_stream stream, const char *call);
epx_status dispatch_args_check(struct epx_handle *handle, const epx_dispatch_inputs *inputs,
                               const epx_dispatch_outputs *outputs, const epx_dispatch_config *config,
                               epx_stream stream, struct dispatch_args *args);
epx_status combine_args_check(struct epx_handle *handle, const epx_combine_inputs *inputs,
                              const epx_combine_outputs *outputs, const epx_combine_config *config, epx_stream stream,
                              struct combine_args *args);

/* The handle has a routing; one over memory of the caller's takes what is there, for as many tokens as `own` has
 * rows. */
epx_status routing_check(struct epx_handle *handle, const epx_tensor *own, epx_stream stream, const char *call);
/* Rows that a receive tensor must hold: EPX_ERR_OVERFLOW, with a message that names the number. */
epx_status need_rows(const char *call, const char *name, int64_t given, int64_t needed, const char *why);
/* The row size of a payload: a multiple of 16 bytes, within the group's limit as it travels (`wire`: cast to that). */
epx_status need_row_bytes(struct epx_handle *handle, const char *call, const char *name, const epx_tensor *t,
                          const epx_tensor *wire);

#endif
