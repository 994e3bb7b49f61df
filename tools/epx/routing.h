/* SPDX-License-Identifier: Apache-2.0 */
/* --routing, as bench, sim and predict have it. */
#ifndef EPX_TOOLS_ROUTING_H
#define EPX_TOOLS_ROUTING_H

#include "options.h"

#define ROUTING_HELP \
    "which experts tokens choose: uniform, zipf, hot, or groups:\n4 of 8 groups of experts, then experts of these"

extern const struct option_choice routing_choices[]; /* enum workload_routing */

#endif
