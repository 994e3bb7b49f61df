/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One interface for both kinds of bootstrap. A process has one TCP rendezvous: its groups share the connections, which
 * stay open after the last group has closed, for the next group, until the process ends. (A second rendezvous would
 * need a port that may be in use by then, and would race with ranks that are one group ahead.) Only a failed rendezvous
 * is closed: ranks meet again for the next group to open, once no group uses it any more, and for the recovery of one.
 */
#include "boot/boot.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "boot/allgather.h"
#include "boot/launcher.h"
#include "boot/secret.h"
#include "util/env.h"
#include "util/log.h"
#include "util/pause.h"
#include "util/status.h"

enum { DEFAULT_TIMEOUT_MS = 100000, MAX_TIMEOUT_MS = 1000000000, PAUSE_NS = 1000000 };

struct boot {
    int rank, nranks;
    int timeout_ms;
    uint32_t group; /* TCP: number of this bootstrap in the process */
    int over_tcp;
    int begun; /* counted in rendezvous.begun */
    epx_allgather_fn allgather;
    void *context;
    unsigned meeting; /* TCP: the rendezvous that its last call has begun with */
    struct launcher launcher;
    struct secret secret;
};

static struct {
    pthread_mutex_t lock; /* held during an all-gather: groups on several threads run one after the other */
    int connected;
    int rank, nranks;
    struct channel *channels; /* rank 0: one per rank; other ranks: [0] is the connection to rank 0 */
    int channel_count;
    struct tree tree;
    int users; /* groups */
    int begun; /* of these: those that are still being created; atomic */
    uint32_t groups;
    unsigned meeting; /* counts how often the ranks have met */
    uint64_t sequence;
    pid_t pid;
    epx_status broken;
    char reason[512];
} rendezvous = {.lock = PTHREAD_MUTEX_INITIALIZER, .tree = {.parent = {.fd = -1}}};

/* ---- The rendezvous; its lock is held in all ------------------------------------------------------------------ */

static void close_connections(void)
{
    for (int i = 0; i < rendezvous.channel_count; i++)
        channel_close(&rendezvous.channels[i]);
    free(rendezvous.channels);
    tree_close(&rendezvous.tree);
    rendezvous.channels = NULL;
    rendezvous.channel_count = 0;
    rendezvous.connected = 0;
    rendezvous.broken = EPX_OK;
    rendezvous.sequence = 0;
}

static void close_rendezvous(void)
{
    close_connections();
    rendezvous.groups = 0;
}

/* A link that is down for less than a deadline, while nothing is sent, ends no connection. */
static void set_silence(int ms)
{
    const struct tree *tree = &rendezvous.tree;

    for (int i = 0; i < rendezvous.channel_count; i++)
        if (rendezvous.channels[i].fd >= 0)
            socket_set_silence(rendezvous.channels[i].fd, ms);
    for (int i = 0; i < tree->count; i++)
        if (tree->children[i].fd >= 0)
            socket_set_silence(tree->children[i].fd, ms);
    if (tree->parent.fd >= 0)
        socket_set_silence(tree->parent.fd, ms);
}

/* Runs when the process ends. A thread may still be in an all-gather: then the system closes the sockets. A child of
 * fork() has none of them (fork.h): their numbers may be files of its own. */
__attribute__((destructor)) static void close_at_exit(void)
{
    if (rendezvous.pid != getpid() || pthread_mutex_trylock(&rendezvous.lock))
        return;
    close_rendezvous();
    pthread_mutex_unlock(&rendezvous.lock);
}

static epx_status connect_ranks(const struct rendezvous_config *config)
{
    int count = config->rank ? 1 : config->nranks;
    struct channel *channels = malloc((size_t)count * sizeof(*channels));
    int block = config->block;
    epx_status status;

    if (!channels)
        return fail(EPX_ERR_MEMORY, "no memory for a rendezvous of %d ranks", config->nranks);
    status = config->rank ? rendezvous_client(config, channels, &block) : rendezvous_root(config, channels);
    if (!status)
        status = config->rank ? tree_open_client(config, block, channels, &rendezvous.tree)
                              : tree_open_root(config, block, channels, &rendezvous.tree);
    if (status) {
        free(channels);
        return status;
    }
    rendezvous.channels = channels;
    rendezvous.channel_count = count;
    rendezvous.rank = config->rank;
    rendezvous.nranks = config->nranks;
    rendezvous.pid = getpid();
    rendezvous.connected = 1;
    rendezvous.meeting++;
    set_silence(config->timeout_ms);
    log_line(LOG_DEBUG, "all %d ranks are connected", config->nranks);
    return EPX_OK;
}

