/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epx._calls: what a call of deep_ep does once per layer, in C over Python's limited API and epx.h.
 *
 *   deep_ep/buffer.py          one line per method
 *     calls: read, check       tensor.c   DLPack's exchange API, or attributes of torch.Tensor
 *            allocate          memory.c   torch.empty, or the heap of a GPU (deep_ep/_memory.py)
 *            queue, wait       library.c  epx.h by the addresses of its functions
 *            return            layout.c, dispatch.c, combine.c
 *     Python                   groups, streams other than the current one, handles' fields, errors in words
 *
 * Rules
 *  - Python's lock is held but in wait.c. There the caller's tensors, the group and the handle are referenced, by the
 *    tuple of arguments or by a bag. Behind each wait the group may have been destroyed: group_of() looks.
 *  - An exception behind the first operation that is queued goes through keep_used(): work that runs later uses memory.
 *  - A function that returns NULL or -1 has set an exception.
 */
#ifndef CALLS_H
#define CALLS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x03090000
#include <Python.h>

#include "epx/epx.h"

/* ---- The library -------------------------------------------------------------------------------------------- */

#define LIBRARY_FUNCTIONS(F) \
    F(epx_last_error)        \
    F(epx_stream_call)       \
    F(epx_handle_update)     \
    F(epx_handle_recv_poll)  \
    F(epx_handle_recv_count) \
    F(epx_handle_recv_fits)  \
    F(epx_dispatch_layout)   \
    F(epx_dispatch)          \
    F(epx_combine)           \
    F(epx_group_error)

struct library {
#define LIBRARY_FIELD(name) __typeof__(&name) name;
    LIBRARY_FUNCTIONS(LIBRARY_FIELD)
#undef LIBRARY_FIELD
};

extern struct library library;
int library_find(void *handle);
/* For tests: another function in place of one of these. That before, or NULL. */
void *library_replace(const char *name, void *address);
/* 0 for EPX_OK; else the exception of epx.errors for the status, with the library's message. */
int library_check(epx_status status);

/* ---- Python's objects ---------------------------------------------------------------------------------------- */

/* Attributes that calls read. */
#define NAMES(N)       \
    N(__enter__)       \
    N(_address)        \
    N(_cdata)          \
    N(_engine)         \
    N(_last_high)      \
    N(_place)          \
    N(address)         \
    N(capturing)       \
    N(closed)          \
    N(context)         \
    N(contiguous)      \
    N(data_ptr)        \
    N(device)          \
    N(dtype)           \
    N(get_device)      \
    N(group)           \
    N(group_size)      \
    N(handle)          \
    N(is_cpu)          \
    N(is_cuda)         \
    N(is_neg)          \
    N(nnodes)          \
    N(pool)            \
    N(record_capture)  \
    N(rows)            \
    N(shape)           \
    N(stride)          \
    N(tokens)          \
    N(topk)            \
    N(untyped_storage) \
    N(view)
struct names {
#define NAMES_FIELD(name) PyObject *name;
    NAMES(NAMES_FIELD)
#undef NAMES_FIELD
};
extern struct names names;
int python_init(void);

/* What deep_ep gives in prepare(): functions and classes of its own and torch's, by name. */
int helpers_take(PyObject *dict);
PyObject *helper(const char *name); /* no new reference */
PyObject *call_helper(const char *name, const char *format, ...);

/* References that a call has until it returns. */
enum { BAG_ITEMS = 32 };
struct bag {
    PyObject *items[BAG_ITEMS];
    int count;
};
PyObject *bag_put(struct bag *bag, PyObject *owned); /* what it was given, or NULL */
void bag_empty(struct bag *bag);

int64_t integer_attribute(PyObject *object, PyObject *name);                 /* -1 with an exception */
int true_attribute(PyObject *object, PyObject *name);                        /* -1 with an exception */
PyObject *call_method(PyObject *object, PyObject *name, PyObject *argument); /* argument: NULL or one */
/* A number of at least `least`, of any kind that has __index__ and is no bool; -1 otherwise. */
int64_t positive(const char *name, PyObject *value, int64_t least);
/* The same, of at most `most`. */
int64_t at_most(const char *name, PyObject *value, int64_t least, int64_t most);
enum { MOST = 1 << 20, MOST_ROWS = INT32_MAX }; /* experts and rows of an alignment; rows */

/* deep_ep's exceptions, and -1. wrong(): "name: expected ..., got ..." of a wrong argument; `given` is stolen. */
int wrong(const char *name, const char *expected, PyObject *given);
int refused(const char *why);

/* ---- Tensors ------------------------------------------------------------------------------------------------- */

/* epx_dtype, and these two. */
enum { DTYPE_OTHER = 0, DTYPE_BOOL = 8, DTYPES = 9 };
#define DTYPE_BIT(dtype) (1u << (dtype))
#define PAYLOADS (DTYPE_BIT(EPX_BF16) | DTYPE_BIT(EPX_FP16) | DTYPE_BIT(EPX_FP32))
#define INDICES (DTYPE_BIT(EPX_INT64) | DTYPE_BIT(EPX_INT32))

