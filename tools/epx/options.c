/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "terminal.h"

enum { WORD_MOST = 48, NEAR = 2, NAME_COLUMNS = 20, HELP_COLUMNS = 108 };

int options_complain(const char *program, const char *format, ...)
{
    va_list args;

    fprintf(stderr, "%s: ", program);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "; see %s --help\n", program);
    return -1;
}

/* ---- Suggestions ------------------------------------------------------------------------------------------------ */

static int least(int a, int b)
{
    return a < b ? a : b;
}

static int listed(const char *list, const char *word)
{
    const size_t length = strlen(word);

    for (const char *at = list; at && *at; at += strcspn(at, " "), at += strspn(at, " "))
        if (strcspn(at, " ") == length && !strncmp(at, word, length))
            return 1;
    return 0;
}

static int is_option(const struct option_spec *spec)
{
    return spec->kind != OPTION_TITLE && !spec->hidden;
}

/* A known name from another program, the only name that begins so, or the one with the fewest typing errors. */
static const struct option_spec *nearest(const struct option_table *table, const char *word)
{
    const struct option_spec *found = NULL, *begins = NULL;
    int best = 1 + least(NEAR, (int)strlen(word) / 3), beginnings = 0;

    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++) {
        if (!is_option(s))
            continue;
        if (listed(s->hints, word))
            return s;
        if (*word && !strncmp(s->name, word, strlen(word))) {
            begins = s;
            beginnings++;
        }
        if (word_distance(s->name, word) < best) {
            best = word_distance(s->name, word);
            found = s;
        }
    }
    return beginnings == 1 ? begins : found;
}

static enum option_result unknown(const struct option_table *table, const char *given, const char *word)
{
    const struct option_spec *spec = nearest(table, word);

    if (spec)
        options_complain(table->program, "unknown option '%s' (did you mean '--%s'?)", given, spec->name);
    else
        options_complain(table->program, "unknown option '%s'", given);
    return OPTIONS_BAD;
}

/* ---- Values ----------------------------------------------------------------------------------------------------- */

const char *option_choice_name(const struct option_choice *choices, int value)
{
    for (; choices->name; choices++)
        if (choices->value == value)
            return choices->name;
    return "?";
}

static int set_choice(const struct option_table *table, const struct option_spec *spec, const char *text,
                      int32_t *value)
{
    char list[256] = "";
    size_t used = 0;

    for (const struct option_choice *c = spec->choices; c->name; c++) {
        if (!strcmp(c->name, text)) {
            *value = c->value;
            return 0;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s %s",
                                 c == spec->choices  ? ""
                                 : c[1].name == NULL ? " or"
                                                     : ",",
                                 c->name);
    }
    return options_complain(table->program, "--%s is '%s'; expected%s", spec->name, text, list);
}

static int set_int(const struct option_table *table, const struct option_spec *spec, const char *text, int32_t *value)
{
    char *end;
    long n;

    errno = 0;
    n = strtol(text, &end, 10);
    if (errno || end == text || *end || n < spec->low || n > spec->high)
        return options_complain(table->program, "--%s is '%s'; expected a number from %lld to %lld", spec->name, text,
                                spec->low, spec->high);
    *value = (int32_t)n;
    return 0;
}

static int set_u64(const struct option_table *table, const struct option_spec *spec, const char *text, uint64_t *value)
{
    const uint64_t high = spec->high ? (uint64_t)spec->high : UINT64_MAX;
    unsigned long long n;
    char *end;

    errno = 0;
    n = strtoull(text, &end, 0);
    if (errno || end == text || *end || strchr(text, '-') || n < (uint64_t)spec->low || n > high)
        return options_complain(table->program, "--%s is '%s'; expected a number from %lld to %llu", spec->name, text,
                                spec->low, (unsigned long long)high);
    *value = n;
    return 0;
}

