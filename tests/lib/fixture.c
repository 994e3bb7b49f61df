/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "thread_boot.h"

enum { FILL = 0xab };

static int complain(struct fixture *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int complain(struct fixture *s, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(s->why, sizeof(s->why), format, args);
    va_end(args);
    return -1;
}

static int must(struct fixture *s, const char *call, epx_status status)
{
    return status == EPX_OK ? 0 : complain(s, "%s: %s: %s", call, epx_strerror(status), epx_last_error());
}

int fixture_expect(struct fixture *s, const char *call, epx_status got, epx_status expected, const char *const *words)
{
    const char *text = epx_last_error();

    if (got != expected)
        return complain(s, "%s: expected \"%s\", got \"%s\" (%s)", call, epx_strerror(expected), epx_strerror(got),
                        text);
    for (; got != EPX_OK && words && *words; words++)
        if (!strstr(text, *words))
            return complain(s, "%s: the message does not say \"%s\": %s", call, *words, text);
    return 0;
}

epx_group_config fixture_config(int timeout_ms)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;

    config.device = EPX_DEVICE_CPU;
    config.num_experts = FIXTURE_EXPERTS;
    config.max_tokens_per_rank = FIXTURE_M;
    config.max_hidden_bytes = FIXTURE_HIDDEN * 2;
    config.max_topk = FIXTURE_TOPK;
    config.num_agents = 2;
    config.timeout_ms = timeout_ms;
    config.alloc_bytes = 1 << 20;
    return config;
}

epx_group_config fixture_config_of(int timeout_ms, int experts, int tokens, int hidden_bytes, int topk)
{
    epx_group_config config = fixture_config(timeout_ms);

    config.num_experts = experts;
    config.max_tokens_per_rank = tokens;
    config.max_hidden_bytes = hidden_bytes;
    config.max_topk = topk;
    return config;
}

epx_handle_config fixture_handle_config(epx_mode mode, epx_layout layout, int topk)
{
    epx_handle_config config = EPX_HANDLE_CONFIG_INIT;

    config.mode = mode;
    config.layout = layout;
    config.topk = topk;
    return config;
}

static void make(epx_tensor *t, epx_dtype dtype, int ndim, int64_t d0, int64_t d1, int64_t d2)
{
    int64_t n = d0 * (ndim > 1 ? d1 : 1) * (ndim > 2 ? d2 : 1);

    *t = epx_tensor_make(calloc((size_t)n + 1, tensor_element_size(dtype)), dtype, ndim, d0, d1, d2, 0);
}

static void make_tensors(struct fixture *s)
{
    int64_t L = s->ll_route.local_experts, rows = (int64_t)s->nranks * FIXTURE_M;

    make(&s->idx, EPX_INT64, 2, FIXTURE_TOKENS, FIXTURE_TOPK, 0);
    make(&s->tokens, EPX_BF16, 2, FIXTURE_TOKENS, FIXTURE_HIDDEN, 0);
    make(&s->weights, EPX_FP32, 2, FIXTURE_TOKENS, FIXTURE_TOPK, 0);
    make(&s->ll_rows, EPX_BF16, 3, L, rows, FIXTURE_HIDDEN);
    make(&s->ll_counts, EPX_INT32, 1, L, 0, 0);
    make(&s->ht_rows, EPX_BF16, 2, rows, FIXTURE_HIDDEN, 0);
    make(&s->ht_weights, EPX_FP32, 2, rows, FIXTURE_TOPK, 0);
    make(&s->ht_idx, EPX_INT64, 2, rows, FIXTURE_TOPK, 0);
    make(&s->combined, EPX_BF16, 2, FIXTURE_TOKENS, FIXTURE_HIDDEN, 0);
    s->ll_info = (epx_layout_info)EPX_LAYOUT_INFO_INIT;
    s->ll_info.expert_counts = &s->ll_counts;
    s->in = (epx_dispatch_inputs)EPX_DISPATCH_INPUTS_INIT;
    s->in.tokens = &s->tokens;
    s->ll_out = s->ht_out = (epx_dispatch_outputs)EPX_DISPATCH_OUTPUTS_INIT;
    s->ll_out.tokens = &s->ll_rows;
    s->ht_out.tokens = &s->ht_rows;
    s->ht_out.topk_weights = &s->ht_weights;
    s->ht_out.topk_idx = &s->ht_idx;
    s->ll_cin = s->ht_cin = (epx_combine_inputs)EPX_COMBINE_INPUTS_INIT;
    s->ll_cin.tokens = &s->ll_rows;
    s->ll_cin.topk_weights = &s->weights;
    s->ht_cin.tokens = &s->ht_rows;
    s->cout = (epx_combine_outputs)EPX_COMBINE_OUTPUTS_INIT;
    s->cout.tokens = &s->combined;
}

