/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EPX_UTIL_SPELLING_H
#define EPX_UTIL_SPELLING_H

/* Letters to add, drop, change or swap to get from one word to another. */
int word_distance(const char *a, const char *b);

#endif
