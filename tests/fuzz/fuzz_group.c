/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What ranks tell each other when a group is created: rank 0 of two creates one, and rank 1 says what rank 0 says, with
 * bytes changed by the input. Settings, results and messages of failures, identities, secrets, exports of heaps.
 *
 *     per all-gather: changes (1), then for each: where (2), xor (1);
 *                     or, for 15 changes: bytes (1), and these to xor its beginning, where results and messages are
 */
#include "fuzz.h"

#include "epx/epx.h"

enum { RANKS = 2, MOST_STEPS = 12 };

static struct fuzz input;
static int steps;

static int gather(void *context, const void *send, void *recv, size_t bytes)
{
    uint8_t *peer = (uint8_t *)recv + bytes;
    unsigned changes;

    (void)context;
    if (++steps > MOST_STEPS)
        return -1;
    memcpy(recv, send, bytes);
    memcpy(peer, send, bytes);
    changes = fuzz_below(&input, 16);
    if (changes == 15) {
        const size_t run = (size_t)fuzz_int(&input, 1) % 65;
        for (size_t i = 0; i < run && i < bytes; i++)
            peer[i] ^= (uint8_t)fuzz_int(&input, 1);
        return 0;
    }
    for (unsigned i = 0; i < changes && bytes; i++) {
        const size_t at = (size_t)fuzz_int(&input, 2) % bytes;
        peer[at] ^= (uint8_t)fuzz_int(&input, 1);
    }
    return 0;
}

static void begin(void)
{
    fuzz_quiet();
    setenv("EPX_SECRET", "0123456789abcdef0123456789abcdef", 1);
}

FUZZ_BEGIN(begin)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    epx_bootstrap boot = EPX_BOOTSTRAP_INIT;
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_group *group = NULL;
    epx_status status;

    input = (struct fuzz){data, bytes};
    steps = 0;
    boot.nranks = RANKS;
    boot.allgather = gather;
    config.device = EPX_DEVICE_CPU;
    config.num_experts = 4;
    config.max_tokens_per_rank = 2;
    config.max_hidden_bytes = 64;
    config.max_topk = 2;
    config.num_agents = 1;
    config.alloc_bytes = 1 << 16;
    config.timeout_ms = 200;
    snprintf(config.net, sizeof(config.net), "null");
    status = epx_group_create(&group, &boot, &config);
    if (status == EPX_OK) {
        FUZZ_REQUIRE(epx_group_destroy(group) == EPX_OK);
        return 0;
    }
    FUZZ_REQUIRE(!group && status != EPX_ERR_INTERNAL);
    for (const char *c = epx_last_error(); *c; c++)
        FUZZ_REQUIRE((unsigned char)*c >= 0x20 && *c != 0x7f);
    return 0;
}
