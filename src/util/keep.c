/* SPDX-License-Identifier: Apache-2.0 */
#include "util/keep.h"

#include <dlfcn.h>
#include <stdlib.h>

#include "util/log.h"

struct kept {
    const void *what;
    struct kept *next;
};

static struct kept *kept;

/* Also after a dlclose by whoever opened the library. */
static void keep_code(void)
{
    Dl_info self;

    if (dladdr((const void *)&kept, &self) && self.dli_fname &&
        !dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE))
        log_line(LOG_DEBUG, "%s cannot be kept open: %s", self.dli_fname, dlerror());
}

void keep_forever(const void *what)
{
    struct kept *k = malloc(sizeof(*k));

    keep_code();
    if (!k)
        return; /* it stays allocated all the same */
    k->what = what;
    k->next = __atomic_load_n(&kept, __ATOMIC_RELAXED);
    /* Nobody follows the list: no order is needed. */
    while (!__atomic_compare_exchange_n(&kept, &k->next, k, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}
