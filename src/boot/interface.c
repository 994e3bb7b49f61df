/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "util/status.h"

enum { NAMES_BYTES = 256 };

/* The marks stand in front of the whole list, as users of NCCL know it: "^=eth0,lo" is all but exactly these two. */
int interface_match(const char *spec, const char *name)
{
    int exclude = *spec == '^';
    int exact, found = 0;

    spec += exclude;
    exact = *spec == '=';
    spec += exact;
    while (*spec && !found) {
        size_t length = strcspn(spec, ",");
        if (length)
            found = !strncmp(spec, name, length) && (!exact || !name[length]);
        spec += length + (spec[length] == ',');
    }
    return found != exclude;
}

static socklen_t address_length(int family)
{
    switch (family) {
    case AF_INET:
        return sizeof(struct sockaddr_in);
    case AF_INET6:
        return sizeof(struct sockaddr_in6);
    default:
        return 0;
    }
}

/* Adds `name` to a comma-separated list unless it is there; the list of addresses has a name once per address. */
static void add_name(char names[NAMES_BYTES], const char *name)
{
    size_t used = strlen(names), length = strlen(name);

    for (const char *at = names; *at; at += strspn(at, ", ")) {
        size_t one = strcspn(at, ",");
        if (one == length && !strncmp(at, name, length))
            return;
        at += one;
    }
    snprintf(names + used, NAMES_BYTES - used, "%s%s", used ? ", " : "", name);
}

epx_status interface_addresses(const char *spec, struct endpoint *out, int limit, int *count)
{
    char names[NAMES_BYTES] = "";
    struct ifaddrs *list;

    *count = 0;
    if (getifaddrs(&list))
        return fail_errno(EPX_ERR_SYSTEM, "EPX_SOCKET_IFNAME is \"%s\", but the interfaces cannot be listed", spec);
    for (struct ifaddrs *at = list; at; at = at->ifa_next) {
        socklen_t length = at->ifa_addr ? address_length(at->ifa_addr->sa_family) : 0;
        if (!length || !(at->ifa_flags & IFF_UP))
            continue;
        add_name(names, at->ifa_name);
        if (*count < limit && interface_match(spec, at->ifa_name)) {
            memset(&out[*count], 0, sizeof(out[*count]));
            memcpy(&out[*count].address, at->ifa_addr, length);
            out[*count].length = length;
            ++*count;
        }
    }
    freeifaddrs(list);
    if (!*count)
        return fail(EPX_ERR_ARGUMENT, "EPX_SOCKET_IFNAME is \"%s\", which picks no interface that is up; there are: %s",
                    spec, names);
    return EPX_OK;
}
