/* SPDX-License-Identifier: Apache-2.0 */
/* Groups, their masks and errors. */
#include "nccl_ep/compat.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "nccl_ep/driver.h"
#include "util/clock.h"
#include "util/env.h"
#include "util/log.h"

static const char create[] = "ncclEpCreateGroup";

enum { GPU_ALLOC_BYTES = 1 << 20 };

/* ---- What a configuration comes to ------------------------------------------------------------------------------- */

/* Milliseconds, 0 = EPX's default. */
static int timeout_of(uint64_t timeout_ns, const struct environment *env)
{
    const uint64_t ms = timeout_ns / 1000000u;

    if (env->timeout_ms)
        return env->timeout_ms;
    if (timeout_ns && !ms)
        return 1;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

static ncclResult_t check_ranges(const ncclEpGroupConfig_t *c)
{
    const struct {
        const char *field;
        unsigned int value, low, high;
    } ranges[] = {{"algorithm", c->algorithm, NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT},
                  {"num_experts", c->num_experts, 1, 1u << 20},
                  {"max_dispatch_tokens_per_rank", c->max_dispatch_tokens_per_rank, 1, 1u << 20},
                  {"max_recv_tokens_per_rank", c->max_recv_tokens_per_rank, 0, INT32_MAX},
                  {"max_token_bytes", c->max_token_bytes, 1, 1u << 24},
                  {"zero_copy", c->zero_copy, NCCL_EP_ZERO_COPY_AUTO, NCCL_EP_ZERO_COPY_ON},
                  {"overflow_policy", c->overflow_policy, NCCL_EP_OVERFLOW_AUTO, NCCL_EP_OVERFLOW_DROP}};

    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++)
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high)
            return compat_fail(ncclInvalidArgument, "%s: config.%s: expected %u to %u, got %u", create, ranges[i].field,
                               ranges[i].low, ranges[i].high, ranges[i].value);
    return ncclSuccess;
}

static ncclResult_t check_high_throughput(const ncclEpGroupConfig_t *c)
{
    const unsigned int T = c->max_recv_tokens_per_rank;

    if (c->max_token_bytes % 16)
        return compat_fail(ncclInvalidArgument, "%s: config.max_token_bytes: expected a multiple of 16, got %u", create,
                           c->max_token_bytes);
    if (T && T < c->max_dispatch_tokens_per_rank)
        return compat_fail(ncclInvalidArgument,
                           "%s: config.max_recv_tokens_per_rank: expected NCCL_EP_AUTO or at least "
                           "max_dispatch_tokens_per_rank = %u, got %u",
                           create, c->max_dispatch_tokens_per_rank, T);
    if (c->num_topk > c->num_experts)
        return compat_fail(ncclInvalidArgument, "%s: config.num_topk: expected at most num_experts = %u, got %u",
                           create, c->num_experts, c->num_topk);
    if (!T && c->overflow_policy == NCCL_EP_OVERFLOW_DROP)
        return compat_fail(ncclInvalidUsage,
                           "%s: config.overflow_policy: DROP expects max_recv_tokens_per_rank, got NCCL_EP_AUTO",
                           create);
    return ncclSuccess;
}

static ncclResult_t check_config(const ncclEpGroupConfig_t *c)
{
    ncclResult_t result = check_ranges(c);

    if (result == ncclSuccess && c->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT)
        result = check_high_throughput(c);
    if (result != ncclSuccess)
        return result;
    if (!c->alloc.alloc_fn != !c->alloc.free_fn)
        return compat_fail(ncclInvalidUsage,
                           "%s: config.alloc: expected both of alloc_fn and free_fn or neither, got %s", create,
                           c->alloc.alloc_fn ? "alloc_fn alone" : "free_fn alone");
    return ncclSuccess;
}

