/* SPDX-License-Identifier: Apache-2.0 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "doctor.h"
#include "epx/epx.h"
#include "terminal.h"

enum { COLUMNS_LEAST = 60, COLUMNS_MOST = 110, NAME_LEAST = 14, TEXT_MOST = 4000 };

enum kind { ROW, WORKS, MISSING, WARNING, ADVICE };

struct item {
    enum kind kind;
    const char *section, *name;
    char *text;
};

struct report {
    struct item *items;
    int count, room;
    const char *section;
    const char *network;
    char *cannot_run;
};

static struct report spare; /* without memory nothing is added to it either */

struct report *report_new(void)
{
    struct report *report = calloc(1, sizeof(*report));

    return report ? report : &spare;
}

void report_free(struct report *report)
{
    for (int i = 0; i < report->count; i++)
        free(report->items[i].text);
    free(report->items);
    free(report->cannot_run);
    if (report != &spare)
        free(report);
}

static char *format_text(const char *format, va_list args)
{
    char text[TEXT_MOST];

    vsnprintf(text, sizeof(text), format, args);
    return strdup(text);
}

static void add(struct report *report, enum kind kind, const char *name, const char *format, va_list args)
{
    char *text = format_text(format, args);

    if (text && report->count == report->room) {
        int room = report->room ? 2 * report->room : 64;
        struct item *items = realloc(report->items, (size_t)room * sizeof(*items));
        if (items) {
            report->items = items;
            report->room = room;
        }
    }
    if (text && report->count < report->room)
        report->items[report->count++] =
            (struct item){.kind = kind, .section = report->section, .name = name, .text = text};
    else
        free(text);
}

void report_section(struct report *report, const char *name)
{
    report->section = name;
}

void report_row(struct report *report, const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    add(report, ROW, name, format, args);
    va_end(args);
}

void report_works(struct report *report, const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    add(report, WORKS, name, format, args);
    va_end(args);
}

void report_missing(struct report *report, const char *name, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    add(report, MISSING, name, format, args);
    va_end(args);
}

void report_warn(struct report *report, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    add(report, WARNING, NULL, format, args);
    va_end(args);
}

void report_advise(struct report *report, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    add(report, ADVICE, NULL, format, args);
    va_end(args);
}

void report_cannot_run(struct report *report, const char *format, ...)
{
    va_list args;

    if (report->cannot_run)
        return;
    va_start(args, format);
    report->cannot_run = format_text(format, args);
    va_end(args);
}

void report_network(struct report *report, const char *name)
{
    report->network = name;
}

int report_can_run(const struct report *report)
{
    return report->cannot_run == NULL;
}

/* ---- Text ----------------------------------------------------------------------------------------------------- */

/* As wide as the terminal, within reason: long lines are hard to read. */
static int text_columns(void)
{
    const int columns = terminal_columns(STDOUT_FILENO, COLUMNS_MOST);

    return columns < COLUMNS_LEAST ? COLUMNS_LEAST : columns > COLUMNS_MOST ? COLUMNS_MOST : columns;
}

/* Deeper by the blanks that the text begins with. */
static void print_words(const char *text, int indent)
{
    const int deeper = (int)strspn(text, " ");

    printf("%*s", deeper, "");
    print_wrapped(stdout, text + deeper, indent + deeper, text_columns());
}

static int name_columns(const struct report *report, const char *section)
{
    int most = NAME_LEAST;

    for (int i = 0; i < report->count; i++) {
        const struct item *item = &report->items[i];
        if (item->kind == ROW && !strcmp(item->section, section) && (int)strlen(item->name) > most)
            most = (int)strlen(item->name);
    }
    return most;
}

static void print_rows(const struct report *report)
{
    const char *section = NULL, *name = NULL;
    int columns = 0;

    for (int i = 0; i < report->count; i++) {
        const struct item *item = &report->items[i];
        if (item->kind != ROW)
            continue;
        if (!section || strcmp(section, item->section)) {
            printf("\n%s\n", item->section);
            columns = name_columns(report, item->section);
            name = NULL;
        }
        section = item->section;
        /* Of several rows with one name the first shows it. */
        printf("  %-*s  ", columns, name && !strcmp(name, item->name) ? "" : item->name);
        name = item->name;
        print_words(item->text, columns + 4);
    }
}