void fixture_refill(struct fixture *s)
{
    s->w.round++;
    for (int t = 0; t < FIXTURE_TOKENS; t++) {
        int32_t idx[FIXTURE_TOPK];

        workload_topk(&s->w, s->rank, t, idx);
        for (int k = 0; k < FIXTURE_TOPK; k++)
            tensor_set_int(&s->idx, t * FIXTURE_TOPK + k, idx[k]);
        workload_token(&s->w, s->rank, t, tensor_row(&s->tokens, t));
        workload_weights(&s->w, s->rank, t, tensor_row(&s->weights, t));
    }
    memset(s->ll_rows.data, FILL, (size_t)tensor_rows(&s->ll_rows) * FIXTURE_HIDDEN * 2);
    memset(s->ht_rows.data, FILL, (size_t)tensor_rows(&s->ht_rows) * FIXTURE_HIDDEN * 2);
    memset(s->combined.data, FILL, (size_t)FIXTURE_TOKENS * FIXTURE_HIDDEN * 2);
}

static int open_handles(struct fixture *s, uint32_t modes)
{
    const epx_handle_config ll = fixture_handle_config(EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, FIXTURE_TOPK);
    const epx_handle_config ht = fixture_handle_config(EPX_HIGH_THROUGHPUT, EPX_FLAT, FIXTURE_TOPK);

    if ((!modes || modes & EPX_LOW_LATENCY) && must(s, "epx_handle_create", epx_handle_create(&s->ll, s->group, &ll)))
        return -1;
    if (!modes || modes & EPX_HIGH_THROUGHPUT)
        return must(s, "epx_handle_create", epx_handle_create(&s->ht, s->group, &ht));
    return 0;
}

static int prepare(struct fixture *s, int rank, int nranks, const epx_bootstrap *boot)
{
    memset(s, 0, sizeof(*s));
    s->rank = rank;
    s->nranks = nranks;
    s->boot = boot;
    s->w = (struct workload){.seed = 5,
                             .nranks = nranks,
                             .experts = FIXTURE_EXPERTS,
                             .topk = FIXTURE_TOPK,
                             .hidden = FIXTURE_HIDDEN,
                             .max_tokens = FIXTURE_TOKENS,
                             .dtype = EPX_BF16,
                             .hole_percent = 10};
    if (oracle_route_from_workload(&s->ll_route, &s->w, FIXTURE_M, EPX_LOW_LATENCY, EPX_EXPERT_MAJOR, 0, 1) ||
        oracle_route_from_workload(&s->ht_route, &s->w, FIXTURE_M, EPX_HIGH_THROUGHPUT, EPX_FLAT, 0, 1) ||
        oracle_recv_init(&s->ll_recv, &s->ll_route, rank) || oracle_recv_init(&s->ht_recv, &s->ht_route, rank))
        return complain(s, "no memory for the oracle");
    make_tensors(s);
    fixture_refill(s);
    return 0;
}

static int create(struct fixture *s, const epx_group_config *config)
{
    return must(s, "epx_group_create", epx_group_create(&s->group, s->boot, config));
}

int fixture_open(struct fixture *s, int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config)
{
    epx_group_config standard = fixture_config(20000);

    if (prepare(s, rank, nranks, boot))
        return -1;
    config = config ? config : &standard;
    s->ht_route.ranks_per_node = config->ranks_per_node;
    return create(s, config) ? -1 : open_handles(s, config->modes);
}

