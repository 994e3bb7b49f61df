/* SPDX-License-Identifier: Apache-2.0 */
/* dispatch(): with a new routing, whose counts are exchanged first, and with that of a handle. */
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

enum { PART_TOKENS, PART_SOURCES, PART_IDX, PART_WEIGHTS, PART_SCALES, PARTS };

/* ---- What is sent ----------------------------------------------------------------------------------------------- */

/* A scale for each group of channels, or four in an int32. DeepEP's contract has groups of 128, and its kernels copy
 * any number of scales; EPX takes groups of any power of two. */
static int check_groups(const struct payload *payload)
{
    const int64_t hidden = payload->tokens.shape[1], columns = payload->scales.ndim == 1 ? 1 : payload->scales.shape[1];
    char expected[96];
    PyObject *shape;

    for (int64_t group = 1;; group *= 2) {
        if (columns == (hidden + group - 1) / group)
            return 0;
        if (group >= hidden)
            break;
    }
    (void)snprintf(expected, sizeof(expected), "a scale for each group of channels ([%lld, %lld] for groups of 128)",
                   (long long)payload->tokens.shape[0], (long long)(hidden + 127) / 128);
    shape = PyObject_GetAttr(payload->scales.tensor, names.shape);
    if (shape) {
        PyObject *list = PySequence_List(shape);

        Py_DECREF(shape);
        shape = list;
    }
    return wrong("x[1]", expected, shape);
}

int payload_read(PyObject *x, struct payload *payload)
{
    const struct want plain = {.dtypes = PAYLOADS, .ndim = 2, .shape = {ANY, ANY}};
    const struct want rows = {.dtypes = DTYPE_BIT(EPX_FP8_E4M3), .ndim = 2, .shape = {ANY, ANY}};
    struct want scales = {.dtypes = DTYPE_BIT(EPX_FP32) | DTYPE_BIT(EPX_INT32), .strided = 1};

    memset(payload, 0, sizeof(*payload));
    if (!PyTuple_Check(x) && !PyList_Check(x))
        return tensor_check("x", x, &plain, &payload->tokens);
    if (PySequence_Size(x) != 2)
        return wrong("x", "a tensor or a pair (tokens, scales)", PyUnicode_FromFormat("%zd items", PySequence_Size(x)));
    payload->pair[0] = PySequence_GetItem(x, 0);
    payload->pair[1] = PySequence_GetItem(x, 1);
    if (!payload->pair[0] || !payload->pair[1] || tensor_check("x[0]", payload->pair[0], &rows, &payload->tokens) ||
        tensor_read("x[1]", payload->pair[1], &payload->scales))
        return -1;
    scales.ndim = payload->scales.ndim == 1 ? 1 : 2;
    scales.shape[0] = payload->tokens.shape[0];
    scales.shape[1] = ANY;
    scales.beside = &payload->tokens;
    return tensor_check("x[1]", payload->pair[1], &scales, &payload->scales) ? -1 : check_groups(payload);
}

void payload_end(struct payload *payload)
{
    Py_XDECREF(payload->pair[0]);
    Py_XDECREF(payload->pair[1]);
}

/* Scales of Tensor.expand() are copied: EPX takes positive strides. */
static int payload_spread(struct call *call, struct payload *payload)
{
    struct view *scales = &payload->scales;
    PyObject *copy;

    for (int i = 0; i < scales->ndim; i++) {
        if (scales->shape[i] <= 1 || scales->stride[i] > 0)
            continue;
        Py_INCREF(scales->tensor);
        copy = bag_put(&call->used, scales->tensor) /* the copy reads it */
                   ? bag_put(&call->made, call_method(scales->tensor, names.contiguous, NULL))
                   : NULL;
        return copy ? tensor_read("x[1]", copy, scales) : -1;
    }
    return 0;
}

/* As a column where there is one scale for each row. */
static epx_tensor columns(epx_tensor t)
{
    if (t.ndim == 1) {
        t.ndim = 2;
        t.shape[1] = 1;
        t.stride[1] = t.stride[0] ? 1 : 0;
    }
    return t;
}

