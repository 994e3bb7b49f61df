/* SPDX-License-Identifier: Apache-2.0 */
/* Environment variables: one table (env.c) names each, its aliases, its default and its meaning, for `epx doctor`
 * too. */
#ifndef EPX_UTIL_ENV_H
#define EPX_UTIL_ENV_H

#include <stdint.h>

struct env_entry {
    const char *name;    /* EPX_... */
    const char *aliases; /* comma separated, or "" */
    const char *fallback;
    const char *meaning;
};

/* The table; *count entries. */
const struct env_entry *env_table(int *count);
enum { ENV_NAME_BYTES = 64 };
/* The value of an entry, NULL when unset or empty, and in `used` the name, its own or an alias, that has it. */
const char *env_look_up(const struct env_entry *entry, char used[ENV_NAME_BYTES]);
/* The value of `name` (it must be in the table) or of its first set alias; NULL when unset or empty. */
const char *env_string(const char *name);
/* Integer value with optional suffix K, M, G (powers of 1024); `fallback` when unset. A malformed or out-of-range
 * value is warned about once and ignored. */
int64_t env_int(const char *name, int64_t fallback, int64_t low, int64_t high);
/* 1 if `name` begins with EPX_ but EPX does not read it; *nearest is then the variable with the most similar name, or
 * NULL. */
int env_is_unknown(const char *name, const char **nearest);
/* Once per process: a warning for each unknown EPX_ variable that is set. */
void env_warn_unknown(void);

#endif
