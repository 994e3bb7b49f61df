#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library (also as libepx.so, for Python), its tool, the GPU module, the GPU benchmark and (CUDA) the tests of
# NCCL EP's interface with gcc and nvcc (or, EPX_BENCH_GPU=hip, hipcc) alone: for
# GPU machines without CMake. usage: gpu_build.sh FOLDER [ARCHITECTURE, default 90 or gfx942]. Only what is newer than its
# object is compiled.
# Without libfabric's headers the network `ofi` is left out; EPX_OFI_INCLUDE=FOLDER says where rdma/fabric.h is, where that is
# not /usr/include (the library itself, libfabric.so.1, is opened at run time).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
build=$1 gpu=${EPX_BENCH_GPU:-cuda}
cc=${CC:-gcc}
jobs=$(nproc)
cflags="-std=gnu11 -D_GNU_SOURCE= -O3 -g1 -Wall -Wextra -fPIC -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-strict-aliasing"
includes="-I$root/include -I$root/src -I$root -I$root/support -I$root/tools/epx"
[ -z "${EPX_OFI_INCLUDE:-}" ] || includes="$includes -I$(cd "$EPX_OFI_INCLUDE" && pwd)"
has() { # headers...: 1 if the compiler finds them all, else 0
    printf '#include <%s>\n' "$@" | "$cc" $includes -fsyntax-only -x c - 2>/dev/null && echo 1 || echo 0
}
cflags="$cflags -DEPX_HAVE_OFI=$(has rdma/fabric.h) -DEPX_HAVE_VERBS=$(has infiniband/verbs.h)"
cflags="$cflags -DEPX_HAVE_EFADV=$(has infiniband/verbs.h infiniband/efadv.h)"
warps=${EPX_NVCC_FLAGS:-} # for experiments: -DLAUNCH_WARPS=24
if [ "$gpu" = hip ]; then
    arch=${2:-gfx942}
    hipcc=$(command -v hipcc || echo /opt/rocm/bin/hipcc)
    rocm=$(cd "$(dirname "$hipcc")/.." && pwd)
    cflags="$cflags -DEPX_HIP"
    [ "$rocm" = /usr ] || includes="$includes -isystem $rocm/include"
    kernel_flags="-x hip --hipcc-func-supp -std=c++17 -O3 -DEPX_HIP -fPIC -fvisibility=hidden -ffp-contract=off --offload-arch=$arch"
    kernel_cc=$hipcc linker=$cc link="-L$rocm/lib -Wl,-rpath,$rocm/lib -lamdhip64"
else
    arch=${2:-90}
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    includes="$includes -I$(cd "$(dirname "$nvcc")/.." && pwd)/include"
    kernel_flags="-std=c++17 -O3 -lineinfo -fmad=false -Xptxas -v -Xcompiler -fPIC -gencode arch=compute_$arch,code=sm_$arch"
    kernel_cc=$nvcc linker=$nvcc link="-cudart static"
fi
mkdir -p "$build/o"

