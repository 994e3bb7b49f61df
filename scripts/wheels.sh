#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheels.sh [--cpu] [--cuda] [OUT]: wheels of epx-moe, epx-moe-deep-ep and epx-moe-nccl-ep into OUT/cpu and OUT/cuda
# (default: build-wheels; --cuda only where nvcc is). One wheel serves every Python from 3.9 on and needs nothing:
# networks and GPUs are found at run time. Each is installed into an environment of its own and tried, and
# scripts/audit_wheel.sh says which manylinux it could be.
# PYTHON=... names the interpreter; it needs scikit-build-core and ninja, or pip downloads them. CMAKE_ARGS reaches
# CMake: -DEPX_CUDA_ARCHITECTURES=90 compiles for one kind of GPU only.
set -euo pipefail
cd "$(dirname "$0")/.."
kinds= out=build-wheels
for argument in "$@"; do
    case $argument in
    --cpu | --cuda) kinds="$kinds ${argument#--}" ;;
    -*) echo "usage: scripts/wheels.sh [--cpu] [--cuda] [OUT]" && exit 2 ;;
    *) out=$argument ;;
    esac
done
python=${PYTHON:-python3}
if [ -z "$kinds" ]; then
    kinds=cpu
    ! command -v nvcc >/dev/null || kinds="cpu cuda"
fi
isolation=
! "$python" -c 'import scikit_build_core, ninja' 2>/dev/null || isolation=--no-build-isolation
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$out"
out=$(realpath "$out")

pip_wheel() { # FOLDER SOURCE OPTION...
    "$python" -m pip --quiet --disable-pip-version-check wheel $isolation --no-deps -w "$@"
}

# In an environment without torch, NumPy and a GPU.
try_wheel() { # FOLDER KIND
    local venv=$scratch/try
    rm -rf "$venv" && "$python" -m venv "$venv"
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps \
        "$1"/epx_moe-*.whl "$1"/epx_moe_deep_ep-*.whl
    # Debian 12 has libc 2.36.
    find "$venv"/lib/python*/site-packages/epx \( -name '*.so*' -o -path '*/epx/bin/*' \) -type f -print0 |
        xargs -0 scripts/check_needed.sh --libc 2.36
    [ "$2" = cpu ] || find "$venv"/lib/python*/site-packages/epx -name libepx_cuda.so | grep -q . ||
        { echo "the wheel with CUDA has no libepx_cuda.so" && return 1; }
    (cd "$scratch" && env -u PYTHONPATH -u EPX_LIBRARY "$venv/bin/epx" doctor >doctor.txt) ||
        { cat "$scratch/doctor.txt" && return 1; }
    (cd "$scratch" && env -u PYTHONPATH -u EPX_LIBRARY "$venv/bin/python" -c '
import importlib.util, epx
print("epx", epx.__version__, "and deep_ep at", importlib.util.find_spec("deep_ep").origin.split("site-packages/")[1])')
}

werror=${WERROR:-${CI:+ON}} # as in the other builds (scripts/configure.sh): ccache then has the objects
for kind in $kinds; do
    mkdir -p "$out/$kind" && rm -f "$out/$kind"/*.whl
    define=OFF && [ "$kind" = cpu ] || define=ON
    pip_wheel "$out/$kind" --config-settings cmake.define.EPX_CUDA=$define \
        --config-settings "cmake.define.EPX_WERROR=${werror:-OFF}" \
        --config-settings build-dir="$out/build-$kind" .
    pip_wheel "$out/$kind" ./python
    pip_wheel "$out/$kind" ./python/nccl
    try_wheel "$out/$kind" "$kind"
    scripts/audit_wheel.sh "$out/$kind"/epx_moe-*.whl
    (cd "$out" && ls -l "$kind"/*.whl | awk '{ print $NF, $5 " bytes" }')
done
