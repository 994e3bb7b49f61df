/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The numbers of LogFMT-10 that all devices share; docs/formats.md has the format. Logarithms to base 2 are integers,
 * in units of 2^-25. Of a bf16 number with mantissa m (7 bits) the logarithm is its exponent, plus m / 128, plus a bend
 * that is 0 at both ends. 2^x is a polynomial of fused multiply-adds. So every device gives the same bits.
 */
#ifndef EPX_UTIL_LOGFMT_H
#define EPX_UTIL_LOGFMT_H

#include <stdint.h>

#ifndef NUMERIC_TABLE
#define NUMERIC_TABLE static const
#endif

#define LOGFMT_BLOCK 128
#define LOGFMT_RAW_BYTES 256   /* a full block as bf16 */
#define LOGFMT_CODED_BYTES 160 /* 128 low code bytes, 16 bytes of ninth bits, 16 bytes of signs */
#define LOGFMT_TOP_CODE 511
#define LOGFMT_FRACTION 25 /* bits */
#define LOGFMT_ONE (1 << LOGFMT_FRACTION)
#define LOGFMT_UNIT (1.0f / LOGFMT_ONE)
#define LOGFMT_RANGE 32 /* powers of two below amax that codes reach */
#define LOGFMT_BELOW 33 /* logarithms are counted from so many powers of two below amax's exponent: none is negative */
#define LOGFMT_TOP 511.5f         /* the code of amax, before its lower half is taken off and it is rounded down */
#define LOGFMT_MIDDLE 0.08664340f /* ln 2 / 8 */
#define BF16_ONE 0x3f80u
#define BF16_NORMAL 0x0080u /* the least number that is not subnormal */

/* 2^(m - 1) for 1 <= m < 2, within 3e-7: always at least 1 and less than 2, so that the exponent is known. */
#define LOGFMT_EXP0 0x1.ff0e66p-2f
#define LOGFMT_EXP1 0x1.675f18p-2f
#define LOGFMT_EXP2 0x1.c9ba44p-4f
#define LOGFMT_EXP3 0x1.268beap-5f
#define LOGFMT_EXP4 0x1.0c4496p-11f
#define LOGFMT_EXP5 0x1.cc57e0p-10f

/* log2(1 + m / 128) - m / 128 in units of 2^-25: a float has it exactly. */
/* clang-format off */
NUMERIC_TABLE int32_t logfmt_bends[128] = {
    0, 114580, 226251, 335058, 441043, 544251, 644721, 742496,
    837614, 930115, 1020037, 1107416, 1192290, 1274694, 1354664, 1432232,
    1507433, 1580299, 1650863, 1719156, 1785209, 1849051, 1910713, 1970224,
    2027611, 2082903, 2136127, 2187310, 2236477, 2283656, 2328870, 2372146,
    2413506, 2452976, 2490578, 2526335, 2560270, 2592406, 2622763, 2651364,
    2678228, 2703378, 2726832, 2748612, 2768736, 2787223, 2804093, 2819365,
    2833055, 2845183, 2855765, 2864820, 2872363, 2878413, 2882985, 2886095,
    2887760, 2887995, 2886816, 2884237, 2880274, 2874941, 2868253, 2860224,
    2850868, 2840199, 2828231, 2814976, 2800448, 2784659, 2767624, 2749354,
    2729861, 2709158, 2687256, 2664169, 2639906, 2614481, 2587903, 2560185,
    2531337, 2501370, 2470295, 2438122, 2404861, 2370524, 2335120, 2298658,
    2261149, 2222603, 2183029, 2142436, 2100833, 2058231, 2014637, 1970061,
    1924512, 1877998, 1830527, 1782109, 1732751, 1682462, 1631250, 1579123,
    1526089, 1472155, 1417330, 1361620, 1305034, 1247579, 1189262, 1130090,
    1070071, 1009211, 947518, 884998, 821659, 757506, 692547, 626788,
    560235, 492896, 424775, 355880, 286217, 215791, 144609, 72677,
};
/* clang-format on */

#endif
