/* SPDX-License-Identifier: Apache-2.0 */
#include "group/signals.h"

#include "proxy/proxy.h"

#define PHASE_FITS(name, maskable, text) \
    EPX_STATIC_ASSERT(sizeof(text) <= sizeof(((epx_error_info *)0)->phase), "epx_error_info.phase: " text);
#define SIGNAL_FITS(kind, operation, counts, flow, owed, maskable, text) PHASE_FITS(kind, maskable, text)
OTHER_PHASES(PHASE_FITS)
SIGNALS(SIGNAL_FITS)

#define PHASE_TEXT(phase, maskable, text) [PHASE_##phase] = text,
#define SIGNAL_TEXT(kind, operation, counts, flow, owed, maskable, text) [PHASE_##kind] = text,
static const char *const phase_texts[PHASE_COUNT] = {OTHER_PHASES(PHASE_TEXT) SIGNALS(SIGNAL_TEXT)};

#define SIGNAL_FLOW(kind, operation, counts, flow, owed, maskable, text) [SIG_##kind] = PROXY_##flow,
const uint8_t signal_flows[SIG_COUNT] = {SIGNALS(SIGNAL_FLOW)};

enum signal_counts { COUNTS_LAPS, COUNTS_EPOCHS, COUNTS_PARITY, COUNTS_ROWS, COUNTS_STEPS, COUNTS_STATUS };
enum signal_owed { OWED_BY_NOBODY, OWED_BY_ALL, OWED_BY_RELAY };

static const struct {
    int8_t operation; /* enum operation */
    uint8_t counts, owed;
} rows[SIG_COUNT] = {
#define SIGNAL_ROW(kind, operation, counts, flow, owed, maskable, text) \
    [SIG_##kind] = {OP_##operation, COUNTS_##counts, OWED_BY_##owed},
    SIGNALS(SIGNAL_ROW)};

#define SIGNAL_SUM(kind, operation, counts, flow, owed, maskable, text) [SIG_##kind] = COUNTS_##counts == COUNTS_ROWS,
const uint8_t signal_sums[SIG_COUNT] = {SIGNALS(SIGNAL_SUM)};

#define SIGNAL_MISSABLE(kind, operation, counts, flow, owed, maskable, text) [SIG_##kind] = (maskable),
const uint8_t signal_missable[SIG_COUNT] = {SIGNALS(SIGNAL_MISSABLE)};

const char *phase_name(int phase)
{
    return phase >= 0 && phase < PHASE_COUNT ? phase_texts[phase] : "unknown";
}

int signal_is_owed(const struct epx_group *group, int kind, int rank)
{
    if (rows[kind].owed == OWED_BY_RELAY)
        return node_relay(&group->map, group->rank, group->map.node_of[rank]) == rank;
    return rows[kind].owed == OWED_BY_ALL;
}

/* How many of epochs 1..epoch are in this slot of `slots`. */
static uint64_t laps_after(uint64_t epoch, uint64_t slots, uint64_t slot)
{
    return slot >= slots || epoch < slot + 1 ? 0 : (epoch - 1 - slot) / slots + 1;
}

uint64_t signal_after(const struct epx_group *group, const uint64_t *epochs, int kind, int slot)
{
    switch (rows[kind].counts) {
    case COUNTS_LAPS:
        return laps_after(epochs[rows[kind].operation], (uint64_t)group->set.inflight, (uint64_t)slot);
    case COUNTS_EPOCHS:
    case COUNTS_PARITY:
        return slot == 0 ? epochs[rows[kind].operation] : 0;
    default: /* rows start over, and what is expected with them; steps are compared with their operation's */
        return 0;
    }
}

uint64_t signal_owed(const struct epx_group *group, const uint64_t *epochs, int kind, int slot, int rank)
{
    const size_t at =
        ((size_t)kind * (size_t)group->set.sig_slots + (size_t)slot) * (size_t)group->nranks + (size_t)rank;
    uint64_t expected = 0;

    if (rows[kind].counts != COUNTS_ROWS)
        return signal_after(group, epochs, kind, slot);
    if (group->device->ops->copy(group->device, &expected, &group->shadow.expected[at], sizeof(expected)) != EPX_OK)
        return 0;
    return expected;
}

uint64_t counter_after(const struct epx_group *group, const uint64_t *epochs, int kind, int slot)
{
    if (rows[kind].counts != COUNTS_PARITY)
        return signal_after(group, epochs, kind, slot);
    /* Slot = epoch % 2 (kernel/ht_notify.h). */
    return slot < 2 ? (epochs[rows[kind].operation] + (uint64_t)slot) / 2 : 0;
}
