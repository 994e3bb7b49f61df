#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_no_exit.sh [LIBRARY...]: nothing under src/, sim/ and standin/ ends the user's process or takes its descriptors
# 0 to 2. Looks at the text (comments and strings removed), or where libraries are given, at what they import.
set -euo pipefail
cd "$(dirname "$0")/.."

words='abort|exit|_exit|_Exit|quick_exit|assert|__assert_fail|__builtin_trap|__builtin_abort|raise'
# Calls that return a new descriptor are arguments of fd_own() of util/descriptor.h, which alone may make the others.
opens='open|openat|openat2|creat|socket|accept4?|dup|epoll_create1?|eventfd|memfd_create|inotify_init1?|signalfd'
opens+='|timerfd_create|userfaultfd|shm_open|mkstemp|mkostemp|pidfd_open|pidfd_getfd'
opens+='|syscall\(SYS_(pidfd_open|pidfd_getfd|memfd_create|openat2)'
hidden='fopen|freopen|opendir|scandir|tmpfile|popen|pipe2?|socketpair|glob|n?ftw'
unowned="(?<![\w.>])((?<!fd_own\()(?<!fd_own\(\(int\))($opens)|$hidden)(\s*\(|,)"
bad=0
count=0
while read -r file; do
    count=$((count + 1))
    grep -qP "\b($words)\b|$unowned" "$file" || continue # most have none of the words, not even in a comment
    # -fpreprocessed keeps everything but the comments.
    text=$(gcc -fpreprocessed -dD -E -x c "$file" 2>/dev/null | grep -v '^#' | sed -E 's/"([^"\\]|\\.)*"//g')
    hits=$(grep -nE "(^|[^A-Za-z0-9_.>])($words)[[:space:]]*\(" <<<"$text" || true)
    if [ "$file" != src/util/descriptor.h ]; then
        hits+=$(grep -nP "$unowned" <<<"$text" || true)
    fi
    if [ -n "$hits" ]; then
        echo "$file:"
        sed -E 's/^[0-9]+:/   /' <<<"$hits"
        bad=$((bad + 1))
    fi
done < <([ $# -gt 0 ] || find src sim standin -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.hip' | sort)

for library in "$@"; do
    count=$((count + 1))
    symbols=$(nm -D --undefined-only "$library") # fails where there is no library: not part of the pipe below
    imports=$(awk '{print $NF}' <<<"$symbols" | sed 's/@.*//' | grep -xE "$words" || true)
    if [ -n "$imports" ]; then
        echo "$library imports: $imports"
        bad=$((bad + 1))
    fi
done

[ "$bad" -eq 0 ] && echo "$count files: none can end the process, or takes its descriptors 0 to 2"
[ "$bad" -eq 0 ]
