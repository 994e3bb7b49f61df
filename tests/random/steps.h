/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of steps share: update.c, dispatch.c, combine.c and refuse.c. */
#ifndef EPX_TESTS_RANDOM_STEPS_H
#define EPX_TESTS_RANDOM_STEPS_H

#include "rank.h"

struct dispatch {
    epx_dispatch_inputs in;
    epx_dispatch_outputs out;
    epx_dispatch_config config;
    epx_layout_info info;
    struct tensor *tokens, *scales, *weights, *idx, *src_rank, *src_token, *map;
    struct tensor *wrapped[2]; /* in EPX's own receive buffer */
    int64_t rows;
};

struct combine {
    epx_combine_inputs in;
    epx_combine_outputs out;
    epx_combine_config config;
    struct tensor *results, *signals, *wrapped;
};

const struct handle_plan *plan_of(const struct rank *me, const struct step *s);
epx_stream stream_of(const struct rank *me, const struct step *s);
/* A contiguous tensor of the step's group. */
struct tensor *packed(struct rank *me, const struct step *s, const char *name, int dtype, int ndim, int64_t d0,
                      int64_t d1, int64_t d2);
int draw_index(struct rank *me);
epx_tensor *of(struct tensor *t);
/* Tokens of rank `from` that go to rank `to`. */
int sent_to(const struct routing *r, int from, int to);
/* A tensor of what is received, `last` elements a row (0: one number). */
struct tensor *received_tensor(struct rank *me, const struct step *s, const char *name, int dtype, enum strides strides,
                               int64_t rows, int64_t last);
/* The same in EPX's own receive buffer (which: EPX_RECV_*). NULL, and 0: it has no room there. */
int recv_buffer_tensor(struct rank *me, const struct step *s, int which, int dtype, int64_t rows, int64_t columns,
                       struct tensor **tensor);
/* Rows of each zone of a receive tensor: what is needed, and some more. */
int64_t draw_rows(struct rank *me, const struct step *s);
/* The row of a place, in a tensor whose zones have `rows` rows. */
int64_t row_of(const struct rank *me, const struct handle_plan *h, const struct place *at, int64_t rows);
void expect_float(struct tensor *t, int64_t i, float value);
int expect_status(const struct rank *me, epx_status expected, epx_status got, const char *what);

void expect_info(struct rank *me, const struct step *s, epx_layout_info *info);
/* A call with one mistake, before the right one. */
int refuse_dispatch(struct rank *me, const struct step *s, const struct dispatch *right);
int refuse_combine(struct rank *me, const struct step *s, const struct combine *right);

#endif
