/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must not be freed before the process ends: a thread that does not come back from a library may still use it.
 */
#ifndef EPX_UTIL_KEEP_H
#define EPX_UTIL_KEEP_H

/* Remembers `what`, so that whoever looks for lost memory finds it in use, and keeps this library's code mapped, for the
 * thread that is left runs in it. */
void keep_forever(const void *what);

#endif
