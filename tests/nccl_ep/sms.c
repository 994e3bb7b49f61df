/* SPDX-License-Identifier: Apache-2.0 */
/* Limits of SMs on a GPU with 132 that this program plays: agents of the group, and the limits of its calls. */
#include <stdarg.h>
#include <stdio.h>

#include "nccl_ep/compat.h"
#include "util/log.h"

enum { SMS = 132, WARPS = 16 };

int gpu_multiprocessors(int device_index)
{
    (void)device_index;
    return SMS;
}

ncclResult_t compat_fail(ncclResult_t result, const char *format, ...)
{
    (void)format;
    return result;
}

static int warned;

void log_line(enum log_level level, const char *format, ...)
{
    (void)format;
    warned += level == LOG_WARN;
}

static const struct {
    int low_latency;
    unsigned int max, dispatch, combine;    /* of the configuration */
    int env_max, env_dispatch, env_combine; /* of the environment */
    ncclResult_t result;
    int agents, dispatch_sms, combine_sms, warned;
} cases[] = {
    {0, 0, 0, 0, 0, 0, 0, ncclSuccess, 0, 0, 0, 0},
    {0, 20, 0, 0, 0, 0, 0, ncclSuccess, 20 * WARPS, 20, 20, 0},
    {0, 20, 8, 0, 0, 0, 0, ncclSuccess, 20 * WARPS, 8, 20, 0},
    {0, 4, 8, 24, 0, 0, 0, ncclSuccess, 24 * WARPS, 8, 24, 0},
    {0, 0, 8, 0, 0, 0, 0, ncclSuccess, 0, 8, 0, 0}, /* combine has no limit */
    {0, 0, 0, 0, 16, 4, 0, ncclSuccess, 16 * WARPS, 4, 16, 0},
    {0, 20, 8, 12, 16, 4, 6, ncclSuccess, 12 * WARPS, 8, 12, 0}, /* the configuration comes first */
    {0, 0, 0, 0, SMS + 1, 0, 0, ncclSuccess, 0, 0, 0, 1},
    {0, SMS, 0, 0, 0, 0, 0, ncclSuccess, 1024, SMS, SMS, 0}, /* more agents than a group has */
    {1, 20, 8, 0, 0, 0, 0, ncclSuccess, 8 * WARPS, 8, 20, 0},
    {1, 0, 0, 6, 0, 0, 0, ncclSuccess, 6 * WARPS, 0, 6, 0},
    {0, SMS + 1, 0, 0, 0, 0, 0, ncclInvalidUsage, 0, 0, 0, 0},
    {0, 0, SMS + 1, 0, 0, 0, 0, ncclInvalidUsage, 0, 0, 0, 0},
    {0, 0, 0, SMS + 1, 0, 0, 0, ncclInvalidUsage, 0, 0, 0, 0},
};

static int test_limits(int i)
{
    struct ncclEpGroup group = {.low_latency = cases[i].low_latency};
    epx_group_config out = {.num_agents = 0};

    group.config.max_num_sms = cases[i].max;
    group.config.dispatch_num_sms = cases[i].dispatch;
    group.config.combine_num_sms = cases[i].combine;
    group.env.comm_sms = cases[i].env_max;
    group.env.dispatch_sms = cases[i].env_dispatch;
    group.env.combine_sms = cases[i].env_combine;
    warned = 0;
    const ncclResult_t result = sms_limit(&group, 1, &out);
    if (result == cases[i].result && out.num_agents == cases[i].agents && group.dispatch_sms == cases[i].dispatch_sms &&
        group.combine_sms == cases[i].combine_sms && warned == cases[i].warned)
        return 0;
    fprintf(stderr, "nccl_ep sms: case %d: got %d, %d agents, %d and %d SMs, %d warnings\n", i, (int)result,
            out.num_agents, group.dispatch_sms, group.combine_sms, warned);
    return 1;
}

int main(void)
{
    struct ncclEpGroup group = {.config.max_num_sms = 8};
    epx_group_config out = {.num_agents = 0};
    int failed = sms_limit(&group, 0, &out) != ncclSuccess || out.num_agents || group.dispatch_sms; /* no GPU */

    for (int i = 0; i < (int)(sizeof(cases) / sizeof(cases[0])); i++)
        failed |= test_limits(i);
    printf("nccl_ep sms: %s\n", failed ? "FAILED" : "ok");
    return failed;
}
