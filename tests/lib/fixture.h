/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small, fixed group with one handle of each mode, for tests that misuse it and then want to see that it still
 * works: good operations are one call each and are checked against the oracle. Every rank has its own fixture.
 */
#ifndef EPX_TESTS_LIB_FIXTURE_H
#define EPX_TESTS_LIB_FIXTURE_H

#include "epx/epx.h"
#include "oracle.h"
#include "workload.h"

enum { FIXTURE_TOKENS = 5, FIXTURE_EXPERTS = 6, FIXTURE_TOPK = 3, FIXTURE_HIDDEN = 80, FIXTURE_M = 6 };

struct fixture {
    int rank, nranks;
    const epx_bootstrap *boot;
    epx_group *group;
    epx_handle *ll, *ht; /* EXPERT_MAJOR and FLAT */
    struct workload w;
    struct oracle_route ll_route, ht_route;
    struct oracle_recv ll_recv, ht_recv;
    /* Good arguments, made by fixture_open; their data is refilled by each good operation. */
    epx_tensor idx, tokens, weights; /* [B,K] int64, [B,H] bf16, [B,K] fp32 */
    epx_tensor ll_rows, ll_counts;   /* [L, R*M, H] bf16, int32 [L] */
    epx_tensor ht_rows;              /* [R*M, H] bf16 */
    epx_tensor ht_weights, ht_idx;   /* [R*M, K] */
    epx_tensor combined;             /* [B,H] bf16 */
    epx_layout_info ll_info;
    epx_dispatch_inputs in;
    epx_dispatch_outputs ll_out, ht_out;
    epx_combine_inputs ll_cin, ht_cin;
    epx_combine_outputs cout;
    void *arg; /* of fixture_run */
    char why[900];
};

/* The configuration that fixture_open uses when given none. */
epx_group_config fixture_config(int timeout_ms);
/* The same for a group of other sizes. */
epx_group_config fixture_config_of(int timeout_ms, int experts, int tokens, int hidden_bytes, int topk);
/* Of a handle, with all settings their defaults. */
epx_handle_config fixture_handle_config(epx_mode mode, epx_layout layout, int topk);
/* 0, or -1 with why filled; `config` may be NULL. */
int fixture_open(struct fixture *s, int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config);
/* The same by epx_group_join. */
int fixture_join(struct fixture *s, const char *ticket, int rank, int nranks, const epx_group_config *config,
                 int timeout_ms);
void fixture_close(struct fixture *s);
/* A barrier of all ranks, by the bootstrap's all-gather. 0 or -1. */
int fixture_meet(struct fixture *s);
/* One whole checked round: dispatch and combine (high throughput: update first). 0 or -1. */
int fixture_ll(struct fixture *s);
int fixture_ht(struct fixture *s);
/* The two halves of fixture_ht: dispatch, after which ht_rows holds the experts' results; and combine. */
int fixture_ht_dispatch(struct fixture *s);
int fixture_ht_combine(struct fixture *s);
/* Fills the inputs for the next round and overwrites the outputs. */
void fixture_refill(struct fixture *s);
/* Parts of fixture_ll: after a dispatch that was issued by hand. */
int fixture_check_ll_dispatch(struct fixture *s);
int fixture_check_ht_dispatch(struct fixture *s); /* fills ht_rows as fixture_ht_dispatch does */
void fixture_fill_ll(struct fixture *s);          /* ll_rows holds the experts' results then; the check does it, too */
int fixture_check_ll_combine(struct fixture *s);
void fixture_set_active(struct fixture *s, int rank, int active);

/* -1, with `what` and epx_last_error() as the reason. */
int fixture_fail(struct fixture *s, const char *what);
/* Waits for the default stream; `status` if that is an error, otherwise that of the wait. */
epx_status fixture_sync(struct fixture *s, epx_status status);

/* What a test does on each rank, with an open fixture. 0, or -1 with why filled. */
typedef int (*fixture_fn)(struct fixture *s);
/* One rank: opens a fixture, runs fn with `arg` in s->arg, prints why it failed, closes. 0 or -1. */
int fixture_rank(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, fixture_fn fn,
                 void *arg);
/* Ranks as threads; returns how many failed. */
int fixture_run(int nranks, const epx_group_config *config, fixture_fn fn, void *arg);

/*
 * A group alone: the fixture has no handles, tensors and oracle. Creates it, runs `fn` (NULL: nothing), prints why it
 * failed, destroys the group where fn has not. 0 or -1. fixture_group_run: with ranks as threads, how many failed.
 */
int fixture_group(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, fixture_fn fn,
                  void *arg);
int fixture_group_run(int nranks, const epx_group_config *config, fixture_fn fn, void *arg);
/* Is creation refused with `status`, and does epx_last_error() contain all of the words? 0, or -1 and prints why. */
int fixture_refused(int rank, int nranks, const epx_bootstrap *boot, const epx_group_config *config, epx_status status,
                    const char *const *words);

/* Did `call` return `status`, and does epx_last_error() contain all of the NULL-terminated words? */
int fixture_expect(struct fixture *s, const char *call, epx_status got, epx_status expected, const char *const *words);

#endif
