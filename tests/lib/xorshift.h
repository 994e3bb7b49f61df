/* SPDX-License-Identifier: Apache-2.0 */
/* A small random generator for tests of numbers; the state must not be 0. */
#ifndef EPX_TESTS_LIB_XORSHIFT_H
#define EPX_TESTS_LIB_XORSHIFT_H

#include <stdint.h>

static inline uint32_t xorshift(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (uint32_t)(*state >> 16);
}

#endif
