#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of python/tests on CUDA tensors: RANKS processes (default 8) share the GPUs there are, under MPS. Builds the
# library as scripts/gpu.sh does (GPU, GPU_ARCH, GPU_BUILD: scripts/gpu_build.sh).
#   usage: python/tests/run_gpu.sh [tests] [bench] [elastic] [late] [curve] [frameworks] [-- arguments of suite.py]
#   (default: tests and bench)
#   frameworks: Megatron-LM's own modules, and those of SGLang, vLLM, torchtitan, DeepSpeed, LMDeploy, NeMo AutoModel
#   and FlashInfer; torch.compile. FlashInfer's, and the calls of others on NCCL EP (nccl_frameworks), are over
#   communicators of NCCL, one rank of a GPU: where ranks share one they are left out.
#   Where Python has no megatron-core, and for the others, EPX_TEST_PACKAGES is a folder that
#   scripts/framework_files.sh FOLDER all has made, here or on another machine (default: build-frameworks). The newest
#   version there is is taken; a folder that is named must have one. FRAMEWORKS="vllm_modules ..." runs some of them.
#   elastic: V2 against V1, expansion against the same bytes, and results that are held, three times.
#   late: products of matrices beside operations that wait for a late rank. curve: whole layers and low-latency pairs
#   with 2, 4, 8, 16 and 32 SMs for each rank (EPX_NUM_AGENTS), where the GPU has as many for all.
#   PYTHON=... names an interpreter with torch; the one of the path if not said. BENCH="--iterations 10 ..." goes to
#   the programs of bench and elastic. Logs go to $OUT (default: gpu-results).
set -u
cd "$(dirname "$0")/../.." || exit
steps=
while [ $# -gt 0 ] && [ "$1" != -- ]; do steps="$steps $1" && shift; done
[ $# -gt 0 ] && shift
steps=${steps:-tests bench}
python=${PYTHON:-python3} ranks=${RANKS:-8}
out=${OUT:-$PWD/gpu-results}
build=${GPU_BUILD:-$PWD/build-gpu}
mkdir -p "$out"
export PATH=$PATH:/usr/local/cuda/bin OMP_NUM_THREADS=1 PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1
scripts/gpu_build.sh "$build" >"$out/python-build.txt" 2>&1 ||
    { tail -20 "$out/python-build.txt" && exit 1; }
unset EPX_OFI_INCLUDE # of the build alone
export EPX_LIBRARY=$build/libepx.so CUDA_MODULE_LOADING=EAGER
export CUDA_MPS_PIPE_DIRECTORY=/tmp/epx-python-mps-$$ CUDA_MPS_LOG_DIRECTORY=/tmp/epx-python-mps-$$
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
nvidia-cuda-mps-control -d || echo "MPS does not start: ranks on one GPU take turns"
trap 'echo quit | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$CUDA_MPS_PIPE_DIRECTORY"' EXIT
export EPX_TEST_DEVICE=${EPX_TEST_DEVICE:-cuda}
if ! ldconfig -p | grep -q 'libfabric\.so\.1'; then
    echo "no libfabric: tests on two nodes are left out"
    export EPX_TEST_NODES=0
fi
launch=("$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks")

failed=0
if [[ $steps == *tests* ]]; then
    # Ranks that share a GPU have many buffers at a time: small heaps.
    EPX_DEEP_EP_GPU_BYTES=${EPX_DEEP_EP_GPU_BYTES:-128M} EPX_TIMEOUT_MS=${EPX_TIMEOUT_MS:-20000} \
        timeout 300 "${launch[@]}" python/tests/suite.py "$@" >"$out/python-tests.txt" 2>&1 || failed=1
    grep -E '^(ok|skipped|on [0-9]+ ranks|[0-9]+ passed)' "$out/python-tests.txt" || tail -40 "$out/python-tests.txt"
    [ $failed = 0 ] || grep -A25 -m1 'FAILED' "$out/python-tests.txt"
    # Rules of deepep_v2.txt whose tests need no ranks.
    (
        cd python/tests || exit
        rules=(test_cuda_*.py)
        timeout 100 "$python" -m unittest "${rules[@]%.py}" test_single.Processes.test_init_dist
    ) >"$out/python-rules.txt" 2>&1 || failed=1
    tail -3 "$out/python-rules.txt"
fi
if [[ $steps == *frameworks* ]]; then
    packages=${EPX_TEST_PACKAGES:-$PWD/build-frameworks}
    modules="ranks_megatron ranks_hybrid ranks_frameworks ranks_elastic_frameworks"
    names="sglang vllm torchtitan deepspeed lmdeploy automodel" gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
    if [ "$ranks" -le "$gpus" ]; then
        names="$names flashinfer" modules="$modules nccl_frameworks"
    fi
    for name in $names; do
        [[ " ${FRAMEWORKS:-${name}_modules} " == *" ${name}_modules "* ]] || continue
        folder=$(printf '%s\n' "$packages/$name"-* | grep -v '\.new$' | sort -V | tail -1) # the newest, and whole
        if [ -d "$folder" ]; then
            export "EPX_TEST_${name^^}=$folder"
            modules="$modules ${name}_modules"
        else
            echo "${name}_modules: left out: no $packages/$name-VERSION"
            [ -z "${EPX_TEST_PACKAGES:-}" ] || failed=1 # a folder that was named should have it
        fi
    done
    modules="$modules torch_compile"
    imports() { PYTHONPATH=$1 "$python" -c 'import megatron.core.models.gpt.moe_module_specs' >/dev/null 2>&1; }
    for folder in $(printf '%s\n' "$packages"/megatron-* | sort -rV); do # the newest that goes with this torch
        imports "$PYTHONPATH" || ! imports "$PYTHONPATH:$folder" || PYTHONPATH=$PYTHONPATH:$folder
    done
    EPX_DEEP_EP_GPU_BYTES=${EPX_DEEP_EP_GPU_BYTES:-128M} EPX_TIMEOUT_MS=${EPX_TIMEOUT_MS:-20000} \
        timeout 500 "${launch[@]}" python/tests/suite.py ${FRAMEWORKS:-$modules} >"$out/python-frameworks.txt" 2>&1 ||
        failed=1
    grep -E '^(ok|skipped|on [0-9]+ ranks|[0-9]+ passed)' "$out/python-frameworks.txt" ||
        tail -40 "$out/python-frameworks.txt"
    [ $failed = 0 ] || grep -A25 'FAILED' "$out/python-frameworks.txt"
fi
if [[ $steps == *bench* ]]; then
    timeout 200 "${launch[@]}" tools/python/deep_ep_bench.py --device "$EPX_TEST_DEVICE" ${BENCH:-} \
        >"$out/python-bench.txt" 2>&1 || failed=1
    grep -E '^(\||deep_ep)' "$out/python-bench.txt" || tail -40 "$out/python-bench.txt"
fi
if [[ $steps == *elastic* ]]; then
    for run in 1 2 3; do
        timeout 120 "${launch[@]}" tools/python/elastic_bench.py --device "$EPX_TEST_DEVICE" ${BENCH:-} \
            >"$out/python-elastic-$run.txt" 2>&1 || failed=1
        grep -E '^(\||deep_ep)' "$out/python-elastic-$run.txt" || tail -40 "$out/python-elastic-$run.txt"
    done
fi
if [[ $steps == *late* ]]; then
    timeout 150 "${launch[@]}" tools/python/late_bench.py --device "$EPX_TEST_DEVICE" >"$out/python-late.txt" 2>&1 ||
        failed=1
    grep -E '^(\||deep_ep)' "$out/python-late.txt" || tail -40 "$out/python-late.txt"
fi
if [[ $steps == *curve* ]]; then
    for sms in 2 4 8 16 32; do
        [ $((sms * ranks)) -le "${GPU_SMS:-131}" ] || continue # all ranks run at the same time
        for program in layer ll; do
            EPX_NUM_AGENTS=$((16 * sms)) timeout 100 "${launch[@]}" "tools/python/${program}_bench.py" \
                --device "$EPX_TEST_DEVICE" >"$out/python-curve-$program-$sms.txt" 2>&1 || failed=1
            grep -E '^\|' "$out/python-curve-$program-$sms.txt" | sed "s/^/$sms SMs /" ||
                tail -40 "$out/python-curve-$program-$sms.txt"
        done
    done
fi
exit $failed