/* What needs the number of ranks, or the environment. */
static ncclResult_t check_group(const struct ncclEpGroup *group)
{
    const ncclEpGroupConfig_t *c = &group->config;

    if (c->num_experts % (unsigned int)group->comm.nranks)
        return compat_fail(ncclInvalidArgument, "%s: config.num_experts: expected a multiple of the %d ranks, got %u",
                           create, group->comm.nranks, c->num_experts);
    if (group->env.local_dup && group->env.nvlink_dup)
        return compat_fail(ncclInvalidUsage,
                           "%s: NCCL_EP_HT_EM_LOCAL_DUP and NCCL_EP_HT_EM_NVLINK_DUP: expected at most one", create);
    if (c->version > NCCL_EP_API_VERSION && group->comm.rank == 0 && group->env.verbose)
        fprintf(stderr, "%s: config.version is %u, this library knows %d\n", create, c->version, NCCL_EP_API_VERSION);
    return ncclSuccess;
}

static int on_gpu(const epx_group_config *config)
{
    const char *device = env_string("EPX_DEVICE");

    return config->device == EPX_DEVICE_CUDA || (device && (!strcasecmp(device, "cuda") || !strcasecmp(device, "hip")));
}

static epx_group_config make_config(const ncclEpGroupConfig_t *c, const struct comm *comm, int max_topk)
{
    epx_group_config out = EPX_GROUP_CONFIG_INIT;

    /* A communicator of NCCL belongs to a GPU, and EPX_DEVICE may override the device; with a stand-in only EPX_DEVICE
     * says which device it is. */
    out.device = comm->real && !env_string("EPX_DEVICE") ? EPX_DEVICE_CUDA : EPX_DEVICE_AUTO;
    out.device_index = comm->device_index;
    out.modes = c->algorithm == NCCL_EP_ALGO_LOW_LATENCY ? EPX_LOW_LATENCY : EPX_HIGH_THROUGHPUT;
    out.num_experts = (int32_t)c->num_experts;
    out.max_tokens_per_rank = (int32_t)c->max_dispatch_tokens_per_rank;
    out.max_hidden_bytes = (int32_t)((c->max_token_bytes + 15) / 16 * 16);
    out.max_topk = max_topk;
    if (out.modes == EPX_HIGH_THROUGHPUT)
        out.max_recv_tokens = (int32_t)c->max_recv_tokens_per_rank;
    if (c->num_topk) /* without a number of rows, there is room for the most that such handles receive */
        out.layouts = EPX_LAYOUT_BIT(EPX_FLAT) | EPX_LAYOUT_BIT(EPX_EXPERT_MAJOR);
    out.enable_mask = c->enable_mask != 0;
    out.timeout_ms = comm->timeout_ms;
    /* For ncclEpxMemAlloc alone: of a GPU's memory no more than was asked for. */
    if (on_gpu(&out) && !env_string("EPX_ALLOC_BYTES"))
        out.alloc_bytes = GPU_ALLOC_BYTES;
    return out;
}

/* EPX asks for memory of one rank with the group as context. */
static int device_alloc(void **ptr, size_t bytes, void *context)
{
    const ncclEpAllocConfig_t *alloc = &((const struct ncclEpGroup *)context)->config.alloc;

    return (int)alloc->alloc_fn(ptr, bytes, alloc->context);
}

static int device_free(void *ptr, void *context)
{
    const ncclEpAllocConfig_t *alloc = &((const struct ncclEpGroup *)context)->config.alloc;

    return (int)alloc->free_fn(ptr, alloc->context);
}

/* EPX allocates what it needs. A size that no layout fits is refused where a layout is asked for (ncclEpInitHandle). */
static void tell_buffer(const ncclEpGroupConfig_t *c, const epx_group_config *config, int nranks)
{
    epx_memory_info info = EPX_MEMORY_INFO_INIT;

    if (c->rdma_buffer_size != NCCL_EP_AUTO && epx_group_memory(config, nranks, &info) == EPX_OK)
        log_line(LOG_INFO, "%s: config.rdma_buffer_size is %lu: EPX takes %llu bytes here", create, c->rdma_buffer_size,
                 (unsigned long long)(config->modes == EPX_LOW_LATENCY ? info.low_latency_bytes
                                                                       : info.high_throughput_bytes));
}

