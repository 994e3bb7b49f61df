/* SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "ep_bench.h"
#include "tools/epx/options.h"

#define FIELD(name) offsetof(struct options, name)

static const struct option_choice algorithms[] = {{"ll", NCCL_EP_ALGO_LOW_LATENCY},
                                                  {"ht", NCCL_EP_ALGO_HIGH_THROUGHPUT},
                                                  {"low-latency", NCCL_EP_ALGO_LOW_LATENCY},
                                                  {"high-throughput", NCCL_EP_ALGO_HIGH_THROUGHPUT},
                                                  {NULL, 0}};
static const struct option_choice layouts[] = {
    {"em", NCCL_EP_LAYOUT_EXPERT_MAJOR}, {"rm", NCCL_EP_LAYOUT_RANK_MAJOR}, {"fl", NCCL_EP_LAYOUT_FLAT}, {NULL, 0}};
static const struct option_choice dispatch_quants[] = {{"none", NCCL_EP_DISP_QUANT_NONE},
                                                       {"scales-forward", NCCL_EP_DISP_QUANT_FWD},
                                                       {"ds-fp8e3m4", NCCL_EP_DISP_QUANT_DS_FP8E3M4},
                                                       {NULL, 0}};
static const struct option_choice combine_quants[] = {
    {"none", NCCL_EP_COMB_QUANT_NONE}, {"nvfp4", NCCL_EP_COMB_QUANT_NVFP4}, {NULL, 0}};
static const struct option_choice floats[] = {{"bf16", BF16}, {"fp16", FP16}, {"fp32", FP32}, {NULL, 0}};
static const struct option_choice token_types[] = {
    {"fp32", FP32}, {"fp16", FP16}, {"bf16", BF16}, {"fp8e4m3", E4M3}, {"fp8e5m2", E5M2}, {"fp4x2", FP4X2}, {NULL, 0}};
static const struct option_choice scale_types[] = {{"fp32", FP32},    {"fp16", FP16}, {"bf16", BF16}, {"fp8e4m3", E4M3},
                                                   {"fp8e5m2", E5M2}, {"uint8", U8},  {NULL, 0}};
static const struct option_choice id_kinds[] = {{"auto", NCCL_EP_EXPERT_ID_AUTO},
                                                {"local", NCCL_EP_EXPERT_ID_LOCAL},
                                                {"global", NCCL_EP_EXPERT_ID_GLOBAL},
                                                {NULL, 0}};
static const struct option_choice em_modes[] = {{"local_permute", 0}, {"local_dup", 1}, {"nvlink_dup", 2}, {NULL, 0}};

#define INT(n, field, text, dflt, lowest, highest)                                                           \
    {                                                                                                        \
        .name = n, .kind = OPTION_INT, .value = "N", .help = text, .fallback = dflt, .offset = FIELD(field), \
        .low = lowest, .high = highest                                                                       \
    }
#define FLAG(n, field, text)                                                 \
    {                                                                        \
        .name = n, .kind = OPTION_FLAG, .help = text, .offset = FIELD(field) \
    }
#define CHOICE(n, field, text, dflt, list)                                                                  \
    {                                                                                                       \
        .name = n, .kind = OPTION_CHOICE, .value = "NAME", .help = text, .fallback = dflt, .choices = list, \
        .offset = FIELD(field)                                                                              \
    }

/* `epx ep-bench` takes it out of the words that it starts ranks with. */
static int refuse_ranks(void *target, const char *text)
{
    (void)target;
    return options_complain("epx ep-bench", "--ranks %s belongs to epx ep-bench, which starts the ranks", text);
}

