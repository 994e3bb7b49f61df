/* SPDX-License-Identifier: Apache-2.0 */
/* Where tokens would go, from the host's side; the kernel is kernel/layout.h. */
#include <string.h>

#include "group/launch.h"
#include "modes/modes.h"

#define LAYOUT_PAIRS 128 /* (token, k) pairs that are worth an agent */

epx_status dispatch_layout(struct epx_group *group, const epx_tensor *topk, const struct layout_results *results,
                           struct device_stream *stream)
{
    const int64_t pairs = topk->shape[0] * topk->shape[1], wanted = (pairs + LAYOUT_PAIRS - 1) / LAYOUT_PAIRS;
    struct layout_count_params p;

    memset(&p, 0, sizeof(p));
    p.g = group->dev;
    p.route = make_route(topk);
    p.experts = group->set.experts;
    p.local_experts = group->set.local_experts;
    p.per_rank = results->per_rank;
    p.per_node = results->per_node;
    p.per_expert = results->per_expert;
    p.in_rank = results->in_rank;
    return launch_agents(group, stream, KERNEL_LAYOUT, &p, sizeof(p), wanted < 1 ? 1 : (int)wanted);
}
