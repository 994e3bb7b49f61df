/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors of callers: check_tensor against its own rules, computed again, and whole calls (dispatch, combine
 * and layout of a group of one rank) with every descriptor from the input. Calls are checked and not run: a
 * description that is accepted may still name memory that is not there, which no library can know.
 */
#include "fuzz.h"

#include "api/args.h"
#include "api/check.h"
#include "modes/handle.h"
#include "tests/lib/fixture.h"

static struct fixture one;

static int alone(void *context, const void *send, void *recv, size_t bytes)
{
    (void)context;
    memcpy(recv, send, bytes);
    return 0;
}

static void begin(void)
{
    static epx_bootstrap boot = EPX_BOOTSTRAP_INIT;

    fuzz_quiet();
    boot.nranks = 1;
    boot.allgather = alone;
    FUZZ_REQUIRE(fixture_open(&one, 0, 1, &boot, NULL) == 0);
    FUZZ_REQUIRE(fixture_ll(&one) == 0 && fixture_ht(&one) == 0); /* the handles have a routing */
}

FUZZ_BEGIN(begin)

static const int64_t extents[] = {
    0, 1, 2, 3, 5, 6, 16, 80, 128, INT32_MAX, INT32_MIN, 1ll << 31, INT64_MAX, INT64_MIN, INT64_MAX / 16};
enum { EXTENTS = sizeof(extents) / sizeof(extents[0]) };

static void draw_tensor(struct fuzz *f, epx_tensor *t)
{
    static char memory[64] __attribute__((aligned(64)));
    const unsigned shape = fuzz_below(f, 4);

    memset(t, 0, sizeof(*t));
    t->size = fuzz_below(f, 8) ? (uint32_t)sizeof(*t) : (uint32_t)fuzz_int(f, 1) * 4 % (sizeof(*t) + 1);
    t->dtype = fuzz_below(f, 16) ? (int32_t)fuzz_below(f, EPX_UINT8 + 2) : (int32_t)fuzz_int(f, 4);
    t->ndim = fuzz_below(f, 16) ? (int32_t)fuzz_below(f, EPX_MAX_NDIM + 2) : (int32_t)fuzz_int(f, 4);
    t->data = fuzz_below(f, 16) ? memory + fuzz_below(f, 2) * fuzz_below(f, 16) : NULL;
    for (int i = 0; i < EPX_MAX_NDIM; i++) {
        t->shape[i] = fuzz_around(f, extents, EXTENTS);
        t->stride[i] = shape ? 0 : fuzz_around(f, extents, EXTENTS);
    }
}

/* Whatever was accepted can be walked through without an overflow, and rows do not overlap where they must not. */
static void require_walkable(const epx_tensor *t, enum strides strides)
{
    int64_t span = 0, step, all;

    for (int i = 0; i < t->ndim; i++) {
        FUZZ_REQUIRE(t->shape[i] >= 0 && t->shape[i] <= INT32_MAX);
        FUZZ_REQUIRE(t->stride[i] >= 0);
        FUZZ_REQUIRE(!__builtin_mul_overflow(t->shape[i], t->stride[i], &step));
        FUZZ_REQUIRE(!__builtin_add_overflow(span, step, &span));
    }
    FUZZ_REQUIRE(!__builtin_mul_overflow(span, (int64_t)epx_dtype_size((epx_dtype)t->dtype), &all));
    FUZZ_REQUIRE((uintptr_t)t->data % epx_dtype_size((epx_dtype)t->dtype) == 0);
    for (int i = 0; i < t->ndim; i++)
        if (!t->shape[i])
            return;
    FUZZ_REQUIRE(t->data);
    for (int i = t->ndim - 1; strides != STRIDES_ANY && i >= 0; i--) {
        if (t->shape[i] <= 1)
            continue;
        if (i == t->ndim - 1 ? t->stride[i] != 1 : t->stride[i] < t->shape[i + 1] * t->stride[i + 1]) {
            for (int k = 0; k < t->ndim; k++)
                fprintf(stderr, "[%d]: %lld by %lld\n", k, (long long)t->shape[k], (long long)t->stride[k]);
            FUZZ_REQUIRE(!"rows overlap");
        }
    }
}

static void check_one(struct fuzz *f)
{
    struct want want = {"call", "name", (unsigned)fuzz_int(f, 1), 0, {0}, (enum strides)fuzz_below(f, 3)};
    epx_tensor given, *exact = malloc(sizeof(given)), out;

    want.ndim = 1 + (int)fuzz_below(f, EPX_MAX_NDIM);
    for (int i = 0; i < want.ndim; i++)
        want.shape[i] = fuzz_below(f, 2) ? -1 : extents[fuzz_below(f, 9)];
    draw_tensor(f, &given);
    FUZZ_REQUIRE(exact);
    *exact = given;
    memset(&out, 0x5a, sizeof(out));
    if (check_tensor(exact, &want, &out) == EPX_OK) {
        FUZZ_REQUIRE(out.ndim == want.ndim && (want.dtypes & DTYPE_BIT(out.dtype)));
        require_walkable(&out, want.strides);
    }
    free(exact);
}

