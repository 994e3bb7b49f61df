/* SPDX-License-Identifier: Apache-2.0 */
/* Where the parts of a LogFMT-10 row lie; docs/formats.md draws it. */
#ifndef EPX_DEVICE_CPU_MATH_LOGFMT_H
#define EPX_DEVICE_CPU_MATH_LOGFMT_H

#include "device/cpu/math_vec.h"

#define LOGFMT_BLOCK 128
#define LOGFMT_RAW_BYTES 256   /* a full block as bf16 */
#define LOGFMT_CODED_BYTES 160 /* 128 low code bytes, 16 bytes of ninth bits, 16 bytes of signs */

/* Decodes one block into 128 floats; what a short last block lacks is 0. */
void logfmt_decode_block(struct f32x8 *to, const void *row, int hidden, int block);

#endif
