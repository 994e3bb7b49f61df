/* SPDX-License-Identifier: Apache-2.0 */
/* The filter of network cards, EPX_IB_HCA, which verbs and libfabric's verbs provider both use. */
#ifndef EPX_NET_CARD_FILTER_H
#define EPX_NET_CARD_FILTER_H

/* 1 if `filter` selects port `port` of `device`. Entries "name" or "name:port" separated by commas; a name is a
 * prefix, after a leading "=" the whole name; a leading "^" (or "^=") means all but these; "" means all. */
int card_filter_match(const char *filter, const char *device, int port);

#endif
