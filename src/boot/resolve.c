/* SPDX-License-Identifier: Apache-2.0 */
/* getaddrinfo() has no deadline, so it runs on a detached thread that may outlive the call. */
#include "boot/rendezvous.h"

#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#include "util/descriptor.h"
#include "util/status.h"

enum { HOST_BYTES = 512 };

struct lookup {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int owners; /* the caller and the thread: the last one to release it frees it */
    int done;
    int error;
    struct addrinfo *list;
    char host[];
};

static int query(const char *host, int flags, struct addrinfo **list)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags};

    fd_hold_standard(); /* libraries of name services are opened here, and keep what they open */
    return getaddrinfo(host, NULL, &hints, list);
}

static int copy_list(const struct addrinfo *list, struct endpoint *out, int limit)
{
    int count = 0;

    for (; list && count < limit; list = list->ai_next) {
        if (list->ai_family != AF_INET && list->ai_family != AF_INET6)
            continue;
        memset(&out[count], 0, sizeof(out[count]));
        memcpy(&out[count].address, list->ai_addr, list->ai_addrlen);
        out[count++].length = list->ai_addrlen;
    }
    return count;
}

static struct lookup *lookup_create(const char *host)
{
    struct lookup *lookup = calloc(1, sizeof(*lookup) + strlen(host) + 1);
    pthread_condattr_t attributes;

    if (!lookup)
        return NULL;
    memcpy(lookup->host, host, strlen(host) + 1);
    lookup->owners = 2;
    pthread_mutex_init(&lookup->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&lookup->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return lookup;
}

static void lookup_release(struct lookup *lookup, int owners)
{
    int left;

    pthread_mutex_lock(&lookup->lock);
    left = lookup->owners -= owners;
    pthread_mutex_unlock(&lookup->lock);
    if (left)
        return;
    if (lookup->list)
        freeaddrinfo(lookup->list);
    pthread_cond_destroy(&lookup->changed);
    pthread_mutex_destroy(&lookup->lock);
    free(lookup);
}

static void *lookup_thread(void *context)
{
    struct lookup *lookup = context;
    struct addrinfo *list = NULL;
    int error = query(lookup->host, 0, &list);

    pthread_mutex_lock(&lookup->lock);
    lookup->error = error;
    lookup->list = error ? NULL : list;
    lookup->done = 1;
    pthread_cond_signal(&lookup->changed);
    pthread_mutex_unlock(&lookup->lock);
    lookup_release(lookup, 1);
    return NULL;
}

static int start_detached(struct lookup *lookup)
{
    pthread_attr_t attributes;
    pthread_t thread;
    int error;

    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    error = pthread_create(&thread, &attributes, lookup_thread, lookup);
    pthread_attr_destroy(&attributes);
    return error;
}

static epx_status look_up(const char *host, uint64_t deadline, struct endpoint *out, int limit, int *count)
{
    struct timespec at = {.tv_sec = (time_t)(deadline / 1000000000u), .tv_nsec = (long)(deadline % 1000000000u)};
    struct lookup *lookup = lookup_create(host);
    epx_status status = EPX_OK;

    if (!lookup)
        return fail(EPX_ERR_MEMORY, "no memory to look up host \"%s\"", host);
    errno = start_detached(lookup);
    if (errno) {
        lookup_release(lookup, 2);
        return fail_errno(EPX_ERR_SYSTEM, "no thread to look up host \"%s\"", host);
    }
    pthread_mutex_lock(&lookup->lock);
    while (!lookup->done && pthread_cond_timedwait(&lookup->changed, &lookup->lock, &at) != ETIMEDOUT) {
    }
    if (!lookup->done)
        status = fail(EPX_ERR_TIMEOUT, "MASTER_ADDR \"%s\": the name was not resolved in time", host);
    else if (lookup->error)
        status = fail(EPX_ERR_SYSTEM, "MASTER_ADDR \"%s\": %s", host, gai_strerror(lookup->error));
    else
        *count = copy_list(lookup->list, out, limit);
    pthread_mutex_unlock(&lookup->lock);
    lookup_release(lookup, 1);
    return status;
}

static epx_status resolve_one(const char *host, uint64_t deadline, struct endpoint *out, int limit, int *count)
{
    struct addrinfo *list;

    *count = 0;
    if (!query(host, AI_NUMERICHOST, &list)) {
        *count = copy_list(list, out, limit);
        freeaddrinfo(list);
        return EPX_OK;
    }
    return look_up(host, deadline, out, limit, count);
}

/* Fails only when none of the names can be resolved. */
epx_status resolve_host(const char *host, uint64_t deadline, struct endpoint *out, int limit, int *count)
{
    char one[HOST_BYTES];
    epx_status status = EPX_OK;

    *count = 0;
    for (size_t length; *host && *count < limit; host += length + (host[length] == ',')) {
        int found;
        epx_status failed;
        length = strcspn(host, ",");
        if (length >= sizeof(one))
            return fail(EPX_ERR_ARGUMENT, "MASTER_ADDR has %zu characters, expected at most %d", length,
                        HOST_BYTES - 1);
        memcpy(one, host, length);
        one[length] = 0;
        failed = resolve_one(one, deadline, out + *count, limit - *count, &found);
        status = failed ? failed : status;
        *count += found;
    }
    return *count ? EPX_OK : status;
}

int host_is_loopback(const char *host)
{
    struct addrinfo *list;
    struct endpoint address;
    int loopback;

    if (!strcasecmp(host, "localhost"))
        return 1;
    if (query(host, AI_NUMERICHOST, &list))
        return 0;
    loopback = copy_list(list, &address, 1) && endpoint_is_loopback(&address);
    freeaddrinfo(list);
    return loopback;
}