static struct part scales_part(const struct payload *payload, int64_t rows)
{
    return part_make(payload->scales.dtype, payload->scales.ndim, rows, payload->scales.shape[1]);
}

static int use_parts(struct call *call, const struct part *parts, int count)
{
    for (int i = 0; i < count; i++) {
        if (parts[i].tensor && !bag_put(&call->used, parts[i].tensor))
            return -1;
    }
    return 0;
}

static epx_tensor part_descriptor(const struct part *part)
{
    return columns(epx_tensor_make(part->data, part->dtype, part->ndim, part->shape[0], part->shape[1], 0, 0));
}

static PyObject *payload_result(PyObject *tokens, PyObject *scales)
{
    if (scales)
        return Py_BuildValue("OO", tokens, scales);
    Py_INCREF(tokens);
    return tokens;
}

/* ---- A new routing ---------------------------------------------------------------------------------------------- */

struct fresh {
    struct call call;
    struct payload x;
    struct view in_rank, per_expert, idx, weights;
    int64_t experts, alignment, worst, topk, rows, channels;
    int64_t guess; /* rows for which it was queued before they were known, or 0 */
    int counts_as_tensor, max_sms;
    PyObject *routing, *handle; /* in the bag, as these tensors */
    PyObject *counts, *expert_counts;
    PyObject *lists; /* a reference to the list of each expert's rows */
    struct part parts[PARTS];
};

struct given {
    PyObject *buffer, *x, *handle, *per_rank, *per_node, *in_rank, *per_expert, *idx, *weights, *alignment, *worst;
    PyObject *counts_as_tensor;
    long long channels;
    int max_sms;
    struct events events;
};

static int read_request(struct fresh *f, const struct given *given)
{
    const struct view *tokens = &f->x.tokens;
    const int64_t count = tokens->shape[0], ranks = integer_attribute(given->buffer, names.group_size);
    const struct want per_rank = {.dtypes = DTYPE_BIT(EPX_INT32), .ndim = 1, .shape = {ranks}, .beside = tokens};
    const struct want in_rank = {.dtypes = DTYPE_BIT(DTYPE_BOOL), .ndim = 2, .shape = {count, ranks}, .beside = tokens};
    const struct want per_expert = {.dtypes = DTYPE_BIT(EPX_INT32), .ndim = 1, .shape = {ANY}, .beside = tokens};
    const struct want idx = {.dtypes = INDICES, .ndim = 2, .shape = {count, ANY}, .beside = tokens};
    struct want weights = {.dtypes = DTYPE_BIT(EPX_FP32), .ndim = 2, .shape = {count, ANY}, .beside = tokens};
    const int64_t nodes = integer_attribute(f->call.engine, names.nnodes);
    const struct want per_node = {.dtypes = DTYPE_BIT(EPX_INT32), .ndim = 1, .shape = {nodes}, .beside = tokens};
    struct view ignored;

    if (ranks < 0 || nodes < 0 || tensor_check("num_tokens_per_rank", given->per_rank, &per_rank, &ignored) ||
        (nodes > 1 && tensor_optional("num_tokens_per_rdma_rank", given->per_node, &per_node, &ignored)) ||
        check_device("x", tokens) || check_row_bytes("x", tokens) ||
        tensor_check("is_token_in_rank", given->in_rank, &in_rank, &f->in_rank) ||
        tensor_check("num_tokens_per_expert", given->per_expert, &per_expert, &f->per_expert) ||
        tensor_optional("topk_idx", given->idx, &idx, &f->idx))
        return -1;
    if (f->idx.tensor)
        weights.shape[1] = f->idx.shape[1];
    f->experts = f->per_expert.shape[0];
    f->topk = f->idx.tensor ? f->idx.shape[1] : ranks;
    if (tensor_optional("topk_weights", given->weights, &weights, &f->weights))
        return -1;
    if (!f->idx.tensor != !f->weights.tensor)
        return wrong("topk_weights", "topk_idx and topk_weights, both or neither", PyUnicode_FromString("one of them"));
    f->alignment = at_most("expert_alignment", given->alignment, 1, MOST);
    f->worst = f->alignment < 0 ? -1 : at_most("num_worst_tokens", given->worst, 0, MOST_ROWS);
    return f->worst < 0 ? -1 : 0;
}