/* ---- Creation and destruction ------------------------------------------------------------------------------------ */

static ncclResult_t open_group(struct ncclEpGroup *group)
{
    const ncclEpGroupConfig_t *config = &group->config;
    epx_bootstrap bootstrap = EPX_BOOTSTRAP_INIT;
    epx_group_info info = EPX_GROUP_INFO_INIT;
    epx_group_config c;
    ncclResult_t result = check_group(group);

    if (result != ncclSuccess)
        return result;
    group->low_latency = config->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    group->eager = !group->low_latency && config->max_recv_tokens_per_rank == NCCL_EP_AUTO;
    /* K is known with the first handle; a group must have room before. */
    group->max_topk = EPX_MAX_TOPK;
    if (!group->low_latency && config->num_topk && config->num_topk < EPX_MAX_TOPK)
        group->max_topk = (int)config->num_topk;
    warn_unused("num_qp_per_rank", config->num_qp_per_rank);
    warn_unused("num_channels", config->num_channels);
    c = make_config(config, &group->comm, group->max_topk);
    result = sms_limit(group, on_gpu(&c), &c);
    if (result != ncclSuccess)
        return result;
    tell_buffer(config, &c, group->comm.nranks);
    if (config->alloc.alloc_fn) {
        c.device_alloc = device_alloc;
        c.device_free = device_free;
        c.device_context = group;
    }
    bootstrap.rank = group->comm.rank;
    bootstrap.nranks = group->comm.nranks;
    bootstrap.allgather = comm_allgather;
    bootstrap.context = &group->comm;
    result = compat_result(epx_group_create(&group->group, &bootstrap, &c), create);
    if (result == ncclSuccess)
        result = compat_result(epx_group_query(group->group, &info), create);
    group->is_cpu = info.device == EPX_DEVICE_CPU;
    group->nodes = info.nnodes;
    group->timeout_ms = info.timeout_ms;
    group->nvfp4 = device_has_nvfp4(group->is_cpu, group->comm.device_index);
    return result;
}

ncclResult_t ncclEpCreateGroup(ncclEpGroup_t *ep_group, ncclComm_t comm, const ncclEpGroupConfig_t *config)
{
    struct ncclEpGroup *group;
    ncclEpGroupConfig_t own;
    ncclResult_t result;

    pointers_begin();
    result = pointer_need_result(create, "ep_group", ep_group, sizeof(*ep_group));
    if (result != ncclSuccess)
        return result;
    *ep_group = NULL;
    result = struct_need(create, "config", config, NCCL_EP_GROUP_CONFIG_V1_SIZE, &own, sizeof(own));
    if (result == ncclSuccess)
        result = check_config(&own);
    if (result != ncclSuccess)
        return result;
    group = calloc(1, sizeof(*group));
    if (!group)
        return compat_fail(ncclSystemError, "%s: no memory", create);
    group->device = streams_attach();
    group->config = own;
    result = comm_open(&group->comm, comm);
    if (result == ncclSuccess) {
        log_set_rank(group->comm.rank);
        environment_read(&group->env, group->comm.rank);
        group->comm.timeout_ms = timeout_of(own.timeout_ns, &group->env);
        result = open_group(group);
    }
    if (result != ncclSuccess) {
        if (group->group)
            (void)epx_group_destroy(group->group);
        free(group);
        return result;
    }
    group_list_add(group);
    *ep_group = group;
    return ncclSuccess;
}

ncclResult_t ncclEpGroupDestroy(ncclEpGroup_t ep_group)
{
    static const char call[] = "ncclEpGroupDestroy";
    ncclResult_t result = ep_group ? group_need(ep_group, call) : ncclSuccess;

    if (!ep_group)
        return ncclSuccess;
    if (result != ncclSuccess)
        return result;
    group_list_remove(ep_group);
    result = compat_result(epx_group_destroy(ep_group->group), call);
    if (result != ncclSuccess) {
        group_list_add(ep_group);
        return result;
    }
    while (ep_group->handles) {
        struct ncclEpHandle *handle = ep_group->handles;
        ep_group->handles = handle->next;
        free(handle);
    }
    streams_forget(ep_group);
    zero_copy_forget(ep_group, NULL);
    free(ep_group);
    return ncclSuccess;
}

