/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of numbers as `epx bench --json` and `epx predict --json` print them, read back: from such a file, from a saved
 * page (--report), which has the same rows in it, or from memory. A row is an object without arrays; the fields of an
 * object inside it are named "outer.inner".
 */
#ifndef EPX_TOOLS_NUMBERS_H
#define EPX_TOOLS_NUMBERS_H

#include <stddef.h>

struct numbers_field {
    char name[32], text[64];
    double value;  /* of a number; 1 and 0 of true and false */
    int is_number; /* null: neither a number nor text */
};

struct numbers_row {
    struct numbers_field *fields;
    int count;
};

struct numbers {
    struct numbers_row *rows;
    int count;
};

/* All objects in `text` that begin with the field `first` ("op"). 0, or -1 without memory. */
int numbers_parse(struct numbers *numbers, const char *text, const char *first);
/* The same of a file; -1 with errno set. */
int numbers_read(struct numbers *numbers, const char *path, const char *first);
void numbers_free(struct numbers *numbers);

/* A field's number, or 0; its text, or "". */
double row_number(const struct numbers_row *row, const char *name);
const char *row_text(const struct numbers_row *row, const char *name);

#endif
