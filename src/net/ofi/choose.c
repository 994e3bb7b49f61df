/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Selects the provider, and one of its addresses or cards.
 *
 * The provider is selected in this order: the caller's ("ofi:tcp"), EPX_OFI_PROVIDER, and else the first that is
 * available of efa, cxi, verbs, tcp. shm is selected by name only: it works inside one machine, where EPX needs no
 * network.
 *
 * "tcp" means TCP without a layer between: the provider tcp where it has endpoints of its own that need no connecting
 * (libfabric 1.18 and later), the same code under the name net in 1.17, and only then tcp below ofi_rxm, which in 1.17
 * reads a null pointer when a peer dies in the middle of a write. "tcp;ofi_rxm" asks for the layer.
 *
 * A provider that speaks IP (tcp, verbs) has an entry per address of the machine. Taken is
 *      a loopback address, when MASTER_ADDR is one by itself: all ranks are here;
 *      else one of an interface that EPX_SOCKET_IFNAME picks;
 *      else the address from which this machine reaches MASTER_ADDR;
 *      else (the caller has a bootstrap of its own) the first that is not loopback;
 * and among equals IPv4 before IPv6 before link-local ones. Other providers have an entry per card: the endpoints of a
 * GPU take the nearest cards, by the PCI addresses that libfabric knows of them; without a GPU the endpoints of all
 * ranks are distributed over the cards.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/launcher.h"
#include "boot/rendezvous.h"
#include "net/card_filter.h"
#include "net/topology.h"
#include "util/env.h"
#include "util/log.h"
#include "util/status.h"

enum { RESOLVE_MS = 5000, OFI_MAX_CARDS = 16 };
#define LAYER "ofi_rxm"

static const char *const preferred[] = {"efa", "cxi", "verbs", "tcp"};

/* ---- Addresses */

static const struct sockaddr *info_sockaddr(const struct fi_info *info)
{
    const struct sockaddr *address = info->src_addr;

    if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6))
        return NULL;
    return info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN ||
                   info->addr_format == FI_SOCKADDR_IN6
               ? address
               : NULL;
}

static int is_loopback(const struct sockaddr *address)
{
    struct sockaddr_in in;
    struct sockaddr_in6 in6;

    if (address->sa_family == AF_INET) {
        memcpy(&in, address, sizeof(in));
        return ntohl(in.sin_addr.s_addr) >> 24 == 127;
    }
    memcpy(&in6, address, sizeof(in6));
    return IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

static int is_link_local(const struct sockaddr *address)
{
    struct sockaddr_in6 in6;

    if (address->sa_family != AF_INET6)
        return 0;
    memcpy(&in6, address, sizeof(in6));
    return IN6_IS_ADDR_LINKLOCAL(&in6.sin6_addr);
}

int ofi_address_is_loopback(uint32_t format, const void *address, size_t bytes)
{
    struct sockaddr_storage storage = {0};

    if ((format != FI_SOCKADDR_IN && format != FI_SOCKADDR_IN6) || bytes > sizeof(storage))
        return 0;
    memcpy(&storage, address, bytes);
    return is_loopback((const struct sockaddr *)&storage);
}

static int same_host(const struct sockaddr *a, const struct sockaddr *b)
{
    if (a->sa_family != b->sa_family)
        return 0;
    if (a->sa_family == AF_INET)
        return !memcmp(&((const struct sockaddr_in *)a)->sin_addr, &((const struct sockaddr_in *)b)->sin_addr,
                       sizeof(struct in_addr));
    return !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr,
                   sizeof(struct in6_addr));
}

/* ---- The choice among the entries of a provider */

struct criteria {
    int loopback;               /* only loopback addresses */
    const char *interfaces;     /* EPX_SOCKET_IFNAME, or NULL */
    const char *cards;          /* EPX_IB_HCA, for verbs, or NULL */
    struct sockaddr_storage at; /* this address, where ss_family is set */
    int gpu;                    /* GPU memory is to be registered */
    const struct net_options *options;
};

