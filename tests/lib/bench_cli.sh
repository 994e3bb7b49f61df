# SPDX-License-Identifier: Apache-2.0
# Read by scripts that test `epx bench`: runs it, keeps its output in $work, counts failures.
. "$(dirname "${BASH_SOURCE[0]}")/script.sh"

expect() { # CODE NAME ARGUMENTS...: runs epx bench, keeps its output, compares the exit code
    local code=$1 name=$2 got
    shift 2
    timeout 200 "$epx" bench "$@" >"$work/out" 2>"$work/err"
    got=$?
    if [ "$got" -eq "$code" ]; then
        echo "ok: $name"
    else
        fail "$name: exit code $got, expected $code (epx bench $*)"
        return 1
    fi
}

says() { # NAME TEXT: the output of the last run has TEXT
    grep -qF -- "$2" "$work/out" "$work/err" && echo "ok: $1" || fail "$1: '$2' is not in the output"
}