static int set_seconds(const struct option_table *table, const struct option_spec *spec, const char *text, int32_t *ms)
{
    char *end;
    const double seconds = strtod(text, &end);

    if (end == text || *end || !(seconds * 1000 >= (double)spec->low && seconds * 1000 <= (double)spec->high))
        return options_complain(table->program, "--%s is '%s'; expected seconds from %g to %g", spec->name, text,
                                (double)spec->low / 1000, (double)spec->high / 1000);
    *ms = (int32_t)(seconds * 1000);
    return 0;
}

static int set(const struct option_table *table, const struct option_spec *spec, void *target, const char *text)
{
    void *field = (char *)target + spec->offset;

    switch (spec->kind) {
    case OPTION_FLAG:
        *(int32_t *)field = 1;
        return 0;
    case OPTION_INT:
        return set_int(table, spec, text, field);
    case OPTION_U64:
        return set_u64(table, spec, text, field);
    case OPTION_CHOICE:
        return set_choice(table, spec, text, field);
    case OPTION_SECONDS:
        return set_seconds(table, spec, text, field);
    case OPTION_TEXT:
        *(const char **)field = text;
        return 0;
    case OPTION_CALL:
        return spec->call(target, text);
    default:
        return -1;
    }
}

/* ---- Help ------------------------------------------------------------------------------------------------------- */

/* Lines of a text, the second and later ones indented. */
static void print_indented(FILE *to, const char *text, int columns)
{
    for (; *text; text++) {
        fputc(*text, to);
        if (*text == '\n')
            fprintf(to, "%*s", columns, "");
    }
}

static void print_option(FILE *to, const struct option_spec *spec)
{
    char name[64], text[1000], letter[8] = "";

    if (spec->letter)
        snprintf(letter, sizeof(letter), "-%c, ", spec->letter);
    snprintf(name, sizeof(name), "%s--%s%s%s", letter, spec->name, spec->value ? " " : "",
             spec->value ? spec->value : "");
    if (strlen(name) > NAME_COLUMNS)
        fprintf(to, "  %s\n  %*s ", name, NAME_COLUMNS, "");
    else
        fprintf(to, "  %-*s ", NAME_COLUMNS, name);
    snprintf(text, sizeof(text), "%s%s%s%s", spec->help, spec->fallback ? " (default: " : "",
             spec->fallback ? spec->fallback : "", spec->fallback ? ")" : "");
    print_wrapped(to, text, NAME_COLUMNS + 3, HELP_COLUMNS);
}

void options_help(const struct option_table *table, FILE *to)
{
    fputs("usage: ", to);
    print_indented(to, table->usage, 7);
    fprintf(to, "\n\n%s\n", table->about);
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++) {
        if (s->kind == OPTION_TITLE)
            fprintf(to, "\n%s\n", s->help);
        else if (is_option(s))
            print_option(to, s);
    }
    fprintf(to, "  %-*s this text\n", NAME_COLUMNS, "-h, --help");
    if (table->notes)
        fprintf(to, "\n%s", table->notes);
}

/* The rows of a table in docs/: tests compare them. */
static void print_markdown(const struct option_table *table)
{
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++) {
        if (!is_option(s))
            continue;
        printf("| `");
        if (s->letter)
            printf("-%c`, `", s->letter);
        printf("--%s%s%s` | ", s->name, s->value ? " " : "", s->value ? s->value : "");
        for (const char *c = s->help; *c; c++)
            putchar(*c == '\n' ? ' ' : *c);
        printf(" | %s |\n", s->fallback ? s->fallback : "");
    }
}

/* For completion in shells: an option a line, with the values that it may have. */
static void print_words(const struct option_table *table)
{
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++) {
        if (!is_option(s))
            continue;
        printf("--%s%s", s->name, s->kind == OPTION_FLAG ? "" : "=");
        for (const struct option_choice *c = s->kind == OPTION_CHOICE ? s->choices : NULL; c && c->name; c++)
            printf(" %s", c->name);
        putchar('\n');
    }
    puts("--help");
}

/* ---- Parsing ---------------------------------------------------------------------------------------------------- */