static void read_criteria(struct criteria *criteria)
{
    char host[LAUNCHER_HOST_BYTES];
    struct endpoint found, from;
    int count = 0;

    memset(criteria, 0, sizeof(*criteria));
    launcher_host(host);
    criteria->loopback = host_is_loopback(host);
    criteria->interfaces = env_string("EPX_SOCKET_IFNAME");
    criteria->cards = env_string("EPX_IB_HCA");
    if (!*host || criteria->loopback || criteria->interfaces)
        return;
    if (resolve_host(host, deadline_in(RESOLVE_MS), &found, 1, &count) || !count || interface_towards(&found, &from) ||
        endpoint_is_loopback(&from)) /* a name that resolves to loopback here resolves to something else elsewhere */
        return;
    criteria->at = from.address;
}

/* Domains of the verbs provider are named after their devices, and have no port in the name. */
static int card_allowed(const struct criteria *criteria, const struct fi_info *info)
{
    char device[64];

    if (!criteria->cards || strncmp(info->fabric_attr->prov_name, "verbs", 5) != 0)
        return 1;
    snprintf(device, sizeof(device), "%s", info->domain_attr->name);
    device[strcspn(device, "-")] = 0; /* "mlx5_0-xrc" */
    return card_filter_match(criteria->cards, device, 1);
}

/* 0 = not usable. The entry with the highest score is selected, and the first of equals. */
static int score(const struct criteria *criteria, const struct fi_info *info)
{
    const struct sockaddr *address = info_sockaddr(info);
    int points = 1;

    if (strstr(info->fabric_attr->prov_name, "ofi_rxd") || info->domain_attr->cq_data_size < sizeof(uint32_t))
        return 0; /* reliable datagrams in software are too slow to be selected */
    if (!card_allowed(criteria, info))
        return 0;
    points += strstr(info->fabric_attr->prov_name, LAYER) ? 0 : 32;
    if (!address)
        return points;
    if (criteria->loopback)
        return is_loopback(address) ? points + (address->sa_family == AF_INET) : 0;
    if (criteria->interfaces) {
        if (!interface_match(criteria->interfaces, info->domain_attr->name))
            return 0;
    } else {
        points += is_loopback(address) ? 0 : 8;
        points += criteria->at.ss_family && same_host(address, (const struct sockaddr *)&criteria->at) ? 16 : 0;
    }
    return points + (is_link_local(address) ? 0 : 2) + (address->sa_family == AF_INET ? 4 : 0);
}

static int same_card(const struct fi_info *a, const struct fi_info *b)
{
    return !strcmp(a->domain_attr->name, b->domain_attr->name);
}

/* The PCI address of an entry's card where libfabric knows it; else its domain, which is often named after the RDMA
 * device: "rdmap0s6-rdm", "mlx5_0-xrc". */
static void card_name(const struct fi_info *info, char *name, size_t bytes)
{
    const struct fi_bus_attr *bus = info->nic ? info->nic->bus_attr : NULL;

    if (bus && bus->bus_type == FI_BUS_PCI) {
        snprintf(name, bytes, "%04x:%02x:%02x.%x", bus->attr.pci.domain_id, bus->attr.pci.bus_id,
                 bus->attr.pci.device_id, bus->attr.pci.function_id);
        return;
    }
    snprintf(name, bytes, "%s", info->domain_attr->name);
    name[strcspn(name, "-")] = 0;
}

int ofi_card_choose(const char *sysfs, const struct net_options *options, const struct fi_info *const *cards, int count)
{
    char text[OFI_MAX_CARDS][64];
    const char *names[OFI_MAX_CARDS];
    int order[OFI_MAX_CARDS], nearest;

    if (!options->pci || !options->pci[0])
        return (options->rank + options->index) % count;
    for (int i = 0; i < count; i++) {
        card_name(cards[i], text[i], sizeof(text[i]));
        names[i] = text[i];
    }
    nearest = topology_sort(sysfs, options->pci, names, count, order);
    return order[(options->gpu + options->index) % nearest];
}

