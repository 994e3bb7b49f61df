/* SPDX-License-Identifier: Apache-2.0 */
/* Quantisation recipes of dispatch: FWD moves any bytes with any scales; what each recipe refuses, before anything is
 * sent; zero_copy's demands. */
#include <string.h>

#include "small.h"

#define BAD ncclInvalidArgument
#define USAGE ncclInvalidUsage

enum { TOKEN_BYTES = 64, SCALE_BYTES = 32, ROW_BYTES = TOKEN_BYTES + SCALE_BYTES };

/* Tokens and scales as bytes; the descriptors say what they are. */
struct forward {
    struct small s;
    struct tensor_pair tokens, scales, out, out_scales;
    ncclDataType_t type, scale_type;
};

static size_t element(ncclDataType_t type)
{
    return type == ncclFloat32 ? 4 : type == ncclFloat16 || type == ncclBfloat16 ? 2 : 1;
}

static void describe(struct tensor_pair *pair, ncclDataType_t type, size_t bytes)
{
    pair->tensor->datatype = type;
    pair->tensor->sizes[pair->tensor->ndim - 1] = bytes / element(type);
}

static void reset_pass(struct forward *f, int backward)
{
    small_calls(&f->s, backward);
    describe(&f->tokens, f->type, TOKEN_BYTES);
    describe(&f->out, f->type, TOKEN_BYTES);
    describe(&f->scales, f->scale_type, SCALE_BYTES);
    describe(&f->out_scales, f->scale_type, SCALE_BYTES);
    f->s.calls.in.tokens = f->tokens.tensor;
    f->s.calls.in.scales = f->scales.tensor;
    f->s.calls.out.tokens = f->out.tensor;
    f->s.calls.out.scales = f->out_scales.tensor;
    f->s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
}

static void reset(struct forward *f)
{
    reset_pass(f, 0);
}

static unsigned char byte_of(int rank, int token, int i, int scale)
{
    return (unsigned char)(rank * 59 + token * 31 + i * 7 + scale * 101 + 1);
}

static int open_received(struct forward *f, struct tensor_pair *pair, int bytes, enum memory memory)
{
    const int64_t R = world.nranks, M = SMALL_TOKENS;
    ncclEpGroup_t g = f->s.group;

    if (f->s.algorithm == HT)
        return tensor_pair_open(pair, g, memory, EPX_UINT8, 2, f->s.rows, bytes, 0);
    return f->s.layout == EXPERT_MAJOR ? tensor_pair_open(pair, g, memory, EPX_UINT8, 3, 2, R * M, bytes)
                                       : tensor_pair_open(pair, g, memory, EPX_UINT8, 3, R, M, bytes);
}

static int forward_open(struct forward *f, ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout,
                        ncclEpZeroCopyMode_t zero_copy, enum memory tokens, enum memory scales, unsigned int rows)
{
    ncclEpGroupConfig_t config = small_config(algorithm, algorithm == HT ? rows : 0);

    memset(f, 0, sizeof(*f));
    config.max_token_bytes = ROW_BYTES;
    config.zero_copy = zero_copy;
    config.num_topk = algorithm == HT ? 2 : 0;
    f->type = ncclFloat8e4m3;
    f->scale_type = ncclUint8;
    if (small_open(&f->s, &config, layout, 4, 2, 64, PLAIN) ||
        tensor_pair_open(&f->tokens, f->s.group, tokens, EPX_UINT8, 2, SMALL_TOKENS, TOKEN_BYTES, 0) ||
        tensor_pair_open(&f->scales, f->s.group, scales, EPX_UINT8, 2, SMALL_TOKENS, SCALE_BYTES, 0) ||
        open_received(f, &f->out, TOKEN_BYTES, tokens) || open_received(f, &f->out_scales, SCALE_BYTES, scales))
        return -1;
    for (int t = 0; t < SMALL_TOKENS; t++) {
        for (int i = 0; i < TOKEN_BYTES; i++)
            ((unsigned char *)f->tokens.view.data)[t * TOKEN_BYTES + i] = byte_of(world.rank, t, i, 0);
        for (int i = 0; i < SCALE_BYTES; i++)
            ((unsigned char *)f->scales.view.data)[t * SCALE_BYTES + i] = byte_of(world.rank, t, i, 1);
    }
    reset(f);
    return tensor_pair_put(&f->tokens) || tensor_pair_put(&f->scales) ? -1 : 0;
}