static const struct option_spec specs[] = {
    {.kind = OPTION_TITLE, .help = "Ranks:"},
    {.name = "ranks",
     .letter = 'n',
     .kind = OPTION_CALL,
     .value = "N",
     .help = "ranks to start on this machine; a launcher's world has its own number",
     .fallback = "8",
     .call = refuse_ranks},
    {.kind = OPTION_TITLE, .help = "What is moved:"},
    CHOICE("algorithm", algorithm, "ll (low latency) or ht (high throughput)", "ll", algorithms),
    CHOICE("layout", layout, "of received rows: em (expert-major), rm (ll: rank-major), fl (ht: flat)", "em; ht fl",
           layouts),
    INT("tokens", tokens, "tokens per rank", "ll 128, ht 4096", 1, 1 << 20),
    INT("hidden", hidden, "elements of a token", "7168", 1, 1 << 20),
    INT("top-k", topk, "experts per token", "8", 1, 32),
    INT("experts", experts, "experts of all ranks", "256", 1, 1 << 16),
    CHOICE("datatype", datatype, "of tokens: bf16, fp16, fp32", "bf16", floats),
    FLAG("non-uniform-tokens", non_uniform, "rank 0 has all its tokens, the last rank none"),
    FLAG("topk-idx-int32", idx32, "ll: indices of 32 bits"),
    FLAG("disable-token-dropping", keep_all, "ll: no index is -1"),
    INT("expert-major-alignment", alignment, "ht em: rows of an expert start at multiples of N, a power of two", "1", 1,
        1 << 20),
    CHOICE("expert-id-kind", id_kind, "of received ids: auto, local, global", "auto", id_kinds),
    {.kind = OPTION_TITLE, .help = "How:"},
    CHOICE("dispatch-quantization", dispatch_quant, "none, scales-forward, ds-fp8e3m4; needs --dispatch-only", "none",
           dispatch_quants),
    CHOICE("combine-quantization", combine_quant, "none, nvfp4 (ll)", "none", combine_quants),
    FLAG("mxfp8", mxfp8, "scales-forward with e4m3 tokens and a uint8 scale for each 32"),
    CHOICE("scales-forward-token-dtype", forward_token, "fp32, fp16, bf16, fp8e4m3, fp8e5m2, fp4x2", "fp8e4m3",
           token_types),
    CHOICE("scales-forward-scale-dtype", forward_scale, "fp32, fp16, bf16, fp8e4m3, fp8e5m2, uint8", "fp32",
           scale_types),
    FLAG("zcopy", zcopy, "receive tensors in windows, zero_copy ON (ht, ll rm)"),
    CHOICE("ht-em-mode", em_mode, "local_permute, local_dup, nvlink_dup: sets NCCL_EP_HT_EM_*", "local_permute",
           em_modes),
    INT("max-num-sms", max_sms, "multiprocessors that EPX may use", "all", 1, 1 << 16),
    INT("shuffle-sms", shuffle_sms, "sets NCCL_EP_SHUFFLE_SMS", "unset", 1, 1 << 16),
    INT("preprocess-num-sms", preprocess_sms, "sets NCCL_EP_PREPROCESS_NUM_SMS", "unset", 1, 1 << 16),
    {.kind = OPTION_TITLE, .help = "Measuring:"},
    INT("warmup", warmup, "iterations before", "10", 0, 1 << 20),
    INT("iters", iters, "timed iterations; the first of several does not count", "50", 1, 1 << 20),
    FLAG("dispatch-only", dispatch_only, "no combine"),
    FLAG("validate", validate, "check what dispatch and combine brought; exit status 2 if it is wrong"),
    FLAG("mask-test", mask_test, "ll, 4 ranks or more: ranks that are late are masked, and brought back"),
    {.name = "dynamic-tokens", .kind = OPTION_FLAG, .offset = FIELD(dynamic), .help = "", .hidden = 1},
};

static const struct option_table table = {
    .program = "epx ep-bench",
    .usage = "epx ep-bench [options]",
    .about = "NVIDIA's ep_bench for NCCL EP, on EPX through nccl_ep.h: the same options, timing and byte formulae.\n"
             "Under mpirun, torchrun or srun it joins that world; else it starts ranks here.",
    .notes = "EPX_DEVICE=cuda measures on a GPU. Exit status: 0 success, 1 bad options or a failed call, 2 validation\n"
             "failed.\n",
    .specs = specs,
    .count = (int)(sizeof(specs) / sizeof(specs[0])),
};

static int complain(const char *what)
{
    options_complain(table.program, "%s", what);
    return EXIT_BAD;
}

static int check(const struct options *o)
{
    const int ll = o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;

    if (o->dynamic)
        return complain("--dynamic-tokens is not supported, as in ep_bench");
    if (o->layout == (ll ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR))
        return complain(ll ? "--layout fl is --algorithm ht's" : "--layout rm is --algorithm ll's");
    if ((o->dispatch_quant || o->mxfp8) && !o->dispatch_only)
        return complain("--dispatch-quantization needs --dispatch-only");
    if (o->dispatch_quant == NCCL_EP_DISP_QUANT_DS_FP8E3M4 && (!ll || o->datatype != BF16 || o->mxfp8))
        return complain("ds-fp8e3m4 is for --algorithm ll with bf16 tokens");
    if (o->combine_quant && (!ll || o->datatype != BF16 || o->dispatch_only))
        return complain("--combine-quantization nvfp4 is for --algorithm ll with bf16 tokens and a combine");
    if (o->zcopy && ll && o->layout != NCCL_EP_LAYOUT_RANK_MAJOR)
        return complain("--zcopy with --algorithm ll needs --layout rm");
    if (o->mask_test && !ll)
        return complain("--mask-test is --algorithm ll's");
    if ((o->topk > o->experts) || (o->alignment & (o->alignment - 1)))
        return complain("--top-k is at most --experts, and --expert-major-alignment a power of two");
    return EXIT_GOOD;
}

int options_read(struct options *o, int argc, char **argv)
{
    int next, ll;

    *o = (struct options){.hidden = 7168,
                          .topk = 8,
                          .experts = 256,
                          .warmup = 10,
                          .iters = 50,
                          .alignment = 1,
                          .forward_token = E4M3,
                          .forward_scale = FP32,
                          .datatype = BF16};
    switch (options_parse(&table, o, argc, argv, 1, &next)) {
    case OPTIONS_HELP:
        return -1;
    case OPTIONS_BAD:
        return EXIT_BAD;
    case OPTIONS_OK:
        break;
    }
    ll = o->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    o->tokens = o->tokens ? o->tokens : ll ? 128 : 4096;
    if (o->mxfp8) {
        o->dispatch_quant = NCCL_EP_DISP_QUANT_FWD;
        o->forward_token = E4M3;
        o->forward_scale = U8;
    }
    if (!o->layout)
        o->layout = ll ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
    return check(o);
}
