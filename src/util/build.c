/* SPDX-License-Identifier: Apache-2.0 */
#include "util/build.h"

#include <stdio.h>

#include "util/status.h"

const char *build_text(uint64_t number, char text[BUILD_TEXT])
{
    const unsigned code = (unsigned)(number >> 32);

    snprintf(text, BUILD_TEXT, "%u.%u.%u-%08x", code / 10000, code / 100 % 100, code % 100, (unsigned)number);
    return text;
}

epx_status build_fail(const char *who, uint64_t theirs, const char *other, uint64_t others)
{
    char a[BUILD_TEXT], b[BUILD_TEXT];

    return fail(EPX_ERR_MISMATCH, "%s has build %s of EPX, %s has %s: install the same build on all ranks", who,
                build_text(theirs, a), other, build_text(others, b));
}
