#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Ranks that may open too few files, start too few threads, have no shared memory left, or are interrupted all the time:
# they work, or each says what it lacks, and nobody hangs or crashes. ctest: cost=80 labels=slow
set -u
. "$(dirname "$0")/../lib/script.sh"
exchange=$build/tests/exchange
chmod 755 "$work"
worked=0 refused=0
no_leak_checks
. "$(dirname "$0")/../lib/slow.sh"
deadline=$(slow 10000)
export deadline

case ${EPX_SANITIZE:-} in
'' | OFF | none) ;;
*) skip "sanitizers need files, threads and memory of their own" ;;
esac

# judge NAME CODE: what ran said why it failed, or did not fail.
judge() {
    if [ "$2" -eq 0 ]; then
        worked=$((worked + 1))
    elif [ "$2" -ge 124 ] && [ "$2" -ne 126 ] || grep -qi 'signal' "$work/out"; then
        fail "$1: exit code $2"
    elif ! grep -qE 'epx_|epx run: cannot start|cannot start thread|Too many open files' "$work/out"; then
        fail "$1: no word of why"
    else
        refused=$((refused + 1))
    fi
}

# four [COMMAND...]: four ranks on two nodes, each started by COMMAND.
four() {
    EPX_RANKS_PER_NODE=2 timeout -s KILL 400 "$epx" run -n 4 "$@" "$exchange" --rounds 2 --timeout-ms "$deadline"
}

have() { # can this network be used here?
    "$epx" doctor 2>/dev/null | grep -qE "^ +(for EPX +)?$1: libfabric "
}

for net in tcp shm; do
    have "$net" || { echo "not over $net"; continue; }
    export EPX_NET="ofi:$net"
    for files in 7 9 11 13 16 20 24 32; do
        (
            ulimit -n $files
            four
        ) >"$work/out" 2>&1
        judge "$files files over $net" $?
    done
    # Not for root, who has no limit.
    if [ "$(id -u)" = 0 ] && setpriv --reuid 65534 --clear-groups test -x "$exchange" 2>/dev/null; then
        for threads in 6 8 10 12 16; do
            export -f four
            export epx exchange
            setpriv --reuid 65534 --clear-groups bash -c "ulimit -u $threads; four" >"$work/out" 2>&1
            judge "$threads threads over $net" $?
        done
    fi
    # Signals that interrupt whatever waits, three thousand times a second.
    if command -v cc >/dev/null && cc -shared -fPIC -o "$work/storm.so" -x c - <<'CODE'; then
#include <signal.h>
#include <sys/time.h>
static void nothing(int sig) { (void)sig; }
__attribute__((constructor)) static void begin(void)
{
    struct sigaction action = {.sa_handler = nothing};
    const struct itimerval often = {{0, 300}, {0, 300}};
    sigaction(SIGALRM, &action, 0);
    signal(SIGCHLD, SIG_IGN);
    setitimer(ITIMER_REAL, &often, 0);
}
CODE
        before=$worked
        four env LD_PRELOAD="$work/storm.so" >"$work/out" 2>&1
        judge "interrupted over $net" $?
        if [ "$worked" -eq "$before" ]; then
            fail "ranks that are interrupted do not work over $net"
        fi
    fi
done

# A heap larger than the files that a process may make: a status, not SIGXFSZ.
(
    ulimit -f 1000
    EPX_NET="" timeout -s KILL 400 "$epx" run -n 2 "$exchange" --rounds 1 --timeout-ms "$deadline" 2>&1 |
        head -c 100000
    exit "${PIPESTATUS[0]}"
) >"$work/out"
code=$?
judge "small files" $code
[ $code -ne 0 ] && grep -q 'ulimit -f' "$work/out" || {
    fail "small files: expected a message about ulimit -f, exit code $code"
}

if have shm && unshare -m true 2>/dev/null; then
    for size in 4k 2m 32m; do
        export EPX_NET="ofi:shm" epx exchange
        export -f four
        unshare -m bash -c "mount -t tmpfs -o size=$size tmpfs /dev/shm && four" >"$work/out" 2>&1
        judge "$size of /dev/shm" $?
    done
fi

echo "$worked worked, $refused said why not, $failures failed"
[ "$worked" -gt 0 ] && [ "$refused" -gt 0 ] && [ "$failures" -eq 0 ]
