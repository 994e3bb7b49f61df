/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the processor time of a rank grows with the number of ranks when its work does not: every token goes to TOPK
 * different ranks, whatever their number. Ranks are processes. Each measures its own processor time (all threads) over
 * many rounds: low latency dispatch and combine; high throughput update, dispatch and combine. The mean of all ranks is
 * printed, and the ratio to the first number of ranks.
 *
 *     perf_growth [mode [ranks,ranks,... [ranks_per_node [rounds [tokens [hidden]]]]]]
 *
 * mode: ll, ht, htem (high throughput, rows by expert); 0 ranks per node: one node; plain: the same copies and sums
 * between the same processes without EPX, and past: those with stores past the cache. What grows there is the
 * machine's.
 */
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device/cpu/math.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"

enum { TOPK = 4, WARMUP = 3 };

struct setting {
    int ht, by_expert, ranks, per_node, rounds, tokens, hidden;
    int plain, past;
};

struct shared {
    struct setting set;
    double total_us[1024];
    int switches[1024];
    uint32_t come, gone; /* of the plain program's barrier */
    char *memory;        /* its rows: of each rank x, sums, and what it receives */
};

struct job {
    const struct setting *set;
    epx_group *group;
    epx_handle *handle;
    epx_tensor idx, weights, x, rows, counts, out_weights, out_idx, combined;
};

static void *memory(struct job *j, size_t bytes)
{
    void *p = NULL;

    if (epx_alloc(j->group, bytes, &p) != EPX_OK)
        fprintf(stderr, "%s\n", epx_last_error());
    return p;
}

static int make_group(struct job *j)
{
    const struct setting *s = j->set;
    const size_t rows = (size_t)s->ranks * (size_t)s->tokens;
    epx_group_config config = fixture_config_of(100000, s->ranks, s->tokens, s->hidden * 2, TOPK);
    const epx_handle_config hc = fixture_handle_config(s->ht ? EPX_HIGH_THROUGHPUT : EPX_LOW_LATENCY,
                                                       s->ht && !s->by_expert ? EPX_FLAT : EPX_EXPERT_MAJOR, TOPK);

    config.ranks_per_node = s->per_node;
    config.num_agents = 1;
    config.modes = s->ht ? EPX_HIGH_THROUGHPUT : EPX_LOW_LATENCY;
    config.alloc_bytes =
        rows * ((size_t)s->hidden * 2 + TOPK * 12) + ((size_t)s->tokens * (size_t)s->hidden * 4) + (4 << 20);
    snprintf(config.net, sizeof(config.net), "ofi:tcp");
    return epx_group_create(&j->group, NULL, &config) != EPX_OK ||
           epx_handle_create(&j->handle, j->group, &hc) != EPX_OK;
}

static int make_tensors(struct job *j, int rank)
{
    const struct setting *s = j->set;
    const int64_t T = s->tokens, H = s->hidden, rows = (int64_t)s->ranks * T;
    int32_t *idx = memory(j, (size_t)T * TOPK * 4);
    float *weights = memory(j, (size_t)T * TOPK * 4);

    if (!idx || !weights)
        return 1;
    for (int64_t i = 0; i < T * TOPK; i++) {
        idx[i] = (int32_t)((rank + 1 + i) % s->ranks);
        weights[i] = 0.25f;
    }
    j->idx = epx_tensor_make(idx, EPX_INT32, 2, T, TOPK, 0, 0);
    j->weights = epx_tensor_make(weights, EPX_FP32, 2, T, TOPK, 0, 0);
    j->x = epx_tensor_make(memory(j, (size_t)(T * H * 2)), EPX_BF16, 2, T, H, 0, 0);
    j->combined = epx_tensor_make(memory(j, (size_t)(T * H * 2)), EPX_BF16, 2, T, H, 0, 0);
    j->counts = epx_tensor_make(memory(j, 4), EPX_INT32, 1, 1, 0, 0, 0);
    j->rows = s->ht ? epx_tensor_make(memory(j, (size_t)(rows * H * 2)), EPX_BF16, 2, rows, H, 0, 0)
                    : epx_tensor_make(memory(j, (size_t)(rows * H * 2)), EPX_BF16, 3, 1, rows, H, 0);
    j->out_weights = s->by_expert ? epx_tensor_make(memory(j, (size_t)rows * 4), EPX_FP32, 1, rows, 0, 0, 0)
                                  : epx_tensor_make(memory(j, (size_t)rows * TOPK * 4), EPX_FP32, 2, rows, TOPK, 0, 0);
    j->out_idx = epx_tensor_make(memory(j, (size_t)rows * TOPK * 4), EPX_INT32, 2, rows, TOPK, 0, 0);
    return !j->rows.data || !j->out_idx.data;
}