/* ---- Masks and errors -------------------------------------------------------------------------------------------- */

/* The caller's own entry, behind the query, where later work of the stream finds it. Waits for the stream: on the CPU
 * the host stores it, and what captures would store it again with every launch. */
static ncclResult_t show_self_masked(struct ncclEpGroup *group, const char *call, int *mask_status, epx_stream stream)
{
    static const int masked = 0;
    int *own = mask_status + group->comm.rank;
    const struct driver *driver;
    ncclResult_t result = compat_result(epx_stream_sync(group->group, stream), call);

    if (result != ncclSuccess)
        return result;
    if (group->is_cpu) {
        *own = masked;
        return ncclSuccess;
    }
    driver = driver_open();
    if (driver && driver->copy_in((driver_address)(uintptr_t)own, &masked, sizeof(masked), stream) == DRIVER_SUCCESS)
        return ncclSuccess;
    return compat_fail(ncclSystemError, "%s: the CUDA driver cannot write mask_status", call);
}

/* A group with masks: of another these calls are refused before they look at anything. */
static ncclResult_t group_need_masks(const struct ncclEpGroup *group, const char *call)
{
    const ncclResult_t result = group_need(group, call);

    if (result == ncclSuccess && !group->config.enable_mask)
        return compat_fail(ncclInvalidUsage, "%s: expected a group with enable_mask", call);
    return result;
}

ncclResult_t ncclEpMaskQuery(ncclEpGroup_t ep_group, int *mask_status, cudaStream_t stream)
{
    static const char call[] = "ncclEpMaskQuery";
    epx_stream own;
    ncclResult_t result = group_need_masks(ep_group, call);

    if (result == ncclSuccess)
        result = compat_stream(ep_group, stream, call, &own);
    if (result == ncclSuccess && ep_group->is_cpu)
        result =
            pointer_need_result(call, "mask_status", mask_status, (size_t)ep_group->comm.nranks * sizeof(*mask_status));
    if (result == ncclSuccess)
        result = compat_result(epx_mask_query(ep_group->group, mask_status, own), call);
    return result == ncclSuccess && ep_group->self_masked ? show_self_masked(ep_group, call, mask_status, own) : result;
}

/* Of a caller that masks itself, too: EPX has no such rank, so the caller's own entry is kept here. */
static ncclResult_t update_masks(struct ncclEpGroup *group, const char *call, const int *mask, epx_stream stream)
{
    const size_t bytes = (size_t)group->comm.nranks * sizeof(*mask);
    const int self = group->comm.rank, masks_self = mask[self] == 0;
    int *others;
    ncclResult_t result;

    others = masks_self ? malloc(bytes) : NULL;
    if (masks_self && !others)
        return compat_fail(ncclSystemError, "%s: no memory", call);
    if (masks_self) {
        memcpy(others, mask, bytes);
        others[self] = 1;
    }
    result = compat_result(epx_mask_update(group->group, masks_self ? others : mask, stream), call);
    if (result == ncclSuccess)
        group->self_masked = masks_self;
    free(others);
    return result;
}

ncclResult_t ncclEpMaskUpdate(ncclEpGroup_t ep_group, const int *mask, cudaStream_t stream)
{
    static const char call[] = "ncclEpMaskUpdate";
    epx_stream own;
    ncclResult_t result = group_need_masks(ep_group, call);

    if (result == ncclSuccess)
        result = compat_stream(ep_group, stream, call, &own);
    if (result == ncclSuccess)
        result = pointer_need(call, "mask", mask, (size_t)ep_group->comm.nranks * sizeof(*mask));
    return result == ncclSuccess ? update_masks(ep_group, call, mask, own) : result;
}

static int is_left_out(struct ncclEpGroup *group)
{
    int left_out = 0;

    return group->config.enable_mask && epx_mask_left_out(group->group, &left_out) == EPX_OK && left_out;
}

