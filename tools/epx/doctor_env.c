/* SPDX-License-Identifier: Apache-2.0 */
/* Environment variables: their values, and those that are set without effect. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "doctor.h"
#include "util/env.h"

extern char **environ;

/* Names of others that have nothing to set here, and why. */
static const struct {
    const char *name, *why;
} needless[] = {
    {"UCCL_RDMA_ADAPTIVE_SLEEP", "idle proxies always sleep; EPX_PROXY_SLEEP_US says after how long"},
};

/* The value, but for the secret's. */
static const char *shown(const struct env_entry *entry, const char *value)
{
    return value && !strcmp(entry->name, "EPX_SECRET") && strcmp(value, "none") ? "(set)" : value;
}

static void show_entry(struct report *report, const struct env_entry *entry)
{
    char used[ENV_NAME_BYTES];
    const char *value = env_look_up(entry, used);
    const int by_alias = value && strcmp(used, entry->name);

    if (value)
        report_row(report, entry->name, "\"%s\"%s%s%s; the default is %s\n%s", shown(entry, value),
                   by_alias ? " (by " : "", by_alias ? used : "", by_alias ? ")" : "", entry->fallback, entry->meaning);
    else
        report_row(report, entry->name, "%s (not set)\n%s%s%s", entry->fallback, entry->meaning,
                   entry->aliases[0] ? "; also " : "", entry->aliases);
}

static void json_or_null(const char *name, const char *text)
{
    printf("\"%s\": ", name);
    if (text)
        json_string(text);
    else
        printf("null");
}

void doctor_env_json(void)
{
    char used[ENV_NAME_BYTES];
    int count;
    const struct env_entry *table = env_table(&count);

    putchar('[');
    for (int i = 0; i < count; i++) {
        const char *value = env_look_up(&table[i], used);

        printf("%s{", i ? ", " : "");
        json_or_null("name", table[i].name);
        printf(", ");
        json_or_null("value", shown(&table[i], value));
        printf(", ");
        json_or_null("by", value ? used : NULL);
        printf(", ");
        json_or_null("default", table[i].fallback);
        printf(", ");
        json_or_null("aliases", table[i].aliases);
        printf(", ");
        json_or_null("meaning", table[i].meaning);
        putchar('}');
    }
    putchar(']');
}

/* An alias that is set to something else and has no say. */
static void check_aliases(struct report *report, const struct env_entry *entry)
{
    char used[ENV_NAME_BYTES], alias[ENV_NAME_BYTES];
    const char *value = env_look_up(entry, used), *at = entry->aliases;

    while (value && *at) {
        size_t length = strcspn(at, ",");
        const char *other;
        snprintf(alias, sizeof(alias), "%.*s", (int)length, at);
        other = getenv(alias);
        if (other && other[0] && strcmp(alias, used) && strcmp(other, value))
            report_warn(report, "%s is \"%s\" to no effect: %s comes first", alias, other, used);
        at += length + (at[length] == ',');
    }
}

void doctor_env(struct report *report)
{
    int count;
    const struct env_entry *table = env_table(&count);

    report_section(report, "environment");
    for (int i = 0; i < count; i++) {
        show_entry(report, &table[i]);
        check_aliases(report, &table[i]);
    }
    for (char **at = environ; *at; at++) {
        char name[ENV_NAME_BYTES];
        const char *nearest;

        snprintf(name, sizeof(name), "%.*s", (int)strcspn(*at, "="), *at);
        if (env_is_unknown(name, &nearest))
            report_warn(report, "%s is set, but EPX reads no such variable%s%s%s", name,
                        nearest ? ": did you mean " : "", nearest ? nearest : "", nearest ? "?" : "");
    }
    for (size_t i = 0; i < sizeof(needless) / sizeof(needless[0]); i++)
        if (getenv(needless[i].name))
            report_warn(report, "%s has no effect: %s", needless[i].name, needless[i].why);
}
