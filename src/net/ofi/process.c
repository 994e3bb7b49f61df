/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Endpoints of this process, for providers whose endpoints must not be connected to another one of their process. shm
 * of libfabric maps the memory of a peer; where the peer is an endpoint of the same process it takes that one's own
 * mapping, and goes on to use it when the peer has been closed: a put then ends the process. Processes cannot close
 * each other's mappings. So ranks that are threads of one process are refused when they connect.
 */
#include "net/ofi/ofi.h"

#if EPX_HAVE_OFI

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/status.h"

struct ofi_local {
    pid_t process; /* a child has the list of its parent, and none of the endpoints */
    size_t bytes;
    struct ofi_local *next;
    uint8_t name[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ofi_local *locals;

static int shares_mappings(const struct ofi_net *n)
{
    return !strcmp(n->info->fabric_attr->prov_name, "shm");
}

epx_status ofi_local_add(struct ofi_net *n)
{
    uint8_t name[NET_ADDRESS_MAX];
    size_t bytes = sizeof(name);
    struct ofi_local *local;

    if (!shares_mappings(n) || fi_getname(&n->ep->fid, name, &bytes) || bytes > sizeof(name))
        return EPX_OK;
    local = malloc(sizeof(*local) + bytes);
    if (!local)
        return fail(EPX_ERR_MEMORY, "ofi: no memory for the name of an endpoint");
    local->process = getpid();
    local->bytes = bytes;
    memcpy(local->name, name, bytes);
    pthread_mutex_lock(&lock);
    local->next = locals;
    locals = local;
    pthread_mutex_unlock(&lock);
    n->local = local;
    return EPX_OK;
}

void ofi_local_remove(struct ofi_net *n)
{
    struct ofi_local **link = &locals;

    if (!n->local)
        return;
    pthread_mutex_lock(&lock);
    while (*link && *link != n->local)
        link = &(*link)->next;
    if (*link)
        *link = n->local->next;
    pthread_mutex_unlock(&lock);
    free(n->local);
    n->local = NULL;
}

epx_status ofi_local_check(const struct ofi_net *n, int peer, const uint8_t *name, size_t bytes)
{
    const struct ofi_local *local;
    int found = 0;

    if (!shares_mappings(n))
        return EPX_OK;
    pthread_mutex_lock(&lock);
    for (local = locals; local && !found; local = local->next)
        found = local->process == getpid() && local->bytes == bytes && !memcmp(local->name, name, bytes);
    pthread_mutex_unlock(&lock);
    return found ? fail(EPX_ERR_UNSUPPORTED,
                        "ofi: rank %d and this rank are threads of one process, in which libfabric's shm uses memory "
                        "of endpoints that are closed; expected ranks that are processes, or another network (tcp)",
                        peer)
                 : EPX_OK;
}

#endif
