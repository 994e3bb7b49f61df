/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_TOOLS_TERMINAL_H
#define EPX_TOOLS_TERMINAL_H

#include <stdio.h>

/* How many columns the terminal behind a descriptor has. Not a terminal, or one that does not say: `fallback`. */
int terminal_columns(int fd, int fallback);
/* Breaks lines between words, before column `most`, and where the text has line ends. The first line continues at
 * column `indent`, where all others begin. A line end follows. */
void print_wrapped(FILE *to, const char *text, int indent, int most);

#endif
