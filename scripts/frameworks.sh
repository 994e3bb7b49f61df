#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks.sh [VENV]: the frameworks' own code on deep_ep, with CPU tensors (make frameworks; some minutes).
# megatron-core is in VENV (scripts/python_env.sh). The files of the others are kept in build-frameworks
# (scripts/framework_files.sh, which says which versions). RANKS="4 8" says with how many ranks.
# Where files cannot be downloaded, their modules are left out; that is a failure where the variable CI is set.
# python/tests/run_gpu.sh frameworks runs the same on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -s "${1:-.venv-test}") kept=$PWD/build-frameworks
failures=0 out=$(mktemp)
trap 'rm -f "$out"' EXIT
scripts/python_env.sh "$venv" || exit

try() { # NAME COMMAND...
    local name=$1
    shift
    if timeout 900 "$@" >"$out" 2>&1; then
        grep '^skipped' "$out"
        echo "ok: $name: $(grep -E '^[0-9]+ passed' "$out" | tail -1)"
    else
        grep -E '^(ok|skipped|on [0-9]+ ranks|[0-9]+ passed)|Error' "$out" | tail -20
        echo "FAILED: $name"
        failures=$((failures + 1))
    fi
}

left_out() { # WHAT WHY
    echo "$1: left out: $2"
    [ -z "${CI:-}" ] || failures=$((failures + 1))
}

export PYTHONPATH=$PWD/python OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export EPX_LIBRARY=${EPX_LIBRARY:-$PWD/build/libepx.so}
modules="ranks_megatron ranks_hybrid ranks_frameworks ranks_elastic_frameworks torch_compile"
seconds=300 # for all downloads together; none is tried behind one that took too long
for name in sglang vllm torchtitan deepspeed lmdeploy automodel; do
    began=$SECONDS rc=0
    folder=$(scripts/framework_files.sh "$kept" "$name" "$venv/bin/python" "$seconds" 2>"$out") || rc=$?
    seconds=$((seconds - SECONDS + began))
    if [ $rc -eq 0 ]; then
        export "EPX_TEST_${name^^}=$folder"
        modules="$modules ${name}_modules"
    elif [ $rc -eq 124 ]; then
        left_out "${name}_modules" "downloads take too long"
    else
        left_out "${name}_modules" "$(tail -1 "$out")"
    fi
    [ $rc -ne 124 ] && [ "$seconds" -gt 0 ] || seconds=1 # what is there already is still found
done
# Ranks are forked from a process that has imported torch: that saves each of them the import.
for ranks in ${RANKS:-4 8}; do
    for module in $modules; do
        try "$module, $ranks ranks" "$venv/bin/python" python/tests/suite.py --fork "$ranks" "$module"
    done
done
unset PYTHONPATH
if [ "$seconds" -gt 1 ]; then
    scripts/check_beside.sh "$venv" >"$out" 2>&1
else
    echo "downloads take too long" >"$out" && (exit 77)
fi
case $? in
0) tail -1 "$out" ;;
77) left_out check_beside.sh "$(tail -1 "$out")" ;;
*) tail -5 "$out" && failures=$((failures + 1)) ;;
esac
echo "$failures failures"
[ "$failures" -eq 0 ]
