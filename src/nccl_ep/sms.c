/* SPDX-License-Identifier: Apache-2.0 */
/* SMs that a group may use: max_num_sms, dispatch_num_sms, combine_num_sms, and the variables for these. */
#include "nccl_ep/compat.h"
#include "util/log.h"

enum { WARPS_PER_MULTIPROCESSOR = 16, MOST_AGENTS = 1024 };

void warn_unused(const char *field, unsigned int value)
{
    if (value != NCCL_EP_AUTO)
        log_line(LOG_INFO, "%s: config.%s is %u: no effect here", "ncclEpCreateGroup", field, value);
}

/* One of the three limits: the configuration's, or the variable's where that has none. `most`: SMs of the GPU; 0: not
 * known. */
static ncclResult_t take_sms(const char *field, unsigned int given, const char *variable, int from_env, int most,
                             unsigned int *sms)
{
    if (most && given > (unsigned int)most)
        return compat_fail(ncclInvalidUsage, "ncclEpCreateGroup: config.%s: the GPU has %d, got %u", field, most,
                           given);
    *sms = given;
    if (!given && from_env && most && from_env > most)
        log_line(LOG_WARN, "%s is %d, the GPU has %d: ignored", variable, from_env, most);
    else if (!given)
        *sms = (unsigned int)from_env;
    return ncclSuccess;
}

/* Of two limits; 0 is none. */
static unsigned int smaller_limit(unsigned int a, unsigned int b)
{
    return !a || (b && b < a) ? b : a;
}

static unsigned int larger_limit(unsigned int a, unsigned int b)
{
    return !a || !b ? 0 : a > b ? a : b;
}

/* SMs are GPUs': a limit there becomes agents; on the CPU device it has no meaning. Low latency's operations run with
 * all agents of the group: the smaller limit is that of both. */
ncclResult_t sms_limit(struct ncclEpGroup *group, int gpu, epx_group_config *out)
{
    const ncclEpGroupConfig_t *c = &group->config;
    const struct environment *env = &group->env;
    const int most = gpu ? gpu_multiprocessors(out->device_index) : 0;
    unsigned int all = 0, dispatch = 0, combine = 0, sms;
    ncclResult_t result;

    if (!gpu) {
        warn_unused("max_num_sms", c->max_num_sms);
        warn_unused("dispatch_num_sms", c->dispatch_num_sms);
        warn_unused("combine_num_sms", c->combine_num_sms);
        return ncclSuccess;
    }
    result = take_sms("max_num_sms", c->max_num_sms, "NCCL_EP_COMM_SMS", env->comm_sms, most, &all);
    if (result == ncclSuccess)
        result = take_sms("dispatch_num_sms", c->dispatch_num_sms, "NCCL_EP_DISPATCH_SMS", env->dispatch_sms, most,
                          &dispatch);
    if (result == ncclSuccess)
        result =
            take_sms("combine_num_sms", c->combine_num_sms, "NCCL_EP_COMBINE_SMS", env->combine_sms, most, &combine);
    if (result != ncclSuccess)
        return result;
    dispatch = dispatch ? dispatch : all;
    combine = combine ? combine : all;
    group->dispatch_sms = (int)dispatch;
    group->combine_sms = (int)combine;
    sms = group->low_latency ? smaller_limit(dispatch, combine) : larger_limit(dispatch, combine);
    if (sms)
        out->num_agents =
            sms > MOST_AGENTS / WARPS_PER_MULTIPROCESSOR ? MOST_AGENTS : (int32_t)sms * WARPS_PER_MULTIPROCESSOR;
    return ncclSuccess;
}
