/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading tensors. torch 2.10 and newer has DLPack's exchange API: a C function that fills a struct, 0.1 us. Before it,
 * methods and attributes of torch.Tensor are called, 0.7 us.
 *
 * The exchange API reads what has no memory (fake tensors, wrappers, emptied storages) as NULL, and ignores the bit of
 * a negated view: both are refused here.
 */
#include <string.h>

#include "calls.h"
#include "dlpack.h"

static const struct {
    const char *name;
    uint8_t code, bits, bytes;
} kinds[DTYPES] = {
    [EPX_BF16] = {"bfloat16", 4, 16, 2}, [EPX_FP16] = {"float16", 2, 16, 2},
    [EPX_FP32] = {"float32", 2, 32, 4},  [EPX_FP8_E4M3] = {"float8_e4m3fn", 10, 8, 1},
    [EPX_INT32] = {"int32", 0, 32, 4},   [EPX_INT64] = {"int64", 0, 64, 8},
    [EPX_UINT8] = {"uint8", 1, 8, 1},    [DTYPE_BOOL] = {"bool", 6, 8, 1},
};

static PyObject *tensor_class;
static PyObject *dtypes[DTYPES];
static const struct dl_exchange *exchange; /* NULL: torch has none */

int tensor_init(PyObject *torch)
{
    PyObject *capsule;

    tensor_class = PyObject_GetAttrString(torch, "Tensor");
    for (int i = 1; tensor_class && i < DTYPES; i++) {
        dtypes[i] = PyObject_GetAttrString(torch, kinds[i].name);
        if (!dtypes[i])
            return -1;
    }
    if (!tensor_class)
        return -1;
    capsule = PyObject_GetAttrString(tensor_class, "__dlpack_c_exchange_api__");
    exchange = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    Py_XDECREF(capsule); /* the struct is static */
    if (exchange && (exchange->header.major != DL_MAJOR || !exchange->tensor_from))
        exchange = NULL;
    return 0;
}

int tensor_by_exchange(int use)
{
    static const struct dl_exchange *found;

    if (!found)
        found = exchange;
    exchange = use ? found : NULL;
    return exchange != NULL;
}

size_t dtype_bytes(int dtype)
{
    return kinds[dtype].bytes;
}

PyObject *dtype_object(int dtype)
{
    return dtypes[dtype];
}

void tensor_kind(struct dl_tensor *tensor, int dtype)
{
    const int as = dtype == EPX_FP8_E4M3 && !exchange ? EPX_UINT8 : dtype; /* which older versions refuse */

    tensor->code = kinds[as].code;
    tensor->bits = kinds[as].bits;
    tensor->lanes = 1;
}

PyObject *tensor_from_capsule(PyObject *capsule, int dtype)
{
    PyObject *tensor = call_helper("from_dlpack", "(O)", capsule), *bytes = tensor;

    if (!tensor || dtype != EPX_FP8_E4M3 || exchange)
        return tensor;
    tensor = call_method(bytes, names.view, dtypes[dtype]);
    Py_DECREF(bytes);
    return tensor;
}

/* ---- Reading ------------------------------------------------------------------------------------------------ */

static int read_exchange(PyObject *value, struct view *view)
{
    struct dl_tensor t;

    memset(&t, 0, sizeof(t));
    if (exchange->tensor_from(value, &t))
        return -1;
    view->ndim = t.ndim;
    view->data = t.data ? (char *)t.data + t.byte_offset : NULL;
    view->device = t.device_type == DL_CPU                                ? EPX_DEVICE_CPU
                   : t.device_type == DL_CUDA || t.device_type == DL_ROCM ? EPX_DEVICE_CUDA
                                                                          : -1;
    view->index = view->device == EPX_DEVICE_CUDA ? t.device_id : 0;
    for (int i = 1; i < DTYPES; i++) {
        if (t.code == kinds[i].code && t.bits == kinds[i].bits && t.lanes == 1)
            view->dtype = i;
    }
    for (int i = 0; i < t.ndim && i < EPX_MAX_NDIM; i++) {
        view->shape[i] = t.shape[i];
        view->stride[i] = t.strides ? t.strides[i] : 0;
    }
    return 0;
}

