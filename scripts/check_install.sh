#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_install.sh BUILD_DIR: installs into a scratch folder, moves that folder (nothing may remember where it was),
# then builds and runs a consumer through pkg-config and another through find_package(epx), of epx.h and of nccl_ep.h.
set -euo pipefail
build=$(realpath "$1")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake --install "$build" --prefix "$scratch/first" >/dev/null
mv "$scratch/first" "$scratch/prefix"
libdir=$(dirname "$(find "$scratch/prefix" -name libepx.so | head -1)")

cat >"$scratch/consumer.c" <<'SOURCE'
#include <epx/epx.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    int code = 0;
    if (epx_version(&code) != EPX_OK || code != EPX_VERSION_CODE || strlen(epx_strerror(EPX_ERR_TIMEOUT)) == 0)
        return 1;
    epx_memory_info info = EPX_MEMORY_INFO_INIT;
    if (epx_group_memory(NULL, 4, &info) != EPX_ERR_ARGUMENT || strlen(epx_last_error()) == 0)
        return 1;
    printf("consumer: epx %d\n", code);
    return 0;
}
SOURCE

export PKG_CONFIG_PATH=$libdir/pkgconfig
cc -std=c11 -Wall -Werror "$scratch/consumer.c" $(pkg-config --cflags --libs epx) -o "$scratch/by_pkg_config"
LD_LIBRARY_PATH=$libdir "$scratch/by_pkg_config"

mkdir "$scratch/cmake"
cat >"$scratch/cmake/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C)
find_package(epx 0.1 REQUIRED)
add_executable(by_cmake ../consumer.c)
target_link_libraries(by_cmake PRIVATE epx::epx)
CMAKE
cmake -S "$scratch/cmake" -B "$scratch/cmake/build" -DCMAKE_PREFIX_PATH="$scratch/prefix" >/dev/null
cmake --build "$scratch/cmake/build" >/dev/null
"$scratch/cmake/build/by_cmake"

# NCCL EP's interface, installed, on the stand-ins: the example, both ways.
example=$(dirname "$0")/../examples/nccl_ep_hello.c
cc -std=gnu11 -Wall -Werror "$example" $(pkg-config --cflags --libs epx-nccl-ep epx-standin epx) \
    -o "$scratch/nccl_by_pkg_config"
LD_LIBRARY_PATH=$libdir "$scratch/nccl_by_pkg_config"
mkdir "$scratch/cmake-nccl"
cp "$example" "$scratch/nccl_hello.c"
cat >"$scratch/cmake-nccl/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.22)
project(consumer LANGUAGES C)
find_package(epx 0.1 REQUIRED COMPONENTS standin)
add_executable(by_cmake ../nccl_hello.c)
target_link_libraries(by_cmake PRIVATE epx::nccl_ep epx::standin_nccl epx::standin_cudart epx::epx)
CMAKE
cmake -S "$scratch/cmake-nccl" -B "$scratch/cmake-nccl/build" -DCMAKE_PREFIX_PATH="$scratch/prefix" >/dev/null
cmake --build "$scratch/cmake-nccl/build" >/dev/null
"$scratch/cmake-nccl/build/by_cmake"

if [ -d "$build/man" ]; then
    for page in man1/epx.1 man1/epx-bench.1 man3/epx_group_create.3 man7/epx_environment.7; do
        [ -s "$scratch/prefix/share/man/$page" ] || { echo "not installed: $page"; exit 1; }
    done
fi

if [ -x "$scratch/prefix/bin/epx" ]; then
    # epx-ep-bench finds its libraries by where it is, and NCCL's name leads to the stand-in.
    "$scratch/prefix/bin/epx" ep-bench -n 2 --tokens 4 --hidden 256 --experts 4 --top-k 2 --iters 1 --warmup 0 \
        --validate >/dev/null
    [ -e "$libdir/epx-standin/libnccl.so.2" ] || { echo "no epx-standin/libnccl.so.2 in $libdir"; exit 1; }
    # The program is self-contained: it runs without libepx.so in its path.
    if ldd "$scratch/prefix/bin/epx" | grep -q libepx; then
        echo "the installed epx needs libepx.so"
        exit 1
    fi
fi

# The stand-ins have a package of their own (debian/epx-standin.install): without their files the rest is whole.
find "$scratch/prefix" \( -name '*epx-standin*' -o -name 'libepx_nccl*' -o -name 'libepx_cudart*' \) -prune \
    -exec rm -r {} +
cmake -S "$scratch/cmake" -B "$scratch/cmake/without" -DCMAKE_PREFIX_PATH="$scratch/prefix" >/dev/null
cmake --build "$scratch/cmake/without" >/dev/null
"$scratch/cmake/without/by_cmake"
if cmake -S "$scratch/cmake-nccl" -B "$scratch/cmake-nccl/without" -DCMAKE_PREFIX_PATH="$scratch/prefix" \
    >"$scratch/log" 2>&1 || ! grep -q standin "$scratch/log"; then
    echo "find_package(epx COMPONENTS standin) without the stand-ins: expected an error that names them, got:"
    cat "$scratch/log"
    exit 1
fi