static int forward_close(struct forward *f)
{
    return tensor_pair_close(&f->tokens) || tensor_pair_close(&f->scales) || tensor_pair_close(&f->out) ||
                   tensor_pair_close(&f->out_scales) || small_close(&f->s)
               ? -1
               : 0;
}

static ncclResult_t dispatch(struct forward *f)
{
    return ncclEpDispatch(f->s.handle, &f->s.calls.in, &f->s.calls.out, &f->s.calls.info, &f->s.calls.config,
                          world.stream);
}

/* Tokens 0..2 go to both experts of the next rank. */
static int forward_route(struct forward *f)
{
    const int to = 2 * ((world.rank + 1) % world.nranks), ids[] = {to, to + 1, to + 1, to, to, to + 1};

    f->tokens.tensor->sizes[0] = f->scales.tensor->sizes[0] = 3;
    return small_route(&f->s, ids, 3);
}

static int row_is(const struct forward *f, int64_t row, int rank, int token)
{
    for (int i = 0; i < TOKEN_BYTES; i++)
        CHECK(((unsigned char *)f->out.view.data)[row * TOKEN_BYTES + i] == byte_of(rank, token, i, 0));
    for (int i = 0; i < SCALE_BYTES; i++)
        CHECK(((unsigned char *)f->out_scales.view.data)[row * SCALE_BYTES + i] == byte_of(rank, token, i, 1));
    return 0;
}

/* What came: in each layout the three tokens of the rank before this one, in expert-major twice. */
static int forward_check(const struct forward *f)
{
    const int from = (world.rank + world.nranks - 1) % world.nranks;
    const int copies = f->s.layout == EXPERT_MAJOR ? 2 : 1;
    const int64_t zone = f->s.algorithm == HT ? 4 : (int64_t)world.nranks * SMALL_TOKENS;

    for (int c = 0; c < copies; c++)
        for (int t = 0; t < 3; t++)
            if (row_is(f, f->s.layout == RANK_MAJOR ? (int64_t)from * SMALL_TOKENS + t : c * zone + t, from, t))
                return -1;
    if (f->s.algorithm == HT && copies == 2) /* padding of both is zero */
        for (int c = 0; c < 2; c++)
            CHECK(small_row_is(&f->out, c * zone + 3, 0) && small_row_is(&f->out_scales, c * zone + 3, 0));
    return 0;
}

static int forward_round(struct forward *f)
{
    if (tensor_pair_fill(&f->out, 0xde) || tensor_pair_fill(&f->out_scales, 0xde))
        return -1;
    TRY(dispatch(f));
    return tensor_pair_get(&f->out) || tensor_pair_get(&f->out_scales) || forward_check(f) ? -1 : 0;
}

/* Bytes of all types arrive as they were sent, in high throughput's backward pass too. */
static int test_bytes(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout, unsigned int rows)
{
    static const ncclDataType_t scales[] = {ncclFloat32,    ncclFloat16,    ncclBfloat16,
                                            ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8};
    const ncclDataType_t tokens[] = {ncclFloat32,    ncclFloat16,    ncclBfloat16,
                                     ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2};
    struct forward f;

    if (forward_open(&f, algorithm, layout, NCCL_EP_ZERO_COPY_AUTO, PLAIN, PLAIN, rows) || forward_route(&f))
        return -1;
    for (int i = 0; i < 6; i++) {
        f.type = tokens[i];
        f.scale_type = scales[(i + 3) % 6];
        reset(&f);
        if (forward_round(&f))
            return -1;
        reset_pass(&f, algorithm == HT);
        if (algorithm == HT && forward_round(&f))
            return -1;
    }
    return forward_close(&f);
}

/* win_offset of each of the four tensors, where it is in a window, one byte off its alignment. */
static int refuse_offsets(struct forward *f)
{
    struct tensor_pair *const pairs[] = {&f->tokens, &f->scales, &f->out, &f->out_scales};

    for (int i = 0; i < 4; i++) {
        if (pairs[i]->memory != WINDOW)
            continue;
        pairs[i]->tensor->win_offset++;
        EXPECT(BAD, dispatch(f));
        CHECK(strstr(ncclEpxGetLastError(), "win_offset aligned to 16 bytes") != NULL);
        pairs[i]->tensor->data = pairs[i]->data; /* an address that is aligned does not help */
        EXPECT(BAD, dispatch(f));
        pairs[i]->tensor->data = NULL;
        pairs[i]->tensor->win_offset--;
    }
    return 0;
}

