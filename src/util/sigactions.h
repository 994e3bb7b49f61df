/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keeps the signal handling of the user's process as it was, whatever a vendor library does while EPX loads it or calls
 * it for the first time. (libpsm2 and libpsm_infinipath, which Debian's libfabric loads on amd64, have constructors
 * that install handlers for SIGINT, SIGTERM, SIGSEGV, ...: Ctrl-C then ends a Python process without a word.)
 *
 *      struct sigactions actions;
 *
 *      sigactions_save(&actions);
 *      handle = dlopen("libvendor.so.1", RTLD_NOW | RTLD_LOCAL);
 *      sigactions_restore(&actions, "libvendor");
 *
 * Dispositions belong to the whole process, and other threads of the application may change them meanwhile. So restore
 * undoes only what a vendor library has most likely done:
 *
 *      a handler inside a library that was loaded between a save and its restore, or that sigactions_vendor() named;
 *      SIG_IGN, SIG_DFL, or other flags of the same handler, if a library was loaded since save (at most 10 s ago).
 *
 * Other handlers are the application's own, and stay. Not covered: a handler that a vendor library installs later, from
 * a thread of its own, and a signal that arrives before restore. The signal mask of the calling thread is restored too.
 */
#ifndef EPX_UTIL_SIGACTIONS_H
#define EPX_UTIL_SIGACTIONS_H

#include <signal.h>
#include <stdint.h>

enum { SIGACTIONS_MAX = 64, SIGACTIONS_OBJECTS = 512 };
/* The kernel's SA_RESTORER: on x86_64 the C library sets it in every action that passes through it, so that one which
 * was put back has it although it had no flags before. It means nothing to the application. */
enum { SIGACTIONS_RESTORER = 0x04000000 };

struct sigactions {
    struct sigaction before[SIGACTIONS_MAX + 1]; /* by signal number */
    sigset_t mask;
    const void *objects[SIGACTIONS_OBJECTS]; /* that were loaded: the program headers of each */
    int count;
    unsigned long long loads; /* of the process, so far */
    uint64_t start_ns;
};

/* Pairs of save and restore may be nested, and may overlap in several threads. Both keep errno. */
void sigactions_save(struct sigactions *s);
/* `library` names the cause in the log (EPX_LOG=info). */
void sigactions_restore(const struct sigactions *s, const char *library);
/* The library that contains `address` is a vendor's, even if the application loaded it. */
void sigactions_vendor(const void *address);

#endif
