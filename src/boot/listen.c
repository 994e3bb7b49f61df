/* SPDX-License-Identifier: Apache-2.0 */
#include "boot/listen.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "boot/interface.h"
#include "util/log.h"
#include "util/status.h"

enum { BACKLOG = 4096 };

/* ---- Addresses ------------------------------------------------------------------------------------------------ */

static void warn_if_unlisted(const struct rendezvous_config *config, const struct endpoint *own, int own_count,
                             const struct endpoint *master, int master_count)
{
    for (int i = 0; i < own_count; i++)
        for (int j = 0; j < master_count; j++)
            if (endpoint_same_host(&own[i], &master[j]))
                return;
    if (master_count)
        log_line(LOG_WARN, "MASTER_ADDR %s is not an address of the interfaces that EPX_SOCKET_IFNAME \"%s\" selects",
                 config->host, config->interfaces);
}

/* Debian resolves a machine's own name to a loopback address (127.0.1.1), and ranks on this machine connect to it. */
static epx_status addresses_of_interfaces(const struct rendezvous_config *config, const struct endpoint *master,
                                          int masters, struct endpoint *own, int *count)
{
    epx_status status = interface_addresses(config->interfaces, own, RENDEZVOUS_MAX_ADDRESSES / 2, count);

    if (status)
        return status;
    for (int i = 0; i < masters; i++)
        if (endpoint_is_loopback(&master[i]))
            own[(*count)++] = master[i];
    warn_if_unlisted(config, own, *count, master, masters);
    return EPX_OK;
}

/* What MASTER_ADDR means on this machine; and where other machines must understand it in another way (a loopback
 * address, that of a router), the one address by which this machine reaches it, or any other machine. */
static epx_status addresses_of_master(const struct rendezvous_config *config, const struct endpoint *master,
                                      int masters, struct endpoint *own, int *count)
{
    int reachable = 0;

    *count = 0;
    for (int i = 0; i < masters; i++)
        if (endpoint_is_local(&master[i])) {
            own[(*count)++] = master[i];
            reachable |= !endpoint_is_loopback(&master[i]);
        }
    return reachable ? EPX_OK : interface_facing(config->host, &own[(*count)++]);
}

static epx_status choose_addresses(const struct rendezvous_config *config, uint64_t deadline, struct endpoint *own,
                                   int *count)
{
    struct endpoint master[RENDEZVOUS_MAX_ADDRESSES / 2];
    int masters = 0;

    if (host_is_loopback(config->host))
        return resolve_host(config->host, deadline, own, RENDEZVOUS_MAX_ADDRESSES, count);
    /* Rank 0 works even if it cannot resolve the name, so a failure is ignored. */
    (void)resolve_host(config->host, deadline_in(RENDEZVOUS_HELLO_MS), master, RENDEZVOUS_MAX_ADDRESSES / 2, &masters);
    return config->interfaces ? addresses_of_interfaces(config, master, masters, own, count)
                              : addresses_of_master(config, master, masters, own, count);
}

/* Without MASTER_ADDR the launcher's variables were only a guess: rank 0 may run on another machine, where no other
 * rank would find it. A name that cannot be resolved here proves nothing. */
static epx_status check_guess(const struct rendezvous_config *config)
{
    struct endpoint master[RENDEZVOUS_MAX_ADDRESSES];
    char name[HOST_NAME_MAX + 1] = "HOST";
    int masters = 0;

    if (!config->host_from)
        return EPX_OK;
    (void)resolve_host(config->host, deadline_in(RENDEZVOUS_HELLO_MS), master, RENDEZVOUS_MAX_ADDRESSES, &masters);
    for (int i = 0; i < masters; i++)
        if (endpoint_is_local(&master[i]))
            return EPX_OK;
    if (!masters)
        return EPX_OK;
    gethostname(name, HOST_NAME_MAX);
    return fail(
        EPX_ERR_USAGE,
        "rank 0 runs on %s, but the other ranks will connect to %s (%s): set MASTER_ADDR and MASTER_PORT, as in "
        "%s (HOST: %s)",
        name, config->host, config->host_from, config->host_hint, name);
}

/* ---- Ports ---------------------------------------------------------------------------------------------------- */

void listeners_close(struct listeners *listeners)
{
    while (listeners->count)
        close(listeners->fds[--listeners->count]);
}

static void add_text(struct listeners *listeners, const struct endpoint *at)
{
    char text[ENDPOINT_TEXT];
    const size_t used = strlen(listeners->text);

    snprintf(listeners->text + used, sizeof(listeners->text) - used, "%s%s", used ? ", " : "", endpoint_text(at, text));
}

/* Listens on all addresses with one port: 0, or -1 with errno. */
static int listen_on(struct listeners *listeners, struct endpoint *own, int count, int port)
{
    listeners->text[0] = 0;
    for (int i = 0; i < count; i++) {
        int fd;
        endpoint_set_port(&own[i], port);
        fd = socket_listen(&own[i], BACKLOG);
        if (fd >= 0) {
            listeners->fds[listeners->count++] = fd;
            add_text(listeners, &own[i]);
        } else if (errno == EADDRINUSE || errno == EACCES || count == 1) {
            int saved = errno;
            listeners_close(listeners);
            errno = saved;
            return -1;
        } /* else one of several addresses is not usable, for example while duplicate address detection runs */
    }
    return listeners->count ? 0 : -1;
}

static epx_status no_port(const struct rendezvous_config *config, int last)
{
    if (config->ports > 1)
        return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot listen on any of the ports %d to %d", config->port, last);
    if (errno == EADDRINUSE)
        return fail_errno(EPX_ERR_SYSTEM,
                          "rank 0 cannot listen on port %d, which another process holds: set EPX_MASTER_PORT to a free "
                          "one, or EPX_MASTER_PORTS=%d to let rank 0 take one of the next",
                          config->port, 1 + RENDEZVOUS_MORE_PORTS);
    return fail_errno(EPX_ERR_SYSTEM, "rank 0 cannot listen on port %d", config->port);
}

epx_status listeners_open(const struct rendezvous_config *config, uint64_t deadline, struct listeners *listeners)
{
    struct endpoint own[RENDEZVOUS_MAX_ADDRESSES];
    int last = config->port + (config->ports > 1 ? config->ports : 1) - 1, count = 0;
    epx_status status = check_guess(config);

    memset(listeners, 0, sizeof(*listeners));
    if (!status)
        status = choose_addresses(config, deadline, own, &count);
    if (status)
        return status;
    last = last > 65535 ? 65535 : last;
    for (int port = config->port; port <= last; port++) {
        if (!listen_on(listeners, own, count, port)) {
            log_line(LOG_INFO, "rank 0 listens at %s for %d ranks", listeners->text, config->nranks - 1);
            return EPX_OK;
        }
        if (errno != EADDRINUSE && errno != EACCES)
            break;
    }
    return no_port(config, last);
}
