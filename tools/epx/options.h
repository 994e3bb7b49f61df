/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command line of a subcommand, from one table: it parses, validates single values, prints --help, and prints the
 * table for the documentation (--help=markdown), for the manual page (--help=man) and for completion in shells
 * (--help=words). Names are never abbreviated; an
 * unknown one gets the nearest known one as a hint.
 */
#ifndef EPX_TOOLS_OPTIONS_H
#define EPX_TOOLS_OPTIONS_H

#include <stddef.h>
#include <stdio.h>

#include "util/spelling.h"

enum option_kind {
    OPTION_TITLE,   /* a heading in --help; only `help` counts */
    OPTION_FLAG,    /* int32_t: 1 */
    OPTION_INT,     /* int32_t in low..high */
    OPTION_U64,     /* uint64_t in low..high; high 0: no limit */
    OPTION_CHOICE,  /* int32_t: value of one of `choices` */
    OPTION_SECONDS, /* int32_t, milliseconds; low..high in milliseconds too */
    OPTION_TEXT,    /* const char * */
    OPTION_CALL     /* `call` */
};

struct option_choice {
    const char *name; /* NULL ends a list */
    int value;
};

struct option_spec {
    const char *name; /* without dashes */
    char letter;      /* or 0 */
    enum option_kind kind;
    const char *value;    /* how --help calls the value; NULL for a flag */
    const char *help;     /* one or several lines */
    const char *fallback; /* the default, as text; NULL: not shown */
    size_t offset;        /* of the field in the target */
    long long low, high;
    const struct option_choice *choices;
    const char *hints; /* names that other programs have for it, separated by spaces */
    int hidden;        /* not in --help */
    /* 0, or -1 after a message. */
    int (*call)(void *target, const char *text);
};

struct option_table {
    const char *program; /* "epx bench" */
    const char *usage;   /* lines after "usage: ", each a way to call it */
    const char *about;   /* what the command does: sentences, with line ends */
    const char *notes;   /* after the options; may be NULL */
    const struct option_spec *specs;
    int count;
    int stop_at_word; /* the first word that is no option ends the options: the rest belongs to another program */
    size_t given; /* of a uint64_t of the target, not its first field: bit i is set if specs[i] was given; 0: none */
};

enum option_result { OPTIONS_BAD = -1, OPTIONS_OK = 0, OPTIONS_HELP = 1 };

/* Parses argv[first..]. *next: the first word that was not taken. Words that are no options are refused unless
 * stop_at_word. OPTIONS_HELP: help was asked for and printed. OPTIONS_BAD: after a message. */
enum option_result options_parse(const struct option_table *table, void *target, int argc, char **argv, int first,
                                 int *next);
/* For tables with `given`. Was this option given? The first one that was and is not in `list` (names, separated by
 * spaces), or NULL: what would be ignored. */
int options_given(const struct option_table *table, const void *target, const char *name);
const char *options_given_beside(const struct option_table *table, const void *target, const char *list);
void options_help(const struct option_table *table, FILE *to);
/* The sections of a manual page from SYNOPSIS on, on stdout. */
void options_man(const struct option_table *table);

/* The name of a value; "?" when there is none. */
const char *option_choice_name(const struct option_choice *choices, int value);
/* "PROGRAM: message; see PROGRAM --help" on stderr. Returns -1. */
int options_complain(const char *program, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
