/* SPDX-License-Identifier: Apache-2.0 */
/* Connections between simulated ranks: the interface of boot/conn.h without TCP. */
#ifndef EPX_SIM_CONN_H
#define EPX_SIM_CONN_H

#include "boot/conn.h"

extern const struct conn_ops sim_conn_ops;

/* Before and after a run. deaths_seen: the port and connections of a dead rank are closed; otherwise they only stop
 * responding. */
void sim_conns_begin(int deaths_seen);
void sim_conns_end(void);

#endif
