/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `epx predict`, in parts:
 *
 *      predict.c           the command: options, which points are predicted
 *      predict_machine.c   machine files
 *      predict_run.c       one point: the simulation with costs (sim/cost.h), and what it says
 *      predict_rank.c      one rank of it: group, tensors, operations, check by the oracle
 *      predict_known.c     measured and published figures beside predicted ones
 *      predict_report.c    tables and JSON
 *      predict_plot.c      the plot, SVG; predict_page.c the page
 */
#ifndef EPX_TOOLS_PREDICT_H
#define EPX_TOOLS_PREDICT_H

#include <stdint.h>
#include <stdio.h>

#include "epx/epx.h"
#include "sim/cost.h"
#include "tests/lib/oracle.h"

/* ---- Machines ------------------------------------------------------------------------------------------------ */

struct machine_text {
    const char *name, *text;
};
extern const struct machine_text machine_texts[]; /* those that are built in; name NULL at the end */

/* A built-in name, or a path. 0, or -1 after a message. */
int machine_load(const char *name, struct cost_machine *machine);
void machine_list(FILE *to);

/* ---- One point ------------------------------------------------------------------------------------------------- */

enum { PREDICT_FEW_AGENTS = 8 }; /* that a rank has at least */

enum predict_dtype { PREDICT_BF16, PREDICT_FP8 };

struct predict_point {
    struct cost_machine machine;
    int32_t mode; /* epx_mode */
    int32_t ranks, tokens, hidden, topk, experts;
    int32_t dtype;   /* enum predict_dtype, of dispatch; combine is bf16 */
    int32_t routing; /* enum workload_routing */
    int32_t groups, topk_groups;
    int32_t iters, agents; /* 0 = automatic */
    uint64_t seed;
};

enum predict_op { PREDICT_DISPATCH, PREDICT_COMBINE, PREDICT_OPS };

struct predict_op_result {
    double us_median, us_slowest; /* over the ranks, of each its mean over the series */
    /* Per rank, on average. */
    double bytes, header_bytes, messages, signals, link_bytes, commands, looks;
};

struct predict_result {
    struct predict_op_result op[PREDICT_OPS];
    double update_us;       /* high throughput: exchange of the routing; the median rank */
    double memory_bytes;    /* EPX's own, per rank, for rows of the real size */
    double rows, node_rows; /* per rank: (token, destination rank), and (token, node), the own one included */
    double seconds;         /* that the prediction took */
    double peak_bytes;      /* of this process so far */
    uint64_t steps, hash;
    char error[600]; /* "" = good */
};

/* 0, or -1 with result->error. */
int predict_run(const struct predict_point *point, struct predict_result *result);
int predict_nodes(const struct predict_point *point);

/* ---- Ranks ------------------------------------------------------------------------------------------------------ */

struct predict_times {
    double us[PREDICT_OPS], update_us;
};

/* What all ranks of a point share. */
struct predict_world {
    const struct predict_point *point;
    int small_hidden, agents, iters;
    const struct oracle_route *route;
    struct predict_times *times;                 /* [ranks] */
    struct cost_traffic (*traffic)[PREDICT_OPS]; /* [ranks], of the whole series */
    int64_t most_rows;                           /* that a rank receives */
    int remote_rows;                             /* most that a rank sends to one other */
    double memory_bytes;                         /* rank 0's */
    char error[600];
};

struct workload predict_workload(const struct predict_world *world);
int predict_rank(int rank, int n, epx_bootstrap *boot, void *world);

/* ---- Figures ---------------------------------------------------------------------------------------------------- */

/* Measured on the H200 (calibration = 1), or published: predicted beside them. An exit status. */
int predict_known(int calibration, int modes, int json, uint64_t seed);

void predict_table_head(void);
void predict_table_row(const struct predict_point *point, const struct predict_result *result);
void predict_json(FILE *to, const struct predict_point *point, const struct predict_result *result);
/* 0, or -1 after a message. */
/* --report; argv: the command line without the program's name. */
int predict_page(const char *path, const struct predict_point *points, const struct predict_result *results, int n,
                 int argc, char **argv);
int plot_write(const char *path, const struct predict_point *points, const struct predict_result *results, int n);

#endif
