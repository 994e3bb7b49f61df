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

enum { MOST_ERRORS = 3, FAR = 1000 };

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

/* `few` has some of the words of `more`, in their order: the words that it lacks, and its errors in the others. FAR: it
 * has none of them without more errors than a name may have. */
static int words_apart(const char *few, const char *more)
{
    const size_t f = strcspn(few, "_"), m = strcspn(more, "_");
    const char *rest = more[m] ? more + m + 1 : more + m;
    char a[ENV_NAME_BYTES], b[ENV_NAME_BYTES];
    int lacks, has;

    if (!*more)
        return *few ? FAR : 0;
    lacks = 1 + words_apart(few, rest);
    if (!*few)
        return lacks;
    snprintf(a, sizeof(a), "%.*s", (int)f, few);
    snprintf(b, sizeof(b), "%.*s", (int)m, more);
    has = word_distance(a, b) + words_apart(few[f] ? few + f + 1 : few + f, rest);
    return has < lacks ? has : lacks;
}

/* Errors in letters, words that are left out (EPX_TIMEOUT) or too many (EPX_LOG_LEVEL). */
static int names_apart(const char *name, const char *known)
{
    const int letters = word_distance(name, known), out = words_apart(name, known), more = words_apart(known, name);
    const int words = out < more ? out : more;

    return !words || letters < words ? letters : words; /* words: EPX_LOG_ has those of EPX_LOG */
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
        const int d = names_apart(name + strlen(PREFIX), table[i].name + strlen(PREFIX));

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
