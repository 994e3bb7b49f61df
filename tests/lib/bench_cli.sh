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

# json NAME CONDITION: every line is an object o, for which the Python expression holds; $json_of says of which lines.
json() {
    python3 - "$work/out" "$2" "${json_of:-True}" <<'PY' && echo "ok: $1" || fail "$1"
import json, sys
rows = [o for o in map(json.loads, open(sys.argv[1])) if eval(sys.argv[3])]
assert rows, "no lines"
for o in rows:
    assert eval('(' + sys.argv[2] + ')'), (sys.argv[2], o)
PY
}