/* Windows for both, for one, for none: what each mode of zero_copy takes. */
static int test_windows(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout)
{
    struct forward f;

    for (int mode = NCCL_EP_ZERO_COPY_AUTO; mode <= NCCL_EP_ZERO_COPY_ON; mode++)
        for (int windows = 0; windows < 4; windows++) {
            const int on = mode == NCCL_EP_ZERO_COPY_ON, half = windows == 1 || windows == 2;
            int refused = algorithm == HT ? half || (on && !(windows & 1)) : on && (!windows || layout != RANK_MAJOR);
            if (forward_open(&f, algorithm, layout, (ncclEpZeroCopyMode_t)mode, windows & 1 ? WINDOW : PLAIN,
                             windows & 2 ? WINDOW : PLAIN, 64) ||
                forward_route(&f))
                return -1;
            if (algorithm == LL && on && world.ranks_per_node && world.ranks_per_node < world.nranks)
                refused = 1; /* one node only */
            if (refused)
                EXPECT(BAD, dispatch(&f));
            else if (forward_round(&f))
                return -1;
            if (refuse_offsets(&f) || forward_close(&f))
                return -1;
        }
    return 0;
}

#define REFUSED(change)                                              \
    do {                                                             \
        change;                                                      \
        EXPECT(BAD, dispatch(f));                                    \
        reset(f);                                                    \
        f->tokens.tensor->sizes[0] = f->scales.tensor->sizes[0] = 3; \
    } while (0)

/* Each of the four tensors, one byte off its alignment. */
static int refuse_unaligned(struct forward *f)
{
    struct tensor_pair *const pairs[] = {&f->tokens, &f->scales, &f->out, &f->out_scales};

    for (int i = 0; i < 4; i++) {
        pairs[i]->tensor->data = pairs[i]->data + 1;
        EXPECT(BAD, dispatch(f));
        pairs[i]->tensor->data = pairs[i]->data;
    }
    return 0;
}

/* Low latency: what is received has exactly the layout's extents, tokens and scales. */
static int refuse_extents(struct forward *f)
{
    struct tensor_pair *const pairs[] = {&f->out, &f->out_scales};

    for (int i = 0; i < 2; i++)
        for (int dimension = 0; dimension < 2; dimension++)
            for (int off = -1; off <= 1; off += 2) {
                pairs[i]->tensor->sizes[dimension] += (size_t)off;
                EXPECT(BAD, dispatch(f));
                CHECK(strstr(ncclEpxGetLastError(), i ? "outputs.scales: expected [" : "outputs.tokens: expected ["));
                pairs[i]->tensor->sizes[dimension] -= (size_t)off;
            }
    return 0;
}

static int test_forward_refused(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout)
{
    struct forward forward, *f = &forward;

    if (forward_open(f, algorithm, layout, NCCL_EP_ZERO_COPY_AUTO, PLAIN, PLAIN, 64) || forward_route(f))
        return -1;
    REFUSED(f->s.calls.in.scales = NULL);
    REFUSED(f->s.calls.out.scales = NULL);
    REFUSED(f->s.calls.config.round_scales = 1);
    REFUSED(f->s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_NONE);
    REFUSED(f->s.calls.config.quant_recipe = (ncclEpDispQuant_t)3);
    REFUSED(f->s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4);
    REFUSED(describe(&f->tokens, ncclUint8, TOKEN_BYTES); describe(&f->out, ncclUint8, TOKEN_BYTES));
    REFUSED(describe(&f->tokens, ncclInt32, TOKEN_BYTES));
    REFUSED(describe(&f->scales, ncclInt32, SCALE_BYTES); describe(&f->out_scales, ncclInt32, SCALE_BYTES));
    REFUSED(describe(&f->out, ncclFloat8e5m2, TOKEN_BYTES));
    REFUSED(describe(&f->out_scales, ncclFloat8e5m2, SCALE_BYTES));
    REFUSED(describe(&f->out, f->type, TOKEN_BYTES - 16));
    REFUSED(describe(&f->out_scales, f->scale_type, SCALE_BYTES - 16));
    REFUSED(describe(&f->tokens, f->type, 15); describe(&f->out, f->type, 15));
    REFUSED(describe(&f->scales, f->scale_type, 15); describe(&f->out_scales, f->scale_type, 15));
    REFUSED(describe(&f->scales, f->scale_type, 0); describe(&f->out_scales, f->scale_type, 0));
    REFUSED(describe(&f->tokens, f->type, TOKEN_BYTES + 16); describe(&f->out, f->type, TOKEN_BYTES + 16));
    REFUSED(f->scales.tensor->sizes[0] = 2);
    if (algorithm == HT)
        REFUSED(f->out_scales.tensor->sizes[0]--);
    f->out_scales.tensor->sizes[0] = (size_t)f->out_scales.view.shape[0];
    if (algorithm == LL && refuse_extents(f))
        return -1;
    if (refuse_unaligned(f) || forward_round(f)) /* nobody was left waiting */
        return -1;
    return forward_close(f);
}

