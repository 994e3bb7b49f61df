/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/interface.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/launcher.h"
#include "boot/rendezvous.h"
#include "util/descriptor.h"
#include "util/env.h"
#include "util/status.h"

enum { NAMES_BYTES = 256, RESOLVE_MS = 5000 };

/* The marks come before the whole list, as for NCCL: "^=eth0,lo" selects all but exactly these two. */
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

/* Adds `name` to a comma-separated list unless it is in it: getifaddrs() returns a name once per address. */
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
    fd_hold_standard();
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
        return fail(EPX_ERR_ARGUMENT,
                    "EPX_SOCKET_IFNAME is \"%s\", which selects no interface that is up; interfaces: %s", spec, names);
    return EPX_OK;
}

/* connect() of a datagram socket only looks up the route. */
int interface_towards(const struct endpoint *to, struct endpoint *from)
{
    struct endpoint at = *to;
    int fd = fd_own(socket(at.address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0)), failed;

    if (fd < 0)
        return -1;
    memset(from, 0, sizeof(*from));
    from->length = sizeof(from->address);
    endpoint_set_port(&at, 9);
    failed = connect(fd, (struct sockaddr *)&at.address, at.length) ||
             getsockname(fd, (struct sockaddr *)&from->address, &from->length);
    close(fd);
    return failed ? -1 : 0;
}

static void set_loopback(struct endpoint *own)
{
    struct sockaddr_in *in = (struct sockaddr_in *)&own->address;

    memset(own, 0, sizeof(*own));
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    own->length = sizeof(*in);
}

/* IPv4 before IPv6 before link-local before loopback. */
static int preference(const struct endpoint *at)
{
    if (endpoint_is_loopback(at))
        return 0;
    return endpoint_is_link_local(at) ? 1 : at->address.ss_family == AF_INET6 ? 2 : 3;
}

static epx_status choose_best(const char *spec, struct endpoint *own)
{
    struct endpoint all[RENDEZVOUS_MAX_ADDRESSES];
    int count;
    epx_status status = interface_addresses(spec, all, RENDEZVOUS_MAX_ADDRESSES, &count);

    if (status != EPX_OK)
        return status;
    *own = all[0];
    for (int i = 1; i < count; i++)
        if (preference(&all[i]) > preference(own))
            *own = all[i];
    return EPX_OK;
}

/* Addresses that are reserved for documentation: only a default route leads there. */
static int towards_any(struct endpoint *own)
{
    static const char *const nowhere[] = {"192.0.2.1", "2001:db8::1"};
    struct endpoint to;
    int count;

    for (int i = 0; i < 2; i++)
        if (resolve_host(nowhere[i], deadline_in(RESOLVE_MS), &to, 1, &count) == EPX_OK && count &&
            !interface_towards(&to, own) && !endpoint_is_loopback(own))
            return 0;
    return -1;
}

epx_status interface_facing(const char *host, struct endpoint *own)
{
    struct endpoint master;
    int count = 0, found;

    found = *host && resolve_host(host, deadline_in(RESOLVE_MS), &master, 1, &count) == EPX_OK && count &&
            interface_towards(&master, own) == 0 && !endpoint_is_loopback(own);
    if (!found && towards_any(own))
        return choose_best("^", own); /* all */
    endpoint_set_port(own, 0);
    return EPX_OK;
}

epx_status interface_own_address(int one_host, struct endpoint *own)
{
    const char *spec = env_string("EPX_SOCKET_IFNAME");
    char host[LAUNCHER_HOST_BYTES];

    launcher_host(host);
    if (*host ? host_is_loopback(host) : one_host && !spec) {
        set_loopback(own);
        return EPX_OK;
    }
    return spec ? choose_best(spec, own) : interface_facing(host, own);
}