/* A creation of another thread goes on for a moment when its rendezvous has failed. Once it has ended, ranks can meet
 * again. */
static void await_ends(int timeout_ms)
{
    const uint64_t deadline = deadline_in(timeout_ms);

    while (rendezvous.broken && rendezvous.users && !deadline_passed(deadline) &&
           rendezvous.users == __atomic_load_n(&rendezvous.begun, __ATOMIC_RELAXED)) {
        pthread_mutex_unlock(&rendezvous.lock);
        pause_ns(PAUSE_NS);
        pthread_mutex_lock(&rendezvous.lock);
    }
}

/* Uses the existing rendezvous if it works, or makes a new one. */
static epx_status share_rendezvous(const struct rendezvous_config *config)
{
    if (rendezvous.connected && rendezvous.pid != getpid())
        return fail(EPX_ERR_USAGE,
                    "this process was forked from rank %d after that had connected to the other ranks, and cannot "
                    "share these connections; fork before the first group, or start it by exec",
                    rendezvous.rank);
    await_ends(config->timeout_ms);
    if (rendezvous.broken && rendezvous.users)
        return fail(rendezvous.broken, "the rendezvous failed earlier: %s", rendezvous.reason);
    if (rendezvous.broken)
        close_rendezvous();
    if (!rendezvous.connected)
        return connect_ranks(config);
    if (rendezvous.rank != config->rank || rendezvous.nranks != config->nranks)
        return fail(EPX_ERR_MISMATCH,
                    "rank and world size are %d and %d now, but were %d and %d when the ranks connected", config->rank,
                    config->nranks, rendezvous.rank, rendezvous.nranks);
    return EPX_OK;
}

/* The others fail with `why`. */
static void end_rendezvous(epx_status status, const char *why)
{
    char text[WIRE_TEXT];

    if (!rendezvous.connected || rendezvous.broken || rendezvous.pid != getpid())
        return;
    snprintf(text, sizeof(text), "rank %d failed: %s", rendezvous.rank, why);
    if (rendezvous.rank)
        send_error(rendezvous.channels, status, text, deadline_in(RENDEZVOUS_CLOSE_MS));
    else
        disconnect_all(rendezvous.channels, rendezvous.nranks, status, text);
    rendezvous.broken = status;
    snprintf(rendezvous.reason, sizeof(rendezvous.reason), "%s", text);
}

/* ---- Open --------------------------------------------------------------------------------------------------- */

epx_status boot_abandon(const struct boot *boot, epx_status status)
{
    char why[400];

    if (boot && !boot->over_tcp)
        return status;
    snprintf(why, sizeof(why), "%.399s", epx_last_error());
    pthread_mutex_lock(&rendezvous.lock);
    end_rendezvous(status, why);
    pthread_mutex_unlock(&rendezvous.lock);
    return fail(status, "%s", why);
}

static struct rendezvous_config config_of(const struct boot *boot)
{
    struct rendezvous_config config;

    rendezvous_from_launcher(&boot->launcher, &boot->secret, boot->timeout_ms, &config);
    config.block = tree_block(boot->nranks);
    return config;
}