/* A list of the verdict. Items may have names, which make a column. */
static void print_list(const struct report *report, enum kind kind, const char *title)
{
    enum { NAME_COLUMNS = 21 };
    int shown = 0;

    for (int i = 0; i < report->count; i++) {
        const struct item *item = &report->items[i];
        if (item->kind != kind)
            continue;
        if (!shown++)
            printf("\n%s\n", title);
        if (item->name)
            printf("  %-*s  ", NAME_COLUMNS, item->name);
        else
            printf("  - ");
        print_words(item->text, item->name ? NAME_COLUMNS + 4 : 4);
    }
}

static void print_text(const struct report *report)
{
    printf("EPX %d.%d.%d ", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH);
    if (report->cannot_run)
        printf("cannot run here: %s\n", report->cannot_run);
    else
        printf("can run here.\n");
    print_list(report, WORKS, "what works");
    print_list(report, MISSING, "what does not work");
    print_list(report, WARNING, "warnings");
    print_list(report, ADVICE, "what to do");
    printf("\n---- details ----\n");
    print_rows(report);
}

/* ---- JSON ----------------------------------------------------------------------------------------------------- */

void json_string(const char *text)
{
    putchar('"');
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c == '\n')
            printf("\\n");
        else if (c < 0x20 || c == 0x7f)
            printf("\\u%04x", c);
        else
            putchar(c);
    }
    putchar('"');
}

/* Rows of one name in one section, which follow each other, make an array. */
static int json_row(const struct report *report, int first)
{
    const struct item *item = &report->items[first];
    int last = first;

    for (int i = first + 1; i < report->count && report->items[i].kind == ROW; i++) {
        if (strcmp(report->items[i].section, item->section) || strcmp(report->items[i].name, item->name))
            break;
        last = i;
    }
    json_string(item->name);
    printf(last > first ? ": [" : ": ");
    for (int i = first; i <= last; i++) {
        if (i > first)
            printf(", ");
        json_string(report->items[i].text);
    }
    if (last > first)
        putchar(']');
    return last;
}

static void json_sections(const struct report *report)
{
    const char *section = NULL;

    printf("\"sections\": {");
    for (int i = 0; i < report->count; i++) {
        const struct item *item = &report->items[i];
        if (item->kind != ROW || !strcmp(item->section, "environment"))
            continue; /* doctor_env_json has it in parts */
        if (!section || strcmp(section, item->section)) {
            printf("%s", section ? "}, " : "");
            json_string(item->section);
            printf(": {");
        } else {
            printf(", ");
        }
        section = item->section;
        i = json_row(report, i);
    }
    printf("%s}", section ? "}" : "");
}

/* Items with names make an object, others an array. */
static void json_named(const struct report *report, enum kind kind, const char *name)
{
    int shown = 0;

    printf(", \"%s\": {", name);
    for (int i = 0; i < report->count; i++) {
        if (report->items[i].kind != kind)
            continue;
        if (shown++)
            printf(", ");
        json_string(report->items[i].name);
        printf(": ");
        json_string(report->items[i].text);
    }
    putchar('}');
}

static void json_list(const struct report *report, enum kind kind, const char *name)
{
    int shown = 0;

    printf(", \"%s\": [", name);
    for (int i = 0; i < report->count; i++) {
        if (report->items[i].kind != kind)
            continue;
        if (shown++)
            printf(", ");
        json_string(report->items[i].text);
    }
    putchar(']');
}

static void print_json(const struct report *report)
{
    printf("{\"version\": \"%d.%d.%d\", \"can_run\": %s, \"cannot_run_because\": ", EPX_VERSION_MAJOR,
           EPX_VERSION_MINOR, EPX_VERSION_PATCH, report->cannot_run ? "false" : "true");
    if (report->cannot_run)
        json_string(report->cannot_run);
    else
        printf("null");
    printf(", \"network\": ");
    if (report->network)
        json_string(report->network);
    else
        printf("null");
    json_named(report, WORKS, "works");
    json_named(report, MISSING, "missing");
    printf(", ");
    json_sections(report);
    printf(", \"environment\": ");
    doctor_env_json();
    json_list(report, WARNING, "warnings");
    json_list(report, ADVICE, "advice");
    printf("}\n");
}

void report_print(const struct report *report, int json)
{
    if (json)
        print_json(report);
    else
        print_text(report);
}
