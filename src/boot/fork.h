/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A child of fork() shares the sockets of its parent. As long as it lives (a data loader of a training program, for
 * instance) no connection of a parent that was killed ends, and its port still accepts: the other ranks would wait for
 * it instead of going on without it. So the child closes them, which it may not use anyway.
 */
#ifndef EPX_BOOT_FORK_H
#define EPX_BOOT_FORK_H

#include <stdint.h>

/* Returns fd, which children of this process from now on do not have. -1 stays -1, with its errno. */
int fork_hides(int fd);

/* The same of a descriptor that another thread may close: it stays if it is another file by then than the one with this
 * number. */
void fork_hides_inode(int fd, uint64_t inode);
/* Of the file of a descriptor; 0: there is none. */
uint64_t fork_inode(int fd);

#endif