rules=$build/rules.mk
{
    objects() { for f in "$@"; do echo "$build/o/$(echo "${f#"$root"/}" | tr / _).o"; done; }
    lib=$(find "$root/src" -name '*.c' ! -path '*/device/gpu/*' ! -path '*/compat/*')
    tool=$(ls "$root"/tools/epx/*.c)
    support=$(ls "$root"/tests/lib/*.c)
    host=$(ls "$root"/src/device/gpu/*.c)
    [ "$gpu" = hip ] && host="$host $(ls "$root"/src/device/gpu/hip/*.c)"
    kernels=$(ls "$root"/src/device/gpu/*.cu)
    headers=$(find "$root/src" "$root/include" "$root/tests/lib" -name '*.h' -o -name '*.cuh' | tr '\n' ' ')
    bench="$root/bench/gpu_bench.c" prop="$root/bench/gpu_prop.c" net="$root/bench/gpu_net.c"
    nccl_all=""
    [ "$gpu" = hip ] || nccl_all="$build/libnccl_ep.so $build/libepx_nccl.so $build/nccl_ep_ranks"
    echo "all: $nccl_all $build/epx $build/libepx.so $build/libepx_$gpu.so $build/gpu_bench $build/gpu_prop $build/gpu_net"
    for f in $lib $tool $support $bench $prop $net; do
        printf '%s: %s %s\n\t@%s %s %s -c $< -o $@\n' "$(objects "$f")" "$f" "$headers" "$cc" "$cflags" "$includes"
    done
    for f in $host; do
        printf '%s: %s %s\n\t@%s %s %s %s -c $< -o $@\n' "$(objects "$f")" "$f" "$headers" "$cc" "$cflags" "$warps" "$includes"
    done
    for f in $kernels; do
        printf '%s: %s %s\n\t@%s %s %s %s -c $< -o $@ >$@.log 2>&1 || { cat $@.log; false; }\n' \
            "$(objects "$f")" "$f" "$headers" "$kernel_cc" "$kernel_flags" "$warps" "$includes"
    done
    printf '%s: %s\n\t@%s -o $@ $^ -lpthread -lm -lrt -ldl\n' "$build/epx" "$(objects $lib $support $tool | tr '\n' ' ')" "$cc"
    printf '%s: %s\n\t@%s -o $@ $^ -lpthread -lm -lrt -ldl\n' "$build/gpu_prop" "$(objects $lib $support $prop | tr '\n' ' ')" "$cc"
    printf '%s: %s\n\t@%s -o $@ $^ -lpthread -lm -lrt -ldl\n' "$build/gpu_net" "$(objects $lib $support $net | tr '\n' ' ')" "$cc"
    printf '%s: %s\n\t@%s -shared -Wl,-soname,libepx.so.0 -Wl,--version-script=%s -o $@ $^ -lpthread -lm -lrt -ldl\n' \
        "$build/libepx.so" "$(objects $lib | tr '\n' ' ')" "$cc" "$root/src/epx.map"
    printf '%s: %s\n\t@%s -shared -o $@ $^ %s\n' "$build/libepx_$gpu.so" "$(objects $host $kernels | tr '\n' ' ')" "$linker" "$link"
    printf '%s: %s\n\t@%s -o $@ $^ %s -lpthread -lm -lrt -ldl\n' "$build/gpu_bench" \
        "$(objects $lib $support $bench | tr '\n' ' ')" "$linker" "$link"
    if [ "$gpu" = cuda ]; then
        # Several ranks share the GPU, which NCCL refuses: its stand-in with real CUDA. The libraries need no CUDA at all.
        face=$(ls "$root"/src/compat/nccl_ep/*.c)
        standin="$root/src/compat/standin/nccl_comm.c $root/src/compat/standin/nccl_memory.c"
        ranks=$(ls "$root"/tests/nccl_ep/*.c | grep -v /comm.c)
        oracle="$root/tests/lib/oracle.c $root/tests/lib/oracle_check.c $root/tests/lib/oracle_math.c $root/tests/lib/compare.c $root/tests/lib/workload.c"
        nccl="-I$root/include/nccl_ep -I$root/include/nccl_ep/standin/nccl"
        for f in $face $standin; do
            printf '%s: %s %s\n\t@%s %s %s -I%s %s -c $< -o $@\n' "$(objects "$f")" "$f" "$headers" "$cc" "$cflags" "$nccl" \
                "$root/include/nccl_ep/standin/cuda" "$includes"
        done
        for f in $ranks; do
            printf '%s: %s %s\n\t@%s %s %s %s -c $< -o $@\n' "$(objects "$f")" "$f" "$headers $root/tests/nccl_ep/nccl_case.h" "$cc" "$cflags" "$nccl" "$includes"
        done
        util="$root/src/util/log.c $root/src/util/env.c"
        printf '%s: %s %s\n\t@%s -shared -Wl,-soname,libnccl_ep.so.0 -Wl,--version-script=%s -o $@ $^ -Wl,-rpath,%s -lpthread -ldl\n' \
            "$build/libnccl_ep.so.0" "$(objects $face $util | tr '\n' ' ')" "$build/libepx.so.0" "$cc" \
            "$root/src/compat/nccl_ep/nccl_ep.map" "'\$\$ORIGIN'"
        printf '%s: %s\n\t@%s -shared -Wl,-soname,libepx_nccl.so.0 -Wl,--version-script=%s -o $@ $^ -lpthread -ldl\n' \
            "$build/libepx_nccl.so.0" \
            "$(objects $standin "$root/src/compat/nccl_ep/driver.c" "$root"/src/boot/*.c "$root"/src/util/*.c | tr '\n' ' ')" "$cc" \
            "$root/src/compat/standin/standin.map"
        for name in libepx libnccl_ep libepx_nccl; do
            [ $name = libepx ] && from=libepx.so to=libepx.so.0 || from=$name.so.0 to=$name.so
            printf '%s: %s\n\t@ln -sf %s $@\n' "$build/$to" "$build/$from" "$from"
        done
        printf '%s: %s | %s\n\t@%s -o $@ $^ -L%s -lnccl_ep -lepx_nccl %s -Xlinker -rpath -Xlinker %s -lpthread -lm -lrt -ldl\n' \
            "$build/nccl_ep_ranks" "$(objects $ranks $oracle | tr '\n' ' ')" "$build/libnccl_ep.so $build/libepx_nccl.so" "$linker" \
            "$build" "$link" "'\$\$ORIGIN'"
    fi
} >"$rules"
make -s -j"$jobs" -f "$rules" all
