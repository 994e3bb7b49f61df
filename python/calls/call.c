/* SPDX-License-Identifier: Apache-2.0 */
/* What the calls have in common: the pool, the stream, the end. */
#include "calls.h"

int call_begin(struct call *call, PyObject *buffer, const struct view *tokens, const struct events *events)
{
    const int asynchronous = PyObject_IsTrue(events->async_finish);
    const int allocate = asynchronous < 0 ? -1 : PyObject_IsTrue(events->allocate_on_comm_stream);
    PyObject *device;
    int closed;

    if (allocate < 0)
        return -1;
    Py_INCREF(buffer);
    call->buffer = buffer;
    call->engine = PyObject_GetAttr(buffer, names._engine);
    closed = call->engine ? true_attribute(call->engine, names.closed) : -1;
    if (closed < 0)
        return -1;
    if (closed)
        return refused("the buffer was destroyed");
    if (events->previous == Py_None && !asynchronous && !allocate)
        return 0;
    device = PyObject_GetAttr(tokens->tensor, names.device);
    call->launcher =
        device ? call_helper("launcher", "OOOii", buffer, device, events->previous, asynchronous, allocate) : NULL;
    Py_XDECREF(device);
    return call->launcher ? 0 : -1;
}

int call_pool(struct call *call, PyObject *pool)
{
    PyObject *capturing;

    call->pool = pool;
    call->group = pool ? PyObject_GetAttr(pool, names.group) : NULL;
    call->place = call->group ? place_of(pool) : NULL;
    capturing = call->place ? call_method(pool, names.capturing, NULL) : NULL;
    call->capturing = capturing ? PyObject_IsTrue(capturing) : -1;
    Py_XDECREF(capturing);
    return call->capturing < 0 ? -1 : 0;
}

/* The address of an epx.Group or an epx.Handle, or NULL with the exception of what is gone. */
static void *address_of(PyObject *object)
{
    PyObject *number = PyObject_GetAttr(object, names._address);
    void *address = NULL;

    if (number == Py_None) {
        Py_DECREF(number);
        number = PyObject_GetAttr(object, names.address); /* which says why */
    }
    if (number)
        address = PyLong_AsVoidPtr(number);
    Py_XDECREF(number);
    return address;
}

epx_group *group_of(const struct call *call)
{
    return address_of(call->group);
}

epx_handle *handle_of(const struct call *call, PyObject *handle)
{
    return group_of(call) ? address_of(handle) : NULL;
}

static int number_of(PyObject *number, epx_stream *stream)
{
    if (!number)
        return -1;
    if (number != Py_None)
        *stream = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

int call_launch(struct call *call)
{
    PyObject *entered;

    if (!call->launcher) {
        call->stream = NULL; /* the group's own */
        return call->place->device == EPX_DEVICE_CPU
                   ? 0
                   : number_of(call_helper("current_stream", "(i)", call->place->index), &call->stream);
    }
    call->launch = PyObject_CallFunctionObjArgs(call->launcher, call->group, NULL);
    if (!call->launch || number_of(PyObject_GetAttr(call->launch, names.address), &call->stream))
        return -1;
    call->context = call_method(call->launch, names.context, NULL);
    entered = call->context ? call_method(call->context, names.__enter__, NULL) : NULL;
    Py_XDECREF(entered);
    return entered ? 0 : -1;
}

static int leave(struct call *call)
{
    PyObject *context = call->context, *left;

    call->context = NULL;
    if (!context)
        return 0;
    left = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
    Py_DECREF(context);
    Py_XDECREF(left);
    return left ? 0 : -1;
}

epx_tensor *call_use(struct call *call, epx_tensor *to, PyObject *tensor, const struct view *view)
{
    Py_INCREF(tensor);
    if (!bag_put(&call->used, tensor))
        return NULL;
    *to = descriptor(view);
    return to;
}

static PyObject *list_of(const struct bag *bag)
{
    PyObject *list = PyList_New(bag->count);

    for (int i = 0; list && i < bag->count; i++) {
        Py_INCREF(bag->items[i]);
        PyList_SetItem(list, i, bag->items[i]);
    }
    return list;
}

/* Without handles and routings, which streams know nothing of. */
static PyObject *tensors_of(const struct bag *bag)
{
    PyObject *list = PyList_New(0);

    for (int i = 0; list && i < bag->count; i++) {
        const int is = tensor_is(bag->items[i]);

        if (is < 0 || (is && PyList_Append(list, bag->items[i]))) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

PyObject *call_finish(struct call *call)
{
    PyObject *used;

    if (leave(call))
        return NULL;
    if (call->launch) {
        PyObject *event;

        used = tensors_of(&call->used);
        event = used ? PyObject_CallMethod(call->launch, "finish", "OO", used, used) : NULL;
        Py_XDECREF(used);
        return event;
    }
    if (call->place->device == EPX_DEVICE_CPU && wait_queued(call))
        return NULL;
    return call_helper("EventOverlap", "()");
}

/* What is queued may run later: it keeps what it uses, whatever exception comes. */
static void keep_used(struct call *call)
{
    PyObject *type, *value, *trace, *used, *kept;

    PyErr_Fetch(&type, &value, &trace);
    used = list_of(&call->used);
    kept = used ? call_helper("keep", "OOO", call->group, call->launch ? call->launch : Py_None, used) : NULL;
    Py_XDECREF(used);
    Py_XDECREF(kept);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
}

static void drop(PyObject **object)
{
    PyObject *gone = *object;

    *object = NULL;
    Py_XDECREF(gone);
}

void call_drop_pool(struct call *call)
{
    drop(&call->pool);
    drop(&call->group);
    drop((PyObject **)&call->place);
    drop(&call->launch);
    bag_empty(&call->used);
    call->queued = 0;
}

PyObject *call_end(struct call *call, PyObject *result)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    if (call->context && leave(call))
        PyErr_Clear(); /* another exception came first */
    PyErr_Restore(type, value, trace);
    if (!result && call->queued)
        keep_used(call);
    PyErr_Fetch(&type, &value, &trace); /* destructors run Python code */
    call_drop_pool(call);
    bag_empty(&call->made);
    drop(&call->launcher);
    drop(&call->engine);
    drop(&call->buffer);
    PyErr_Restore(type, value, trace);
    return result;
}