static int read_numbers(PyObject *tuple, int64_t *numbers, int *count)
{
    Py_ssize_t size = tuple ? PyTuple_Size(tuple) : -1;

    for (Py_ssize_t i = 0; i < size && i < EPX_MAX_NDIM; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (numbers[i] == -1 && PyErr_Occurred())
            size = -1;
    }
    *count = (int)size;
    Py_XDECREF(tuple);
    return size < 0 ? -1 : 0;
}

static int read_device(PyObject *value, struct view *view)
{
    int on_cpu = true_attribute(value, names.is_cpu), on_gpu = on_cpu ? 0 : true_attribute(value, names.is_cuda);
    PyObject *number;

    if (on_cpu < 0 || on_gpu < 0)
        return -1;
    view->device = on_cpu ? EPX_DEVICE_CPU : on_gpu ? EPX_DEVICE_CUDA : -1;
    if (!on_gpu)
        return 0;
    number = call_method(value, names.get_device, NULL);
    view->index = number ? (int)PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return view->index < 0 ? -1 : 0;
}

static int read_attributes(PyObject *value, struct view *view)
{
    PyObject *dtype = PyObject_GetAttr(value, names.dtype), *address;
    int strides = 0;

    for (int i = 1; i < DTYPES; i++) {
        if (dtype == dtypes[i])
            view->dtype = i;
    }
    Py_XDECREF(dtype);
    if (!dtype || read_device(value, view) ||
        read_numbers(PyObject_GetAttr(value, names.shape), view->shape, &view->ndim) ||
        read_numbers(call_method(value, names.stride, NULL), view->stride, &strides))
        return -1;
    if (view->device < 0)
        return 0; /* some have no address */
    address = call_method(value, names.data_ptr, NULL);
    view->data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

static int64_t elements(const struct view *view)
{
    int64_t count = 1;

    for (int i = 0; i < view->ndim && i < EPX_MAX_NDIM; i++)
        count *= view->shape[i];
    return count;
}

static int is_negated(const struct view *view)
{
    PyObject *answer;
    int negated;

    if (view->dtype != EPX_FP32 && view->dtype != EPX_FP16)
        return 0; /* parts of complex numbers */
    answer = call_method(view->tensor, names.is_neg, NULL);
    negated = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return negated;
}

int tensor_is(PyObject *value)
{
    return (PyObject *)Py_TYPE(value) == tensor_class ? 1 : PyObject_IsInstance(value, tensor_class);
}

int tensor_read(const char *name, PyObject *value, struct view *view)
{
    const int is = tensor_is(value);
    int failed, negated;

    memset(view, 0, sizeof(*view));
    if (is < 0)
        return -1;
    if (!is)
        return wrong(name, "a tensor", PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__"));
    view->tensor = value;
    failed = exchange ? read_exchange(value, view) : read_attributes(value, view);
    if (failed && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1; /* Ctrl-C */
    PyErr_Clear();
    negated = failed ? 0 : is_negated(view);
    if (negated < 0)
        return -1;
    if (negated)
        return wrong(name, "a tensor in memory", PyUnicode_FromString("a view that negates; make a copy of it"));
    if (failed || (!view->data && view->device >= 0 && elements(view)))
        return wrong(name, "a strided tensor with memory", call_helper("describe", "(O)", value));
    return 0;
}

/* ---- Checking ----------------------------------------------------------------------------------------------- */

int tensor_contiguous(const struct view *view)
{
    int64_t step = 1;

    if (!elements(view))
        return 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->stride[i] != step)
            return 0;
        step *= view->shape[i];
    }
    return 1;
}

static int wrong_dtype(const char *name, unsigned allowed, const struct view *view)
{
    char expected[128] = "dtype ";

    for (int i = 1; i < DTYPES; i++) {
        if (!(allowed & DTYPE_BIT(i)))
            continue;
        if (strlen(expected) > 6)
            strcat(expected, " or ");
        strcat(expected, kinds[i].name);
    }
    return wrong(name, expected, call_helper("dtype_name", "(O)", view->tensor));
}

static int wrong_shape(const char *name, const struct want *want, const struct view *view)
{
    char expected[64] = "shape [";
    size_t length = strlen(expected);
    PyObject *shape = PyObject_GetAttr(view->tensor, names.shape), *list;

    for (int i = 0; i < want->ndim; i++) {
        const char *comma = i ? ", " : "";

        if (want->shape[i] == ANY)
            length += (size_t)snprintf(expected + length, sizeof(expected) - length, "%s*", comma);
        else
            length += (size_t)snprintf(expected + length, sizeof(expected) - length, "%s%lld", comma,
                                       (long long)want->shape[i]);
    }
    (void)snprintf(expected + length, sizeof(expected) - length, "]");
    list = shape ? PySequence_List(shape) : NULL;
    Py_XDECREF(shape);
    return wrong(name, expected, list);
}

int wrong_device(const char *name, int device, int index, const char *why, const struct view *view)
{
    char expected[80];

    if (device == EPX_DEVICE_CUDA)
        (void)snprintf(expected, sizeof(expected), "a tensor on cuda:%d%s", index, why);
    else
        (void)snprintf(expected, sizeof(expected), "a tensor on cpu%s", why);
    return wrong(name, expected, PyObject_GetAttr(view->tensor, names.device));
}

int tensor_check(const char *name, PyObject *value, const struct want *want, struct view *view)
{
    int same;

    if (tensor_read(name, value, view))
        return -1;
    if (!(want->dtypes & DTYPE_BIT(view->dtype)) || view->dtype == DTYPE_OTHER)
        return wrong_dtype(name, want->dtypes, view);
    same = view->ndim == want->ndim;
    for (int i = 0; same && i < want->ndim; i++)
        same = want->shape[i] == ANY || want->shape[i] == view->shape[i];
    if (!same)
        return wrong_shape(name, want, view);
    if (!want->strided && !tensor_contiguous(view))
        return wrong(name, "a contiguous tensor", call_helper("strides_of", "(O)", value));
    if (want->beside && (want->beside->device != view->device || want->beside->index != view->index))
        return wrong_device(name, want->beside->device, want->beside->index, "", view);
    return 0;
}

int tensor_optional(const char *name, PyObject *value, const struct want *want, struct view *view)
{
    if (value != Py_None)
        return tensor_check(name, value, want, view);
    memset(view, 0, sizeof(*view));
    return 0;
}

int check_row_bytes(const char *name, const struct view *view)
{
    const int64_t columns = view->shape[view->ndim - 1], nbytes = columns * (int64_t)dtype_bytes(view->dtype);

    if (nbytes >= 16 && nbytes % 16 == 0)
        return 0;
    return wrong(name, "rows of a multiple of 16 bytes",
                 PyUnicode_FromFormat("%lld torch.%s = %lld bytes", (long long)columns, kinds[view->dtype].name,
                                      (long long)nbytes));
}

int check_device(const char *name, const struct view *view)
{
    if (view->device >= 0)
        return 0;
    return wrong(name, "a tensor on the CPU or on a CUDA device", PyObject_GetAttr(view->tensor, names.device));
}

epx_tensor descriptor(const struct view *view)
{
    epx_tensor t = EPX_TENSOR_INIT;

    t.dtype = view->dtype == DTYPE_BOOL ? EPX_UINT8 : view->dtype;
    t.ndim = view->ndim;
    t.data = view->data;
    memcpy(t.shape, view->shape, sizeof(t.shape));
    if (!tensor_contiguous(view))
        memcpy(t.stride, view->stride, sizeof(t.stride));
    return t;
}