static epx_status open_from_environment(struct boot *boot)
{
    const struct launcher *launcher = &boot->launcher;
    struct rendezvous_config config;
    char why[400];
    epx_status status = launcher_read(&boot->launcher);

    if (status)
        return boot_abandon(NULL, status);
    boot->rank = launcher->rank;
    boot->nranks = launcher->nranks;
    boot->timeout_ms = (int)env_int("EPX_BOOT_TIMEOUT_MS", boot->timeout_ms, 1, MAX_TIMEOUT_MS);
    log_set_rank(boot->rank);
    if (boot->nranks == 1)
        return EPX_OK;
    launcher_keep_host(launcher);
    status = secret_read(1, &boot->secret);
    if (status)
        return boot_abandon(NULL, status);
    config = config_of(boot);
    pthread_mutex_lock(&rendezvous.lock);
    status = share_rendezvous(&config);
    if (!status) {
        boot->over_tcp = 1;
        boot->meeting = rendezvous.meeting;
        boot->group = ++rendezvous.groups;
        boot->begun = 1;
        rendezvous.users++;
        __atomic_fetch_add(&rendezvous.begun, 1, __ATOMIC_RELAXED);
    } else { /* under the same lock: ranks that meet later, for another thread, do not fail for this */
        snprintf(why, sizeof(why), "%.399s", epx_last_error());
        end_rendezvous(status, why);
        status = fail(status, "%s", why);
    }
    pthread_mutex_unlock(&rendezvous.lock);
    return status;
}

static int tail_is_zero(const epx_bootstrap *user)
{
    const unsigned char *bytes = (const unsigned char *)user;

    for (uint32_t i = sizeof(*user); i < user->size; i++)
        if (bytes[i])
            return 0;
    return 1;
}

static epx_status open_from_caller(struct boot *boot, const epx_bootstrap *user)
{
    if (user->size < sizeof(*user))
        return fail(EPX_ERR_ARGUMENT, "bootstrap.size is %u, expected %zu: start from EPX_BOOTSTRAP_INIT", user->size,
                    sizeof(*user));
    if (user->size > 4096 || !tail_is_zero(user))
        return fail(EPX_ERR_ARGUMENT, "bootstrap.size is %u and has fields that this version (%zu bytes) does not know",
                    user->size, sizeof(*user));
    if (user->nranks < 1 || user->nranks > RENDEZVOUS_MAX_RANKS)
        return fail(EPX_ERR_ARGUMENT, "bootstrap.nranks is %d, expected 1 to %d", user->nranks, RENDEZVOUS_MAX_RANKS);
    if (user->rank < 0 || user->rank >= user->nranks)
        return fail(EPX_ERR_ARGUMENT, "bootstrap.rank is %d, expected 0 to %d", user->rank, user->nranks - 1);
    if (!user->allgather && user->nranks > 1)
        return fail(EPX_ERR_ARGUMENT, "bootstrap.allgather is NULL, expected a function for %d ranks", user->nranks);
    boot->rank = user->rank;
    boot->nranks = user->nranks;
    boot->allgather = user->allgather;
    boot->context = user->context;
    return user->nranks > 1 ? secret_read(0, &boot->secret) : EPX_OK;
}

epx_status boot_open(const epx_bootstrap *user, int timeout_ms, struct boot **out)
{
    struct boot *boot;
    epx_status status;

    if (!out)
        return fail(EPX_ERR_ARGUMENT, "boot_open: no pointer for the result");
    *out = NULL;
    boot = calloc(1, sizeof(*boot));
    if (!boot) {
        status = fail(EPX_ERR_MEMORY, "no memory for a bootstrap");
        return user ? status : boot_abandon(NULL, status);
    }
    boot->timeout_ms = timeout_ms > 0 ? timeout_ms : DEFAULT_TIMEOUT_MS;
    if (boot->timeout_ms > MAX_TIMEOUT_MS)
        boot->timeout_ms = MAX_TIMEOUT_MS;
    status = user ? open_from_caller(boot, user) : open_from_environment(boot);
    if (status) {
        free(boot);
        return status;
    }
    *out = boot;
    return EPX_OK;
}

/* Without the lock: another thread may have it for a whole all-gather, and the group is there. */
void boot_created(struct boot *boot)
{
    __atomic_fetch_sub(&rendezvous.begun, boot->begun, __ATOMIC_RELAXED);
    boot->begun = 0;
}

void boot_close(struct boot *boot)
{
    if (!boot)
        return;
    if (boot->over_tcp) {
        pthread_mutex_lock(&rendezvous.lock);
        __atomic_fetch_sub(&rendezvous.begun, boot->begun, __ATOMIC_RELAXED);
        if (!--rendezvous.users && rendezvous.broken)
            close_rendezvous();
        pthread_mutex_unlock(&rendezvous.lock);
    }
    free(boot);
}