static const struct option_spec *find(const struct option_table *table, const char *name, size_t length)
{
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++)
        if (s->kind != OPTION_TITLE && strlen(s->name) == length && !strncmp(s->name, name, length))
            return s;
    return NULL;
}

static const struct option_spec *find_letter(const struct option_table *table, char letter)
{
    for (const struct option_spec *s = table->specs; s < table->specs + table->count; s++)
        if (letter && s->kind != OPTION_TITLE && s->letter == letter)
            return s;
    return NULL;
}

static int is_help(const struct option_table *table, const char *word)
{
    if (!strcmp(word, "--help=markdown")) {
        print_markdown(table);
        return 1;
    }
    if (!strcmp(word, "--help=words")) {
        print_words(table);
        return 1;
    }
    if (!strcmp(word, "--help=man")) {
        options_man(table);
        return 1;
    }
    if (strcmp(word, "--help") && strcmp(word, "-h"))
        return 0;
    options_help(table, stdout);
    return 1;
}

static uint64_t *given_of(const struct option_table *table, void *target)
{
    return (uint64_t *)((char *)target + table->given);
}

static int is_given(const struct option_table *table, const void *target, int i)
{
    return (*(const uint64_t *)((const char *)target + table->given) >> i & 1) != 0;
}

int options_given(const struct option_table *table, const void *target, const char *name)
{
    for (int i = 0; i < table->count; i++)
        if (is_given(table, target, i) && !strcmp(table->specs[i].name, name))
            return 1;
    return 0;
}

const char *options_given_beside(const struct option_table *table, const void *target, const char *list)
{
    for (int i = 0; i < table->count; i++)
        if (is_given(table, target, i) && !listed(list, table->specs[i].name))
            return table->specs[i].name;
    return NULL;
}

/* One option at argv[*at], with its value if it has one: "--name value", "--name=value", "-n value" or "-nvalue". */
static enum option_result parse_one(const struct option_table *table, void *target, int argc, char **argv, int *at)
{
    const char *word = argv[*at], *name = word + 2, *text = NULL;
    const size_t length = strcspn(name, "=");
    const struct option_spec *spec;
    char given[WORD_MOST + 1];

    if (word[1] == '-') {
        spec = find(table, name, length);
        text = name[length] ? name + length + 1 : NULL;
    } else {
        spec = find_letter(table, word[1]);
        text = word[2] ? word + 2 : NULL;
    }
    snprintf(given, sizeof(given), "%.*s", (int)strcspn(word, "="), word);
    if (!spec)
        return unknown(table, given, word[1] == '-' ? given + 2 : given + 1);
    if (spec->kind == OPTION_FLAG && text)
        return options_complain(table->program, "%s takes no value", given), OPTIONS_BAD;
    if (spec->kind != OPTION_FLAG && !text) {
        if (*at + 1 >= argc)
            return options_complain(table->program, "%s needs a value: %s %s", given, given, spec->value), OPTIONS_BAD;
        text = argv[++*at];
    }
    if (set(table, spec, target, text) != 0)
        return OPTIONS_BAD;
    if (table->given)
        *given_of(table, target) |= (uint64_t)1 << (spec - table->specs);
    return OPTIONS_OK;
}

enum option_result options_parse(const struct option_table *table, void *target, int argc, char **argv, int first,
                                 int *next)
{
    enum option_result result = OPTIONS_OK;
    int at;

    for (at = first; at < argc; at++) {
        const char *word = argv[at];

        if (!strcmp(word, "--")) {
            at++;
            break;
        }
        if (word[0] != '-' || !word[1])
            break;
        if (is_help(table, word))
            return OPTIONS_HELP;
        if ((result = parse_one(table, target, argc, argv, &at)) != OPTIONS_OK)
            return result;
    }
    *next = at;
    if (at >= argc || table->stop_at_word)
        return OPTIONS_OK;
    options_complain(table->program, "unexpected argument '%s'", argv[at]);
    return OPTIONS_BAD;
}
