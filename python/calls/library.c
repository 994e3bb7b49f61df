/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <string.h>

#include "calls.h"

struct library library;

void *library_replace(const char *name, void *address)
{
    void *before;

#define LIBRARY_REPLACE(one)              \
    if (strcmp(name, #one) == 0) {        \
        before = *(void **)&library.one;  \
        *(void **)&library.one = address; \
        return before;                    \
    }
    LIBRARY_FUNCTIONS(LIBRARY_REPLACE)
#undef LIBRARY_REPLACE
    return NULL;
}

int library_find(void *handle)
{
#define LIBRARY_FIND(name)                                                                                       \
    *(void **)&library.name = dlsym(handle, #name);                                                              \
    if (!library.name) {                                                                                         \
        PyErr_SetString(PyExc_ImportError, "epx: expected a libepx.so of this version, got one without " #name); \
        return -1;                                                                                               \
    }
    LIBRARY_FUNCTIONS(LIBRARY_FIND)
#undef LIBRARY_FIND
    return 0;
}
