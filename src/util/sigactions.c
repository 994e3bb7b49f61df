/* SPDX-License-Identifier: Apache-2.0 */
#include "util/sigactions.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "util/clock.h"
#include "util/descriptor.h"
#include "util/log.h"

enum { VENDORS_MAX = 256 };
#define LATE_NS 10000000000u /* a call that took longer says nothing of who set SIG_IGN meanwhile */

/* A vendor library may never return from a call: the lock is not held between save and restore. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const void *vendors[VENDORS_MAX]; /* objects of vendor libraries, as in struct sigactions */
static int nvendors;
static int active;                                       /* saves without their restore yet */
static struct sigaction application[SIGACTIONS_MAX + 1]; /* the last dispositions that were not a vendor's */

/* ---- Objects: the program and its libraries, known by the address of their program headers ----------------------- */

static int contains(const void *const *objects, int count, const void *object)
{
    for (int i = 0; i < count; i++)
        if (objects[i] == object)
            return 1;
    return 0;
}

static int list_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct sigactions *s = arg;

    (void)size;
    s->loads = info->dlpi_adds;
    if (s->count < SIGACTIONS_OBJECTS)
        s->objects[s->count++] = info->dlpi_phdr;
    return 0;
}

static void add_vendor(const void *object)
{
    if (nvendors < VENDORS_MAX && !contains(vendors, nvendors, object))
        vendors[nvendors++] = object;
}

struct news {
    const struct sigactions *since;
    unsigned long long loads;
};

static int add_if_new(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct news *news = arg;

    (void)size;
    news->loads = info->dlpi_adds;
    if (!contains(news->since->objects, news->since->count, info->dlpi_phdr))
        add_vendor(info->dlpi_phdr);
    return 0;
}

/* Libraries that were loaded since save are vendors'. 1 if there are any. */
static int find_new_vendors(const struct sigactions *s)
{
    struct news news = {.since = s};

    if (s->count < SIGACTIONS_OBJECTS) /* else the list may lack some of the application's */
        dl_iterate_phdr(add_if_new, &news);
    return news.loads > s->loads;
}

struct place {
    uintptr_t address;
    const void *object;
    const char *name;
};

static int find_place(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct place *place = arg;

    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];

        if (part->p_type != PT_LOAD || place->address - (info->dlpi_addr + part->p_vaddr) >= part->p_memsz)
            continue;
        place->object = info->dlpi_phdr;
        place->name = info->dlpi_name;
        return 1;
    }
    return 0;
}

void sigactions_vendor(const void *address)
{
    struct place place = {.address = (uintptr_t)address};

    if (!dl_iterate_phdr(find_place, &place))
        return;
    pthread_mutex_lock(&lock);
    add_vendor(place.object);
    pthread_mutex_unlock(&lock);
}

/* ---- Dispositions ------------------------------------------------------------------------------------------------ */

/* Non-zero for the two signals that libc keeps for itself. */
static int read_action(int sig, struct sigaction *action)
{
    return sigaction(sig, NULL, action);
}

static int is_function(const struct sigaction *a)
{
    return a->sa_handler != SIG_DFL && a->sa_handler != SIG_IGN;
}

/* Of a mask libc fills only what the kernel knows, a bit per signal. */
static int same(const struct sigaction *a, const struct sigaction *b)
{
    return a->sa_handler == b->sa_handler && ((a->sa_flags ^ b->sa_flags) & ~SIGACTIONS_RESTORER) == 0 &&
           !memcmp(&a->sa_mask, &b->sa_mask, SIGACTIONS_MAX / 8);
}

/* A handler inside a vendor's library; *name is the library's. */
static int is_vendors(const struct sigaction *a, const char **name)
{
    struct place place = {.address = (uintptr_t)a->sa_handler};

    if (!is_function(a) || !dl_iterate_phdr(find_place, &place))
        return 0;
    *name = place.name;
    return contains(vendors, nvendors, place.object);
}

/* 1 if the disposition was changed by a vendor and is now what it was before. */
static int undo(int sig, const struct sigaction *before, int loaded, const char **name)
{
    struct sigaction now, replaced;

    if (read_action(sig, &now) != 0 || same(&now, before))
        return 0;
    if (!is_vendors(&now, name) && !(loaded && (!is_function(&now) || now.sa_handler == before->sa_handler)))
        return 0;
    if (sigaction(sig, before, &replaced) != 0)
        return 0;
    if (same(&replaced, &now))
        return 1;
    sigaction(sig, &replaced, NULL); /* another thread was faster: that is the application's choice */
    return 0;
}

/* While another thread is between save and restore, it will undo what a vendor has done. Only another function that is
 * not a vendor's is certainly the application's. */
static int is_applications(const struct sigaction *now, const struct sigaction *known)
{
    const char *name;

    return is_function(now) && now->sa_handler != known->sa_handler && !is_vendors(now, &name);
}

void sigactions_save(struct sigactions *s)
{
    const int saved = errno;

    fd_hold_standard(); /* what a vendor library opens is not one of them either */
    s->count = 0;
    s->loads = 0;
    dl_iterate_phdr(list_object, s);
    pthread_mutex_lock(&lock);
    for (int sig = 1; sig <= SIGACTIONS_MAX; sig++) {
        struct sigaction now;

        if (read_action(sig, &now) != 0)
            continue;
        if (!active || is_applications(&now, &application[sig]))
            application[sig] = now;
        s->before[sig] = application[sig];
    }
    active++;
    pthread_mutex_unlock(&lock);
    pthread_sigmask(SIG_SETMASK, NULL, &s->mask);
    s->start_ns = clock_ns();
    errno = saved;
}

void sigactions_restore(const struct sigactions *s, const char *library)
{
    const int saved = errno;
    const char *name = "";
    char list[SIGACTIONS_MAX * 4 + 1] = "";
    size_t used = 0;
    int loaded;

    pthread_mutex_lock(&lock);
    loaded = find_new_vendors(s) && clock_ns() - s->start_ns < LATE_NS;
    for (int sig = 1; sig <= SIGACTIONS_MAX; sig++)
        if (undo(sig, &s->before[sig], loaded, &name))
            used += (size_t)snprintf(list + used, sizeof(list) - used, " %d", sig);
    active--;
    pthread_mutex_unlock(&lock);
    pthread_sigmask(SIG_SETMASK, &s->mask, NULL);
    if (used)
        log_line(LOG_INFO, "%s%s%s changed how signals%s are handled: restored", library, name[0] ? " with " : "", name,
                 list);
    errno = saved;
}
