/* SPDX-License-Identifier: Apache-2.0 */
/* The variables of NCCL EP, read when a group is created. Those that mean something here act; the others are accepted,
 * and the log says that they do nothing. */
#include "nccl_ep/environment.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "util/log.h"

/* Also what Python packages look for in the library. */
static const char banner[] = "NCCL EP version 0.2.0+cuda13.0 (EPX)";

static const struct {
    const char *name, *meaning;
    int acts;
} variables[] = {
    {"NCCL_EP_DEBUG", "banner at load; why zero-copy was taken or not, for each call", 1},
    {"NCCL_EP_ENV_VERBOSE", "rank 0 prints this list", 1},
    {"NCCL_EP_TIMEOUT_MS", "deadline of waits; comes before timeout_ns", 1},
    {"NCCL_EP_HT_EM_LOCAL_DUP", "not together with _NVLINK_DUP; EPX has one way to make copies", 1},
    {"NCCL_EP_HT_EM_NVLINK_DUP", "not together with _LOCAL_DUP; EPX has one way to make copies", 1},
    {"NCCL_EP_COMM_SMS", "SMs of a GPU, if max_num_sms is not set", 1},
    {"NCCL_EP_DISPATCH_SMS", "those of dispatch, if dispatch_num_sms is not set", 1},
    {"NCCL_EP_COMBINE_SMS", "those of combine, if combine_num_sms is not set", 1},
    {"NCCL_EP_DISABLE_GUARD", "no effect: neighbouring operations need no barrier", 0},
    {"NCCL_EP_SHUFFLE_SMS", "no effect: no kernel of its own", 0},
    {"NCCL_EP_PREPROCESS_NUM_SMS", "no effect: no kernel of its own", 0},
    {"NCCL_EP_HT_EM_AG_SCAN_MODE", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_HT_EM_COUNT_UNFUSED", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_HT_EM_PULL_PUSH", "no effect: EPX chooses for each tensor", 0},
    {"NCCL_EP_HT_UNFUSED_SYNC", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_HT_GIN_CTXS_PER_COMM", "no effect: EPX's networks have no contexts of NCCL", 0},
    {"NCCL_EP_HT_GIN_MAX_CONTEXTS", "no effect: EPX's networks have no contexts of NCCL", 0},
    {"NCCL_EP_TOKENS_PER_CHUNK", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_DISPATCH_NUM_STAGES", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_DISPATCH_NUM_PIPELINES", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_COMBINE_NUM_STAGES_G2S", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_COMBINE_NUM_STAGES_S2G", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_COMBINE_NUM_PIPELINES", "no effect: kernel shapes are EPX's", 0},
    {"NCCL_EP_HOME", "no effect: nothing is compiled at run time", 0},
    {"NCCL_HOME", "no effect: nothing is compiled at run time", 0},
    {"CUDA_HOME", "no effect: nothing is compiled at run time", 0},
    {"CUDA_PATH", "no effect: nothing is compiled at run time", 0},
    {"NVCC", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_SOURCE_DIR", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_BUILD_INCLUDE_DIR", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_CUDA_INCLUDE_DIR", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_NVCC", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_CACHE_DIR", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_JIT_LOG", "no effect: nothing is compiled at run time", 0},
    {"NCCL_EP_BENCH_VERBOSE_VALIDATION", "no effect on the library: epx ep-bench prints the worst element", 0},
};

static const char *value_of(const char *name)
{
    const char *text = getenv(name);

    return text && text[0] ? text : NULL;
}

static int flag(const char *name)
{
    const char *text = value_of(name);

    if (!text || !strcmp(text, "0") || !strcasecmp(text, "off") || !strcasecmp(text, "false"))
        return 0;
    if (!strcmp(text, "1") || !strcasecmp(text, "on") || !strcasecmp(text, "true"))
        return 1;
    log_line(LOG_WARN, "%s is \"%s\", expected 1, on, true, 0, off or false: ignored", name, text);
    return 0;
}

/* 0: not set, or not from 1 to most. */
static int number(const char *name, int most)
{
    const char *text = value_of(name);
    char *end;
    long value;

    if (!text)
        return 0;
    errno = 0;
    value = strtol(text, &end, 10);
    if (!errno && !*end && value > 0 && value <= most)
        return (int)value;
    log_line(LOG_WARN, "%s is \"%s\", expected 1 to %d: ignored", name, text, most);
    return 0;
}

static void tell(int verbose)
{
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        const char *text = value_of(variables[i].name);
        if (verbose)
            fprintf(stderr, "%s=%s (%s)\n", variables[i].name, text ? text : "", variables[i].meaning);
        else if (text && !variables[i].acts)
            log_line(LOG_INFO, "%s=%s: %s", variables[i].name, text, variables[i].meaning);
    }
}

void environment_read(struct environment *env, int rank)
{
    env->debug = flag("NCCL_EP_DEBUG");
    env->verbose = flag("NCCL_EP_ENV_VERBOSE");
    env->local_dup = flag("NCCL_EP_HT_EM_LOCAL_DUP");
    env->nvlink_dup = flag("NCCL_EP_HT_EM_NVLINK_DUP");
    env->timeout_ms = number("NCCL_EP_TIMEOUT_MS", INT_MAX);
    env->comm_sms = number("NCCL_EP_COMM_SMS", 1 << 16);
    env->dispatch_sms = number("NCCL_EP_DISPATCH_SMS", 1 << 16);
    env->combine_sms = number("NCCL_EP_COMBINE_SMS", 1 << 16);
    if (env->timeout_ms && rank == 0)
        fprintf(stderr, "NCCL EP: timeout %d ms (NCCL_EP_TIMEOUT_MS)\n", env->timeout_ms);
    if (rank == 0)
        tell(env->verbose);
}

__attribute__((constructor)) static void greet(void)
{
    if (value_of("NCCL_EP_DEBUG") && flag("NCCL_EP_DEBUG"))
        fprintf(stderr, "%s\n", banner);
}
