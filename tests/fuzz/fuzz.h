/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the harnesses share. Each fuzz_NAME.c is a libFuzzer program over one decoder; its seeds are in corpus/NAME. A
 * harness takes its input apart with the functions below: bytes that are missing are zeros, so that every input means
 * something and short ones mean simple things.
 */
#ifndef EPX_TESTS_FUZZ_FUZZ_H
#define EPX_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerInitialize(int *argc, char ***argv);

struct fuzz {
    const uint8_t *at;
    size_t left;
};

static inline void fuzz_fill(struct fuzz *f, void *out, size_t bytes)
{
    const size_t have = f->left < bytes ? f->left : bytes;

    memset(out, 0, bytes);
    if (have)
        memcpy(out, f->at, have);
    f->at += have;
    f->left -= have;
}

/* `bytes` of them, 1 to 8, little endian. */
static inline uint64_t fuzz_int(struct fuzz *f, size_t bytes)
{
    uint8_t raw[8] = {0};
    uint64_t value = 0;

    fuzz_fill(f, raw, bytes);
    for (size_t i = 8; i-- > 0;)
        value = value << 8 | raw[i];
    return value;
}

/* 0 to n - 1. */
static inline unsigned fuzz_below(struct fuzz *f, unsigned n)
{
    return (unsigned)fuzz_int(f, 1) % n;
}

/* One of a few interesting values, or any: what a decoder compares with is rarely hit by chance. */
static inline int64_t fuzz_around(struct fuzz *f, const int64_t *values, unsigned count)
{
    const unsigned which = fuzz_below(f, count + 2);

    if (which < count)
        return values[which];
    return which == count ? (int64_t)fuzz_int(f, 8) : (int8_t)fuzz_int(f, 1);
}

/* What must hold whatever the input is. */
#define FUZZ_REQUIRE(condition)                                                            \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                       \
        }                                                                                  \
    } while (0)

/* Messages are made but not shown: there are thousands per second. */
static inline void fuzz_quiet(void)
{
    setenv("EPX_LOG", "none", 1);
}

/* A harness names the function that is called once, before the first input. */
#define FUZZ_BEGIN(function)                          \
    int LLVMFuzzerInitialize(int *argc, char ***argv) \
    {                                                 \
        (void)argc;                                   \
        (void)argv;                                   \
        function();                                   \
        return 0;                                     \
    }

#endif
