#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks.sh [VENV]: the frameworks' own code on deep_ep, with CPU tensors (make frameworks; some minutes).
# megatron-core is in VENV (scripts/python_env.sh). The files of the others are kept in build-frameworks
# (scripts/framework_files.sh, which says which versions). RANKS="4 8" says with how many ranks.
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
        echo "ok: $name"
    else
        grep -E '^(ok|skipped|on [0-9]+ ranks)|Error' "$out" | tail -20
        echo "FAILED: $name"
        failures=$((failures + 1))
    fi
}

export PYTHONPATH=$PWD/python OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export EPX_LIBRARY=${EPX_LIBRARY:-$PWD/build/libepx.so}
modules="ranks_megatron ranks_hybrid ranks_frameworks ranks_elastic_frameworks torch_compile"
for name in sglang vllm torchtitan deepspeed lmdeploy automodel; do
    if folder=$(scripts/framework_files.sh "$kept" "$name" "$venv/bin/python" 2>"$out"); then
        export "EPX_TEST_${name^^}=$folder"
        modules="$modules ${name}_modules"
    else
        tail -1 "$out"
        echo "$name cannot be downloaded here: its modules are left out"
    fi
done
for ranks in ${RANKS:-4 8}; do
    for module in $modules; do
        try "$module, $ranks ranks" "$venv/bin/python" -m torch.distributed.run --standalone \
            --nproc-per-node "$ranks" python/tests/suite.py "$module"
    done
done
unset PYTHONPATH
scripts/check_beside.sh "$venv" >"$out" 2>&1
case $? in
0 | 77) tail -1 "$out" ;;
*) tail -5 "$out" && failures=$((failures + 1)) ;;
esac
echo "$failures failures"
[ "$failures" -eq 0 ]