/* Endpoints are spread over entries of equal score on different cards. Entries with IP addresses are not spread: the
 * peers would have to be reachable from every interface. */
static const struct fi_info *spread(const struct fi_info *first, const struct criteria *criteria)
{
    const struct fi_info *cards[OFI_MAX_CARDS];
    int count = 0;

    if (info_sockaddr(first))
        return first;
    for (const struct fi_info *at = first; at && count < OFI_MAX_CARDS; at = at->next) {
        int seen = score(criteria, at) != score(criteria, first) ||
                   strcmp(at->fabric_attr->prov_name, first->fabric_attr->prov_name);
        for (int i = 0; i < count && !seen; i++)
            seen = same_card(cards[i], at);
        if (!seen)
            cards[count++] = at;
    }
    return count ? cards[ofi_card_choose(TOPOLOGY_SYSFS, criteria->options, cards, count)] : first;
}

static const struct fi_info *best(const struct fi_info *list, const struct criteria *criteria)
{
    const struct fi_info *taken = NULL;

    for (const struct fi_info *at = list; at; at = at->next)
        if (score(criteria, at) > (taken ? score(criteria, taken) : 0))
            taken = at;
    return taken ? spread(taken, criteria) : NULL;
}

/* ---- Providers */

static struct fi_info *make_hints(const struct ofi_lib *lib, const char *provider, int gpu)
{
    struct fi_info *hints = lib->dupinfo(NULL);

    if (!hints)
        return NULL;
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT | FI_MR_RMA_EVENT;
    if (gpu) {
        hints->caps |= FI_HMEM;
        hints->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    /* No threads of the provider beside the proxy, which polls anyway. */
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->cq_data_size = sizeof(uint32_t);
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->fabric_attr->prov_name = strdup(provider); /* freed with the hints */
    if (hints->fabric_attr->prov_name)
        return hints;
    lib->freeinfo(hints);
    return NULL;
}

/* 0, or what fi_getinfo said (-FI_ENODATA: no such provider, or nothing that it could run on). */
static int try_memory(const struct ofi_lib *lib, const char *provider, const struct criteria *criteria, int gpu,
                      struct fi_info **info)
{
    struct fi_info *hints = make_hints(lib, provider, gpu), *list = NULL;
    const struct fi_info *taken;
    int rc;

    if (!hints)
        return -FI_ENOMEM;
    rc = lib->getinfo(OFI_API, NULL, NULL, 0, hints, &list);
    lib->freeinfo(hints);
    if (rc)
        return rc;
    taken = best(list, criteria);
    *info = taken ? lib->dupinfo(taken) : NULL;
    lib->freeinfo(list);
    return *info ? 0 : taken ? -FI_ENOMEM : -FI_ENODATA;
}

/* Asks for FI_HMEM where GPU memory is to be registered and the provider supports it; else for host memory. */
static int try_provider(const struct ofi_lib *lib, const char *provider, const struct criteria *criteria,
                        struct fi_info **info)
{
    if (criteria->gpu && !try_memory(lib, provider, criteria, 1, info))
        return 0;
    return try_memory(lib, provider, criteria, 0, info);
}

/* Once, by rank 0: libfabric's own filter leaves only TCP below a layer that nobody has asked for. */
static void warn_of_layer(const struct net_options *options)
{
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    const char *filter = getenv("FI_PROVIDER");

    if (filter && options->rank == 0 && !atomic_flag_test_and_set(&warned))
        log_line(LOG_WARN,
                 "FI_PROVIDER is \"%s\", which hides the provider net of this libfabric: what is left, tcp below " LAYER
                 ", takes three times the processor time to connect many ranks, and a peer that dies may end this "
                 "process too; expected FI_PROVIDER=net,tcp, or none",
                 filter);
}

/* The same, with the meaning of "tcp" (above). */
static int find_provider(const struct ofi_lib *lib, const char *provider, const struct criteria *criteria,
                         struct fi_info **info)
{
    struct fi_info *plain;
    int rc = try_provider(lib, provider, criteria, info);

