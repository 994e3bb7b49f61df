#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks.sh [VENV]: the frameworks' own code on deep_ep, with CPU tensors (make frameworks; some minutes).
# megatron-core is in VENV (scripts/python_env.sh). Of the wheels of SGLang, vLLM and torchtitan three, eight and two
# Python files are used, kept in build-frameworks. RANKS="4 8" says with how many ranks; SGLANG=, VLLM= and TORCHTITAN=
# say which versions. python/tests/run_gpu.sh frameworks runs the same on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -s "${1:-.venv-test}") kept=$PWD/build-frameworks
sglang=${SGLANG:-0.5.23} vllm=${VLLM:-0.32.0} torchtitan=${TORCHTITAN:-0.3.0}
failures=0 out=$(mktemp)
trap 'rm -f "$out"' EXIT
scripts/python_env.sh "$venv" || exit
mkdir -p "$kept"

# Single files: the wheels have compiled parts, of hundreds of megabytes.
files_of() { # NAME VERSION FILE...
    local name=$1 version=$2 file missing=
    shift 2
    for file in "$@"; do [ -e "$kept/$name-$version/$file" ] || missing=yes; done
    [ -n "$missing" ] || return 0
    rm -rf "$kept/new" "$kept/$name-$version"
    timeout 300 "$venv/bin/python" scripts/wheel_files.py "$name==$version" "$kept/new" "$@" &&
        mv "$kept/new" "$kept/$name-$version"
}

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
moe=sglang/srt/layers/moe
if files_of sglang "$sglang" $moe/token_dispatcher/base.py $moe/token_dispatcher/deepep.py $moe/utils.py; then
    export EPX_TEST_SGLANG=$kept/sglang-$sglang
    modules="$modules sglang_modules"
else
    echo "sglang $sglang cannot be downloaded here: its modules are left out"
fi
moe=vllm/model_executor/layers/fused_moe comm=vllm/distributed/device_communicators
if files_of vllm "$vllm" $moe/modular_kernel.py $moe/topk_weight_and_reduce.py $moe/prepare_finalize/deepep_ht.py \
    $moe/prepare_finalize/deepep_ll.py $moe/prepare_finalize/deepep_v2.py $comm/all2all.py \
    $comm/base_device_communicator.py vllm/v1/worker/ubatching.py; then
    export EPX_TEST_VLLM=$kept/vllm-$vllm
    modules="$modules vllm_modules"
else
    echo "vllm $vllm cannot be downloaded here: its modules are left out"
fi
deepep=torchtitan/distributed/deepep
if files_of torchtitan "$torchtitan" $deepep/deepep.py $deepep/hybridep.py; then
    export EPX_TEST_TORCHTITAN=$kept/torchtitan-$torchtitan
    modules="$modules torchtitan_modules"
else
    echo "torchtitan $torchtitan cannot be downloaded here: its modules are left out"
fi
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
