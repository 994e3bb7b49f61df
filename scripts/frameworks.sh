#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks.sh [VENV]: the frameworks' own code on deep_ep and on NCCL EP's interface, with CPU tensors
# (make frameworks; some minutes). megatron-core and NVIDIA's packages for NCCL EP are in VENV (scripts/python_env.sh).
# The files of the others are kept in build-frameworks (scripts/framework_files.sh, which says which versions).
# RANKS="4 8" says with how many ranks those of deep_ep run; those of NCCL EP run with 2 and 4. Models of transformers
# run in an environment of their own, .venv-transformers, on 4 ranks; then their exchange is timed.
# Where files cannot be downloaded, their modules are left out; that is a failure where the variable CI is set.
# python/tests/run_gpu.sh frameworks runs the same on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -s "${1:-.venv-test}") kept=$PWD/build-frameworks
failures=0 out=$(mktemp) made=$(mktemp -d)
trap 'rm -rf "$out" "$made"' EXIT
scripts/python_env.sh "$venv" || exit

try() { # NAME COMMAND...
    local name=$1
    shift
    if timeout 900 "$@" >"$out" 2>&1; then
        grep '^skipped' "$out"
        echo "ok: $name: $(grep -E '^[0-9]+ passed|: ok$' "$out" | tail -1)"
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
build=$(dirname "$EPX_LIBRARY")
modules="ranks_megatron ranks_hybrid ranks_frameworks ranks_elastic_frameworks torch_compile"
nccl_modules=nccl_frameworks
seconds=300 # for all downloads together; none is tried behind one that took too long

download() { # NAME: exports its folder as EPX_TEST_NAME
    local began=$SECONDS rc=0 folder
    folder=$(scripts/framework_files.sh "$kept" "$1" "$venv/bin/python" "$seconds" 2>"$out") || rc=$?
    seconds=$((seconds - SECONDS + began))
    if [ $rc -eq 0 ]; then
        export "EPX_TEST_${1^^}=$folder"
    elif [ $rc -eq 124 ]; then
        left_out "$1" "downloads take too long"
    else
        left_out "$1" "$(tail -1 "$out")"
    fi
    [ $rc -ne 124 ] && [ "$seconds" -gt 0 ] || seconds=1 # what is there already is still found
    return $rc
}

for name in sglang vllm torchtitan deepspeed lmdeploy automodel; do
    download "$name" && modules="$modules ${name}_modules"
done
download flashinfer && nccl_modules="$nccl_modules flashinfer_modules"
te= nvidia=
download cudart && download transformerengine && te=yes # the longest download is the last
standins=$build/libnccl_ep.so:$build/standin/libnccl.so.2:$build/libepx_cudart.so
runtime=${EPX_TEST_CUDART:-}/nvidia/cu13/lib
if "$venv/bin/python" -c "import importlib.metadata as m; m.version('nccl-extensions')" 2>"$out"; then
    nvidia=yes
else
    left_out "nccl4py and nccl-extensions" "$(tail -1 "$out")"
fi

# What TransformerEngine's library is linked with and its expert parallelism does not call: empty libraries of these
# names and versions.
if [ -n "$te" ]; then
    export EPX_TEST_TRANSFORMERENGINE
    mkdir -p "$made/lib" "$made/empty" && ln -s "$build/libnccl_ep.so" "$made/lib/"
    readelf -d "$EPX_TEST_TRANSFORMERENGINE/transformer_engine/wheel_lib/libtransformer_engine.so" |
        sed -n 's/.*NEEDED.*\[\(libcu\(blas\|dnn\)[^]]*\)\].*/\1/p' | while read -r name; do
        echo "$name { };" >"$made/map"
        "${CC:-cc}" -shared -x c /dev/null -Wl,-soname,"$name",--version-script="$made/map" -o "$made/empty/$name"
    done
fi

# Ranks are forked from a process that has imported torch: that saves each of them the import.
for ranks in ${RANKS:-4 8}; do
    for module in $modules; do
        try "$module, $ranks ranks" "$venv/bin/python" python/tests/suite.py --fork "$ranks" "$module"
    done
done
for ranks in 2 4; do
    for module in $nccl_modules; do
        try "$module, $ranks ranks" "$venv/bin/python" python/tests/suite.py --fork "$ranks" "$module"
    done
    # NVIDIA's own programs look for symbols among what is preloaded.
    run=(env -u PYTHONPATH EPX_ALLOC_BYTES=64M LD_PRELOAD="$standins"
        LD_LIBRARY_PATH="$build/standin:$made/empty:$runtime" NCCL_EP_HOME="$made"
        NCCL_EP_JIT_BUILD_INCLUDE_DIR="$PWD/standin/include/nccl"
        "$build/epx" run -n "$ranks" -- "$venv/bin/python")
    if [ -n "$nvidia" ]; then
        try "nccl4py and nccl-extensions, $ranks ranks" "${run[@]}" python/tests/nccl_program.py nvidia
    fi
    if [ -n "$te" ]; then
        try "TransformerEngine's library, $ranks ranks" "${run[@]}" python/tests/te_program.py
    fi
done
hf=$PWD/.venv-transformers
if scripts/python_env.sh "$hf" scripts/transformers_requirements.txt >"$out" 2>&1; then
    try "transformers_models, 4 ranks" "$hf/bin/python" python/tests/suite.py --fork 4 transformers_models
    try "transformers_bench, 4 ranks" "$hf/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
        tools/python/transformers_bench.py --tokens 1 128 --calls 10
    grep -A 20 '^4 ranks' "$out"
else
    left_out transformers_models "$(tail -1 "$out")"
fi
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
