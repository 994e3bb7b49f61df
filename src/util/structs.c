/* SPDX-License-Identifier: Apache-2.0 */
#include "util/structs.h"

#include <string.h>

#include "util/status.h"

static epx_status claimed_size(const void *theirs, const char *name, uint32_t *size)
{
    if (!theirs)
        return fail(EPX_ERR_ARGUMENT, "%s: expected a pointer, got NULL", name);
    memcpy(size, theirs, sizeof(*size));
    if (*size < 2 * sizeof(uint32_t) || *size > 65536)
        return fail(EPX_ERR_ARGUMENT,
                    "%s.size: expected sizeof the struct, got %u (initialise it with its EPX_..._INIT macro)", name,
                    *size);
    return EPX_OK;
}

epx_status struct_in(void *ours, size_t bytes, const void *theirs, const char *name)
{
    uint32_t size = 0;
    epx_status status = claimed_size(theirs, name, &size);

    if (status != EPX_OK)
        return status;
    for (size_t i = bytes; i < size; i++)
        if (((const unsigned char *)theirs)[i])
            return fail(EPX_ERR_ARGUMENT, "%s: byte %zu is set, but this library knows only %zu bytes of it", name, i,
                        bytes);
    memset(ours, 0, bytes);
    memcpy(ours, theirs, size < bytes ? size : bytes);
    return EPX_OK;
}

epx_status struct_out(void *theirs, const void *ours, size_t bytes, const char *name)
{
    uint32_t size = 0;
    epx_status status = claimed_size(theirs, name, &size);

    if (status != EPX_OK)
        return status;
    if (size > bytes)
        memset((char *)theirs + bytes, 0, size - bytes);
    memcpy((char *)theirs + sizeof(size), (const char *)ours + sizeof(size),
           (size < bytes ? size : bytes) - sizeof(size));
    return EPX_OK;
}