    if (strcmp(provider, "tcp") || (!rc && !strstr((*info)->fabric_attr->prov_name, LAYER)))
        return rc;
    if (try_provider(lib, "net", criteria, &plain)) {
        if (!rc)
            warn_of_layer(criteria->options);
        return rc;
    }
    if (!rc)
        lib->freeinfo(*info);
    *info = plain;
    return 0;
}

/* "tcp, shm, udp": what this libfabric has, whether it can run here or not. */
static void list_providers(const struct ofi_lib *lib, char *text, size_t bytes)
{
    struct fi_info *list = NULL;
    size_t used = 0;

    snprintf(text, bytes, "none");
    if (lib->getinfo(OFI_API, NULL, NULL, FI_PROV_ATTR_ONLY, NULL, &list))
        return;
    for (const struct fi_info *at = list; at && used + 1 < bytes; at = at->next) {
        const char *name = at->fabric_attr->prov_name;

        if (strncmp(name, "ofi_", 4)) /* layers and hooks are no providers by themselves */
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "", name);
    }
    lib->freeinfo(list);
}

static epx_status fail_provider(const struct ofi_lib *lib, const char *name, int from_env,
                                const struct criteria *criteria, int rc)
{
    char known[160];

    list_providers(lib, known, sizeof(known));
    return fail(EPX_ERR_UNSUPPORTED, "%s \"%s\" cannot be used here%s%s%s: %s; this libfabric has %s",
                from_env ? "EPX_OFI_PROVIDER: the libfabric provider" : "the libfabric provider", name,
                criteria->interfaces ? " on the interfaces of EPX_SOCKET_IFNAME \"" : "",
                criteria->interfaces ? criteria->interfaces : "", criteria->interfaces ? "\"" : "", lib->strerror(-rc),
                known);
}

/* Once: a name that is misspelled, or forgotten in the environment, must not look as if it counted. */
static void warn_if_ignored(const char *provider)
{
    static atomic_flag warned = ATOMIC_FLAG_INIT;
    const char *other = env_string("EPX_OFI_PROVIDER");

    if (other && strcmp(other, provider) && !atomic_flag_test_and_set(&warned))
        log_line(LOG_WARN, "EPX_OFI_PROVIDER is \"%s\" to no effect: the network was asked for as ofi:%s", other,
                 provider);
}

epx_status ofi_choose(const struct ofi_lib *lib, const struct net_options *options, struct fi_info **info)
{
    const char *provider = options->provider;
    const int from_env = !provider || !provider[0];
    const char *name = from_env ? env_string("EPX_OFI_PROVIDER") : provider;
    struct criteria criteria;
    int rc = -FI_ENODATA;

    if (!from_env)
        warn_if_ignored(provider);
    read_criteria(&criteria);
    criteria.gpu = net_memory_is_gpu(options->memory_kind);
    criteria.options = options;
    if (name) {
        rc = find_provider(lib, name, &criteria, info);
        return rc ? fail_provider(lib, name, from_env, &criteria, rc) : EPX_OK;
    }
    for (size_t i = 0; i < sizeof(preferred) / sizeof(preferred[0]); i++) {
        rc = find_provider(lib, preferred[i], &criteria, info);
        if (!rc)
            return EPX_OK;
    }
    return fail(EPX_ERR_UNSUPPORTED, "libfabric has none of the providers efa, cxi, verbs, tcp here: %s",
                lib->strerror(-rc));
}

void ofi_describe(const struct fi_info *info, char *text, size_t bytes)
{
    const struct sockaddr *address = info_sockaddr(info);
    char host[INET6_ADDRSTRLEN] = "";

    if (address && address->sa_family == AF_INET)
        inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, host, sizeof(host));
    else if (address)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, host, sizeof(host));
    snprintf(text, bytes, "%s on %s%s%s%s", info->fabric_attr->prov_name, info->domain_attr->name, host[0] ? " (" : "",
             host, host[0] ? ")" : "");
}

#endif
