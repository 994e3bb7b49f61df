#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# EPX leaves the signal handling of its user's process as it was, in C and in Python: with the libfabric of this machine
# over tcp and shm (whose endpoints install handlers), and with libraries that install handlers when they are loaded and
# called (unit/fake_vendor.c) in place of libfabric and of libibverbs.
set -u
. "$(dirname "$0")/../lib/script.sh"
ran=0
export EPX_RANKS_PER_NODE=1 EPX_TIMEOUT_MS=120000
no_leak_checks # other tests look for leaks of ours

expect() { # NAME COMMAND...: two ranks, each a node, end well
    local name=$1
    shift
    ran=$((ran + 1))
    if timeout -s KILL 600 "$build/epx" run -n 2 "$@" >"$work/out" 2>&1; then
        echo "ok: $name"
    else
        fail "$name: exit code $?"
    fi
}

both() { # LANGUAGE PROGRAM NAME ENVIRONMENT... -- ARGUMENTS...
    local language=$1 program=$2 name=$3 environment=(PYTHONPATH="$root/python" EPX_LIBRARY="$build/libepx.so")
    shift 3
    while [ "$1" != -- ]; do
        environment+=("$1")
        shift
    done
    # shellcheck disable=SC2086
    expect "$language: $name" env "${environment[@]}" $program "${@:2}"
}

c() { # NAME ENVIRONMENT... -- ARGUMENTS...
    both C "$build/tests/sigactions_rank" "$@"
}

python() { # likewise
    [ -n "$with_python" ] || return 0
    both Python "python3 $root/tests/scripts/sigactions_rank.py" "$@"
}

# The loader finds sanitizers' runtimes only for programs that are built with them.
with_python=
case ${EPX_SANITIZE:-none} in
none | OFF) with_python=yes ;;
*) echo "Python is left out: its interpreter is built without the sanitizer" ;;
esac

"$epx" doctor 2>/dev/null | grep -qE '^ +(for EPX +)?tcp: libfabric ' ||
    skip "libfabric's tcp provider cannot be used here"
real=$(python3 - <<'PY'
import ctypes
ctypes.CDLL("libfabric.so.1")
print(next(line.split()[-1] for line in open("/proc/self/maps") if "libfabric.so" in line))
PY
)
[ -n "$real" ] || die "where libfabric.so.1 is cannot be found"

c "libfabric over tcp" EPX_NET=tcp EPX_LOG=info --
# Debian 12's libfabric for amd64 brings the libraries of Intel's cards, which take over signals when they are loaded
# (Debian 13's brings them too, and they do not). There these cases are about a real library.
if python3 -c 'import ctypes, signal, sys
ctypes.CDLL("libfabric.so.1")
caught = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("SigCgt"))
sys.exit(not int(caught, 16) >> (signal.SIGTERM - 1) & 1)'; then
    grep -qE 'changed how signals 2( [0-9]+)* 11 15 are handled: restored' "$work/out" ||
        fail "libpsm2 takes over signals, and the log does not say that its handlers were removed"
    echo "ok: libpsm2's own handlers"
fi
python "libfabric over tcp" EPX_NET=tcp --
c "libfabric over shm" EPX_NET=shm --
python "libfabric over shm" EPX_NET=shm --
c "whatever there is" EPX_NET=auto --

ofi=(LD_LIBRARY_PATH="$build/tests/fake_ofi${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" EPX_NET=tcp)
c "a libfabric that takes over the signals" "${ofi[@]}" FAKE_VENDOR_REAL="$real" --
python "a libfabric that takes over the signals" "${ofi[@]}" FAKE_VENDOR_REAL="$real" --
c "the same without a provider" "${ofi[@]}" -- fails
python "the same without a provider" "${ofi[@]}" -- fails

verbs=(LD_LIBRARY_PATH="$build/tests/fake_verbs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
c "a libibverbs that takes over the signals and is good for nothing" "${verbs[@]}" EPX_NET=verbs -- fails
python "a libibverbs that takes over the signals and is good for nothing" "${verbs[@]}" EPX_NET=verbs -- fails

# The test sees what it looks for: without the guard the fake's handlers stay.
if env "${ofi[@]}" python3 -c '
import ctypes, os, signal
ctypes.CDLL("libfabric.so.1")
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass' 2>/dev/null; then
    fail "the fake library takes over no signals: this test proves nothing"
fi

echo "$ran cases, $failures failed"
[ "$failures" -eq 0 ]
