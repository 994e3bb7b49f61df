/* SPDX-License-Identifier: Apache-2.0 */
#include "util/text.h"

#include <stdint.h>
#include <string.h>

/* Bytes of the character at `at`, of which `left` are there; 0 = not UTF-8, or a control character. */
static size_t character(const uint8_t *at, size_t left)
{
    const size_t length = *at < 0x80 ? 1 : *at >= 0xc2 && *at < 0xe0 ? 2 : *at >= 0xe0 && *at < 0xf0 ? 3 : 0;

    if (!length || length > left || (length == 1 && (*at < 0x20 || *at == 0x7f)))
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    if (length == 2 && at[0] == 0xc2 && at[1] < 0xa0) /* C1: the control characters above ASCII */
        return 0;
    if (length == 3 && at[0] == 0xe2 && at[1] == 0x80 && at[2] >= 0xaa && at[2] <= 0xae) /* turn the direction */
        return 0;
    return length;
}

const char *text_clean(char *out, size_t bytes, const char *text, size_t most)
{
    const size_t length = strnlen(text, most);
    size_t used = 0;

    for (size_t i = 0; i < length;) {
        const size_t n = character((const uint8_t *)text + i, length - i);
        if (used + (n ? n : 1) >= bytes)
            break;
        if (n)
            memcpy(out + used, text + i, n);
        else
            out[used] = '?';
        used += n ? n : 1;
        i += n ? n : 1;
    }
    out[used] = 0;
    return out;
}
