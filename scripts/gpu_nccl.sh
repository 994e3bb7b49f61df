#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_nccl.sh BUILD: libnccl_ep.so of BUILD over a communicator of NCCL itself, with CUDA's own runtime and graphs: the
# tests "runtime" of tests/nccl_ep on one rank (NCCL refuses several on one GPU). NCCL is that of NCCL_HOME, of the
# machine, or of torch. Exit 77 where there is none.
set -euo pipefail
build=$(realpath "$1")
cd "$(dirname "$0")/.."
cuda=${CUDA_HOME:-/usr/local/cuda}
home=${NCCL_HOME:-}
[ -n "$home" ] || [ ! -e /usr/include/nccl.h ] || home=/usr
[ -n "$home" ] || home=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null || true)
[ -e "$home/include/nccl.h" ] || { echo "no nccl.h: set NCCL_HOME"; exit 77; }
library=$(find "$home"/lib* -name 'libnccl.so*' 2>/dev/null | head -1)
[ -n "$library" ] || { echo "no libnccl.so in $home"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -std=gnu11 -O1 -ffp-contract=off -D_GNU_SOURCE -DEPX_REAL_NCCL -I. -Iinclude -Iinclude/nccl_ep -Isrc \
    -I"$home/include" -I"$cuda/include" tests/nccl_ep/{ranks,runtime,report}.c -L"$build" -lnccl_ep -lepx "$library" \
    -L"$cuda/lib64" -L"$cuda/targets/$(uname -m)-linux/lib" -lcudart_static -lpthread -ldl -lrt -lm \
    -Wl,-rpath,"$build" -Wl,-rpath,"$(dirname "$library")" -o "$work/ranks"
env -u EPX_DEVICE "$work/ranks" runtime
echo "over NCCL of $library"