/* Meets the ranks that are not masked; one that is masked returns at once. In this interface the masked ones take part
 * again from the next operation on: EPX needs to meet them first, and does it there (group_rejoin). */
ncclResult_t ncclEpMaskClean(ncclEpGroup_t ep_group, cudaStream_t stream)
{
    static const char call[] = "ncclEpMaskClean";
    epx_stream own;
    epx_status status;
    int failed;
    ncclResult_t result = group_need_masks(ep_group, call);

    if (result == ncclSuccess)
        result = compat_stream(ep_group, stream, call, &own);
    if (result != ncclSuccess)
        return result;
    if (ep_group->low_latency && !ep_group->handles_made)
        return compat_fail(ncclInvalidUsage, "%s: expected a group that has had a handle", call);
    if (is_left_out(ep_group) || (ep_group->low_latency && ep_group->self_masked)) {
        ep_group->rejoin = 1;
        ep_group->self_masked = 0;
        return ncclSuccess;
    }
    failed = epx_group_error(ep_group->group, NULL) != EPX_OK;
    status = ep_group->low_latency ? epx_mask_clean_active(ep_group->group, own) : epx_mask_clean(ep_group->group, own);
    /* This rank is one of the masked, and did not know; or the others are through, and meet in their next operation. */
    if (ep_group->low_latency && (status == EPX_ERR_PEER || status == EPX_ERR_MISMATCH))
        status = EPX_OK;
    result = compat_result(status, call);
    if (result == ncclSuccess) {
        ep_group->self_masked = 0;
        ep_group->rejoin = ep_group->low_latency;
        ep_group->error_kept |= failed; /* the call clears it; in this interface only ncclEpErrorClear does */
    }
    return result;
}

/* Routings of low latency are forgotten when ranks meet: these are the handles' last. */
static ncclResult_t route_again(struct ncclEpGroup *group, const char *call, epx_stream stream)
{
    for (struct ncclEpHandle *h = group->handles; h; h = h->next) {
        ncclResult_t result = h->topk.at
                                  ? compat_result(epx_handle_update(h->handle, &h->topk.storage, NULL, stream), call)
                                  : ncclSuccess;
        if (result != ncclSuccess)
            return result;
    }
    return ncclSuccess;
}

int group_waits_to_rejoin(struct ncclEpGroup *group)
{
    return group->config.enable_mask && group->low_latency &&
           (group->rejoin || group->self_masked || is_left_out(group));
}

ncclResult_t group_rejoin(struct ncclEpGroup *group, const char *call, cudaStream_t stream)
{
    const uint64_t start = clock_ns(), most = 4000000ull * (uint64_t)group->timeout_ms;
    const struct timespec pause = {.tv_nsec = 1000000};
    epx_status status;
    epx_stream own;
    ncclResult_t result;

    if (!group_waits_to_rejoin(group))
        return ncclSuccess;
    result = compat_stream(group, stream, call, &own);
    if (result != ncclSuccess)
        return result;
    /* The others may still be cleaning their masks without this rank. */
    while (((status = epx_mask_clean(group->group, own)) == EPX_ERR_MISMATCH || status == EPX_ERR_PEER) &&
           clock_ns() - start < most)
        nanosleep(&pause, NULL);
    result = compat_result(status, call);
    if (result != ncclSuccess)
        return result;
    group->rejoin = 0;
    group->self_masked = 0;
    return route_again(group, call, own);
}

static ncclResult_t get_error(struct ncclEpGroup *group, const char *call, int *error_out)
{
    epx_error_info info = EPX_ERROR_INFO_INIT;
    epx_status status;
    ncclResult_t result = pointer_need_result(call, "error_out", error_out, sizeof(*error_out));

    if (result != ncclSuccess)
        return result;
    status = group->rejoin && is_left_out(group) ? EPX_OK : epx_group_error(group->group, &info);
    *error_out = group->error_kept || status != EPX_OK;
    (void)compat_result(status, call); /* keeps the sentence */
    /* As operation_result(): a kernel has found that the T rows of the tensors are too few. */
    if (status == EPX_ERR_OVERFLOW && group_traps(group) &&
        info.seen == (int64_t)group->config.max_recv_tokens_per_rank)
        (void)epx_group_abort(group->group, EPX_ERR_OVERFLOW);
    return ncclSuccess;
}

