/* SPDX-License-Identifier: Apache-2.0 */
#include "util/pause.h"

#include "util/runtime.h"

uint64_t host_now_ns(void)
{
    return runtime()->now_ns();
}

void pause_ns(uint64_t ns)
{
    runtime()->pause_ns(ns);
}
