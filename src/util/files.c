/* SPDX-License-Identifier: Apache-2.0 */
#include "util/files.h"

#include <dirent.h>
#include <pthread.h>
#include <sys/resource.h>

#include "util/descriptor.h"
#include "util/log.h"
#include "util/status.h"

enum { SPARE = 64 /* for the program itself while the ranks meet */, UNKNOWN = 64 };

static int open_files(void)
{
    DIR *folder = fd_open_folder("/proc/self/fd");
    int count = 0;

    if (!folder)
        return UNKNOWN;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static epx_status raise_limit(const char *who, int count)
{
    const int used = open_files();
    const rlim_t need = (rlim_t)used + (rlim_t)count + SPARE;
    struct rlimit limit, higher;

    if (getrlimit(RLIMIT_NOFILE, &limit))
        return EPX_OK; /* then it is met or not */
    if (limit.rlim_cur >= need)
        return EPX_OK;
    higher = (struct rlimit){.rlim_cur = need < limit.rlim_max ? need : limit.rlim_max, .rlim_max = limit.rlim_max};
    if (limit.rlim_max < need || setrlimit(RLIMIT_NOFILE, &higher))
        return fail(EPX_ERR_SYSTEM,
                    "%s needs %d file descriptors besides the %d that are open, and the limit is %llu (RLIMIT_NOFILE, "
                    "hard limit %llu): expected at least %llu, as ulimit -Hn %llu sets it",
                    who, count, used, (unsigned long long)limit.rlim_cur, (unsigned long long)limit.rlim_max,
                    (unsigned long long)need, (unsigned long long)need);
    log_line(LOG_INFO, "%s: RLIMIT_NOFILE is raised from %llu to %llu", who, (unsigned long long)limit.rlim_cur,
             (unsigned long long)need);
    return EPX_OK;
}

epx_status files_need(const char *who, int count)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* ranks that are threads must not lower each other's */
    epx_status status;

    pthread_mutex_lock(&lock);
    status = raise_limit(who, count);
    pthread_mutex_unlock(&lock);
    return status;
}