static ncclResult_t clear_error(struct ncclEpGroup *group, const char *call)
{
    ncclResult_t result;

    if (is_left_out(group) || group->rejoin) {
        group->error_kept = 0;
        group->rejoin = 1; /* what is left to clear is cleared when all ranks meet */
        return ncclSuccess;
    }
    if (group->error_kept && epx_group_error(group->group, NULL) == EPX_OK) {
        group->error_kept = 0; /* the ranks have met since: nothing is left to clear with the others */
        return ncclSuccess;
    }
    result = compat_result(epx_group_error_clear(group->group), call);
    if (result == ncclSuccess)
        group->error_kept = 0;
    return result;
}

ncclResult_t ncclEpGetAsyncError(ncclEpGroup_t ep_group, int *error_out)
{
    static const char call[] = "ncclEpGetAsyncError";
    const ncclResult_t result = group_need_masks(ep_group, call);

    return result == ncclSuccess ? get_error(ep_group, call, error_out) : result;
}

ncclResult_t ncclEpErrorClear(ncclEpGroup_t ep_group)
{
    static const char call[] = "ncclEpErrorClear";
    const ncclResult_t result = group_need_masks(ep_group, call);

    return result == ncclSuccess ? clear_error(ep_group, call) : result;
}

ncclResult_t ncclEpxGetAsyncError(ncclEpGroup_t ep_group, int *error_out)
{
    static const char call[] = "ncclEpxGetAsyncError";
    const ncclResult_t result = group_need(ep_group, call);

    return result == ncclSuccess ? get_error(ep_group, call, error_out) : result;
}

ncclResult_t ncclEpxErrorClear(ncclEpGroup_t ep_group)
{
    static const char call[] = "ncclEpxErrorClear";
    const ncclResult_t result = group_need(ep_group, call);

    return result == ncclSuccess ? clear_error(ep_group, call) : result;
}

ncclResult_t ncclEpxSetTimeout(ncclEpGroup_t ep_group, uint64_t timeout_ns)
{
    static const char call[] = "ncclEpxSetTimeout";
    epx_group_info info = EPX_GROUP_INFO_INIT;
    ncclResult_t result = group_need(ep_group, call);

    if (result == ncclSuccess)
        result = compat_result(epx_group_set_timeout(ep_group->group, timeout_of(timeout_ns, &ep_group->env)), call);
    if (result == ncclSuccess)
        result = compat_result(epx_group_query(ep_group->group, &info), call);
    if (result == ncclSuccess)
        ep_group->timeout_ms = info.timeout_ms;
    return result;
}

/* ---- Memory that the node reaches -------------------------------------------------------------------------------- */

ncclResult_t ncclEpxMemAlloc(ncclEpGroup_t ep_group, size_t bytes, void **ptr)
{
    ncclResult_t result = group_need(ep_group, "ncclEpxMemAlloc");

    if (result == ncclSuccess)
        result = pointer_need_result("ncclEpxMemAlloc", "ptr", ptr, sizeof(*ptr));
    if (result == ncclSuccess)
        result = compat_result(epx_alloc(ep_group->group, bytes, ptr), "ncclEpxMemAlloc");
    if (result == ncclSuccess)
        zero_copy_add(ep_group, *ptr, bytes);
    return result;
}

ncclResult_t ncclEpxMemFree(ncclEpGroup_t ep_group, void *ptr)
{
    ncclResult_t result = group_need(ep_group, "ncclEpxMemFree");

    if (result == ncclSuccess)
        result = compat_result(epx_free(ep_group->group, ptr), "ncclEpxMemFree");
    if (result == ncclSuccess && ptr)
        zero_copy_forget(ep_group, ptr);
    return result;
}