int fixture_join(struct fixture *s, const char *ticket, int rank, int nranks, const epx_group_config *config,
                 int timeout_ms)
{
    if (prepare(s, rank, nranks, NULL))
        return -1;
    s->ht_route.ranks_per_node = config->ranks_per_node;
    if (must(s, "epx_group_join", epx_group_join(&s->group, ticket, rank, config, timeout_ms)))
        return -1;
    return open_handles(s, config->modes);
}

void fixture_close(struct fixture *s)
{
    epx_tensor *tensors[] = {&s->idx,     &s->tokens,     &s->weights, &s->ll_rows, &s->ll_counts,
                             &s->ht_rows, &s->ht_weights, &s->ht_idx,  &s->combined};

    if (s->group)
        epx_group_destroy(s->group);
    for (size_t i = 0; i < sizeof(tensors) / sizeof(*tensors); i++)
        free(tensors[i]->data);
    oracle_recv_free(&s->ll_recv);
    oracle_recv_free(&s->ht_recv);
    oracle_route_free(&s->ll_route);
    oracle_route_free(&s->ht_route);
}

int fixture_meet(struct fixture *s)
{
    char mine = 0, *all = malloc((size_t)s->nranks);
    int rc = all ? s->boot->allgather(s->boot->context, &mine, all, 1) : -1;

    free(all);
    return rc ? complain(s, "the ranks did not meet") : 0;
}

void fixture_set_active(struct fixture *s, int rank, int active)
{
    s->ll_route.active[rank] = s->ht_route.active[rank] = active;
    oracle_recv_free(&s->ll_recv);
    oracle_recv_free(&s->ht_recv);
    if (oracle_recv_init(&s->ll_recv, &s->ll_route, s->rank) || oracle_recv_init(&s->ht_recv, &s->ht_route, s->rank))
        complain(s, "no memory for the oracle");
}

int fixture_check_ll_dispatch(struct fixture *s)
{
    struct oracle_data data = oracle_data_workload(&s->w, EPX_BF16);
    struct mismatch m;

    if (oracle_check_layout(&s->ll_recv, &s->ll_info, &m) ||
        oracle_check_dispatch(&s->ll_recv, &data, &s->ll_out, NULL, FILL, &m))
        return complain(s, "low latency: %s", m.text);
    fixture_fill_ll(s);
    return 0;
}

void fixture_fill_ll(struct fixture *s)
{
    struct oracle_data data = oracle_data_workload(&s->w, EPX_BF16);

    oracle_fill_results(&s->ll_recv, &data, &s->ll_rows, NULL);
}

int fixture_check_ll_combine(struct fixture *s)
{
    struct oracle_data data = oracle_data_workload(&s->w, EPX_BF16);
    struct oracle_combine how = {.weighted = 1};
    struct mismatch m;

    if (oracle_check_combine(&s->ll_route, &data, s->rank, &how, &s->cout, &m))
        return complain(s, "low latency: %s", m.text);
    return 0;
}

int fixture_ll(struct fixture *s)
{
    fixture_refill(s);
    if (must(s, "epx_handle_update", epx_handle_update(s->ll, &s->idx, NULL, NULL)) ||
        must(s, "epx_dispatch", epx_dispatch(s->ll, &s->in, &s->ll_out, &s->ll_info, NULL, NULL)) ||
        must(s, "epx_stream_sync", epx_stream_sync(s->group, NULL)) || fixture_check_ll_dispatch(s) ||
        must(s, "epx_combine", epx_combine(s->ll, &s->ll_cin, &s->cout, NULL, NULL)) ||
        must(s, "epx_stream_sync", epx_stream_sync(s->group, NULL)))
        return -1;
    return fixture_check_ll_combine(s);
}

int fixture_check_ht_dispatch(struct fixture *s)
{
    struct oracle_data data = oracle_data_workload(&s->w, EPX_BF16);
    struct mismatch m;

    if (oracle_check_dispatch(&s->ht_recv, &data, &s->ht_out, NULL, FILL, &m))
        return complain(s, "high throughput: %s", m.text);
    oracle_fill_results(&s->ht_recv, &data, &s->ht_rows, NULL);
    return 0;
}