static int check_request(struct fresh *f, const struct given *given)
{
    f->counts_as_tensor = PyObject_IsTrue(given->counts_as_tensor);
    if (f->counts_as_tensor < 0)
        return -1;
    if (f->worst && !f->idx.tensor)
        return wrong("topk_idx", "a tensor where num_worst_tokens is given", PyUnicode_FromString("None"));
    if (f->counts_as_tensor && !f->idx.tensor)
        return wrong("topk_idx", "a tensor where num_recv_tokens_per_expert_as_cuda is given",
                     PyUnicode_FromString("None"));
    if (f->topk < 1 || f->topk > EPX_MAX_TOPK)
        return wrong("topk_idx", "1 to 32 experts per token", PyLong_FromLongLong(f->topk));
    return 0;
}

static int64_t hidden_bytes(const struct view *tokens)
{
    const int64_t element = (int64_t)dtype_bytes(tokens->dtype);

    return tokens->shape[1] * (element < 2 ? 2 : element);
}

/* The pool of the last dispatch, if it is one for this call. */
static int last_pool(struct fresh *f)
{
    const struct view *tokens = &f->x.tokens;
    PyObject *pool = PyObject_GetAttr(f->call.engine, names._last_high);
    struct place *place;
    int fits;

    if (!pool || pool == Py_None) {
        Py_XDECREF(pool);
        return pool ? 0 : -1;
    }
    if (call_pool(&f->call, pool))
        return -1;
    place = f->call.place;
    fits = place->device == tokens->device && place->index == tokens->index && place->experts == f->experts &&
           place->topk >= f->topk && place->hidden_bytes >= hidden_bytes(tokens) && (f->worst || !f->call.capturing);
    if (!fits)
        call_drop_pool(&f->call);
    return fits;
}

static int find_pool(struct fresh *f)
{
    const int last = last_pool(f);
    PyObject *pool;

    if (last)
        return last < 0 ? -1 : 0;
    pool = call_helper("high_pool", "OOLLLLO", f->call.engine, f->x.tokens.tensor, (long long)f->experts,
                       (long long)f->x.tokens.shape[0], (long long)hidden_bytes(&f->x.tokens), (long long)f->topk,
                       f->worst ? Py_True : Py_False);

    return pool ? call_pool(&f->call, pool) : -1;
}

/* One expert on each rank that the token goes to, where the caller gave no indices. */
static int find_indices(struct fresh *f)
{
    PyObject *made;

    if (f->idx.tensor)
        return 0;
    made = bag_put(&f->call.made,
                   call_helper("routing_indices", "OOO", f->call.engine, f->in_rank.tensor, f->per_expert.tensor));
    return made ? tensor_read("topk_idx", made, &f->idx) : -1;
}

static int update(struct fresh *f)
{
    struct place *place = f->call.place;
    const int64_t ranks = place->nranks, local = place->local_experts, size = ranks * (ranks + 2);
    epx_layout_info info = EPX_LAYOUT_INFO_INIT;
    epx_tensor idx, matrix, tokens, relayed, experts;
    epx_handle *handle;
    void *data, *expert_data = NULL;

    f->counts = bag_put(&f->call.used, memory_empty(place, EPX_INT32, 1, &size, &data));
    if (f->counts && f->counts_as_tensor)
        f->expert_counts = bag_put(&f->call.used, memory_empty(place, EPX_INT64, 1, &local, &expert_data));
    handle = f->counts && (f->expert_counts || !f->counts_as_tensor) ? handle_of(&f->call, f->handle) : NULL;
    if (!handle || !call_use(&f->call, &idx, f->idx.tensor, &f->idx))
        return -1;
    matrix = epx_tensor_make(data, EPX_INT32, 2, ranks, ranks, 0, 0);
    tokens = epx_tensor_make((int32_t *)data + ranks * ranks, EPX_INT32, 1, ranks, 0, 0, 0);
    relayed = epx_tensor_make((int32_t *)data + ranks * (ranks + 1), EPX_INT32, 1, ranks, 0, 0, 0);
    experts = epx_tensor_make(expert_data, EPX_INT64, 1, local, 0, 0, 0);
    info.expected_rows = (uint32_t)f->guess;
    info.rank_matrix = &matrix;
    info.rank_tokens = &tokens;
    info.relay_counts = &relayed;
    info.expert_counts = expert_data ? &experts : NULL;
    f->call.queued = 1;
    return library_check(library.epx_handle_update(handle, &idx, &info, f->call.stream));
}

