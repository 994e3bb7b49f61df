#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The public headers are C and C++; kernel sources are also valid C++, which is what nvcc and hipcc compile. Checks
# both with g++ and clang++ (where it is), each kernel file by itself after the primitives of the CPU device.
set -euo pipefail
cd "$(dirname "$0")/.."

compilers=()
for cxx in g++ clang++; do
    command -v "$cxx" >/dev/null && compilers+=("$cxx")
done

# epx.h, with all its initial values.
program=$(
    echo '#include "epx/epx.h"'
    echo 'uint32_t sum(void); uint32_t sum(void) { uint32_t n = 0;'
    sed -n 's/^#define \(EPX_[A-Z_]*_INIT\) EPX_INITIAL_VALUE(\(.*\))$/{ \2 value = \1; n += value.size; }/p' \
        include/epx/epx.h
    echo 'return n; }'
)
[ "$(grep -c value.size <<<"$program")" -eq 17 ] || { echo "expected 17 EPX_*_INIT in epx.h, got" "$program"; exit 1; }
for cxx in "${compilers[@]}"; do
    for std in c++11 c++20; do
        "$cxx" -x c++ -std=$std -pedantic -Wall -Wextra -Werror -Iinclude -fsyntax-only - <<<"$program"
    done
done
cc -x c -std=c11 -pedantic -Wall -Wextra -Werror -Iinclude -fsyntax-only - <<<"$program"

# nccl_ep.h, with all its initial values.
standin="-Iinclude/nccl_ep -Istandin/include/nccl -Istandin/include/cuda"
values=$(grep -oE '#define NCCL_EP_[A-Z_]+_INIT ' include/nccl_ep/nccl_ep.h | awk '{print $2}' | sort -u)
[ "$(wc -w <<<"$values")" -eq 12 ] || { echo "expected 12 NCCL_EP_*_INIT in nccl_ep.h, got" $values; exit 1; }
program=$(
    echo '#include "nccl_ep.h"'
    echo 'unsigned int sum(void) { unsigned int n = 0;'
    for value in $values; do echo "n += $value.size;"; done
    echo 'return n; }'
)
# What C++ adds to CUDA's runtime: pointers to any type, and the default stream.
typed='
#include <cuda_runtime.h>
cudaError_t copy(float *host) { float *device; cudaMalloc(&device, 4);
    return cudaMemcpyAsync(device, host, 4, cudaMemcpyDefault); }'
for cxx in "${compilers[@]}"; do
    "$cxx" -x c++ -std=c++11 -pedantic -Wall -Wextra -Werror $standin -fsyntax-only - <<<"$program$typed"
    # Initial values are constants since C++14.
    "$cxx" -x c++ -std=c++14 -pedantic -Wall -Wextra -Werror $standin -fsyntax-only - <<<'#include "nccl_ep.h"
constexpr ncclEpGroupConfig_t group = NCCL_EP_GROUP_CONFIG_INIT;
constexpr ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
static_assert(group.version == 3 && tensor.size == NCCL_EP_TENSOR_SIZE, "constants");'
    # Designated initialisers are C++ since C++20. Both names of a recipe can be set so.
    "$cxx" -x c++ -std=c++20 -Wall -Wextra -Werror -Wno-missing-field-initializers \
        $standin -fsyntax-only - <<<'#include "nccl_ep.h"
ncclEpTensor_t t = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2, .datatype = ncclFloat32};
ncclEpDispatchConfig_t d = {.size = 24, .magic = NCCL_EP_MAGIC, .quant_recipe = NCCL_EP_DISP_QUANT_FWD};
ncclEpCombineConfig_t c = {.size = 20, .magic = NCCL_EP_MAGIC, .quantization_recipe = NCCL_EP_COMB_QUANT_NVFP4};'
done
cc -x c -std=c11 -pedantic -Wall -Wextra -Werror $standin -fsyntax-only - <<<"$program"

prims=src/device/cpu/prims.h
mapfile -t kernels < <(find src/kernel -name '*.[ch]' 2>/dev/null | sort)
if [ ! -f "$prims" ] || [ ${#kernels[@]} -eq 0 ]; then
    echo "epx.h and nccl_ep.h are C11 and C++11; no kernels yet: not compiled as C++"
    exit 77
fi
for cxx in "${compilers[@]}"; do
    for kernel in "${kernels[@]}"; do
        "$cxx" -x c++ -std=c++17 -Wall -Wextra -Werror -Wno-unused-function -Iinclude -Isrc -fsyntax-only - \
            <<<"#include \"${prims#src/}\"
#include \"${kernel#src/}\""
    done
done
echo "epx.h, nccl_ep.h and ${#kernels[@]} kernel files are C++ too: ${compilers[*]}"
