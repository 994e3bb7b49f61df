#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# configure.sh FOLDER [CMAKE_OPTION]...: runs CMake on FOLDER; says nothing if all is well. `make` and `make test` both
# use it, so that the second does not compile again what the first has compiled.
#
# Options given before, by hand or by CMAKE_ARGS, stay as they were: only a new FOLDER gets defaults of ours.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift

defaults=()
werror=${WERROR:-${CI:+ON}} # warnings are errors for developers
[ -z "$werror" ] || defaults+=("-DEPX_WERROR=$werror")
if [ ! -f "$folder/CMakeCache.txt" ]; then
    # Of the CUDA module, where nvcc is: one architecture takes a third of the time of all that a release has.
    defaults+=(-DCMAKE_BUILD_TYPE=Release -DEPX_CUDA_ARCHITECTURES=90)
    [ -n "${CC:-}" ] || ! command -v gcc >/dev/null || defaults+=(-DCMAKE_C_COMPILER=gcc)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cmake -S . -B "$folder" ${defaults[@]+"${defaults[@]}"} "$@" >"$log" 2>&1 || { cat "$log" && exit 1; }
