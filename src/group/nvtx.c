/* SPDX-License-Identifier: Apache-2.0 */
/* NVTX 3 is a header alone: it opens the profiler's library if the profiler has named one, and is linked with nothing.
 * Where CUDA's headers are not there when EPX is built, there are no ranges. */
#include "group/nvtx.h"

#if defined(__has_include) && __has_include(<nvtx3/nvToolsExt.h>)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include <nvtx3/nvToolsExt.h>
#pragma GCC diagnostic pop

#include <pthread.h>

static void open_profiler(void)
{
    nvtxInitialize(NULL);
}

/* Once: in the header threads race at their first range. */
void nvtx_push(const char *name)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, open_profiler);
    nvtxRangePushA(name);
}

void nvtx_pop(void)
{
    nvtxRangePop();
}
#else
void nvtx_push(const char *name)
{
    (void)name;
}

void nvtx_pop(void)
{
}
#endif
