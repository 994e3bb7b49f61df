/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bootstrap protocol over TCP. All ranks connect to rank 0:
 *
 *      rank r                                              rank 0
 *        | connect to MASTER_PORT, or, where that was asked  | listens on MASTER_PORT, or on the first free port of
 *        | for, to one of the next                           | these
 *        | <----- both prove that they know the secret ----> | (auth.h) or close; all that follows is sealed
 *        | -- hello (build, job, r, world size) -----------> |
 *        | <------------------------------- WELCOME ------- | or OTHER_JOB: r tries the next port;
 *        | -- ACK -----------------------------------------> |   or ERROR: both fail
 *        |                                                   | ... until all have joined, or the deadline: ERROR to all
 *        | <-------------------------------- START --------- | with the ranks of a block: they make a tree (tree.h)
 *        |                                                   |
 *        | -- GATHER n, bytes, data -----------------------> | receives from all ranks at once
 *        | <--------------------------------- HERE --------- | only where it waits long: those that came first wait on
 *        | <------------------------ RESULT n, all data ---- | sends to all ranks at once, to many through the tree
 *        |                ...                                |
 *
 * ACK distinguishes a rank that has joined from one that stopped waiting for WELCOME and will connect again: only the
 * loss of the first is a failure. Instead of any message either side may send ERROR (status and text) and close. Rank 0
 * forwards the error of one rank to all others. All machines must have the same byte order: otherwise the magic
 * differs.
 */
#ifndef EPX_BOOT_WIRE_H
#define EPX_BOOT_WIRE_H

#include <assert.h>
#include <stdint.h>

enum {
    WIRE_VERSION = 5,
    WIRE_FRAME_MAGIC = 0x46585045, /* "EPXF" */
    WIRE_HELLO_MAGIC = 0x48585045, /* "EPXH" */
    WIRE_TEXT = 504
};

enum wire_op {
    WIRE_WELCOME = 1,
    WIRE_OTHER_JOB = 2,
    WIRE_ACK = 3,
    WIRE_START = 4,
    WIRE_GATHER = 5,
    WIRE_RESULT = 6,
    WIRE_ERROR = 7,
    WIRE_PORT = 8, /* to WIRE_GO: tree.h */
    WIRE_PARENT = 9,
    WIRE_READY = 10,
    WIRE_GO = 11,
    WIRE_HERE = 12
};

/* This, struct wire_frame and struct wire_error keep their layout in all builds: a mismatch can be reported. */
struct wire_hello {
    uint32_t magic;
    uint32_t version; /* WIRE_VERSION: for builds from before `build` */
    uint64_t job;
    int32_t rank;
    int32_t nranks;
    uint64_t build; /* util/build.h; 0 = older than these numbers */
};
static_assert(sizeof(struct wire_hello) == 32, "on the wire");

struct wire_frame {
    uint32_t magic;
    uint32_t op;
    uint64_t sequence; /* GATHER, RESULT: counts the all-gathers of the connection; START: ranks of a block */
    uint64_t bytes;    /* GATHER: per rank; RESULT, ERROR: bytes that follow */
    uint32_t group;    /* GATHER, RESULT: number of the bootstrap in its process, in order of opening */
    uint32_t reserved;
};
static_assert(sizeof(struct wire_frame) == 32, "on the wire");

struct wire_error {
    int32_t status;
    uint32_t reserved;
    char text[WIRE_TEXT];
};
static_assert(sizeof(struct wire_error) == 512, "on the wire");

#endif
