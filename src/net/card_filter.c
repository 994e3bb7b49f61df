/* SPDX-License-Identifier: Apache-2.0 */
#include "net/card_filter.h"

#include <stdlib.h>
#include <string.h>

/* One entry of a filter, `length` characters long. */
static int entry_matches(const char *entry, size_t length, int exact, const char *device, int port)
{
    const char *colon = memchr(entry, ':', length);
    size_t name = colon ? (size_t)(colon - entry) : length;

    if (!name || strncmp(entry, device, name) || (exact && device[name]))
        return 0;
    return !colon || atoi(colon + 1) == port;
}

int card_filter_match(const char *filter, const char *device, int port)
{
    int exclude = *filter == '^', exact, found = 0;

    filter += exclude;
    exact = *filter == '=';
    filter += exact;
    if (!*filter)
        return 1;
    while (*filter) {
        size_t length = strcspn(filter, ",");
        found |= entry_matches(filter, length, exact, device, port);
        filter += length + (filter[length] == ',');
    }
    return found != exclude;
}