/* The number of rows, and the list for the caller. */
static int receive_counts(struct fresh *f)
{
    const int local = f->call.place->local_experts;
    int64_t *counts;

    f->rows = f->worst;
    if (f->worst) {
        f->lists = PyList_New(0);
        return f->lists ? 0 : -1;
    }
    counts = PyMem_Malloc(sizeof(*counts) * (size_t)local);
    if (!counts) {
        PyErr_NoMemory();
        return -1;
    }
    if (!wait_counts(&f->call, f->handle, &f->rows, counts))
        f->lists = f->weights.tensor ? PyList_New(local)
                                     : call_helper("sum_counts", "OOL", f->call.engine, f->per_expert.tensor,
                                                   (long long)f->alignment);
    for (int i = 0; f->lists && f->weights.tensor && i < local; i++)
        PyList_SetItem(f->lists, i, PyLong_FromLongLong((counts[i] + f->alignment - 1) / f->alignment * f->alignment));
    PyMem_Free(counts);
    return f->lists ? 0 : -1;
}

static int make_parts(struct fresh *f)
{
    struct part *parts = f->parts, *idx = &parts[PART_IDX];
    const int scaled = f->x.scales.tensor != NULL, weighted = f->weights.tensor != NULL;
    int failed;

    parts[PART_TOKENS] = part_make(f->x.tokens.dtype, 2, f->rows, f->x.tokens.shape[1]);
    parts[PART_SOURCES] = part_make(EPX_INT32, 2, 2, f->rows);
    parts[PART_IDX] = part_make(f->idx.dtype, 2, f->rows, f->topk);
    parts[PART_WEIGHTS] = part_make(EPX_FP32, 2, f->rows, f->topk);
    *(weighted ? &parts[PART_SCALES] : idx) = scales_part(&f->x, f->rows);
    failed = memory_results(f->call.place, f->call.stream, f->call.capturing, parts, PART_IDX + 2 * weighted + scaled);
    if (!weighted) { /* the scales are in place of the indices */
        parts[PART_SCALES] = *idx;
        *idx = part_make(EPX_INT64, 2, 0, 0);
    }
    return use_parts(&f->call, parts, PARTS) || failed ? -1 : 0;
}

/* Of a dispatch that was queued before its rows were known. Views would be other tensors to autograd. */
static int cut_parts(struct fresh *f)
{
    for (int i = 0; i < PARTS; i++) {
        const struct part *part = &f->parts[i];
        PyObject *cut;

        if (!part->tensor || i == PART_SOURCES)
            continue;
        cut = part->ndim == 1
                  ? PyObject_CallMethod(part->tensor, "resize_", "L", (long long)f->rows)
                  : PyObject_CallMethod(part->tensor, "resize_", "LL", (long long)f->rows, (long long)part->shape[1]);
        if (!cut)
            return -1;
        Py_DECREF(cut);
    }
    return 0;
}

