/* SPDX-License-Identifier: Apache-2.0 */
/* --help=man: the table as the body of a manual page. scripts/manual adds title, name and references to others. */
#include <string.h>

#include "options.h"

/* One line: '-' stays what a reader can copy, and nothing is taken for a request of roff. */
static void print_escaped(const char *text, size_t length)
{
    if (length && (text[0] == '.' || text[0] == '\''))
        fputs("\\&", stdout);
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '-')
            fputs("\\-", stdout);
        else if (text[i] == '\\')
            fputs("\\e", stdout);
        else
            putchar(text[i]);
    }
}

/* Lines that begin with a space stay as they are; others are filled; an empty one begins a paragraph. */
static void print_text(const char *text)
{
    int verbatim = 0;

    while (*text) {
        const size_t length = strcspn(text, "\n");
        if (verbatim != (text[0] == ' ')) {
            verbatim = !verbatim;
            puts(verbatim ? ".PP\n.nf" : ".fi");
        }
        if (!length)
            puts(".PP");
        print_escaped(text, length);
        if (length)
            putchar('\n');
        text += length + (text[length] == '\n');
    }
    if (verbatim)
        puts(".fi");
}

static void print_option(const struct option_spec *spec)
{
    puts(".TP");
    if (spec->letter)
        printf("\\fB\\-%c\\fR, ", spec->letter);
    fputs("\\fB\\-\\-", stdout);
    print_escaped(spec->name, strlen(spec->name));
    printf("\\fR%s%s%s\n", spec->value ? " \\fI" : "", spec->value ? spec->value : "", spec->value ? "\\fR" : "");
    print_text(spec->help);
    if (spec->fallback) {
        fputs(".br\nDefault: ", stdout);
        print_escaped(spec->fallback, strlen(spec->fallback));
        putchar('\n');
    }
}

static void print_title(const char *title)
{
    const size_t length = strlen(title);

    fputs(".SS ", stdout);
    print_escaped(title, length && title[length - 1] == ':' ? length - 1 : length);
    putchar('\n');
}

void options_man(const struct option_table *table)
{
    puts(".SH SYNOPSIS\n.nf");
    for (const char *at = table->usage; *at; at += strcspn(at, "\n"), at += *at == '\n') {
        print_escaped(at, strcspn(at, "\n"));
        putchar('\n');
    }
    puts(".fi\n.SH DESCRIPTION");
    print_text(table->about);
    puts(".SH OPTIONS");
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++) {
        if (s->kind == OPTION_TITLE)
            print_title(s->help);
        else if (!s->hidden)
            print_option(s);
    }
    puts(".TP\n\\fB\\-h\\fR, \\fB\\-\\-help\\fR\nPrints a summary of the options.");
    if (table->notes) {
        puts(".SH NOTES");
        print_text(table->notes);
    }
}