int fixture_ht_dispatch(struct fixture *s)
{
    epx_dispatch_inputs in = s->in;

    fixture_refill(s);
    in.topk_weights = &s->weights;
    if (must(s, "epx_handle_update", epx_handle_update(s->ht, &s->idx, NULL, NULL)) ||
        must(s, "epx_dispatch", epx_dispatch(s->ht, &in, &s->ht_out, NULL, NULL, NULL)) ||
        must(s, "epx_stream_sync", epx_stream_sync(s->group, NULL)))
        return -1;
    return fixture_check_ht_dispatch(s);
}

int fixture_ht_combine(struct fixture *s)
{
    struct oracle_data data = oracle_data_workload(&s->w, EPX_BF16);
    struct oracle_combine how = {0};
    struct mismatch m;

    if (must(s, "epx_combine", epx_combine(s->ht, &s->ht_cin, &s->cout, NULL, NULL)) ||
        must(s, "epx_stream_sync", epx_stream_sync(s->group, NULL)))
        return -1;
    if (oracle_check_combine(&s->ht_route, &data, s->rank, &how, &s->cout, &m))
        return complain(s, "high throughput: %s", m.text);
    return 0;
}

int fixture_ht(struct fixture *s)
{
    return fixture_ht_dispatch(s) || fixture_ht_combine(s) ? -1 : 0;
}

int fixture_fail(struct fixture *s, const char *what)
{
    return complain(s, "%s (last error: %s)", what, epx_last_error());
}

epx_status fixture_sync(struct fixture *s, epx_status status)
{
    const epx_status synced = epx_stream_sync(s->group, NULL);

    return status != EPX_OK ? status : synced;
}

int fixture_rank(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, fixture_fn fn,
                 void *arg)
{
    struct fixture *s = malloc(sizeof(*s));
    int rc;

    if (!s)
        return -1;
    rc = fixture_open(s, rank, nranks, boot, config);
    s->arg = arg;
    rc = rc || fn(s);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s->why);
    fixture_close(s);
    free(s);
    return rc ? -1 : 0;
}

int fixture_group(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, fixture_fn fn,
                  void *arg)
{
    struct fixture s = {.rank = rank, .nranks = nranks, .boot = boot, .arg = arg};
    int rc = create(&s, config) || (fn && fn(&s));

    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s.why);
    if (s.group && epx_group_destroy(s.group) != EPX_OK)
        rc = -1;
    return rc ? -1 : 0;
}

int fixture_refused(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, epx_status status,
                    const char *const *words)
{
    struct fixture s = {.rank = rank, .nranks = nranks, .boot = boot};
    epx_group *group = (epx_group *)&s; /* which must not stay */
    const epx_status got = epx_group_create(&group, boot, config);
    int rc = fixture_expect(&s, "epx_group_create", got, status, words);

    if (!rc && group)
        rc = complain(&s, "epx_group_create failed but left a pointer");
    if (got == EPX_OK)
        epx_group_destroy(group);
    if (rc)
        fprintf(stderr, "rank %d: %s\n", rank, s.why);
    return rc;
}

struct fixture_job {
    int (*run)(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, fixture_fn fn,
               void *arg);
    const epx_group_config *config;
    fixture_fn fn;
    void *arg;
};

static int job_rank(int rank, int nranks, epx_bootstrap *boot, void *arg)
{
    const struct fixture_job *job = arg;

    return job->run(rank, nranks, boot, job->config, job->fn, job->arg);
}

int fixture_run(int nranks, const epx_group_config *config, fixture_fn fn, void *arg)
{
    struct fixture_job job = {fixture_rank, config, fn, arg};

    return run_ranks(nranks, job_rank, &job);
}

int fixture_group_run(int nranks, const epx_group_config *config, fixture_fn fn, void *arg)
{
    struct fixture_job job = {fixture_group, config, fn, arg};

    return run_ranks(nranks, job_rank, &job);
}
