/* SPDX-License-Identifier: Apache-2.0 */
/* epx help environment: the variables that EPX reads, from the table that reads them. */
#include <stdio.h>
#include <string.h>

#include "commands.h"
#include "options.h"
#include "terminal.h"
#include "util/env.h"

enum { TEXT_COLUMNS = 100, INDENT = 4 };

static void print_entry(const struct env_entry *entry)
{
    printf("%s", entry->name);
    if (entry->fallback[0])
        printf("   (default: %s)", entry->fallback);
    putchar('\n');
    printf("%*s", INDENT, "");
    print_wrapped(stdout, entry->meaning, INDENT, TEXT_COLUMNS);
    if (entry->aliases[0])
        printf("%*salso: %s\n", INDENT, "", entry->aliases);
}

/* A row of the table in docs/environment.md. */
static void print_row(const struct env_entry *entry)
{
    const char *at = entry->aliases;

    printf("| `%s` | ", entry->name);
    while (*at) {
        const int length = (int)strcspn(at, ",");
        printf("%s`%.*s`", at == entry->aliases ? "" : ", ", length, at);
        at += length + (at[length] == ',');
    }
    printf(" | %s | %s |\n", entry->fallback, entry->meaning);
}

int help_environment(int argc, char **argv)
{
    const int markdown = argc == 2 && !strcmp(argv[1], "--markdown");
    int count;
    const struct env_entry *table = env_table(&count);

    if (argc > 1 && !markdown) {
        options_complain("epx", "epx help environment: unexpected argument '%s'", argv[1]);
        return EXIT_USAGE;
    }
    if (markdown)
        puts("| Variable | Aliases | Default | Meaning |\n|---|---|---|---|");
    for (int i = 0; i < count; i++)
        markdown ? print_row(&table[i]) : print_entry(&table[i]);
    return EXIT_OK;
}
