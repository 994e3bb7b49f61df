/* SPDX-License-Identifier: Apache-2.0 */
/* This machine: the CPU device, memory that processes share, huge pages, and the rendezvous: launcher and
 * interfaces. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include "boot/interface.h"
#include "boot/launcher.h"
#include "boot/rendezvous.h"
#include "device/device.h"
#include "doctor.h"
#include "util/clock.h"
#include "util/crypto.h"
#include "util/env.h"

#define THP_SHMEM "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

enum { CHILD_MS = 5000, PATTERN = 0x45505821, ANSWER = 0x21585045 };

static void show_system(struct report *report)
{
    struct utsname name;

    report_section(report, "machine");
    if (uname(&name) == 0)
        report_row(report, "system", "%s %s, %s, host %s", name.sysname, name.release, name.machine, name.nodename);
}

static void show_device(struct report *report, struct device *device)
{
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    int usable = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : (int)online;

    report_section(report, "cpu device");
    report_row(report, "cores", "%d usable of %ld online%s", usable, online,
               usable < online ? " (this process is pinned, or in a smaller cpuset)" : "");
    report_row(report, "agents", "%d per operation with 1 rank on this machine, %d with 4, %d with 8",
               device->ops->default_agents(device, 1), device->ops->default_agents(device, 4),
               device->ops->default_agents(device, 8));
}

/* ---- Memory that another process maps ------------------------------------------------------------------------- */

/* The child's part: maps the parent's heap as a rank does, reads, answers. Exit status 0, or 1 after a sentence. */
static int child_main(struct device *device, const struct heap_export *export, int to_parent)
{
    void *base = NULL;
    volatile uint32_t *words;

    if (device->ops->heap_open(device, export, &base) != EPX_OK) {
        dprintf(to_parent, "%s", epx_last_error());
        return 1;
    }
    words = base;
    if (words[0] != PATTERN) {
        dprintf(to_parent, "the memory that was mapped holds other bytes");
        return 1;
    }
    words[1] = ANSWER;
    device->ops->heap_close(device, export, base);
    return 0;
}

/* Waits a bounded time. The exit status, or -1. */
static int wait_child(pid_t pid)
{
    const uint64_t end = clock_ns() + (uint64_t)CHILD_MS * 1000000u;
    const struct timespec pause = {0, 1000000};
    int status = 0;

    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (clock_ns() > end) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return -1;
        }
        nanosleep(&pause, NULL);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* 0 when a process of its own could read and write the heap; else -1 and the reason. */
static int try_sharing(struct device *device, struct heap *heap, char *why, size_t bytes)
{
    volatile uint32_t *words = heap->base;
    ssize_t got;
    int fds[2], rc;
    pid_t pid;

    if (pipe(fds) != 0) {
        snprintf(why, bytes, "no pipe: %s", strerror(errno));
        return -1;
    }
    words[0] = PATTERN;
    fflush(NULL);
    pid = fork();
    if (pid == 0)
        _exit(child_main(device, &heap->export, fds[1]));
    close(fds[1]);
    rc = pid > 0 ? wait_child(pid) : -1;
    snprintf(why, bytes, "%s", pid > 0 ? "the second process did not end well" : strerror(errno));
    got = rc == 1 ? read(fds[0], why, bytes - 1) : 0;
    if (got > 0)
        why[got] = 0;
    close(fds[0]);
    if (rc == 0 && words[1] != ANSWER) {
        snprintf(why, bytes, "what the second process wrote is not seen here");
        return -1;
    }
    return rc == 0 ? 0 : -1;
}