/* NONE has no scales; combine takes none either, and says so before it asks for its output. */
static int test_none_refused(ncclEpAlgorithm_t algorithm, ncclEpLayout_t layout)
{
    struct forward forward, *f = &forward;
    const int low = algorithm == LL;

    if (forward_open(f, algorithm, layout, NCCL_EP_ZERO_COPY_AUTO, PLAIN, PLAIN, 64) || forward_route(f))
        return -1;
    small_calls(&f->s, 0);
    f->s.calls.in.scales = f->scales.tensor;
    EXPECT(BAD, dispatch(f));
    small_calls(&f->s, 0);
    f->s.calls.out.scales = f->out_scales.tensor;
    EXPECT(BAD, dispatch(f));
    small_calls(&f->s, 0);
    f->s.calls.cin.tokens = f->out.tensor; /* FP8 */
    f->s.calls.cout.tokens = NULL;
    EXPECT(BAD, ncclEpCombine(f->s.handle, &f->s.calls.cin, &f->s.calls.cout, NULL, world.stream));
    small_calls(&f->s, 0);
    f->s.calls.cin.scales = f->out_scales.tensor;
    EXPECT(BAD, ncclEpCombine(f->s.handle, &f->s.calls.cin, &f->s.calls.cout, NULL, world.stream));
    small_calls(&f->s, 0);
    f->s.calls.cconfig.quant_recipe = (ncclEpCombQuant_t)3;
    EXPECT(BAD, ncclEpCombine(f->s.handle, &f->s.calls.cin, &f->s.calls.cout, &f->s.calls.cconfig, world.stream));
    f->s.calls.cconfig.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4; /* high throughput has none */
    if (!low)
        EXPECT(USAGE, ncclEpCombine(f->s.handle, &f->s.calls.cin, &f->s.calls.cout, &f->s.calls.cconfig, world.stream));
    return forward_close(f);
}

/* F: version 1 has no recipes. FP8 with both scales is forwarded, without them refused; a longer config has one. */
static int test_version_1(void)
{
    ncclEpGroupConfig_t config = small_config(HT, 64);
    const int ids[] = {0};
    struct tensor_pair tokens = {0}, scales = {0}, out = {0}, out_scales = {0};
    struct small s;

    config.version = 1;
    config.max_token_bytes = 512;
    if (small_open(&s, &config, FLAT, 1, 1, 64, PLAIN) || small_route(&s, ids, 1) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_FP8_E4M3, 2, 1, 384, 0) ||
        tensor_pair_open(&scales, s.group, PLAIN, EPX_FP32, 2, 1, 3, 0) ||
        tensor_pair_open(&out, s.group, PLAIN, EPX_FP8_E4M3, 2, 64, 384, 0) ||
        tensor_pair_open(&out_scales, s.group, PLAIN, EPX_FP32, 2, 64, 3, 0) || tensor_pair_fill(&tokens, 0x31) ||
        tensor_pair_fill(&scales, 0x42))
        return -1;
    s.calls.in.tokens = tokens.tensor;
    s.calls.out.tokens = out.tensor;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream)); /* no scales */
    s.calls.in.scales = scales.tensor;
    s.calls.out.scales = out_scales.tensor;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream)); /* NONE */
    for (int i = 0; i < 2; i++) {
        tokens.tensor->datatype = out.tensor->datatype = i ? ncclFloat8e5m2 : ncclFloat8e4m3;
        s.calls.config.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
        if (tensor_pair_fill(&out, 0) || tensor_pair_fill(&out_scales, 0))
            return -1;
        TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, i ? NULL : &s.calls.config, world.stream));
        if (tensor_pair_get(&out) || tensor_pair_get(&out_scales))
            return -1;
        for (int row = 0; row < (world.rank ? 0 : world.nranks); row++)
            CHECK(small_row_is(&out, row, 0x31) && small_row_is(&out_scales, row, 0x42));
    }
    return tensor_pair_close(&tokens) || tensor_pair_close(&scales) || tensor_pair_close(&out) ||
                   tensor_pair_close(&out_scales) || small_close(&s)
               ? -1
               : 0;
}

