#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_nccl_python.sh VENV: one program for nccl.ep (python/tests/nccl_program.py) on two ranks of the CPU, with EPX's
# own package, and with NVIDIA's nccl4py and nccl-extensions from PyPI, unchanged, pointed at libnccl_ep.so. VENV has
# the wheel of EPX installed (check_wheel.sh). Exit 77 where NVIDIA's packages do not exist for this Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1/bin/python")
tests=$PWD/python/tests
program=$tests/nccl_program.py
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH EPX_LIBRARY

pip() { "$python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "python3 is older than 3.11: NVIDIA's nccl-extensions does not exist for it"
    exit 77
}
# Not into VENV: NVIDIA's package has the same name.
pip wheel --no-build-isolation --no-deps -w "$scratch" ./python/nccl
pip install --no-deps --target "$scratch/ours" "$scratch"/epx_moe_nccl_ep-*.whl
cd "$scratch"
lib=$("$python" -c 'import os, epx; print(os.path.join(os.path.dirname(epx.__file__), "lib"))')
epx=$(dirname "$python")/epx
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

PYTHONPATH=$scratch/ours "$epx" run -n 2 --timeout 100 -- "$python" "$program" epx
PYTHONPATH=$scratch/ours "$epx" run -n 4 --timeout 100 -- "$python" "$program" epx
PYTHONPATH=$scratch/ours OMP_NUM_THREADS=1 timeout 100 "$python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 "$tests/nccl_torch.py"
# A process that has NCCL but no GPU, as with torch for CUDA on a plain machine, is to use the stand-in.
mkdir "$scratch/nccl"
for name in ncclGetUniqueId ncclCommInitRank ncclCommUserRank ncclCommCount ncclAllGather ncclCommGetAsyncError \
    ncclCommDestroy; do
    echo "int $name(void) { return 1; } /* ncclUnhandledCudaError */"
done | "${CC:-cc}" -shared -fPIC -x c -Wl,-soname,libnccl.so.2 -o "$scratch/nccl/libnccl.so.2" -
PYTHONPATH=$scratch/ours LD_PRELOAD=$scratch/nccl/libnccl.so.2 "$epx" run -n 2 --timeout 100 -- "$python" "$program" epx
# NVIDIA's packages look for a file libnccl.so.2 (on x86_64 torch may have brought NCCL's own, on aarch64 there is
# none), and then for each function first among what is loaded.
nvidia() { LD_PRELOAD=$lib/libnccl_ep.so:$lib/standin/libnccl.so.2 LD_LIBRARY_PATH=$lib/standin "$@"; }
nvidia "$python" "$tests/nccl_surface.py" "$scratch/ours"
for ranks in 2 4; do
    NCCL_COMM_ID=127.0.0.1:$port nvidia "$epx" run -n $ranks --timeout 100 -- "$python" "$program" nvidia
done
