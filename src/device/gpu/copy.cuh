/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies by a warp: 16 bytes per lane and access, several loads in flight before the first store. Rows pass through
 * once: they are kept out of the first-level cache.
 */
#ifndef EPX_DEVICE_GPU_COPY_CUH
#define EPX_DEVICE_GPU_COPY_CUH

#ifndef COPY_FLIGHT
#define COPY_FLIGHT 8 /* loads of a lane in flight: 8 * WARP * 16 bytes of a row */
#endif

KFN int aligned16(const void *p)
{
    return ((uintptr_t)p & 15) == 0;
}

/* Any alignment: in elements of 4, 2 or 1 bytes. All lanes go round equally often. */
template <typename T> KFN void copy_elements(void *to, const void *from, size_t bytes)
{
    const size_t n = bytes / sizeof(T);

    ROLLED
    for (size_t at = 0; at < n; at += WARP) {
        const size_t i = at + (size_t)lane_id();
        if (i < n)
            ((volatile T *)to)[i] = ((const volatile T *)from)[i];
    }
}

KFN_STEP void copy_odd(void *to, const void *from, size_t bytes)
{
    const uintptr_t all = (uintptr_t)to | (uintptr_t)from | bytes;

    if (all % 4 == 0)
        copy_elements<uint32_t>(to, from, bytes);
    else if (all % 2 == 0)
        copy_elements<uint16_t>(to, from, bytes);
    else
        copy_elements<uint8_t>(to, from, bytes);
    __syncwarp(); /* lanes that returned early shuffled alone in ag_copy_many(), and got no address */
}

KFN void ag_zero(struct agent *ag, void *to, size_t bytes)
{
    const uint4 zero = {0, 0, 0, 0};

    (void)ag;
    if (((uintptr_t)to | bytes) & 15) {
        for (size_t i = (size_t)lane_id(); i < bytes; i += WARP)
            ((char *)to)[i] = 0;
        return;
    }
    for (size_t i = (size_t)lane_id() * 16; i < bytes; i += WARP * 16)
        vec_store((char *)to + i, zero);
}

/* Lane i holds destination i; before it is settled, what lane i offers and for which place. */
struct copy_set {
    char *to;
    int place;
};

KFN void copy_set_begin(struct copy_set *set)
{
    set->to = NULL;
    set->place = -1;
}

KFN void copy_set_offer(struct copy_set *set, int place, void *to)
{
    set->to = (char *)to;
    set->place = place;
}

/* The lane that offers for this lane's place; its own number where none does. */
KFN_STEP int offers_lane(int place)
{
    lanes_t offers = __ballot_sync(ALL_LANES, place >= 0 && place != lane_id());
    int from = lane_id();

    while (offers) {
        const int lane = lanes_first(offers);
        if (__shfl_sync(ALL_LANES, place, lane) == lane_id())
            from = lane;
        offers &= offers - 1;
    }
    return from;
}

KFN void copy_set_settle(struct agent *ag, struct copy_set *set)
{
    (void)ag;
    set->to = (char *)__shfl_sync(ALL_LANES, (unsigned long long)set->to, offers_lane(set->place));
}

KFN void copy_set_put(struct agent *ag, struct copy_set *set, int i, void *to)
{
    (void)ag;
    if (lane_id() == i)
        set->to = (char *)to;
}

KFN void *copy_set_get(struct agent *ag, const struct copy_set *set, int i)
{
    (void)ag;
    return (void *)__shfl_sync(ALL_LANES, (unsigned long long)set->to, i);
}

struct int_pair {
    int a, b;
};

struct pair_set {
    struct int_pair pair;
    int place;
};

KFN void pair_set_begin(struct pair_set *set)
{
    set->pair.a = set->pair.b = -1;
    set->place = -1;
}

KFN void pair_set_offer(struct pair_set *set, int place, int a, int b)
{
    set->pair.a = a;
    set->pair.b = b;
    set->place = place;
}

KFN void pair_set_settle(struct agent *ag, struct pair_set *set)
{
    const int from = offers_lane(set->place);

    (void)ag;
    set->pair.a = __shfl_sync(ALL_LANES, set->pair.a, from);
    set->pair.b = __shfl_sync(ALL_LANES, set->pair.b, from);
}

