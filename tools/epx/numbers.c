/* SPDX-License-Identifier: Apache-2.0 */
#include "numbers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *skip_blanks(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* The text between quotes at `at`, without its escapes' backslashes; returns what follows, or NULL. */
static const char *read_string(const char *at, char *text, size_t bytes)
{
    size_t used = 0;

    if (*at++ != '"')
        return NULL;
    for (; *at && *at != '"'; at++) {
        if (*at == '\\' && at[1])
            at++;
        if (used + 1 < bytes)
            text[used++] = *at;
    }
    text[used] = 0;
    return *at ? at + 1 : NULL;
}

static struct numbers_field *add_field(struct numbers_row *row, const char *outer, const char *name)
{
    struct numbers_field *fields = realloc(row->fields, (size_t)(row->count + 1) * sizeof(*fields));

    if (!fields)
        return NULL;
    row->fields = fields;
    fields += row->count++;
    memset(fields, 0, sizeof(*fields));
    snprintf(fields->name, sizeof(fields->name), "%.14s%s%.15s", outer, outer[0] ? "." : "", name);
    return fields;
}

static const char *read_value(const char *at, struct numbers_field *field)
{
    char *end;

    if (*at == '"')
        return read_string(at, field->text, sizeof(field->text));
    if (!strncmp(at, "null", 4))
        return at + 4;
    if (!strncmp(at, "true", 4) || !strncmp(at, "false", 5)) {
        field->value = *at == 't';
        field->is_number = 1;
        return at + (*at == 't' ? 4 : 5);
    }
    field->value = strtod(at, &end);
    field->is_number = end != at;
    return end != at ? end : NULL;
}

/* An object at `at`; what follows it, or NULL: it is none, or has what a row does not have. */
static const char *read_object(struct numbers_row *row, const char *at, const char *outer)
{
    char name[32];

    if (*at++ != '{')
        return NULL;
    for (at = skip_blanks(at); *at != '}'; at = skip_blanks(at + (*at == ','))) {
        at = read_string(at, name, sizeof(name));
        at = at ? skip_blanks(at) : NULL;
        if (!at || *at != ':')
            return NULL;
        at = skip_blanks(at + 1);
        if (*at == '{' && !outer[0]) {
            at = read_object(row, at, name);
        } else {
            struct numbers_field *field = add_field(row, outer, name);
            at = field ? read_value(at, field) : NULL;
        }
        at = at ? skip_blanks(at) : NULL;
        if (!at || (*at != ',' && *at != '}'))
            return NULL;
    }
    return at + 1;
}

static int add_row(struct numbers *numbers, const struct numbers_row *row)
{
    struct numbers_row *rows = realloc(numbers->rows, (size_t)(numbers->count + 1) * sizeof(*rows));

    if (!rows)
        return -1;
    numbers->rows = rows;
    rows[numbers->count++] = *row;
    return 0;
}

int numbers_parse(struct numbers *numbers, const char *text, const char *first)
{
    char begins[40];

    memset(numbers, 0, sizeof(*numbers));
    snprintf(begins, sizeof(begins), "{\"%s\":", first);
    for (const char *at = strstr(text, begins); at; at = strstr(at, begins)) {
        struct numbers_row row = {0};
        const char *next = read_object(&row, at, "");

        if (!next) {
            free(row.fields);
            at++;
            continue;
        }
        if (add_row(numbers, &row) != 0) {
            free(row.fields);
            return -1;
        }
        at = next;
    }
    return 0;
}

int numbers_read(struct numbers *numbers, const char *path, const char *first)
{
    FILE *file = fopen(path, "re");
    char *text = NULL;
    size_t bytes = 0;
    int result = -1;

    memset(numbers, 0, sizeof(*numbers));
    if (!file)
        return -1;
    errno = 0;
    if (getdelim(&text, &bytes, 0, file) >= 0)
        result = numbers_parse(numbers, text, first);
    else if (!errno) /* it is empty */
        result = 0;
    free(text);
    fclose(file);
    return result;
}

void numbers_free(struct numbers *numbers)
{
    for (int i = 0; i < numbers->count; i++)
        free(numbers->rows[i].fields);
    free(numbers->rows);
    memset(numbers, 0, sizeof(*numbers));
}

static const struct numbers_field *find(const struct numbers_row *row, const char *name)
{
    for (int i = 0; i < row->count; i++)
        if (!strcmp(row->fields[i].name, name))
            return &row->fields[i];
    return NULL;
}

double row_number(const struct numbers_row *row, const char *name)
{
    const struct numbers_field *field = find(row, name);

    return field && field->is_number ? field->value : 0;
}

const char *row_text(const struct numbers_row *row, const char *name)
{
    const struct numbers_field *field = find(row, name);

    return field ? field->text : "";
}
