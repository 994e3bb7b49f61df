/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Signals between ranks, and barriers between the agents of one launch: what the kernels of both modes include.
 *
 *   writer                                             reader
 *   data stores                                        wait_peers(kind, slot, v): acquire sig[kind][slot][writer] >= v
 *   sync_last(): acq_rel over the agents                 sync_barrier() shares it with its other agents
 *   signal_peers(kind, slot, v): release sig[..][me] = v data loads
 *
 * To a rank on another node a signal is a put of no bytes: its proxy counts it (put.h). Who waits for all ranks looks
 * at the words of its node and at one word of each of its proxies, the aggregate (proxy/count.c), however many ranks
 * there are. The counters of single ranks say who is missing when a wait fails, and who is masked.
 *
 * Every wait has a deadline. Expiry masks the peer if the group allows it, otherwise it records who waited for whom,
 * in which phase, for what and what was there, and tells all ranks through their abort words.
 */
#ifndef EPX_KERNEL_SYNC_H
#define EPX_KERNEL_SYNC_H

#include "kernel/abort.h"        /* how an operation fails: error record, abort words */
#include "kernel/barrier.h"      /* between agents of this rank */
#include "kernel/begin_end.h"    /* first and last lines of every kernel */
#include "kernel/waiting_for.h"  /* who keeps a rank from answering */
#include "kernel/late_writes.h"  /* masked ranks write nothing any more */
#include "kernel/launch_stage.h" /* which part of an operation a launch runs */
#include "kernel/signal_peers.h"
#include "kernel/signal_words.h" /* where the words are */
#include "kernel/signature.h"    /* what ranks must agree on in one operation */
#include "kernel/wait_peers.h"
#include "kernel/wait_rows.h"
#include "kernel/wait_word.h" /* one word of one peer, and waits that fail */

#endif
