/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A vendor library that takes over the signals of its process, as libpsm2 does: its constructor installs handlers for
 * SIGINT, SIGTERM, SIGSEGV and SIGABRT, ignores SIGPIPE and blocks SIGUSR1. Built as libfabric.so.1 and as
 * libibverbs.so.1, in folders of their own (test_sigactions_guard.c, scripts/sigactions.sh).
 *
 * As libfabric it forwards to the real library, whose path is in FAKE_VENDOR_REAL; without one it has no provider. Each
 * fi_getinfo installs a handler too, for SIGBUS, as libfabric's shm provider does when it is opened.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma GCC visibility push(default)

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

enum { NO_DATA = 61, VERSION = 1 << 16 | 17 };

static void handler(int sig)
{
    (void)sig;
    _exit(1); /* without a word */
}

void fake_install(int sig);
void fake_install(int sig)
{
    struct sigaction action;

    memset(&action, 0, sizeof(action));
    action.sa_handler = handler;
    sigaction(sig, &action, NULL);
}

__attribute__((constructor)) static void take_over(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGSEGV, SIGABRT};
    sigset_t blocked;

    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        fake_install(signals[i]);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
}

/* ---- libfabric --------------------------------------------------------------------------------------------------- */

static void *real(const char *name)
{
    static void *library;
    const char *path = getenv("FAKE_VENDOR_REAL");

    if (!library && path && path[0])
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : NULL;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info);
int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info)
{
    int (*call)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);

    fake_install(SIGBUS);
    *(void **)&call = real("fi_getinfo");
    return call ? call(version, node, service, flags, hints, info) : -NO_DATA;
}

void fi_freeinfo(struct fi_info *info);
void fi_freeinfo(struct fi_info *info)
{
    void (*call)(struct fi_info *);

    *(void **)&call = real("fi_freeinfo");
    if (call)
        call(info);
}

struct fi_info *fi_dupinfo(const struct fi_info *info);
struct fi_info *fi_dupinfo(const struct fi_info *info)
{
    struct fi_info *(*call)(const struct fi_info *);

    *(void **)&call = real("fi_dupinfo");
    return call ? call(info) : NULL;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
    int (*call)(struct fi_fabric_attr *, struct fid_fabric **, void *);

    fake_install(SIGFPE);
    *(void **)&call = real("fi_fabric");
    return call ? call(attr, fabric, context) : -NO_DATA;
}

const char *fi_strerror(int error);
const char *fi_strerror(int error)
{
    return strerror(error);
}

uint32_t fi_version(void);
uint32_t fi_version(void)
{
    uint32_t (*call)(void);

    *(void **)&call = real("fi_version");
    return call ? call() : VERSION;
}
