/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of a GPU have to say for a trace (kernel/marks.h): its memory, and how it gets into the trace. */
#ifndef EPX_GROUP_MARKS_H
#define EPX_GROUP_MARKS_H

#include "group/objects.h"

/* If EPX_TRACE is set, or trace_switch() is on, and the device keeps marks: memory for them, and its clock. */
void group_marks_open(struct epx_group *group);
/* Adds to the trace what kernels marked since the last call. Streams must be idle. */
void group_marks_take(struct epx_group *group);
/* The last call of that, and the clock again. */
void group_marks_end(struct epx_group *group);
void group_marks_free(struct epx_group *group);

#endif