/* What a call reads of a tensor, once. */
struct view {
    PyObject *tensor; /* the caller's reference; NULL: None was given */
    void *data;
    int64_t shape[EPX_MAX_NDIM], stride[EPX_MAX_NDIM];
    int dtype, ndim;
    int device, index; /* epx_device and its number; -1 = another kind of device */
};

struct dl_tensor;
int tensor_init(PyObject *torch);
/* DLPack's kind of a dtype, and a tensor from a capsule of it. */
void tensor_kind(struct dl_tensor *tensor, int dtype);
PyObject *tensor_from_capsule(PyObject *capsule, int dtype);
/* Chooses between the exchange API and attributes, for tests: which one is used now. */
int tensor_by_exchange(int use);
/* 1: a torch.Tensor; 0: not; -1: an exception. */
int tensor_is(PyObject *value);
int tensor_read(const char *name, PyObject *value, struct view *view);

enum { ANY = -1 };
struct want {
    unsigned dtypes;
    int ndim;
    int64_t shape[2];
    const struct view *beside; /* on the same device; NULL: on any */
    int strided;               /* may have any strides */
};
/* Reads a tensor and checks it. */
int tensor_check(const char *name, PyObject *value, const struct want *want, struct view *view);
int tensor_optional(const char *name, PyObject *value, const struct want *want, struct view *view);
int tensor_contiguous(const struct view *view);
size_t dtype_bytes(int dtype);
PyObject *dtype_object(int dtype); /* torch's; no new reference */
/* Rows of a multiple of 16 bytes. */
int check_row_bytes(const char *name, const struct view *view);
int check_device(const char *name, const struct view *view);
int wrong_device(const char *name, int device, int index, const char *why, const struct view *view);
epx_tensor descriptor(const struct view *view);

/* ---- Memory --------------------------------------------------------------------------------------------------- */

/* Numbers of streams: torch's, where 0 is the default stream. It is 1 in EPX, whose NULL is the group's own. */
#define EPX_DEFAULT_STREAM ((uintptr_t)1)
#define NO_STREAM UINTPTR_MAX

/* A tensor to be made. */
struct part {
    int dtype, ndim;
    int strided; /* dense, with these strides; else contiguous */
    int64_t shape[EPX_MAX_NDIM], stride[EPX_MAX_NDIM];
    PyObject *tensor;
    void *data;
};
enum { MOST_PARTS = 8 };
struct part part_make(int dtype, int ndim, int64_t rows, int64_t columns);
/* Of a tuple of (dtype, shape, strides or None); their number, or -1. */
int parts_read(PyObject *given, struct part *parts);

struct heap;

/* The facts about a pool of deep_ep that do not change: Place of Python. */
struct place {
    PyObject_HEAD int device, index;
    int nranks, local_experts, nnodes, experts;
    int topk, hidden_bytes, max_recv_tokens;
    int64_t most; /* rows of the last dispatches: see guess_rows() */
    PyObject *torch_device;
    PyObject *heap_object;
    struct heap *heap;          /* NULL: results lie in torch's memory */
    PyObject *keywords[DTYPES]; /* of torch.empty() */
};
int place_init(PyObject *module);
struct place *place_of(PyObject *pool); /* a new reference */

/* A new tensor in torch's own memory, a new reference. */
PyObject *memory_empty(struct place *place, int dtype, int ndim, const int64_t *shape, void **data);
/* Results, in reach of the other ranks where there is room. */
int memory_results(struct place *place, epx_stream stream, int capturing, struct part *parts, int count);

/* ---- One call ------------------------------------------------------------------------------------------------- */

struct events {
    PyObject *previous, *async_finish, *allocate_on_comm_stream;
};

/* The references are the call's. */
struct call {
    PyObject *buffer, *engine, *pool, *group;
    PyObject *launcher, *launch; /* NULL where the work runs on the current stream and the caller waits */
    PyObject *context;           /* entered */
    struct place *place;
    struct bag used; /* by what was queued */
    struct bag made; /* of what the caller has given */
    epx_stream stream;
    int capturing, queued;
};

int call_begin(struct call *call, PyObject *buffer, const struct view *tokens, const struct events *events);
int call_pool(struct call *call, PyObject *pool); /* steals it */
/* Chooses the stream, and enters the context of torch's own work. */
int call_launch(struct call *call);
epx_tensor *call_use(struct call *call, epx_tensor *to, PyObject *tensor, const struct view *view);
/* Leaves the context and waits as the caller has asked: an EventOverlap. */
PyObject *call_finish(struct call *call);
/* For another attempt with another pool. */
void call_drop_pool(struct call *call);
/* Ends a call, and returns its result. Without one, what is queued keeps what it uses. */
PyObject *call_end(struct call *call, PyObject *result);
epx_group *group_of(const struct call *call); /* NULL: it was destroyed */
epx_handle *handle_of(const struct call *call, PyObject *handle);

/* Waits for the counts of an update, and for queued work of CPU tensors. */
int wait_counts(const struct call *call, PyObject *handle, int64_t *rows, int64_t *expert_counts);
int wait_queued(const struct call *call);

PyObject *calls_layout(PyObject *module, PyObject *arguments);
PyObject *calls_dispatch(PyObject *module, PyObject *arguments);
PyObject *calls_combine(PyObject *module, PyObject *arguments);

#endif
