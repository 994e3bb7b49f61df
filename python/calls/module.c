/* SPDX-License-Identifier: Apache-2.0 */
#include "heap.h"

/* open(handle): finds epx.h's functions in the library with this handle of dlopen(). */
static PyObject *calls_open(PyObject *module, PyObject *handle)
{
    void *address = PyLong_AsVoidPtr(handle);

    (void)module;
    if (PyErr_Occurred() || library_find(address))
        return NULL;
    Py_RETURN_NONE;
}

/* replace(name, address): see library_replace(). */
static PyObject *calls_replace(PyObject *module, PyObject *arguments)
{
    const char *name;
    unsigned long long address;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "sK", &name, &address))
        return NULL;
    return PyLong_FromVoidPtr(library_replace(name, (void *)(uintptr_t)address));
}

/* prepare(torch, helpers) */
static PyObject *calls_prepare(PyObject *module, PyObject *arguments)
{
    PyObject *torch, *given;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO", &torch, &given))
        return NULL;
    if (!PyDict_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "prepare: expected a dict");
        return NULL;
    }
    if (helpers_take(given) || tensor_init(torch))
        return NULL;
    Py_RETURN_NONE;
}

/* by_exchange(bool): True if tensors are read by DLPack's exchange API from now on. */
static PyObject *calls_by_exchange(PyObject *module, PyObject *use)
{
    const int wanted = PyObject_IsTrue(use);

    (void)module;
    return wanted < 0 ? NULL : PyBool_FromLong(tensor_by_exchange(wanted));
}

/* used_on(stream, address): see heap_used_on(). */
static PyObject *calls_used_on(PyObject *module, PyObject *arguments)
{
    unsigned long long stream, address;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "KK", &stream, &address))
        return NULL;
    heap_used_on((uintptr_t)stream, (const void *)(uintptr_t)address);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", calls_open, METH_O, NULL},
    {"replace", calls_replace, METH_VARARGS, NULL},
    {"prepare", calls_prepare, METH_VARARGS, NULL},
    {"by_exchange", calls_by_exchange, METH_O, NULL},
    {"used_on", calls_used_on, METH_VARARGS, NULL},
    {"layout", calls_layout, METH_VARARGS, NULL},
    {"dispatch", calls_dispatch, METH_VARARGS, NULL},
    {"combine", calls_combine, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

PyMODINIT_FUNC PyInit__calls(void)
{
    static struct PyModuleDef definition = {
        PyModuleDef_HEAD_INIT, "epx._calls", "Calls of deep_ep and epx in C.", -1, methods, NULL, NULL, NULL, NULL};
    PyObject *module = PyModule_Create(&definition);

    if (module && (python_init() || place_init(module) || heap_init(module))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