/* F, low latency of version 1: bf16 with outputs.scales and no recipe is DS_FP8E3M4. */
static int version_1_casts(void)
{
    ncclEpGroupConfig_t config = small_config(LL, 0);
    const int ids[] = {0};
    struct tensor_pair tokens = {0}, out = {0}, scales = {0};
    struct small s;

    config.version = 1;
    config.max_token_bytes = 1024;
    if (small_open(&s, &config, RANK_MAJOR, 1, 1, 0, PLAIN) || small_route(&s, ids, 1) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_BF16, 2, 1, 512, 0) ||
        tensor_pair_open(&out, s.group, PLAIN, EPX_FP8_E4M3, 3, world.nranks, SMALL_TOKENS, 512) ||
        tensor_pair_open(&scales, s.group, PLAIN, EPX_FP32, 3, world.nranks, SMALL_TOKENS, 4) ||
        tensor_pair_fill(&tokens, 0))
        return -1;
    s.calls.in.tokens = tokens.tensor;
    s.calls.out.tokens = out.tensor;
    s.calls.out.scales = scales.tensor;
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, NULL, world.stream));
    if (tensor_pair_get(&scales))
        return -1;
    CHECK(world.rank || ((float *)scales.view.data)[0] == 1e-4f * (1.0f / 448.0f));
    return tensor_pair_close(&tokens) || tensor_pair_close(&out) || tensor_pair_close(&scales) || small_close(&s) ? -1
                                                                                                                  : 0;
}

/* DS_FP8E3M4: low latency, rows in 512s, and exactly H/128 float scales. layouts.c compares what it casts. */
static int test_fp8_refused(void)
{
    ncclEpGroupConfig_t config = small_config(LL, 0);
    const int ids[] = {0}, R = world.nranks;
    struct tensor_pair tokens = {0}, out = {0}, scales = {0};
    struct small s;

    config.max_token_bytes = 512 + 16; /* as it travels */
    if (small_open(&s, &config, RANK_MAJOR, 1, 1, 0, PLAIN) || small_route(&s, ids, 1) ||
        tensor_pair_open(&tokens, s.group, PLAIN, EPX_BF16, 2, 1, 512, 0) ||
        tensor_pair_open(&out, s.group, PLAIN, EPX_FP8_E4M3, 3, R, SMALL_TOKENS, 512) ||
        tensor_pair_open(&scales, s.group, PLAIN, EPX_FP32, 3, R, SMALL_TOKENS, 4) || tensor_pair_fill(&tokens, 0))
        return -1;
    s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    s.calls.in.tokens = tokens.tensor;
    s.calls.out.tokens = out.tensor;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    s.calls.out.scales = scales.tensor;
    s.calls.in.scales = scales.tensor;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    s.calls.in.scales = NULL;
    tokens.tensor->sizes[1] = out.tensor->sizes[2] = 256;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    tokens.tensor->sizes[1] = out.tensor->sizes[2] = 1024; /* more than max_token_bytes, as it travels */
    scales.tensor->sizes[2] = 8;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    tokens.tensor->sizes[1] = out.tensor->sizes[2] = 512;
    scales.tensor->sizes[2] = 3;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    scales.tensor->sizes[2] = 4;
    tokens.tensor->datatype = ncclFloat16;
    EXPECT(BAD, ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    tokens.tensor->datatype = ncclBfloat16;
    TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, NULL, &s.calls.config, world.stream));
    if (tensor_pair_get(&scales))
        return -1;
    CHECK(world.rank || ((float *)scales.view.data)[0] == 1e-4f * (1.0f / 448.0f)); /* of a row of zeros */
    return tensor_pair_close(&tokens) || tensor_pair_close(&out) || tensor_pair_close(&scales) || small_close(&s) ? -1
                                                                                                                  : 0;
}

