/* SPDX-License-Identifier: Apache-2.0 */
/* Python's objects: names, references, numbers, and errors in words. */
#include <stdarg.h>

#include "calls.h"

struct names names;
static PyObject *helpers; /* a dict */

int python_init(void)
{
#define NAMES_KEEP(name)                            \
    names.name = PyUnicode_InternFromString(#name); \
    if (!names.name)                                \
        return -1;
    NAMES(NAMES_KEEP)
#undef NAMES_KEEP
    return 0;
}

int helpers_take(PyObject *dict)
{
    PyObject *before = helpers;

    Py_INCREF(dict);
    helpers = dict;
    Py_XDECREF(before);
    return 0;
}

PyObject *helper(const char *name)
{
    PyObject *found = helpers ? PyDict_GetItemString(helpers, name) : NULL;

    if (!found)
        PyErr_Format(PyExc_RuntimeError, "epx._calls: expected prepare() with %s", name);
    return found;
}

PyObject *call_helper(const char *name, const char *format, ...)
{
    PyObject *function = helper(name), *arguments, *result = NULL;
    va_list list;

    va_start(list, format);
    arguments = Py_VaBuildValue(format, list);
    va_end(list);
    if (function && arguments)
        result = PyObject_CallObject(function, arguments);
    Py_XDECREF(arguments);
    return result;
}

PyObject *bag_put(struct bag *bag, PyObject *owned)
{
    if (owned && bag->count == BAG_ITEMS) {
        Py_DECREF(owned);
        PyErr_SetString(PyExc_SystemError, "epx._calls: a bag is full");
        return NULL;
    }
    if (owned)
        bag->items[bag->count++] = owned;
    return owned;
}

void bag_empty(struct bag *bag)
{
    while (bag->count) {
        PyObject *item = bag->items[--bag->count];
        Py_DECREF(item);
    }
}

int64_t integer_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int64_t number = value ? PyLong_AsLongLong(value) : -1;

    Py_XDECREF(value);
    return number;
}

int true_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int truth = value ? PyObject_IsTrue(value) : -1;

    Py_XDECREF(value);
    return truth;
}

PyObject *call_method(PyObject *object, PyObject *name, PyObject *argument)
{
    PyObject *method = PyObject_GetAttr(object, name);
    PyObject *result = method ? PyObject_CallFunctionObjArgs(method, argument, NULL) : NULL;

    Py_XDECREF(method);
    return result;
}

static int raise(PyObject *error)
{
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return -1;
}

int wrong(const char *name, const char *expected, PyObject *given)
{
    return given ? raise(call_helper("wrong", "ssN", name, expected, given)) : -1;
}

int refused(const char *why)
{
    return raise(call_helper("refused", "(s)", why));
}

int library_check(epx_status status)
{
    const char *text = library.epx_last_error();

    if (status == EPX_OK)
        return 0;
    return raise(
        call_helper("make_error", "iN", (int)status, PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace")));
}

int64_t positive(const char *name, PyObject *value, int64_t least)
{
    char expected[64];
    PyObject *number = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    int overflow = 0;
    int64_t found = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : least - 1;

    Py_XDECREF(number);
    PyErr_Clear(); /* of PyNumber_Index() */
    if (overflow > 0)
        found = INT64_MAX;
    if (overflow >= 0 && found >= least)
        return found;
    (void)snprintf(expected, sizeof(expected), "an integer of at least %lld", (long long)least);
    return wrong(name, expected, PyObject_Repr(value));
}

int64_t at_most(const char *name, PyObject *value, int64_t least, int64_t most)
{
    const int64_t found = positive(name, value, least);
    char expected[64];

    if (found <= most)
        return found;
    (void)snprintf(expected, sizeof(expected), "at most %lld", (long long)most);
    return wrong(name, expected, PyObject_Repr(value));
}