static int pair(struct job *j)
{
    const int ht = j->set->ht;
    epx_dispatch_inputs in = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs out = EPX_DISPATCH_OUTPUTS_INIT;
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_combine_inputs cin = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs cout = EPX_COMBINE_OUTPUTS_INIT;

    in.tokens = &j->x;
    in.topk_weights = ht ? &j->weights : NULL;
    out.tokens = &j->rows;
    out.topk_weights = ht ? &j->out_weights : NULL;
    out.topk_idx = ht && !j->set->by_expert ? &j->out_idx : NULL;
    info.expert_counts = &j->counts;
    cin.tokens = &j->rows;
    cin.topk_weights = ht ? NULL : &j->weights;
    cout.tokens = &j->combined;
    return epx_handle_update(j->handle, &j->idx, NULL, NULL) != EPX_OK ||
           epx_dispatch(j->handle, &in, &out, ht ? NULL : &info, NULL, NULL) != EPX_OK ||
           epx_combine(j->handle, &cin, &cout, NULL, NULL) != EPX_OK;
}

static double own_us(int *switches)
{
    struct rusage u;

    getrusage(RUSAGE_SELF, &u);
    *switches = (int)(u.ru_nvcsw + u.ru_nivcsw);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* ---- Without EPX ------------------------------------------------------------------------------------------------- */

static void meet(struct shared *s)
{
    const uint32_t seen = __atomic_load_n(&s->gone, __ATOMIC_ACQUIRE);

    if (__atomic_add_fetch(&s->come, 1, __ATOMIC_ACQ_REL) == (uint32_t)s->set.ranks) {
        s->come = 0;
        __atomic_store_n(&s->gone, seen + 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &s->gone, FUTEX_WAKE, s->set.ranks, NULL, NULL, 0);
    }
    while (__atomic_load_n(&s->gone, __ATOMIC_ACQUIRE) == seen)
        syscall(SYS_futex, &s->gone, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static size_t plain_row(const struct setting *s, int rank, int row)
{
    return ((size_t)rank * (size_t)s->tokens * (TOPK + 2) + (size_t)row) * (size_t)s->hidden * 2;
}

/* Where the k-th row of token t of `rank` goes; the number of tokens times TOPK is a multiple of that of ranks. */
static char *plain_place(const struct shared *shared, int rank, int t, int k)
{
    const struct setting *s = &shared->set;
    const int i = t * TOPK + k, from_each = s->tokens * TOPK / s->ranks;

    return shared->memory + plain_row(s, (rank + 1 + i) % s->ranks, 2 * s->tokens + rank * from_each + i / s->ranks);
}

static void plain_pair(struct shared *shared, int rank)
{
    const struct setting *s = &shared->set;

    meet(shared);
    for (int t = 0; t < s->tokens; t++) {
        void *to[TOPK];
        for (int k = 0; k < TOPK; k++)
            to[k] = plain_place(shared, rank, t, k);
        (s->past ? math_copy_many_past : math_copy_many)(to, TOPK, shared->memory + plain_row(s, rank, t),
                                                         (size_t)s->hidden * 2);
    }
    meet(shared);
    for (int t = 0; t < s->tokens; t++) {
        struct reduce_row rows[TOPK];
        for (int k = 0; k < TOPK; k++)
            rows[k] = (struct reduce_row){.data = plain_place(shared, rank, t, k), .weight = 0.25f};
        math_reduce(shared->memory + plain_row(s, rank, s->tokens + t), EPX_BF16, s->hidden, rows, TOPK, 1, NULL, NULL);
    }
}

static int be_plain(int rank, void *arg)
{
    struct shared *shared = arg;
    double before = 0;
    int switched = 0;

    for (int i = 0; i < WARMUP + shared->set.rounds; i++) {
        if (i == WARMUP)
            before = own_us(&switched);
        plain_pair(shared, rank);
    }
    shared->total_us[rank] = own_us(&shared->switches[rank]) - before;
    shared->switches[rank] -= switched;
    return 0;
}

/* ---- With it ----------------------------------------------------------------------------------------------------- */

static int be_rank(int rank, void *arg)
{
    struct shared *shared = arg;
    const struct setting *s = &shared->set;
    struct job j = {.set = s};
    double before = 0;
    int switched = 0, bad = make_group(&j) || make_tensors(&j, rank);

    for (int i = 0; i < WARMUP + s->rounds && !bad; i++) {
        if (i == WARMUP)
            before = own_us(&switched);
        bad = pair(&j) || epx_stream_sync(j.group, NULL) != EPX_OK;
    }
    if (bad) {
        fprintf(stderr, "rank %d: %s\n", rank, epx_last_error());
        return 1;
    }
    shared->total_us[rank] = own_us(&shared->switches[rank]) - before;
    shared->switches[rank] -= switched;
    return epx_handle_destroy(j.handle) != EPX_OK || epx_group_destroy(j.group) != EPX_OK;
}

/* Microseconds of a rank and round; -1: failed. */
static double measure(const struct setting *s)
{
    struct shared *shared = child_share(sizeof(*shared));
    pid_t pids[1024];
    double sum = 0, switches = 0;
    int failed;

    shared->set = *s;
    shared->memory = s->plain ? child_share(plain_row(s, s->ranks, 0)) : NULL;
    child_world(s->ranks);
    child_start_ranks(pids, s->ranks, s->plain ? be_plain : be_rank, shared);
    failed = child_failures(pids, s->ranks);
    if (s->plain)
        child_unshare(shared->memory, plain_row(s, s->ranks, 0));
    for (int r = 0; r < s->ranks; r++) {
        sum += shared->total_us[r];
        switches += shared->switches[r];
    }
    printf(
        "%s %4d ranks, %d per node, %d tokens of %d: %8.1f us of processor time, %.1f switches of a rank in a round%s",
        s->past    ? "past"
        : s->plain ? "plain"
        : s->ht    ? (s->by_expert ? "htem" : "ht")
                   : "ll",
        s->ranks, s->per_node, s->tokens, s->hidden, sum / s->ranks / s->rounds, switches / s->ranks / s->rounds,
        failed ? "  FAILED" : "");
    child_unshare(shared, sizeof(*shared));
    return failed ? -1 : sum / s->ranks / s->rounds;
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "ll";
    struct setting s = {.ht = !strncmp(mode, "ht", 2),
                        .by_expert = !strcmp(mode, "htem"),
                        .past = !strcmp(mode, "past"),
                        .plain = !strcmp(mode, "past") || !strcmp(mode, "plain"),
                        .per_node = argc > 3 ? atoi(argv[3]) : 0,
                        .rounds = argc > 4 ? atoi(argv[4]) : 30,
                        .tokens = argc > 5 ? atoi(argv[5]) : 128,
                        .hidden = argc > 6 ? atoi(argv[6]) : 7168};
    char list[256];
    double first = 0;

    snprintf(list, sizeof(list), "%s", argc > 2 ? argv[2] : "8,16,32,64,128");
    setenv("EPX_SECRET", "0123456789abcdef0123456789abcdef", 1);
    for (char *save, *at = strtok_r(list, ",", &save); at; at = strtok_r(NULL, ",", &save)) {
        double us;

        s.ranks = atoi(at);
        if (s.ranks <= TOPK || s.ranks > 1024 || (s.plain && s.tokens * TOPK % s.ranks))
            return 2;
        us = measure(&s);
        if (us < 0)
            return 1;
        first = first > 0 ? first : us;
        printf(", %.2f times\n", us / first);
        fflush(stdout);
    }
    return 0;
}
