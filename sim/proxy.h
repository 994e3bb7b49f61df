/* SPDX-License-Identifier: Apache-2.0 */
/* Proxies as tasks: each takes its turns (proxy_step), and parks when there is nothing to do. */
#ifndef EPX_SIM_PROXY_H
#define EPX_SIM_PROXY_H

#include "proxy/proxy.h"

extern const struct proxy_driver sim_proxy_driver;
/* Endpoint `index` of `rank` has something to poll. */
void sim_proxy_notify(int rank, int index);
/* Forgets those that were never stopped. */
void sim_proxy_reset(void);

#endif