/* One of the tensors that a good call has, that of another argument, a drawn one, or none. */
static epx_tensor *pick(struct fuzz *f, epx_tensor *good, epx_tensor *room)
{
    switch (fuzz_below(f, 8)) {
    case 0:
        return NULL;
    case 1:
        draw_tensor(f, room);
        return room;
    case 2:
        *room = *good;
        room->shape[fuzz_below(f, EPX_MAX_NDIM)] = fuzz_around(f, extents, EXTENTS);
        return room;
    case 3:
        *room = *good;
        room->stride[fuzz_below(f, EPX_MAX_NDIM)] = fuzz_around(f, extents, EXTENTS);
        return room;
    case 4:
        *room = *good;
        room->dtype = (int32_t)fuzz_below(f, EPX_UINT8 + 2);
        return room;
    default:
        return good;
    }
}

static void check_dispatch(struct fuzz *f, struct epx_handle *handle, int low)
{
    epx_dispatch_inputs in = one.in;
    epx_dispatch_outputs out = low ? one.ll_out : one.ht_out;
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    struct dispatch_args args;
    epx_tensor room[10];

    in.tokens = pick(f, &one.tokens, &room[0]);
    in.scales = fuzz_below(f, 3) ? NULL : pick(f, &one.tokens, &room[1]);
    in.topk_weights = pick(f, &one.weights, &room[2]);
    out.tokens = pick(f, low ? &one.ll_rows : &one.ht_rows, &room[3]);
    out.scales = fuzz_below(f, 3) ? NULL : pick(f, low ? &one.ll_rows : &one.ht_rows, &room[4]);
    out.topk_weights = fuzz_below(f, 2) ? NULL : pick(f, &one.ht_weights, &room[5]);
    out.topk_idx = fuzz_below(f, 2) ? NULL : pick(f, &one.ht_idx, &room[6]);
    out.src_rank = fuzz_below(f, 2) ? NULL : pick(f, &one.ll_counts, &room[7]);
    out.source_map = fuzz_below(f, 3) ? NULL : pick(f, &one.ht_idx, &room[8]);
    config.direction = (int32_t)fuzz_below(f, 3);
    config.source_stride = (int32_t)fuzz_around(f, extents, 8);
    memset(&args, 0, sizeof(args));
    if (dispatch_args_check(handle, &in, &out, &config, NULL, &args) != EPX_OK)
        return;
    require_walkable(&args.tokens, STRIDES_ROWS);
    require_walkable(&args.out_tokens, STRIDES_ROWS);
    if (args.out_scales.ndim)
        require_walkable(&args.out_scales, STRIDES_ANY);
    FUZZ_REQUIRE(args.tokens.shape[0] == handle->ntokens && args.tokens.shape[1] == args.out_tokens.shape[1 + low]);
}

static void check_combine(struct fuzz *f, struct epx_handle *handle, int low)
{
    epx_combine_inputs in = low ? one.ll_cin : one.ht_cin;
    epx_combine_outputs out = one.cout;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    struct combine_args args;
    epx_tensor room[6];

    in.tokens = pick(f, low ? &one.ll_rows : &one.ht_rows, &room[0]);
    in.topk_weights = fuzz_below(f, 2) ? NULL : pick(f, &one.weights, &room[1]);
    in.row_scales = fuzz_below(f, 3) ? NULL : pick(f, &one.ll_rows, &room[2]);
    out.tokens = pick(f, &one.combined, &room[3]);
    out.topk_weights = fuzz_below(f, 2) ? NULL : pick(f, &one.weights, &room[4]);
    config.direction = (int32_t)fuzz_below(f, 3);
    config.nvfp4 = (int32_t)fuzz_below(f, 3);
    memset(&args, 0, sizeof(args));
    if (combine_args_check(handle, &in, &out, &config, NULL, &args) != EPX_OK)
        return;
    require_walkable(&args.tokens, STRIDES_ROWS);
    require_walkable(&args.out_tokens, STRIDES_ROWS);
}

static void check_layout(struct fuzz *f, struct epx_handle *handle)
{
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    struct layout_tensors out;
    epx_tensor room[14],
        **at[] = {&info.expert_counts, &info.expert_offsets, &info.rank_counts, &info.total,       &info.layout_range,
                  &info.expert_stats,  &info.wait_ns,        &info.rank_matrix, &info.rank_tokens, &info.relay_counts,
                  &info.expert_rows,   &info.expert_ends,    &info.source_ends};
    const uint64_t which = fuzz_int(f, 2);

    for (unsigned i = 0; i < sizeof(at) / sizeof(at[0]); i++)
        if (which >> i & 1)
            *at[i] = pick(f, &one.ll_counts, &room[i]);
    info.expected_rows = (uint32_t)fuzz_int(f, 4);
    if (layout_tensors_check(handle, &info, "call", &out) == EPX_OK && out.source_ends.ndim)
        FUZZ_REQUIRE(out.source_ends.shape[0] == 1); /* it divides the number of ranks */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    const int low = (int)fuzz_int(&f, 1) & 1;

    switch (fuzz_below(&f, 4)) {
    case 0:
        check_one(&f);
        break;
    case 1:
        check_dispatch(&f, low ? one.ll : one.ht, low);
        break;
    case 2:
        check_combine(&f, low ? one.ll : one.ht, low);
        break;
    default:
        check_layout(&f, low ? one.ll : one.ht);
        break;
    }
    return 0;
}
