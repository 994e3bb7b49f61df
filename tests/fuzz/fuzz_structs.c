/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sizes of structs: a caller's struct of any claimed size. The memory behind it has exactly as many bytes as its size
 * claims (and at most what the input has), so that AddressSanitizer sees a byte too many.
 *
 *     which struct (1) | in or out (1) | claimed size (4) | its other bytes
 */
#include "fuzz.h"

#include "epx/epx.h"
#include "util/structs.h"

#define ENTRY(type)         \
    {                       \
#type, sizeof(type) \
    }

static const struct {
    const char *name;
    size_t bytes;
} structs[] = {
    ENTRY(epx_tensor),           ENTRY(epx_bootstrap),       ENTRY(epx_world),          ENTRY(epx_group_config),
    ENTRY(epx_group_info),       ENTRY(epx_handle_config),   ENTRY(epx_layout_info),    ENTRY(epx_dispatch_inputs),
    ENTRY(epx_dispatch_outputs), ENTRY(epx_dispatch_config), ENTRY(epx_combine_inputs), ENTRY(epx_combine_outputs),
    ENTRY(epx_combine_config),   ENTRY(epx_error_info),      ENTRY(epx_stats),          ENTRY(epx_memory_info),
};
enum { MOST = 8192, COUNT = sizeof(structs) / sizeof(structs[0]) };

FUZZ_BEGIN(fuzz_quiet)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fuzz f = {data, bytes};
    const unsigned which = fuzz_below(&f, COUNT);
    const int out = (int)fuzz_int(&f, 1) & 1;
    const uint32_t claimed = (uint32_t)fuzz_int(&f, 4);
    const size_t room = claimed < sizeof(claimed) ? sizeof(claimed) : claimed > MOST ? MOST : claimed;
    const size_t ours = structs[which].bytes;
    uint8_t *theirs = malloc(room), *own = malloc(ours), *before = malloc(room);
    epx_status status;

    FUZZ_REQUIRE(theirs && own && before);
    fuzz_fill(&f, theirs, room);
    memcpy(theirs, &claimed, sizeof(claimed));
    memcpy(before, theirs, room);
    memset(own, 0xee, ours);
    status =
        out ? struct_out(theirs, own, ours, structs[which].name) : struct_in(own, ours, theirs, structs[which].name);
    FUZZ_REQUIRE(status == EPX_OK || status == EPX_ERR_ARGUMENT);
    if (status != EPX_OK) {
        FUZZ_REQUIRE(!memcmp(theirs, before, room));
    } else if (out) {
        FUZZ_REQUIRE(!memcmp(theirs, before, sizeof(claimed)));
        FUZZ_REQUIRE(claimed <= ours || !memcmp(theirs + ours, before + ours, claimed - ours));
    } else {
        FUZZ_REQUIRE(!memcmp(own, theirs, claimed < ours ? claimed : ours));
        for (size_t i = claimed; i < ours; i++)
            FUZZ_REQUIRE(!own[i]);
        for (size_t i = ours; i < claimed; i++) /* what this library does not know was not asked for */
            FUZZ_REQUIRE(!theirs[i]);
    }
    free(before);
    free(own);
    free(theirs);
    return 0;
}
