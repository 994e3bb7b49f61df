/* SPDX-License-Identifier: Apache-2.0 */
#include "util/leak.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "util/log.h"

struct leaked {
    const void *what;
    struct leaked *next;
};

static struct leaked *leaked;

/* This library stays mapped after a dlclose by whoever opened it. */
static void pin_code(void)
{
    Dl_info self;

    if (dladdr((const void *)&leaked, &self) && self.dli_fname &&
        !dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE))
        log_line(LOG_DEBUG, "%s cannot be pinned: %s", self.dli_fname, dlerror());
}

void leak_on_purpose(const void *what)
{
    struct leaked *k = malloc(sizeof(*k));

    pin_code();
    if (!k)
        return; /* `what` stays allocated all the same */
    k->what = what;
    k->next = __atomic_load_n(&leaked, __ATOMIC_RELAXED);
    /* Nothing reads the list: no order is needed. */
    while (!__atomic_compare_exchange_n(&leaked, &k->next, k, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}
