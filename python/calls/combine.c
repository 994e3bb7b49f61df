/* SPDX-License-Identifier: Apache-2.0 */
/* combine(): rows return to their tokens and are summed. */
#include <string.h>

#include "dispatch.h"

struct combine {
    struct call call;
    struct view x, weights, bias[2];
    PyObject *routing, *handle; /* in the bag */
    int64_t tokens, topk;
    int max_sms;
    PyObject *out, *out_weights; /* in the bag */
    void *out_data, *out_weights_data;
};

static int read_bias(struct combine *c, PyObject *bias)
{
    const struct want want = {
        .dtypes = DTYPE_BIT(c->x.dtype), .ndim = 2, .shape = {c->tokens, c->x.shape[1]}, .beside = &c->x};
    const int pair = PyTuple_Check(bias) || PyList_Check(bias);
    const Py_ssize_t count = pair ? PySequence_Size(bias) : 1;
    int used = 0;

    if (count > 2)
        return wrong("bias", "None, a tensor or a pair of tensors", PyUnicode_FromFormat("%zd tensors", count));
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = pair ? PySequence_GetItem(bias, i) : bias;

        if (!pair)
            Py_INCREF(one);
        if (!one || !bag_put(&c->call.used, one) || tensor_optional("bias", one, &want, &c->bias[used]))
            return -1;
        used += one != Py_None;
    }
    return 0;
}

static int read_rows(struct combine *c, PyObject *x, PyObject *handle, PyObject *weights, PyObject *bias)
{
    const struct want want = {.dtypes = PAYLOADS, .ndim = 2, .shape = {ANY, ANY}};
    struct want beside = {.dtypes = DTYPE_BIT(EPX_FP32), .ndim = 2, .shape = {ANY, ANY}, .beside = &c->x};
    int64_t rows;

    if (tensor_check("x", x, &want, &c->x) || !(c->routing = routing_find(&c->call, handle, &c->x)))
        return -1;
    rows = integer_attribute(c->routing, names.rows);
    c->tokens = integer_attribute(c->routing, names.tokens);
    c->handle = bag_put(&c->call.used, PyObject_GetAttr(c->routing, names.handle));
    c->topk = c->handle ? integer_attribute(c->handle, names.topk) : -1;
    if (rows < 0 || c->tokens < 0 || c->topk < 0)
        return -1;
    if (c->x.shape[0] != rows) {
        char expected[64];

        (void)snprintf(expected, sizeof(expected), "the %lld rows that were received", (long long)rows);
        return wrong("x", expected, PyLong_FromLongLong(c->x.shape[0]));
    }
    beside.shape[0] = c->x.shape[0];
    beside.shape[1] = c->topk;
    return tensor_optional("topk_weights", weights, &beside, &c->weights) || read_bias(c, bias) ? -1 : 0;
}

/* EPX reads registered memory in place, and stages other memory in its receive buffer. A copy is needed of what is
 * neither and has more rows than that. */
static int in_reach(struct combine *c, const char *name, struct view *view)
{
    PyObject *there;

    if (!view->tensor || view->shape[0] <= c->call.place->max_recv_tokens)
        return 0;
    there = bag_put(&c->call.used, call_helper("within_reach", "OOO", c->call.pool, view->tensor,
                                               c->call.launch ? c->call.launch : Py_None));
    return there ? tensor_read(name, there, view) : -1;
}

static int make_results(struct combine *c)
{
    const int64_t rows[2] = {c->tokens, c->x.shape[1]}, weights[2] = {c->tokens, c->topk};

    c->out = bag_put(&c->call.used, memory_empty(c->call.place, c->x.dtype, 2, rows, &c->out_data));
    if (c->out && c->weights.tensor)
        c->out_weights =
            bag_put(&c->call.used, memory_empty(c->call.place, EPX_FP32, 2, weights, &c->out_weights_data));
    return c->out && (c->out_weights || !c->weights.tensor) ? 0 : -1;
}

static int send(struct combine *c)
{
    epx_combine_inputs inputs = EPX_COMBINE_INPUTS_INIT;
    epx_combine_outputs outputs = EPX_COMBINE_OUTPUTS_INIT;
    epx_combine_config config = EPX_COMBINE_CONFIG_INIT;
    epx_tensor x, weights, bias[2], out, out_weights;
    epx_handle *handle = handle_of(&c->call, c->handle);

    if (!handle || !(inputs.tokens = call_use(&c->call, &x, c->x.tensor, &c->x)))
        return -1;
    out = epx_tensor_make(c->out_data, c->x.dtype, 2, c->tokens, c->x.shape[1], 0, 0);
    outputs.tokens = &out;
    if (c->weights.tensor) {
        if (!(inputs.topk_weights = call_use(&c->call, &weights, c->weights.tensor, &c->weights)))
            return -1;
        out_weights = epx_tensor_make(c->out_weights_data, EPX_FP32, 2, c->tokens, c->topk, 0, 0);
        outputs.topk_weights = &out_weights;
    }
    for (int i = 0; i < 2; i++) {
        if (!c->bias[i].tensor)
            continue;
        bias[i] = descriptor(&c->bias[i]);
        inputs.bias[i] = &bias[i];
    }
    config.max_sms = c->max_sms;
    c->call.queued = 1;
    return library_check(library.epx_combine(handle, &inputs, &outputs, &config, c->call.stream));
}

/* (buffer, x, handle, topk_weights, bias, max_sms, previous_event, async_finish, allocate_on_comm_stream) */
PyObject *calls_combine(PyObject *module, PyObject *arguments)
{
    PyObject *buffer, *x, *handle, *weights, *bias, *event, *result = NULL;
    struct events events;
    struct combine c;

    (void)module;
    memset(&c, 0, sizeof(c));
    if (!PyArg_ParseTuple(arguments, "OOOOOiOOO", &buffer, &x, &handle, &weights, &bias, &c.max_sms, &events.previous,
                          &events.async_finish, &events.allocate_on_comm_stream))
        return NULL;
    if (!tensor_read("x", x, &c.x) && !call_begin(&c.call, buffer, &c.x, &events) &&
        !read_rows(&c, x, handle, weights, bias) && !call_launch(&c.call) && !in_reach(&c, "x", &c.x) &&
        !in_reach(&c, "topk_weights", &c.weights) && !make_results(&c) && !send(&c)) {
        event = call_finish(&c.call);
        result = event ? Py_BuildValue("OON", c.out, c.out_weights ? c.out_weights : Py_None, event) : NULL;
    }
    return call_end(&c.call, result);
}
