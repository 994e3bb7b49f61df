#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# framework_files.sh FOLDER NAME [PYTHON [SECONDS]]: files of a framework's wheel, into FOLDER/NAME-VERSION; prints that
# path. NAME: sglang, vllm, torchtitan, deepspeed, lmdeploy, automodel, flashinfer (two to twelve files each), megatron
# (all of megatron-core, 6 MB), or all of these; transformerengine (its library, 340 MB of a download of 280) and cudart
# (CUDA's runtime, which that one is linked with). SGLANG=, VLLM= and so on say which versions. Files that are there
# already are kept. PYTHON has pip. Exit 124: a download took more than SECONDS (300).
# A machine without a network gets FOLDER as it is: EPX_TEST_PACKAGES=FOLDER python/tests/run_gpu.sh frameworks.
set -euo pipefail
folder=$1 name=$2 python=${3:-python3} limit_s=${4:-300}
here=$(dirname "$0")
if [ "$name" = all ]; then
    for name in sglang vllm torchtitan deepspeed lmdeploy automodel flashinfer megatron; do
        "$0" "$folder" "$name" "$python" "$limit_s"
    done
    exit
fi
package=$name kind=
case $name in
sglang)
    version=${SGLANG:-0.5.23} moe=sglang/srt/layers/moe
    files="$moe/token_dispatcher/base.py $moe/token_dispatcher/deepep.py $moe/token_dispatcher/deepep_v2.py
        $moe/utils.py"
    ;;
vllm)
    version=${VLLM:-0.33.0} moe=vllm/model_executor/layers/fused_moe comm=vllm/distributed/device_communicators
    files="$moe/modular_kernel.py $moe/topk_weight_and_reduce.py $moe/prepare_finalize/deepep_ht.py
        $moe/prepare_finalize/deepep_ll.py $moe/prepare_finalize/deepep_v2.py $comm/all2all.py
        $comm/base_device_communicator.py vllm/v1/worker/ubatching.py"
    ;;
torchtitan)
    version=${TORCHTITAN:-0.3.0} deepep=torchtitan/distributed/deepep
    files="$deepep/deepep.py $deepep/hybridep.py"
    ;;
deepspeed)
    version=${DEEPSPEED:-0.19.8} kind=--source # it has no wheel
    files="deepspeed/module_inject/auto_ep_comm.py deepspeed/module_inject/auto_ep_layer.py"
    ;;
lmdeploy)
    version=${LMDEPLOY:-0.18.0} backends=lmdeploy/pytorch/backends
    files="$backends/token_dispatcher.py $backends/cuda/token_dispatcher.py"
    ;;
automodel)
    package=nemo_automodel version=${AUTOMODEL:-0.7.0} moe=nemo_automodel/components/moe/megatron
    files="$moe/fused_a2a.py $moe/token_dispatcher.py $moe/moe_utils.py"
    ;;
flashinfer)
    package=flashinfer-python version=${FLASHINFER:-0.7.2} moe=flashinfer/moe_ep
    comm=$moe/backends/split/comm/nccl_ep
    files="$moe/errors.py $moe/algo_knobs.py $moe/config.py $moe/weights.py $moe/core/bootstrap_utils.py
        $moe/core/validation/common.py $moe/core/comm/fleet.py $moe/core/comm/handle.py
        $moe/core/comm/fault_tolerance.py $comm/fleet.py $comm/handle.py $comm/_mask_ffi.py"
    ;;
transformerengine)
    package=transformer_engine_cu13 version=${TRANSFORMERENGINE:-2.20.2}
    files=transformer_engine/wheel_lib/libtransformer_engine.so
    ;;
cudart) package=nvidia-cuda-runtime version=${CUDART:-13.0.96} files=nvidia/cu13/lib/libcudart.so.13 ;;
megatron) package=megatron-core version=${MEGATRON:-0.16.1} files="megatron/*.py" ;;
*)
    echo "framework_files.sh: NAME: expected sglang, vllm, torchtitan, deepspeed, lmdeploy, automodel, flashinfer," \
        "megatron, all, transformerengine or cudart, got $name" >&2
    exit 2
    ;;
esac
set -f # the pattern is for the wheel
to=$folder/$name-$version missing=
for file in $files; do
    case $file in
    *\**) [ -d "$to" ] || missing=yes ;;
    *) [ -e "$to/$file" ] || missing=yes ;;
    esac
done
if [ -n "$missing" ]; then
    new=$folder/.$name-$version # no pattern of NAME-VERSION finds it
    mkdir -p "$folder"
    rm -rf "$new"
    timeout "$limit_s" "$python" -B "$here/wheel_files.py" $kind "$package==$version" "$new" $files >&2 ||
        { rc=$? && rm -rf "$new" && exit $rc; }
    rm -rf "$to"
    mv "$new" "$to"
fi
echo "$to"
