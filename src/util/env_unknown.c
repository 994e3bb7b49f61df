/* SPDX-License-Identifier: Apache-2.0 */
/* EPX_ variables that EPX does not read: most often a misspelt name. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "util/env.h"
#include "util/log.h"
#include "util/spelling.h"

extern char **environ;

#define PREFIX "EPX_"

enum { MOST_ERRORS = 3 };

/* After EPX_: beginnings of names that builds, tests and benchmarks of EPX read, rather than the library. */
static const char *const not_of_the_library[] = {"TEST_",     "BENCH_",    "RXE_",     "FRESH_",  "QUICK_", "PIP_",
                                                 "BUILD_DIR", "SANITIZE",  "GCC",      "CCACHE",  "WERROR", "HIPCC",
                                                 "GPU_BUILD", "GPU_CASES", "GPU_ARCH", "HARDWARE"};

static int is_of_the_library(const char *suffix)
{
    for (size_t i = 0; i < sizeof(not_of_the_library) / sizeof(not_of_the_library[0]); i++)
        if (!strncmp(suffix, not_of_the_library[i], strlen(not_of_the_library[i])))
            return 0;
    return 1;
}

int env_is_unknown(const char *name, const char **nearest)
{
    const int letters = (int)strlen(name) - (int)strlen(PREFIX);
    int count, best = 1 + (letters / 3 < MOST_ERRORS ? letters / 3 : MOST_ERRORS);
    const struct env_entry *table = env_table(&count);

    *nearest = NULL;
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0 || !is_of_the_library(name + strlen(PREFIX)))
        return 0;
    for (int i = 0; i < count; i++) {
        const int d = word_distance(name, table[i].name);

        if (d < best) {
            best = d;
            *nearest = table[i].name;
        }
    }
    return best > 0;
}

void env_warn_unknown(void)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;

    if (atomic_flag_test_and_set(&done))
        return;
    for (char **at = environ; at && *at; at++) {
        char name[ENV_NAME_BYTES];
        const char *nearest;

        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*at, "="), *at);
        if (env_is_unknown(name, &nearest))
            log_line(LOG_WARN, "%s is set, but EPX reads no such variable%s%s%s", name,
                     nearest ? ": did you mean " : " (epx doctor lists all)", nearest ? nearest : "",
                     nearest ? "?" : "");
    }
}