/* A heap as large as a group's. Untouched pages cost nothing, but limits of the machine may forbid the size. */
static void show_sharing(struct report *report, struct device *device)
{
    const uint64_t alloc = (uint64_t)env_int("EPX_ALLOC_BYTES", (int64_t)4 << 30, 1, INT64_MAX / 4);
    struct heap heap;
    char why[512];

    if (device->ops->heap_create(device, alloc, &heap) != EPX_OK) {
        report_row(report, "memory sharing", "no: %s", epx_last_error());
        report_missing(report, "cpu device", "%s", epx_last_error());
        report_cannot_run(report, "a heap of %" PRIu64 " MiB cannot be made (EPX_ALLOC_BYTES makes it smaller): %s",
                          alloc >> 20, epx_last_error());
        return;
    }
    if (try_sharing(device, &heap, why, sizeof(why)) == 0) {
        report_works(report, "cpu device", "ranks of this machine share memory; %ld core%s",
                     sysconf(_SC_NPROCESSORS_ONLN), sysconf(_SC_NPROCESSORS_ONLN) == 1 ? "" : "s");
        report_row(report, "memory sharing",
                   "works: a second process mapped a heap of %" PRIu64 " MiB, read it and wrote to it", alloc >> 20);
    } else {
        report_row(report, "memory sharing", "does not work: %s", why);
        report_missing(report, "cpu device", "processes cannot share memory: %s", why);
        report_cannot_run(report, "processes cannot share memory: %s", why);
    }
    device->ops->heap_destroy(device, &heap);
}

/* Who can map each other's heaps; ranks compare this when a group is created. */
static void show_node(struct report *report, struct device *device)
{
    char pid[64] = "", user[64] = "";
    uint8_t id[64];

    if (device->ops->identity(device, id) != EPX_OK) {
        report_row(report, "a node", "cannot be told: %s", epx_last_error());
        report_cannot_run(report, "%s", epx_last_error());
    } else if (readlink("/proc/self/ns/pid", pid, sizeof(pid) - 1) > 0 &&
               readlink("/proc/self/ns/user", user, sizeof(user) - 1) > 0) {
        report_row(report, "a node", "is the ranks of user %d in %s and %s", (int)geteuid(), pid, user);
    }
}

/* "always within_size advise [never]" -> "never" */
static void show_huge_pages(struct report *report)
{
    char line[128], *open, *close;

    read_line(THP_SHMEM, line, sizeof(line));
    open = strchr(line, '[');
    close = open ? strchr(open, ']') : NULL;
    if (!close) {
        report_row(report, "huge pages", "this kernel has none for shared memory");
        return;
    }
    *close = 0;
    if (strcmp(open + 1, "never") && strcmp(open + 1, "deny")) {
        report_row(report, "huge pages", "on for heaps (shmem_enabled is %s)", open + 1);
        return;
    }
    report_row(report, "huge pages", "off for shared memory (shmem_enabled is %s)", open + 1);
    report_advise(report, "Huge pages for heaps: as root, echo advise > " THP_SHMEM
                          " (rows that lie apart then copy some 20 to 40 %% faster)");
}

void doctor_host(struct report *report)
{
    struct device *device = NULL, *asked = NULL;

    show_system(report);
    report_section(report, "cpu device");
    if (device_open(EPX_DEVICE_CPU, 0, &device) != EPX_OK) {
        report_row(report, "device", "cannot be opened: %s", epx_last_error());
        report_cannot_run(report, "the CPU device cannot be opened: %s", epx_last_error());
        return;
    }
    show_device(report, device);
    show_sharing(report, device);
    show_node(report, device);
    show_huge_pages(report);
    if (device_open(EPX_DEVICE_AUTO, 0, &asked) != EPX_OK) {
        report_warn(report, "Groups that leave the device open cannot be created: %s", epx_last_error());
        report_cannot_run(report, "%s", epx_last_error());
    } else {
        report_row(report, "default device", "%s", asked->ops->name);
        asked->ops->close(asked);
    }
    device->ops->close(device);
}

/* ---- Sockets -------------------------------------------------------------------------------------------------- */

static int is_ip(const struct ifaddrs *at)
{
    return at->ifa_addr && (at->ifa_addr->sa_family == AF_INET || at->ifa_addr->sa_family == AF_INET6);
}

static const char *address_text(const struct sockaddr *address, char *text, socklen_t bytes)
{
    const void *raw = address->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)address)->sin_addr
                                                    : (const void *)&((const struct sockaddr_in6 *)address)->sin6_addr;

    return inet_ntop(address->sa_family, raw, text, bytes) ? text : "?";
}

