/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for results: torch's own, or the heap of a pool. */
#include <stdlib.h>
#include <string.h>

#include "heap.h"

static PyTypeObject *place_type;

static PyObject *extents(int ndim, const int64_t *shape)
{
    PyObject *tuple = PyTuple_New(ndim);

    for (int i = 0; tuple && i < ndim; i++) {
        PyObject *number = PyLong_FromLongLong(shape[i]);

        if (!number || PyTuple_SetItem(tuple, i, number)) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

static PyObject *keywords_of(struct place *place, int dtype)
{
    if (!place->keywords[dtype])
        place->keywords[dtype] =
            Py_BuildValue("{s:O,s:O}", "dtype", dtype_object(dtype), "device", place->torch_device);
    return place->keywords[dtype];
}

PyObject *memory_empty(struct place *place, int dtype, int ndim, const int64_t *shape, void **data)
{
    PyObject *empty = helper("empty"), *keywords = keywords_of(place, dtype), *sizes = extents(ndim, shape), *tensor;
    PyObject *arguments = sizes ? PyTuple_New(1) : NULL;
    struct view view;

    if (arguments)
        (void)PyTuple_SetItem(arguments, 0, sizes);
    tensor = empty && keywords && arguments ? PyObject_Call(empty, arguments, keywords) : NULL;
    Py_XDECREF(arguments);
    if (!tensor)
        return NULL;
    if (tensor_read("a result", tensor, &view)) { /* FakeTensorMode, say */
        Py_DECREF(tensor);
        return NULL;
    }
    *data = view.data;
    return tensor;
}

struct part part_make(int dtype, int ndim, int64_t rows, int64_t columns)
{
    struct part part;

    memset(&part, 0, sizeof(part));
    part.dtype = dtype;
    part.ndim = ndim;
    part.shape[0] = rows;
    part.shape[1] = columns;
    return part;
}

int memory_results(struct place *place, epx_stream stream, int capturing, struct part *parts, int count)
{
    /* A graph needs memory of its own for replays, which torch's allocator keeps. */
    if (place->heap && !capturing && heap_tensors(place->heap, (uintptr_t)stream, 0, parts, count))
        return -1;
    for (int i = 0; i < count; i++) {
        struct part *part = &parts[i];

        if (!part->tensor)
            part->tensor = memory_empty(place, part->dtype, part->ndim, part->shape, &part->data);
        if (!part->tensor)
            return -1;
    }
    return 0;
}

static int numbers(PyObject *given, int64_t *to)
{
    const Py_ssize_t count = PyTuple_Check(given) ? PyTuple_Size(given) : -1;

    if (count < 0 || count > EPX_MAX_NDIM) {
        PyErr_SetString(PyExc_ValueError, "expected a tuple of at most 4 numbers");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(PyTuple_GetItem(given, i));
        if (to[i] < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "expected numbers of at least 0");
            return -1;
        }
    }
    return (int)count;
}

static int part_read(PyObject *given, struct part *part)
{
    PyObject *dtype, *shape, *stride;

    memset(part, 0, sizeof(*part));
    if (!PyArg_ParseTuple(given, "OOO", &dtype, &shape, &stride))
        return -1;
    for (int i = 1; i < DTYPES; i++)
        part->dtype = dtype == dtype_object(i) ? i : part->dtype;
    if (part->dtype == DTYPE_OTHER) {
        PyErr_SetString(PyExc_TypeError, "expected a dtype of EPX");
        return -1;
    }
    part->ndim = numbers(shape, part->shape);
    part->strided = stride != Py_None;
    if (part->strided && numbers(stride, part->stride) < 0)
        return -1;
    return part->ndim < 0 ? -1 : 0;
}

int parts_read(PyObject *given, struct part *parts)
{
    const Py_ssize_t count = PyTuple_Check(given) ? PyTuple_Size(given) : -1;

    if (count < 0 || count > MOST_PARTS) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of at most 8 parts");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyTuple_Check(PyTuple_GetItem(given, i)) || part_read(PyTuple_GetItem(given, i), &parts[i])) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "expected parts (dtype, shape, strides)");
            return -1;
        }
    }
    return (int)count;
}

/* ---- Place ---------------------------------------------------------------------------------------------------- */

/* Place(torch's device, heap or None, nranks, local_experts, nnodes, experts, topk, hidden_bytes, max_recv_tokens) */
static PyObject *place_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *device, *heap;
    struct place *self = (struct place *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);

    (void)keywords;
    if (!self ||
        !PyArg_ParseTuple(arguments, "OiOiiiiiii", &device, &self->index, &heap, &self->nranks, &self->local_experts,
                          &self->nnodes, &self->experts, &self->topk, &self->hidden_bytes, &self->max_recv_tokens)) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->device = self->index < 0 ? EPX_DEVICE_CPU : EPX_DEVICE_CUDA;
    self->index = self->index < 0 ? 0 : self->index;
    Py_INCREF(device);
    self->torch_device = device;
    self->heap = heap_of(heap);
    if (self->heap) {
        Py_INCREF(heap);
        self->heap_object = heap;
    }
    return (PyObject *)self;
}

static void place_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    struct place *self = (struct place *)object;

    Py_XDECREF(self->torch_device);
    Py_XDECREF(self->heap_object);
    for (int i = 0; i < DTYPES; i++)
        Py_XDECREF(self->keywords[i]);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF((PyObject *)type);
}

struct place *place_of(PyObject *pool)
{
    PyObject *place = PyObject_GetAttr(pool, names._place);

    if (place && !PyObject_TypeCheck(place, place_type)) {
        Py_DECREF(place);
        PyErr_SetString(PyExc_TypeError, "epx._calls: expected a Place");
        return NULL;
    }
    return (struct place *)place;
}

int place_init(PyObject *module)
{
    static PyType_Slot slots[] = {{Py_tp_new, (void *)place_new}, {Py_tp_dealloc, (void *)place_dealloc}, {0, NULL}};
    static PyType_Spec spec = {"epx._calls.Place", sizeof(struct place), 0, Py_TPFLAGS_DEFAULT, slots};

    place_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!place_type)
        return -1;
    Py_INCREF((PyObject *)place_type);
    return PyModule_AddObject(module, "Place", (PyObject *)place_type);
}
