# SPDX-License-Identifier: Apache-2.0
# Read by tests in bash: where things are, a folder $work that is removed at the end, failures that are counted.
# shellcheck disable=SC2034
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${EPX_BUILD_DIR:-build}
epx=$build/epx
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

skip() { # REASON
    echo "skipped: $1"
    exit 77
}

fail() { # WHAT: counts it, and shows what the last command has written into $work/out* and $work/err*
    echo "FAILED: $1"
    sed 's/^/    /' "$work"/out* "$work"/err* 2>/dev/null || :
    failures=$((failures + 1))
}

die() { # WHAT: what follows would be of no use
    fail "$1"
    exit 1
}

# A leak check at every exit costs seconds on some machines, and libfabric has leaks of its own.
no_leak_checks() { export ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}detect_leaks=0; }

finish() { # the last command of a script
    echo "$failures failures"
    [ "$failures" -eq 0 ]
}
