/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of a random program: its tensors, each with an image of what shall be in its memory, byte by byte, when the
 * operations that were issued have completed; what lies between and around rows is part of it.
 */
#ifndef EPX_TESTS_RANDOM_RANK_H
#define EPX_TESTS_RANDOM_RANK_H

#include "model.h"

/* `image` has the strides of `t` over other memory: what is expected. */
struct tensor {
    struct tensor *next;
    const char *name;
    int step;
    epx_tensor t, image;
    unsigned char *base, *expected, *any; /* any: bytes that nobody promises */
    float *bound;                         /* NULL, or how far each element may be off: 0 = not at all */
    size_t bytes;
    int in_heap, wrapped; /* wrapped: of EPX's own memory */
    epx_group *group;
};

struct handle_run {
    epx_handle *handle;
    void *memory;             /* NULL, or the caller's for its tables */
    struct routing routing;   /* of the last update, or of the last dispatch in low latency */
    struct received received; /* by it */
    struct tensor *idx;
    int fresh;        /* low latency: the update has not been given to the library yet */
    int64_t expected; /* rows that this rank expects; 0 = it does not say */
    int fits;         /* no rank gets more */
    int staged;
};

struct rank {
    const struct plan *p;
    int rank, at; /* at: the step */
    struct draw d;
    epx_group *group[MOST_GROUPS];
    epx_stream stream[MOST_GROUPS][3];
    int active[MOST_GROUPS][MOST_RANKS]; /* 0: masked */
    epx_bootstrap *boot;
    struct handle_run h[MOST_HANDLES];
    struct tensor *tensors;
};

/* Prints where and what; the plan too, the first time. Returns -1. */
int wrong(const struct rank *me, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define CHECK(condition)                                            \
    do {                                                            \
        if (!(condition))                                           \
            return wrong(me, __FILE__, __LINE__, "%s", #condition); \
    } while (0)
#define TRY(call)                                                                                             \
    do {                                                                                                      \
        const epx_status status_ = (call);                                                                    \
        if (status_ != EPX_OK)                                                                                \
            return wrong(me, __FILE__, __LINE__, "%s: status %d: %s", #call, (int)status_, epx_last_error()); \
    } while (0)

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* PACKED: contiguous. ROWS: rows are, with gaps between them. ANY: any order of dimensions, any gaps. */
enum strides { PACKED, ROWS, ANY };
/* NULL without memory. */
struct tensor *tensor_new(struct rank *me, int group, const char *name, int dtype, enum strides strides, int ndim,
                          int64_t d0, int64_t d1, int64_t d2);
/* Row of n elements, which the operation shall write; `given`: which it shall find there. */
void tensor_expect(struct tensor *t, int64_t row, const void *values);
void tensor_give(struct tensor *t, int64_t row, const void *values);
void tensor_give_int(struct tensor *t, int64_t i, int64_t value);
void tensor_expect_int(struct tensor *t, int64_t i, int64_t value);
void tensor_zero(struct tensor *t, int64_t row);
/* The same for rows whose elements may be off. */
void tensor_expect_within(struct tensor *t, int64_t row, const void *values, const float *bound);
/* Element `row`: nobody says what it is. */
void tensor_ignore(struct tensor *t, int64_t row);
/* Memory that EPX lets the caller use (epx_handle_recv_tensor): compared and forgotten by tensor_unwrap. */
struct tensor *tensor_wrap(struct rank *me, const char *name, const epx_tensor *t);
int tensor_unwrap(struct rank *me, struct tensor *t);
/* All that this rank has issued is complete: compares everything. */
int tensors_check(struct rank *me);
void tensors_free(struct rank *me);

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

int run_update(struct rank *me, const struct step *s);
int run_dispatch(struct rank *me, const struct step *s);
int run_combine(struct rank *me, const struct step *s);
int run_sync(struct rank *me);
epx_group_config group_config(const struct plan *p);
/* The streams and handles of a group; forget_handles: once the group is destroyed. */
int open_handles(struct rank *me, int group);
void forget_handles(struct rank *me, int group);
/* High throughput, by chance: another handle over a copy of the routing's memory takes the place of this one. */
int move_handle(struct rank *me, int number);
/* epx_dispatch_layout() of the routing that an update has drawn. */
int check_routes(struct rank *me, const struct step *s);
/* MASK, CLEAR, CLEAN and JOIN (membership.c). */
int run_membership(struct rank *me, const struct step *s);
int has_masked(const struct rank *me, int group);

#endif
