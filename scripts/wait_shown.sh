# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by scripts that wait for something long.
#   wait_shown PID TEXT COMMAND...: waits for PID, a child of the shell, and returns its status. On a terminal a line on
#   standard error shows TEXT, the seconds that have passed and the last line that COMMAND prints, after two seconds.
wait_shown() {
    local pid=$1 text=$2 began=$SECONDS rc=0 shown=
    shift 2
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        if [ $((SECONDS - began)) -ge 2 ]; then
            shown=1
            printf '\r\033[K%s: %d s, %s' "$text" $((SECONDS - began)) "$("$@" 2>/dev/null | tail -n 1)" >&2
        fi
        sleep 0.5 &
        wait $! # a signal interrupts this, not a command in the foreground
    done
    wait "$pid" || rc=$?
    [ -z "$shown" ] || printf '\r\033[K' >&2
    return $rc
}
