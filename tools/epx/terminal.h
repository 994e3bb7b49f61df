/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TOOLS_TERMINAL_H
#define EPX_TOOLS_TERMINAL_H

/* How many columns the terminal behind a descriptor has. Not a terminal, or one that does not say: `fallback`. */
int terminal_columns(int fd, int fallback);

#endif
