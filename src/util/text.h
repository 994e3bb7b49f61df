/* SPDX-License-Identifier: Apache-2.0 */
/* Text that others have sent. */
#ifndef EPX_UTIL_TEXT_H
#define EPX_UTIL_TEXT_H

#include <stddef.h>

/* Copies text of at most `most` bytes, with or without a zero at its end, so that it may be shown: at most bytes - 1,
 * always ended, every control character (newlines, escape sequences of a terminal) and every byte that is no UTF-8
 * replaced by '?'. Returns out. */
const char *text_clean(char *out, size_t bytes, const char *text, size_t most);

#endif
