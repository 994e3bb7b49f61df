/* SPDX-License-Identifier: Apache-2.0 */
/* Lines between simulated ranks: what boot/line.h has over TCP. */
#ifndef EPX_SIM_LINE_H
#define EPX_SIM_LINE_H

#include "boot/line.h"

extern const struct line_ops sim_line_ops;

/* Before and after a run. deaths_seen: a dead rank's port is gone and its lines end; else it is only silent. */
void sim_lines_begin(int deaths_seen);
void sim_lines_end(void);

#endif