/* All addresses of the interface of `first`, of which it is the first in the list. */
static void show_interface(struct report *report, const struct ifaddrs *first, const char *spec)
{
    char list[1024] = "", text[INET6_ADDRSTRLEN];

    for (const struct ifaddrs *at = first; at; at = at->ifa_next) {
        size_t used = strlen(list);
        if (is_ip(at) && !strcmp(at->ifa_name, first->ifa_name))
            snprintf(list + used, sizeof(list) - used, "%s%s", used ? ", " : "",
                     address_text(at->ifa_addr, text, sizeof(text)));
    }
    report_row(report, "interfaces", "%s: %s%s%s", first->ifa_name, list, first->ifa_flags & IFF_UP ? "" : "; down",
               spec && !interface_match(spec, first->ifa_name) ? "; not picked" : "");
}

static void show_interfaces(struct report *report, const char *spec)
{
    struct ifaddrs *list;

    if (getifaddrs(&list) != 0) {
        report_row(report, "interfaces", "cannot be listed: %s", strerror(errno));
        return;
    }
    for (const struct ifaddrs *at = list; at; at = at->ifa_next) {
        const struct ifaddrs *before = list;
        while (before != at && !(is_ip(before) && !strcmp(before->ifa_name, at->ifa_name)))
            before = before->ifa_next;
        if (before == at && is_ip(at))
            show_interface(report, at, spec);
    }
    freeifaddrs(list);
}

static void show_launcher(struct report *report)
{
    struct launcher found;

    if (!launcher_name())
        report_row(report, "launcher", "none: this process is no rank");
    else if (launcher_read(&found) != EPX_OK)
        report_warn(report, "%s", epx_last_error());
    else if (found.nranks == 1)
        report_row(report, "launcher", "%s: rank 0 of 1", found.name);
    else
        report_row(report, "launcher", "%s: rank %d of %d; rank 0 is at %s, port %d", found.name, found.rank,
                   found.nranks, found.host, found.port);
}

/* Who proves what to whom. The file of the user is not made here. */
static void show_secret(struct report *report)
{
    const char *secret = env_string("EPX_SECRET"), *file = env_string("EPX_SECRET_FILE");
    const struct crypto_ops *ops = crypto();

    if (secret && !strcmp(secret, "none"))
        report_row(report, "secret", "none: everybody who connects is believed (EPX_SECRET)");
    else
        report_row(report, "secret", "%s%s",
                   secret ? "of EPX_SECRET"
                   : file ? "in EPX_SECRET_FILE, "
                          : "the user's own",
                   !secret && file ? file : "");
    if (ops)
        report_row(report, "proved with", "%s", ops->name);
    else
        report_warn(report, "Ranks cannot connect to each other: install libsodium (Debian: libsodium23), or OpenSSL's "
                            "libcrypto; or set EPX_SECRET=none on all ranks (docs/security.md)");
}

static void show_facing(struct report *report, const char *host)
{
    struct endpoint own;
    char text[ENDPOINT_TEXT];

    if (interface_facing(host ? host : "", &own) == EPX_OK)
        report_row(report, "listens on", "what MASTER_ADDR means on rank 0's machine, else %s, which faces it",
                   endpoint_text(&own, text));
    else
        report_row(report, "listens on", "nothing: %s", epx_last_error());
}

void doctor_sockets(struct report *report)
{
    const char *spec = env_string("EPX_SOCKET_IFNAME"), *host = getenv("MASTER_ADDR");
    struct endpoint found[RENDEZVOUS_MAX_ADDRESSES];
    int count = 0;

    report_section(report, "rendezvous over tcp");
    show_launcher(report);
    show_secret(report);
    if (host && host_is_loopback(host))
        report_row(report, "listens on", "loopback, as MASTER_ADDR is %s", host);
    else if (!spec)
        show_facing(report, host);
    else if (interface_addresses(spec, found, RENDEZVOUS_MAX_ADDRESSES, &count) == EPX_OK)
        report_row(report, "listens on", "%d address%s of the interfaces \"%s\" (EPX_SOCKET_IFNAME)", count,
                   count == 1 ? "" : "es", spec);
    else {
        report_row(report, "listens on", "nothing: %s", epx_last_error());
        report_warn(report, "%s", epx_last_error());
    }
    show_interfaces(report, spec);
}
