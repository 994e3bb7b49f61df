/* SPDX-License-Identifier: Apache-2.0 */
/* A program that opens the library and closes it again, perhaps while a group has threads: its code stays. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/lib/unit.h"

static void code_stays_after_dlclose(void **state)
{
    const char *build = getenv("EPX_BUILD_DIR");
    char path[1024];
    void *library;

    (void)state;
    snprintf(path, sizeof(path), "%s/libepx.so", build ? build : "build");
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(library);
    assert_int_equal(dlclose(library), 0);
    library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(library);
    dlclose(library);
}

UNIT_TESTS(code_stays_after_dlclose)