/* DS_FP8E3M4's scales need no more alignment than their type has; zero_copy ON does not go with the recipe, whatever
 * is in windows. */
static int test_fp8_scales(ncclEpLayout_t layout)
{
    const int ids[] = {0}, R = world.nranks, major = layout == EXPERT_MAJOR;
    const int64_t d0 = major ? 2 : R, d1 = (int64_t)SMALL_TOKENS * (major ? R : 1);
    struct tensor_pair tokens = {0}, out = {0}, scales = {0};
    const float scale = 1e-4f * (1.0f / 448.0f); /* of a row of zeros */
    ncclEpGroupConfig_t config = small_config(LL, 0);
    struct small s;

    config.max_token_bytes = 512 + 16;
    for (int on = 0; on < 2; on++) {
        config.zero_copy = on ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_AUTO;
        if (small_open(&s, &config, layout, 1, 1, 0, PLAIN) || small_route(&s, ids, 1) ||
            tensor_pair_open(&tokens, s.group, PLAIN, EPX_BF16, 2, 1, 512, 0) ||
            tensor_pair_open(&out, s.group, on ? WINDOW : PLAIN, EPX_FP8_E4M3, 3, d0, d1, 512) ||
            tensor_pair_open(&scales, s.group, on ? WINDOW : PLAIN, EPX_FP32, 3, d0 + 1, d1, 4) ||
            tensor_pair_fill(&tokens, 0) || tensor_pair_fill(&scales, 0x5a))
            return -1;
        s.calls.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
        s.calls.in.tokens = tokens.tensor;
        s.calls.out.tokens = out.tensor;
        s.calls.out.scales = scales.tensor;
        scales.tensor->sizes[0] = (size_t)d0;
        for (int shift = 1; shift < 4 && !on; shift++) { /* floats from addresses 4, 8 and 12 past a multiple of 16 */
            scales.tensor->data = scales.data + 4 * shift;
            TRY(ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream));
            if (tensor_pair_get(&scales))
                return -1;
            for (int i = 0; i < 4 && world.rank == 0; i++)
                CHECK(((float *)scales.view.data)[shift + i] == scale);
        }
        if (on) {
            EXPECT(BAD,
                   ncclEpDispatch(s.handle, &s.calls.in, &s.calls.out, &s.calls.info, &s.calls.config, world.stream));
            CHECK(strstr(ncclEpxGetLastError(), "recipe NONE or FWD") != NULL);
        }
        if (tensor_pair_close(&tokens) || tensor_pair_close(&out) || tensor_pair_close(&scales) || small_close(&s))
            return -1;
    }
    return 0;
}

int test_recipes(void)
{
    CHECK(world.nranks >= 2);
    return test_bytes(LL, EXPERT_MAJOR, 0) || test_bytes(LL, RANK_MAJOR, 0) || test_bytes(HT, FLAT, 64) ||
                   test_bytes(HT, EXPERT_MAJOR, 64) || test_bytes(HT, FLAT, NCCL_EP_AUTO) ||
                   test_bytes(HT, EXPERT_MAJOR, NCCL_EP_AUTO) || test_windows(HT, FLAT) ||
                   test_windows(HT, EXPERT_MAJOR) || test_windows(LL, RANK_MAJOR) || test_windows(LL, EXPERT_MAJOR) ||
                   test_forward_refused(LL, EXPERT_MAJOR) || test_forward_refused(LL, RANK_MAJOR) ||
                   test_forward_refused(HT, FLAT) || test_forward_refused(HT, EXPERT_MAJOR) ||
                   test_none_refused(LL, EXPERT_MAJOR) || test_none_refused(HT, FLAT) || test_version_1() ||
                   version_1_casts() || test_fp8_refused() || test_fp8_scales(RANK_MAJOR) ||
                   test_fp8_scales(EXPERT_MAJOR)
               ? -1
               : 0;
}