KFN int_pair pair_set_get(struct agent *ag, const struct pair_set *set, int i)
{
    const int_pair pair = {__shfl_sync(ALL_LANES, set->pair.a, i), __shfl_sync(ALL_LANES, set->pair.b, i)};

    (void)ag;
    return pair;
}

struct word_set {
    char *to;
    int64_t stride;
    int place;
};

KFN void word_set_begin(struct word_set *set)
{
    set->to = NULL;
    set->stride = 0;
    set->place = -1;
}

KFN void word_set_offer(struct word_set *set, int place, void *to, int64_t stride)
{
    set->to = (char *)to;
    set->stride = stride;
    set->place = place;
}

KFN void word_set_settle(struct agent *ag, struct word_set *set)
{
    const int from = offers_lane(set->place);

    (void)ag;
    set->to = (char *)__shfl_sync(ALL_LANES, (unsigned long long)set->to, from);
    set->stride = __shfl_sync(ALL_LANES, set->stride, from);
}

KFN_STEP void ag_copy_words(struct agent *ag, const struct word_set *set, int n, const char *from, int64_t stride,
                            int words)
{
    (void)ag;
    ROLLED
    for (int at = 0; at < words; at += 2 * WARP) {
        const int a = at + lane_id(), b = a + WARP;
        const uint32_t first = a < words ? *(const volatile uint32_t *)(from + a * stride) : 0;
        const uint32_t second = b < words ? *(const volatile uint32_t *)(from + b * stride) : 0;
        ROLLED
        for (int i = 0; i < n; i++) {
            char *to = (char *)__shfl_sync(ALL_LANES, (unsigned long long)set->to, i);
            const int64_t step = __shfl_sync(ALL_LANES, set->stride, i);
            if (a < words)
                *(uint32_t *)(to + a * step) = first;
            if (b < words)
                *(uint32_t *)(to + b * step) = second;
        }
    }
}

/* A flight of a row: `left` vectors of it from this lane's on, or, if it is WHOLE, as many as a flight has: these need
 * neither conditions nor an address each. Set to zero: what is not loaded would keep registers of the flight before. */
template <int WHOLE> KFN void copy_flight(char *own, int count, const char *from, int left)
{
    uint4 v[COPY_FLIGHT] = {};
#pragma unroll
    for (int j = 0; j < COPY_FLIGHT; j++)
        if (WHOLE || j * WARP < left)
            v[j] = vec_load(from + j * WARP * 16);
    ROLLED
    for (int i = 0; i < count; i++) {
        char *to = (char *)__shfl_sync(ALL_LANES, (unsigned long long)own, i) + lane_id() * 16;
#pragma unroll
        for (int j = 0; j < COPY_FLIGHT; j++)
            if (WHOLE || j * WARP < left)
                vec_store(to + j * WARP * 16, v[j]);
    }
}

/* `own` is this lane's destination; all rows are aligned and of whole vectors. */
KFN_STEP void copy_row_many(char *own, int count, const char *from, int n)
{
    from += lane_id() * 16;
    ROLLED
    for (; n >= COPY_FLIGHT * WARP; n -= COPY_FLIGHT * WARP) {
        copy_flight<1>(own, count, from, 0);
        from += COPY_FLIGHT * WARP * 16;
        own += COPY_FLIGHT * WARP * 16;
    }
    if (n > 0)
        copy_flight<0>(own, count, from, n - lane_id());
}

KFN void ag_copy(struct agent *ag, void *to, const void *from, size_t bytes)
{
    (void)ag;
    if (((uintptr_t)to | (uintptr_t)from | bytes) & 15)
        copy_odd(to, from, bytes);
    else
        copy_row_many((char *)to, 1, (const char *)from, (int)(bytes / 16));
}

KFN void ag_copy_many(struct agent *ag, const struct copy_set *set, int count, const void *from, size_t bytes)
{
    const int odd = (lane_id() < count && !aligned16(set->to)) || !aligned16(from) || (bytes & 15);

    if (!__any_sync(ALL_LANES, odd)) {
        copy_row_many(set->to, count, (const char *)from, (int)(bytes / 16));
        return;
    }
    for (int i = 0; i < count; i++)
        copy_odd(copy_set_get(ag, set, i), from, bytes);
}

#endif
