/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is leaked on purpose: a thread that never returned from a library call may still use it until the process
 * ends.
 */
#ifndef EPX_UTIL_LEAK_H
#define EPX_UTIL_LEAK_H

/* Keeps `what` reachable, so that leak checkers do not report it, and keeps this library's code mapped, because the
 * abandoned thread still runs in it. */
void leak_on_purpose(const void *what);

#endif
