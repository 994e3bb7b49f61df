/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibers: stacks of their own on the calling thread. A scheduler enters a fiber; the fiber leaves when it has to wait,
 * and goes on behind that call when it is entered again.
 */
#ifndef EPX_SIM_FIBER_H
#define EPX_SIM_FIBER_H

struct fiber;

/* NULL when there is no memory. `main` ends with fiber_leave(1) and must not return. */
struct fiber *fiber_new(void (*main)(void *), void *arg);
/* Not while it runs. One that has not ended loses what lies on its stack. */
void fiber_free(struct fiber *fiber);
/* Runs it until it leaves. Not from inside a fiber. */
void fiber_enter(struct fiber *fiber);
/* Back to whoever entered. `last`: it will not be entered again. */
void fiber_leave(int last);

#endif
