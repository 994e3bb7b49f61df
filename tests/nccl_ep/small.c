/* SPDX-License-Identifier: Apache-2.0 */
#include "small.h"

#include <string.h>

ncclEpGroupConfig_t small_config(ncclEpAlgorithm_t algorithm, unsigned int max_recv)
{
    ncclEpGroupConfig_t c = NCCL_EP_GROUP_CONFIG_INIT;

    c.algorithm = algorithm;
    c.num_experts = 2u * (unsigned int)world.nranks;
    c.max_dispatch_tokens_per_rank = SMALL_TOKENS;
    c.max_recv_tokens_per_rank = max_recv;
    c.max_token_bytes = SMALL_HIDDEN * 2;
    return c;
}

float small_value(int rank, int token)
{
    return (float)(4 * rank + token + 1);
}

static int open_received(struct small *s, struct tensor_pair *pair, epx_dtype dtype, int64_t last, enum memory memory)
{
    const int64_t R = world.nranks;

    if (s->algorithm == HT)
        return tensor_pair_open(pair, s->group, memory, dtype, last ? 2 : 1, s->rows, last, 0);
    return s->layout == EXPERT_MAJOR
               ? tensor_pair_open(pair, s->group, memory, dtype, 3, s->local, R * SMALL_TOKENS, last)
               : tensor_pair_open(pair, s->group, memory, dtype, 3, R, SMALL_TOKENS, last);
}

static int open_tensors(struct small *s, enum memory memory)
{
    const int64_t K = s->topk, B = SMALL_TOKENS, major = s->layout == EXPERT_MAJOR;
    ncclEpGroup_t g = s->group;

    if (tensor_pair_open(&s->idx, g, PLAIN, EPX_INT64, 2, B, K, 0) ||
        tensor_pair_open(&s->tokens, g, PLAIN, EPX_BF16, 2, B, SMALL_HIDDEN, 0) ||
        tensor_pair_open(&s->weights, g, PLAIN, EPX_FP32, 2, B, K, 0) ||
        tensor_pair_open(&s->counts, g, PLAIN, EPX_INT32, 1, s->local, 0, 0) ||
        tensor_pair_open(&s->offsets, g, PLAIN, EPX_INT32, 1, s->local, 0, 0) ||
        tensor_pair_open(&s->total, g, PLAIN, EPX_INT32, 1, 1, 0, 0) ||
        tensor_pair_open(&s->rank_counts, g, PLAIN, EPX_INT32, 1, world.nranks, 0, 0) ||
        tensor_pair_open(&s->back, g, PLAIN, EPX_BF16, 2, B, SMALL_HIDDEN, 0) ||
        tensor_pair_open(&s->back_weights, g, PLAIN, EPX_FP32, 2, B, K, 0) ||
        open_received(s, &s->out, EPX_BF16, SMALL_HIDDEN, memory))
        return -1;
    if (s->algorithm == LL && major)
        return 0;
    if (open_received(s, &s->out_weights, EPX_FP32, major ? 0 : K, PLAIN))
        return -1;
    return major ? 0 : open_received(s, &s->out_idx, s->algorithm == LL ? EPX_INT32 : EPX_INT64, K, PLAIN);
}

int small_open(struct small *s, const ncclEpGroupConfig_t *config, ncclEpLayout_t layout, int alignment, int topk,
               int64_t rows, enum memory memory)
{
    ncclEpHandleConfig_t handle = NCCL_EP_HANDLE_CONFIG_INIT;

    memset(s, 0, sizeof(*s));
    s->algorithm = config->algorithm;
    s->layout = layout;
    s->topk = topk;
    s->experts = (int)config->num_experts;
    s->local = s->experts / world.nranks;
    s->rows = rows;
    handle.dispatch_output_per_expert_alignment = (size_t)alignment;
    TRY(ncclEpCreateGroup(&s->group, world.comm, config));
    TRY(ncclEpInitHandle(&s->handle, s->group, layout, &handle, topk, NULL));
    if (open_tensors(s, memory))
        return -1;
    for (int t = 0; t < SMALL_TOKENS; t++) {
        for (int h = 0; h < SMALL_HIDDEN; h++)
            oracle_from_float(EPX_BF16, small_value(world.rank, t),
                              (char *)s->tokens.view.data + 2 * (t * SMALL_HIDDEN + h));
        for (int k = 0; k < topk; k++)
            ((float *)s->weights.view.data)[t * topk + k] = 1.0f / (float)(1 + k + t);
    }
    small_calls(s, 0);
    return tensor_pair_put(&s->tokens) || tensor_pair_put(&s->weights) ? -1 : 0;
}

int small_close(struct small *s)
{
    struct tensor_pair *const pairs[] = {&s->idx,         &s->tokens,      &s->weights, &s->out,
                                         &s->out_weights, &s->out_idx,     &s->counts,  &s->offsets,
                                         &s->total,       &s->rank_counts, &s->back,    &s->back_weights};

    TRY(ncclEpHandleDestroy(s->handle));
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (tensor_pair_close(pairs[i]))
            return -1;
    TRY(ncclEpGroupDestroy(s->group));
    return 0;
}

