/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Close-on-exec for descriptors that a vendor library opens. Without it a program that a rank starts, and that outlives
 * the rank, keeps the rank's connections open: its peers find that it has ended at their deadlines only.
 *
 *      struct cloexec before;
 *
 *      cloexec_begin(&before);
 *      rc = vendor_open(...);
 *      cloexec_end(&before);
 *
 * All sockets, event queues and character devices that have appeared meanwhile are the library's. Another thread of the
 * application may open files and pipes for its children at the same time; these are left alone.
 */
#ifndef EPX_UTIL_CLOEXEC_H
#define EPX_UTIL_CLOEXEC_H

#include <stdint.h>

enum { CLOEXEC_FILES = 1 << 14 };

struct cloexec {
    uint64_t open[CLOEXEC_FILES / 64]; /* a bit for each descriptor */
};

void cloexec_begin(struct cloexec *before);
void cloexec_end(const struct cloexec *before);
/* Each descriptor of the process, in no order. fn may close it. */
void cloexec_each(void (*fn)(int fd, void *arg), void *arg);
void cloexec_set(int fd);

#endif
