#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The public header is C and C++; kernel sources are also valid C++, which is what nvcc and hipcc compile. Compiles
# both with g++ and clang++ (where it is), without producing anything. Exit 77 while there are no kernels.
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

unit=src/device/cpu/kernels.c
if [ ! -f "$unit" ]; then
    echo "epx.h is C11 and C++11; no kernels yet: not compiled as C++"
    exit 77
fi
for cxx in "${compilers[@]}"; do
    "$cxx" -x c++ -std=c++17 -Wall -Wextra -Werror -D_GNU_SOURCE -Iinclude -Isrc -fsyntax-only "$unit"
done
echo "epx.h and the kernels are C++ too: ${compilers[*]}"