void small_calls(struct small *s, int backward)
{
    struct nccl_calls *c = &s->calls;
    const int low = s->algorithm == LL, major = s->layout == EXPERT_MAJOR;

    *c = nccl_calls_none();
    c->in.tokens = s->tokens.tensor;
    c->out.tokens = s->out.tensor;
    c->cin.tokens = s->out.tensor;
    c->cout.tokens = s->back.tensor;
    c->config.pass_direction = c->cconfig.pass_direction = backward ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS;
    if (!backward && s->out_weights.tensor) {
        c->in.topk_weights = s->weights.tensor;
        c->out.topk_weights = s->out_weights.tensor;
        c->out.topk_idx = s->out_idx.tensor;
    }
    if (backward) {
        c->cin.topk_weights = s->out_weights.tensor;
        c->cout.topk_weights = s->back_weights.tensor;
    }
    if (low && major)
        c->cout.topk_weights = s->weights.tensor;
    if (!low || major)
        c->info.expert_counters = s->counts.tensor;
    if (low && !major)
        c->info.src_rank_counters = s->rank_counts.tensor;
    if (!low)
        c->info.recv_total_counter = s->total.tensor;
    if (!low && major)
        c->info.expert_offsets = s->offsets.tensor;
}

static int set_tokens(struct small *s, int tokens)
{
    struct tensor_pair *const pairs[] = {&s->idx, &s->tokens, &s->weights, &s->back, &s->back_weights};

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        pairs[i]->tensor->sizes[0] = (size_t)tokens;
    return 0;
}

int small_route(struct small *s, const int *ids, int tokens)
{
    set_tokens(s, tokens);
    for (int i = 0; i < tokens * s->topk; i++)
        ((int64_t *)s->idx.view.data)[i] = ids[i];
    if (tensor_pair_put(&s->idx))
        return -1;
    TRY(ncclEpUpdateHandle(s->handle, s->idx.tensor, &s->calls.info, world.stream));
    return tensor_pair_get(&s->counts) || tensor_pair_get(&s->offsets) || tensor_pair_get(&s->total) ? -1 : 0;
}

static int fetch(struct small *s)
{
    struct tensor_pair *const pairs[] = {&s->out,     &s->out_weights, &s->out_idx,    &s->counts,
                                         &s->offsets, &s->total,       &s->rank_counts};

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        if (pairs[i]->tensor && tensor_pair_get(pairs[i]))
            return -1;
    return 0;
}

int small_dispatch(struct small *s, int byte)
{
    if (tensor_pair_fill(&s->out, byte) || tensor_pair_fill(&s->out_weights, byte) ||
        tensor_pair_fill(&s->out_idx, byte))
        return -1;
    TRY(ncclEpDispatch(s->handle, &s->calls.in, &s->calls.out, &s->calls.info, &s->calls.config, world.stream));
    TRY(ncclEpComplete(s->handle, NULL, world.stream));
    return fetch(s);
}

int small_combine(struct small *s, int byte)
{
    if (tensor_pair_fill(&s->back, byte))
        return -1;
    TRY(ncclEpCombine(s->handle, &s->calls.cin, &s->calls.cout, &s->calls.cconfig, world.stream));
    TRY(ncclEpComplete(s->handle, NULL, world.stream));
    return tensor_pair_get(&s->back) || tensor_pair_get(&s->back_weights) ? -1 : 0;
}

int small_there_and_back(struct small *s)
{
    if (small_dispatch(s, 0x5a) || small_combine(s, 0))
        return -1;
    for (int t = 0; t < SMALL_TOKENS; t++)
        CHECK(small_row(&s->back, t) == small_value(world.rank, t));
    return 0;
}

float small_row(const struct tensor_pair *pair, int64_t row)
{
    const char *data = (const char *)pair->view.data + row * SMALL_HIDDEN * 2;
    const float first = oracle_to_float(EPX_BF16, data);

    for (int h = 1; h < SMALL_HIDDEN; h++)
        if (oracle_to_float(EPX_BF16, data + 2 * h) != first)
            return -1;
    return first;
}

int64_t small_count(const struct tensor_pair *pair, int64_t i)
{
    return pair->view.dtype == EPX_INT64 ? ((const int64_t *)pair->view.data)[i]
                                         : ((const int32_t *)pair->view.data)[i];
}

int small_row_is(const struct tensor_pair *pair, int64_t row, int byte)
{
    const int64_t rows = pair->view.ndim == 3 ? pair->view.shape[0] * pair->view.shape[1] : pair->view.shape[0];
    const size_t bytes = pair->bytes / (size_t)rows;
    const unsigned char *data = (const unsigned char *)pair->view.data + (size_t)row * bytes;

    for (size_t i = 0; i < bytes; i++)
        if (data[i] != byte)
            return 0;
    return 1;
}
