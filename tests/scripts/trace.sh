#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# EPX_TRACE: one file of all ranks that a JSON reader opens; spans nest, causes precede effects; a second run begins
# anew; without the variable there is no file.
# ctest: labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
here=$root/tests/scripts
small=(--tokens 16 --hidden 512 --experts 16 --topk 4 --iters 1 --warmup 1)
check() { python3 "$here/trace_check.py" "$@" || fail "the trace: $*"; }

EPX_TRACE=$work/ht.json expect 0 "two nodes, high throughput" ht "${small[@]}" --ranks 4 --nodes 2
check "$work/ht.json" --ranks 4 --nets --operations "ht update,ht dispatch,ht combine"
EPX_TRACE=$work/ht.json expect 0 "the same file again" ll "${small[@]}" --ranks 3
check "$work/ht.json" --ranks 3 --operations "ll dispatch,ll combine"
EPX_TRACE=$work/threads.json expect 0 "ranks that are threads" ll "${small[@]}" --ranks 3 --threads
check "$work/threads.json" --ranks 3 --operations "ll dispatch,ll combine"
EPX_TRACE=$work/no/such/folder expect 0 "a file that cannot be written" ll "${small[@]}" --ranks 2 &&
    says "is a warning" "EPX_TRACE: cannot write"
expect 0 "without the variable" ll "${small[@]}" --ranks 2
[ "$(find "$work" -name '*.json' | wc -l)" = 2 ] && echo "ok: there is no file" || fail "there is a file"

# A child of fork() has its parent's events, and does not write them again.
cat >"$work/forks.c" <<'C'
#include <epx/epx.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void)
{
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_handle_config handle_config = EPX_HANDLE_CONFIG_INIT;
    epx_handle *handle;
    epx_group *group;
    config.num_experts = handle_config.topk = 1;
    config.max_tokens_per_rank = 4;
    config.max_hidden_bytes = 256;
    handle_config.mode = EPX_LOW_LATENCY;
    handle_config.layout = EPX_EXPERT_MAJOR;
    if (epx_group_create(&group, NULL, &config) || epx_handle_create(&handle, group, &handle_config))
        return 1;
    if (fork() == 0)
        exit(0);
    return wait(NULL) < 0;
}
C
build=$(dirname "$epx")
cc -I"$here/../../include" "$work/forks.c" -L"$build" -lepx -Wl,-rpath,"$(cd "$build" && pwd)" -o "$work/forks" &&
    RANK=0 WORLD_SIZE=1 EPX_TRACE=$work/forks.trace "$work/forks" || fail "a program that forks"
[ "$(grep -c '"name":"epx_handle_create"' "$work/forks.trace")" = 1 ] && echo "ok: a child writes nothing again" ||
    fail "events are there twice"

# A file that may not grow, as on a full disk, and one that another process keeps locked: the program goes on, the file
# stays as it was, and has all events once it can be written.
cat >"$work/full.c" <<'C'
#include <epx/epx.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>
static epx_status begin_and_end(rlim_t most)
{
    struct rlimit limit = {most, RLIM_INFINITY};
    epx_group_config config = EPX_GROUP_CONFIG_INIT;
    epx_group *group;
    config.num_experts = 1;
    config.max_tokens_per_rank = 4;
    config.max_hidden_bytes = 256;
    if (epx_group_create(&group, NULL, &config) || epx_group_error(group, NULL) || setrlimit(RLIMIT_FSIZE, &limit))
        return EPX_ERR_SYSTEM;
    return epx_group_destroy(group);
}
int main(void)
{
    const int fd = open(getenv("EPX_TRACE"), O_RDWR | O_CREAT, 0666);
    struct rlimit none = {RLIM_INFINITY, RLIM_INFINITY};
    int rc = begin_and_end(200) || setrlimit(RLIMIT_FSIZE, &none) || lseek(fd, 0, SEEK_END) != 0;
    flock(fd, LOCK_EX);
    rc = rc || begin_and_end(RLIM_INFINITY);
    flock(fd, LOCK_UN);
    return rc;
}
C
cc -I"$here/../../include" "$work/full.c" -L"$build" -lepx -Wl,-rpath,"$(cd "$build" && pwd)" -o "$work/full" &&
    RANK=0 WORLD_SIZE=1 EPX_TRACE=$work/full.trace timeout 60 "$work/full" || fail "a program whose disk is full"
python3 -m json.tool "$work/full.trace" >"$work/full.json" &&
    [ "$(grep -c '"name": "epx_group_error"' "$work/full.json")" = 2 ] && echo "ok: all events are there in the end" ||
    fail "a trace that could not be written"

# Rank 1 is late by more than a second: rank 0 waits in slices, and the signal belongs to the last one.
cat >"$work/late.h" <<'C'
#include <epx/epx.h>
#include <stdlib.h>
#include <time.h>
static epx_status late(epx_handle *handle, const epx_dispatch_inputs *in, const epx_dispatch_outputs *out,
                       const epx_layout_info *layout, const epx_dispatch_config *config, epx_stream stream)
{
    const struct timespec pause = {1, 200000000};
    if (atoi(getenv("RANK")) == 1)
        nanosleep(&pause, NULL);
    return epx_dispatch(handle, in, out, layout, config, stream);
}
#define epx_dispatch late
C
cc -I"$here/../../include" -include "$work/late.h" "$root/examples/hello.c" -L"$build" -lepx \
    -Wl,-rpath,"$(cd "$build" && pwd)" -o "$work/late" &&
    EPX_TRACE=$work/late.trace "$epx" run -n 2 "$work/late" >/dev/null || fail "a rank that is late"
check "$work/late.trace" --ranks 2 --slices --operations "ll dispatch,ll combine"

# What cannot be merged: the same ranks twice, half of a file, none at all.
"$epx" trace merge -o "$work/twice.json" "$work/forks.trace" "$work/forks.trace" 2>"$work/err" && fail "ranks twice"
grep -q "rank 0 is in .*forks.trace and in" "$work/err" && echo "ok: the same rank twice is refused" ||
    fail "its message"
head -c 200 "$work/forks.trace" >"$work/half.json"
"$epx" trace merge -o "$work/twice.json" "$work/half.json" 2>/dev/null && fail "half of a trace"
[ -e "$work/twice.json" ] && fail "what failed leaves a file"
"$epx" trace merge 2>/dev/null
[ $? = 2 ] && echo "ok: no files is wrong usage" || fail "no files"

finish
