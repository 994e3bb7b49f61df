/* SPDX-License-Identifier: Apache-2.0 */
/*
 * list  = item {"," item}                    commas inside brackets do not separate items
 * item  = {text | "[" range {"," range} "]"}
 * range = number | number "-" number         all numbers of a range have the width of its first one
 *
 * With several brackets the last one varies fastest, as in Slurm.
 */
#include "boot/nodelist.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DIGITS = 9, ENTRY_BYTES = 24 }; /* a long on every machine holds nine digits */

#define MAX_HOSTS 1000000000l /* of one list; more is malformed */

struct text {
    char *at;
    size_t used, bytes;
};

static int append(struct text *out, const char *from, size_t length)
{
    if (length >= out->bytes - out->used)
        return -1;
    memcpy(out->at + out->used, from, length);
    out->used += length;
    out->at[out->used] = 0;
    return 0;
}

/* The number at *at, which moves behind it; -1: there is none. */
static long read_number(const char **at, int *width)
{
    size_t digits = strspn(*at, "0123456789");
    long value;

    if (!digits || digits > MAX_DIGITS)
        return -1;
    value = strtol(*at, NULL, 10);
    *width = (int)digits;
    *at += digits;
    return value;
}

/* Entry `index` of the bracket whose content starts at *at, which moves behind the "]". Returns how many entries the
 * bracket has, or -1. */
static long read_bracket(const char **at, long index, char entry[ENTRY_BYTES])
{
    long count = 0;
    int more = 1;

    entry[0] = 0;
    while (more) {
        int width, other;
        long first = read_number(at, &width), last = first;
        if (first >= 0 && **at == '-') {
            ++*at;
            last = read_number(at, &other);
        }
        if (first < 0 || last < first)
            return -1;
        if (index >= count && index - count <= last - first)
            snprintf(entry, ENTRY_BYTES, "%0*ld", width, first + index - count);
        count += last - first + 1;
        more = **at == ',';
        *at += more;
    }
    if (**at != ']' || count > MAX_HOSTS)
        return -1;
    ++*at;
    return count;
}

/* How many hosts the item has that starts at `at`; -1: malformed. *end: behind it. */
static long count_item(const char *at, const char **end)
{
    char ignored[ENTRY_BYTES];
    const char *start = at;
    long count = 1;

    while (*at && *at != ',') {
        long entries = 1;
        if (*at == ']')
            return -1;
        if (*at++ == '[')
            entries = read_bracket(&at, 0, ignored);
        if (entries < 0 || count > MAX_HOSTS / entries)
            return -1;
        count *= entries;
    }
    *end = at;
    return at == start ? -1 : count;
}

/* Writes host `index` of the `count` hosts of an item that count_item() has accepted. */
static int write_item(const char *at, long index, long count, struct text *out)
{
    while (*at && *at != ',') {
        size_t plain = strcspn(at, "[,");
        char entry[ENTRY_BYTES];
        if (append(out, at, plain))
            return -1;
        at += plain;
        if (*at != '[')
            continue;
        const char *content = ++at;
        long entries = read_bracket(&at, 0, entry);
        count /= entries;
        read_bracket(&content, index / count, entry);
        index %= count;
        if (append(out, entry, strlen(entry)))
            return -1;
    }
    return 0;
}

long nodelist_host(const char *list, long index, char *out, size_t bytes)
{
    struct text text = {.at = out, .bytes = bytes};
    long total = 0;

    out[0] = 0;
    for (;;) {
        const char *end;
        long count = count_item(list, &end);
        if (count < 0)
            return -1;
        if (index >= total && index - total < count && write_item(list, index - total, count, &text))
            return -1;
        total += count;
        if (!*end)
            return total;
        if (total > MAX_HOSTS)
            return -1;
        list = end + 1;
    }
}