static int send(struct fresh *f, int if_expected)
{
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_dispatch_inputs inputs = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs outputs = EPX_DISPATCH_OUTPUTS_INIT;
    epx_tensor tokens, scales, weights, to[PARTS], ranks, places;
    epx_handle *handle = handle_of(&f->call, f->handle);
    struct call *call = &f->call;
    int32_t *sources = f->parts[PART_SOURCES].data;

    for (int i = 0; i < PARTS; i++)
        to[i] = part_descriptor(&f->parts[i]);
    ranks = epx_tensor_make(sources, EPX_INT32, 1, f->rows, 0, 0, 0);
    places = epx_tensor_make(sources + f->rows, EPX_INT32, 1, f->rows, 0, 0, 0);
    if (!handle || !(inputs.tokens = call_use(call, &tokens, f->x.tokens.tensor, &f->x.tokens)))
        return -1;
    outputs.tokens = &to[PART_TOKENS];
    outputs.src_rank = &ranks;
    outputs.src_token = &places;
    if (f->x.scales.tensor) {
        if (!call_use(call, &scales, f->x.scales.tensor, &f->x.scales))
            return -1;
        scales = columns(scales);
        inputs.scales = &scales;
        outputs.scales = &to[PART_SCALES];
    }
    if (f->weights.tensor) {
        if (!(inputs.topk_weights = call_use(call, &weights, f->weights.tensor, &f->weights)))
            return -1;
        outputs.topk_idx = &to[PART_IDX];
        outputs.topk_weights = &to[PART_WEIGHTS];
    }
    config.if_expected = if_expected;
    config.max_sms = f->max_sms;
    return library_check(library.epx_dispatch(handle, &inputs, &outputs, NULL, &config, call->stream));
}

/* Rows that this dispatch will hardly exceed, by those before it; 0: the rows are waited for first. */
static int64_t guess_rows(const struct fresh *f)
{
    const struct place *place = f->call.place;
    const int64_t most = place->most;

    if (f->worst || !f->weights.tensor || !place->heap || place->nnodes > 1 || f->call.capturing || !most)
        return 0;
    return (most + most / 32 + 127) / 64 * 64;
}

/* What was once more is forgotten slowly. */
static void learn_rows(struct place *place, int64_t rows)
{
    const int64_t less = (place->most - rows) / 16;

    place->most = rows > place->most ? rows : place->most - (less > 4 ? less : 4);
    if (place->most < rows)
        place->most = rows;
}

/* Rows whose number is known by now; what was sent for a guess did nothing if a rank has more than it expected. */
static int receive_rows(struct fresh *f)
{
    epx_handle *handle;
    int fits = 0;

    if (receive_counts(f))
        return -1;
    if (!f->worst)
        learn_rows(f->call.place, f->rows);
    handle = handle_of(&f->call, f->handle);
    if (!handle || (f->guess && library_check(library.epx_handle_recv_fits(handle, &fits))))
        return -1;
    if (fits)
        return cut_parts(f);
    return make_parts(f) || send(f, 0) ? -1 : 0;
}

static PyObject *or_none(PyObject *object)
{
    return object ? object : Py_None;
}

/* Of what was queued: the handle of the caller, the event, and the tuple. */
static PyObject *fresh_result(struct fresh *f)
{
    struct call *call = &f->call;
    PyObject *rows = PyLong_FromLongLong(f->rows), *handle, *counts, *event = NULL, *x, *result = NULL;
    const int set = rows ? PyObject_SetAttr(f->routing, names.rows, rows) : -1;

    Py_XDECREF(rows);
    handle =
        set ? NULL
            : call_helper("make_handle", "OOOOOOOLK", call->engine, f->routing, or_none(call->launch),
                          f->in_rank.tensor, f->counts, f->parts[PART_SOURCES].tensor, f->worst ? Py_True : Py_False,
                          (long long)f->channels, (unsigned long long)(uintptr_t)call->stream);
    counts =
        handle && f->expert_counts ? call_helper("aligned", "OL", f->expert_counts, (long long)f->alignment) : f->lists;
    if (counts == f->lists)
        Py_XINCREF(counts);
    if (call->launch && f->expert_counts && counts) {
        Py_INCREF(counts);
        if (!bag_put(&call->used, counts))
            handle = NULL;
    }
    if (handle && counts)
        event = call_finish(call);
    x = event ? payload_result(f->parts[PART_TOKENS].tensor, f->parts[PART_SCALES].tensor) : NULL;
    if (x)
        result = Py_BuildValue("OOOOOO", x, or_none(f->parts[PART_IDX].tensor), or_none(f->parts[PART_WEIGHTS].tensor),
                               counts, handle, event);
    Py_XDECREF(x);
    Py_XDECREF(event);
    Py_XDECREF(counts);
    Py_XDECREF(handle);
    return result;
}

