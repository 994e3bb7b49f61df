#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The public header is C and C++; kernel sources are also valid C++, which is what nvcc and hipcc compile. Checks
# both with g++ and clang++ (where it is), each kernel file by itself after the primitives of the CPU device.
set -euo pipefail
cd "$(dirname "$0")/.."

compilers=()
for cxx in g++ clang++; do
    command -v "$cxx" >/dev/null && compilers+=("$cxx")
done

for cxx in "${compilers[@]}"; do
    "$cxx" -x c++ -std=c++11 -pedantic -Wall -Wextra -Werror -Iinclude -fsyntax-only - <<<'#include "epx/epx.h"'
done
cc -x c -std=c11 -pedantic -Wall -Wextra -Werror -Iinclude -fsyntax-only - <<<'#include "epx/epx.h"'

prims=src/device/cpu/prims.h
mapfile -t kernels < <(find src/kernel -name '*.[ch]' 2>/dev/null | sort)
if [ ! -f "$prims" ] || [ ${#kernels[@]} -eq 0 ]; then
    echo "epx.h is C11 and C++11; no kernels yet: not compiled as C++"
    exit 77
fi
for cxx in "${compilers[@]}"; do
    for kernel in "${kernels[@]}"; do
        "$cxx" -x c++ -std=c++17 -Wall -Wextra -Werror -Wno-unused-function -Iinclude -Isrc -fsyntax-only - \
            <<<"#include \"${prims#src/}\"
#include \"${kernel#src/}\""
    done
done
echo "epx.h and ${#kernels[@]} kernel files are C++ too: ${compilers[*]}"
