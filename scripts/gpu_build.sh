#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Configures and builds EPX with its GPU module by CMake, for scripts/gpu.sh and python/tests/run_gpu.sh. Machines with
# GPUs often lack CMake, cmocka and the headers of libfabric and libibverbs: tests are left out, and so is a network
# without its headers, with a note.
#   usage: scripts/gpu_build.sh FOLDER [ARGUMENTS OF CMAKE...]
#   GPU=cuda|hip (default: cuda where nvcc is, else hip where hipcc is), GPU_ARCH (default 90, gfx942)
#   EPX_OFI_INCLUDE: folder that has rdma/fabric.h, where that is not /usr/include; or CMAKE_PREFIX_PATH
set -eu
cd "$(dirname "$0")/.."
build=$1
shift
export PATH=$PATH:/usr/local/cuda/bin:/opt/rocm/bin
if ! command -v cmake >/dev/null; then
    echo "gpu_build.sh: cmake is missing. Install it (Debian: cmake; or pip install cmake)," \
        "or unpack PyPI's wheel of cmake" >&2
    echo "and add its folder cmake/data/bin to PATH." >&2
    exit 2
fi
gpu=${GPU:-}
[ -n "$gpu" ] || { command -v nvcc >/dev/null && gpu=cuda; } || { command -v hipcc >/dev/null && gpu=hip; } || true
case $gpu in
cuda) arguments=(-DEPX_CUDA=ON -DEPX_HIP=OFF "-DEPX_CUDA_ARCHITECTURES=${GPU_ARCH:-90}") ;;
hip) arguments=(-DEPX_CUDA=OFF -DEPX_HIP=ON "-DEPX_HIP_ARCHITECTURES=${GPU_ARCH:-gfx942}") ;;
*) echo "gpu_build.sh: GPU is '$gpu'; expected cuda (needs nvcc) or hip (needs hipcc)" >&2 && exit 2 ;;
esac

# has_header PATH: in a folder where CMake would look.
has_header() {
    local folder
    for folder in ${EPX_OFI_INCLUDE:-} $(tr ':' '\n' <<<"${CMAKE_PREFIX_PATH:-}" | sed 's|$|/include|') \
        /usr/include /usr/local/include; do
        [ ! -e "$folder/$1" ] || return 0
    done
    return 1
}
network() { # OPTION HEADER PACKAGE
    if has_header "$2"; then
        arguments+=("-D$1=ON")
    else
        echo "gpu_build.sh: no $2 (Debian: $3): built with $1=OFF"
        arguments+=("-D$1=OFF")
    fi
}
network EPX_OFI rdma/fabric.h libfabric-dev
network EPX_VERBS infiniband/verbs.h libibverbs-dev
[ -z "${EPX_OFI_INCLUDE:-}" ] || arguments+=("-DEPX_OFI_INCLUDE=$(cd "$EPX_OFI_INCLUDE" && pwd)")

cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DEPX_BUILD_TESTS=OFF "${arguments[@]}" "$@"
cmake --build "$build" -j"$(nproc)"