static PyObject *attempt(struct fresh *f)
{
    struct call *call = &f->call;

    if (call_launch(call) || payload_spread(call, &f->x) || find_indices(f))
        return NULL;
    f->handle = bag_put(&call->used,
                        PyObject_CallMethod(call->pool, "take", "iii", EPX_HIGH_THROUGHPUT, EPX_FLAT, (int)f->topk));
    f->routing = f->handle ? bag_put(&call->used, call_helper("Routing", "OOL", call->pool, f->handle,
                                                              (long long)f->x.tokens.shape[0]))
                           : NULL;
    f->rows = f->guess = guess_rows(f);
    if (!f->routing || update(f) || (f->guess && (make_parts(f) || send(f, 1))) || receive_rows(f))
        return NULL;
    return fresh_result(f);
}

/* A rank has more tokens than the group is for: all ranks have learnt it in the update, and make a larger one. */
static PyObject *attempt_again(struct fresh *f)
{
    PyObject *type, *value, *trace, *pool;

    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    pool = call_helper("larger_pool", "OOOOLLLLO", f->call.engine, f->call.pool, value, f->x.tokens.tensor,
                       (long long)f->experts, (long long)f->x.tokens.shape[0], (long long)hidden_bytes(&f->x.tokens),
                       (long long)f->topk, f->worst ? Py_True : Py_False);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (!pool)
        return NULL;
    call_drop_pool(&f->call);
    Py_XDECREF(f->lists);
    f->lists = NULL;
    return call_pool(&f->call, pool) ? NULL : attempt(f);
}

static PyObject *fresh(struct fresh *f, const struct given *given)
{
    PyObject *result;

    f->channels = given->channels;
    f->max_sms = given->max_sms;
    if (call_begin(&f->call, given->buffer, &f->x.tokens, &given->events) || read_request(f, given) ||
        check_request(f, given) || find_pool(f))
        return NULL;
    result = attempt(f);
    if (!result && PyErr_ExceptionMatches(helper("OverflowingError")))
        result = attempt_again(f);
    Py_XDECREF(f->lists);
    return result;
}

/* ---- The routing of a handle ------------------------------------------------------------------------------------ */

PyObject *routing_find(struct call *call, PyObject *handle, const struct view *rows)
{
    PyObject *routing = call_helper("find", "(O)", handle),
             *pool = routing ? PyObject_GetAttr(routing, names.pool) : NULL;
    const int64_t nbytes = rows->shape[1] * (int64_t)dtype_bytes(rows->dtype);
    struct place *place;

    if (!routing || !bag_put(&call->used, routing)) {
        Py_XDECREF(pool);
        return NULL;
    }
    if (!pool || true_attribute(pool, names.closed) || call_pool(call, pool)) {
        if (pool && !PyErr_Occurred())
            Py_XDECREF(PyObject_CallMethod(pool, "check_open", NULL));
        if (!call->pool)
            Py_XDECREF(pool);
        return NULL;
    }
    place = call->place;
    if (rows->device != place->device || rows->index != place->index) {
        (void)wrong_device("x", place->device, place->index, ", the device of the handle", rows);
        return NULL;
    }
    if (check_row_bytes("x", rows))
        return NULL;
    if (nbytes > place->hidden_bytes) {
        char expected[80];

        (void)snprintf(expected, sizeof(expected), "rows of at most %d bytes, the limit of the handle",
                       place->hidden_bytes);
        (void)wrong("x", expected, PyUnicode_FromFormat("%lld bytes", (long long)nbytes));
        return NULL;
    }
    if (call->capturing)
        Py_XDECREF(call_method(routing, names.record_capture, NULL));
    return PyErr_Occurred() ? NULL : routing;
}

struct again {
    struct call call;
    struct payload x;
    struct part parts[2];
};