int boot_rank(const struct boot *boot)
{
    return boot->rank;
}

int boot_nranks(const struct boot *boot)
{
    return boot->nranks;
}

const uint8_t *boot_key(const struct boot *boot)
{
    return boot->secret.off ? NULL : boot->secret.key;
}

int boot_own_secret(const struct boot *boot)
{
    return boot->over_tcp;
}

/* ---- Meeting again ------------------------------------------------------------------------------------------ */

int boot_is_lost(const struct boot *boot)
{
    int lost;

    pthread_mutex_lock(&rendezvous.lock);
    lost = boot->over_tcp && (rendezvous.broken || boot->meeting != rendezvous.meeting);
    pthread_mutex_unlock(&rendezvous.lock);
    return lost;
}

/* The numbers of the groups stay: all ranks have the same ones. */
static epx_status meet_again(const struct boot *boot)
{
    const struct rendezvous_config config = config_of(boot);
    epx_status status;

    close_connections();
    status = connect_ranks(&config);
    if (status) {
        rendezvous.broken = status;
        snprintf(rendezvous.reason, sizeof(rendezvous.reason), "%s", epx_last_error());
    } else {
        log_line(LOG_INFO, "the %d ranks have met again", boot->nranks);
    }
    return status;
}

epx_status boot_begin(struct boot *boot)
{
    epx_status status = EPX_OK;

    if (!boot->over_tcp)
        return EPX_OK;
    pthread_mutex_lock(&rendezvous.lock);
    if (rendezvous.broken)
        status = meet_again(boot);
    boot->meeting = rendezvous.meeting;
    pthread_mutex_unlock(&rendezvous.lock);
    return status;
}

/* ---- All-gather --------------------------------------------------------------------------------------------- */

static epx_status gather_over_tcp(struct boot *boot, const void *send, void *recv, size_t bytes)
{
    struct gather gather = {.rank = boot->rank,
                            .nranks = boot->nranks,
                            .timeout_ms = boot->timeout_ms,
                            .group = boot->group,
                            .send = send,
                            .recv = recv,
                            .bytes = bytes,
                            .tree = &rendezvous.tree};
    epx_status status;

    pthread_mutex_lock(&rendezvous.lock);
    if (rendezvous.broken) {
        status = fail(rendezvous.broken, "the rendezvous failed earlier: %s", rendezvous.reason);
    } else if (boot->meeting != rendezvous.meeting) {
        status = fail(EPX_ERR_PEER, "the rendezvous failed earlier, and the ranks have met again for another call");
    } else if (!rendezvous.connected) { /* close_at_exit() */
        status = fail(EPX_ERR_USAGE, "the process ends, and has closed its connections to the other ranks");
    } else {
        gather.sequence = ++rendezvous.sequence;
        status =
            boot->rank ? allgather_client(&gather, rendezvous.channels) : allgather_root(&gather, rendezvous.channels);
        if (status) {
            rendezvous.broken = status;
            snprintf(rendezvous.reason, sizeof(rendezvous.reason), "%s", epx_last_error());
        }
    }
    pthread_mutex_unlock(&rendezvous.lock);
    return status;
}

epx_status boot_allgather(struct boot *boot, const void *send, void *recv, size_t bytes)
{
    int result;

    if (bytes && (!send || !recv))
        return fail(EPX_ERR_ARGUMENT, "an all-gather of %zu bytes was given a null pointer", bytes);
    if (bytes > SIZE_MAX / (size_t)boot->nranks)
        return fail(EPX_ERR_ARGUMENT, "an all-gather of %zu bytes among %d ranks does not fit in memory", bytes,
                    boot->nranks);
    if (boot->over_tcp)
        return gather_over_tcp(boot, send, recv, bytes);
    if (boot->nranks == 1) {
        if (bytes)
            memmove(recv, send, bytes);
        return EPX_OK;
    }
    result = boot->allgather(boot->context, send, recv, bytes);
    if (result)
        return fail(EPX_ERR_PEER, "rank %d: the caller's all-gather of %zu bytes among %d ranks returned %d",
                    boot->rank, bytes, boot->nranks, result);
    return EPX_OK;
}