static int send_again(struct again *a, PyObject *routing, int64_t rows, int max_sms)
{
    epx_dispatch_config config = EPX_DISPATCH_CONFIG_INIT;
    epx_dispatch_inputs inputs = EPX_DISPATCH_INPUTS_INIT;
    epx_dispatch_outputs outputs = EPX_DISPATCH_OUTPUTS_INIT;
    const int count = a->x.scales.tensor ? 2 : 1;
    PyObject *handle = bag_put(&a->call.used, PyObject_GetAttr(routing, names.handle));
    epx_tensor tokens, scales, to[2];
    epx_handle *address;

    a->parts[0] = part_make(a->x.tokens.dtype, 2, rows, a->x.tokens.shape[1]);
    a->parts[1] = scales_part(&a->x, rows);
    if (!handle || memory_results(a->call.place, a->call.stream, a->call.capturing, a->parts, count) ||
        use_parts(&a->call, a->parts, count) ||
        !(inputs.tokens = call_use(&a->call, &tokens, a->x.tokens.tensor, &a->x.tokens)))
        return -1;
    to[0] = part_descriptor(&a->parts[0]);
    outputs.tokens = &to[0];
    if (count == 2) {
        if (!call_use(&a->call, &scales, a->x.scales.tensor, &a->x.scales))
            return -1;
        scales = columns(scales);
        to[1] = part_descriptor(&a->parts[1]);
        inputs.scales = &scales;
        outputs.scales = &to[1];
    }
    address = handle_of(&a->call, handle);
    if (!address)
        return -1;
    config.max_sms = max_sms;
    a->call.queued = 1;
    return library_check(library.epx_dispatch(address, &inputs, &outputs, NULL, &config, a->call.stream));
}

static PyObject *again(struct again *a, const struct given *given)
{
    PyObject *routing, *event, *x, *result = NULL;
    int64_t tokens, rows;

    if (call_begin(&a->call, given->buffer, &a->x.tokens, &given->events) ||
        !(routing = routing_find(&a->call, given->handle, &a->x.tokens)))
        return NULL;
    tokens = integer_attribute(routing, names.tokens);
    rows = integer_attribute(routing, names.rows);
    if (tokens < 0 || rows < 0)
        return NULL;
    if (tokens != a->x.tokens.shape[0]) {
        char expected[80];

        (void)snprintf(expected, sizeof(expected), "%lld tokens, as in the dispatch of the handle", (long long)tokens);
        (void)wrong("x", expected, PyLong_FromLongLong(a->x.tokens.shape[0]));
        return NULL;
    }
    if (call_launch(&a->call) || payload_spread(&a->call, &a->x) || send_again(a, routing, rows, given->max_sms) ||
        !(event = call_finish(&a->call)))
        return NULL;
    x = payload_result(a->parts[0].tensor, a->parts[1].tensor);
    if (x)
        result = Py_BuildValue("OOOOOO", x, Py_None, Py_None, Py_None, Py_None, event);
    Py_XDECREF(x);
    Py_DECREF(event);
    return result;
}

/* (buffer, x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
 * topk_weights, expert_alignment, num_worst_tokens, channels, max_sms, previous_event, async_finish,
 * allocate_on_comm_stream, num_recv_tokens_per_expert_as_cuda) */
PyObject *calls_dispatch(PyObject *module, PyObject *arguments)
{
    struct given g;
    PyObject *result;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOLiOOOO", &g.buffer, &g.x, &g.handle, &g.per_rank, &g.per_node,
                          &g.in_rank, &g.per_expert, &g.idx, &g.weights, &g.alignment, &g.worst, &g.channels,
                          &g.max_sms, &g.events.previous, &g.events.async_finish, &g.events.allocate_on_comm_stream,
                          &g.counts_as_tensor))
        return NULL;
    if (g.handle != Py_None) {
        struct again a;

        memset(&a, 0, sizeof(a));
        if (g.idx != Py_None || g.weights != Py_None) {
            (void)wrong("topk_idx, topk_weights", "None with a handle, which has the routing",
                        PyUnicode_FromString("a tensor"));
            return NULL;
        }
        result = call_end(&a.call, payload_read(g.x, &a.x) ? NULL : again(&a, &g));
        payload_end(&a.x);
    } else {
        struct fresh f;

        memset(&f, 0, sizeof(f));
        result = call_end(&f.call, payload_read(g.x, &f.x) ? NULL : fresh(&f, &g));
        payload_end(&f.x);
    }
    return result;
}
