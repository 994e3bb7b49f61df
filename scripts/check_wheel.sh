#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_wheel.sh VENV [CMAKE_BUILD_DIR]: builds the wheels as `pip install .` does, installs them into VENV, and checks
# what a user meets first: nothing is shadowed, imports are quick and need neither torch nor NumPy, versions agree, and
# the source distribution has every file.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1/bin/python")
cmake_dir=${2:-build/wheel}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH EPX_LIBRARY

pip() { "$python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
fail() {
    echo "$1"
    exit 1
}

# The CUDA module takes minutes to compile; scripts/gpu.sh tests it where a GPU is. (pip 23.0 of Debian 12 has no short
# -C.) EPX_WERROR and the compiler's name as in the other builds (scripts/configure.sh): ccache then has the objects.
[ -n "${CC:-}" ] || ! command -v gcc >/dev/null || export CC=gcc
werror=${WERROR:-${CI:+ON}}
pip wheel --no-build-isolation --no-deps -w "$scratch" --config-settings build-dir="$cmake_dir" \
    --config-settings cmake.define.EPX_CUDA=OFF --config-settings "cmake.define.EPX_WERROR=${werror:-OFF}" .
pip wheel --no-build-isolation --no-deps -w "$scratch" ./python
pip uninstall -y epx-moe epx-moe-deep-ep >/dev/null 2>&1
pip install --no-deps "$scratch"/epx_moe-*.whl
find "$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/epx" \
    \( -name '*.so*' -o -path '*/epx/bin/*' \) -type f -print0 | xargs -0 scripts/check_needed.sh

cd "$scratch" # not the source tree: what is imported is what was installed
if "$python" -c 'import deep_ep' 2>/dev/null; then
    fail "installing epx alone made a deep_ep: it may shadow another one"
fi

# Without torch and NumPy, best of five: the first import also reads files.
"$python" - <<'EOF2'
import subprocess, sys
code = """
import sys, time
sys.modules["torch"] = sys.modules["numpy"] = None
begin = time.perf_counter()
import epx
print(time.perf_counter() - begin)
"""
seconds = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))
print(f"import epx takes {seconds:.3f} s without torch and NumPy")
sys.exit(f"expected at most 0.3 s to import epx, got {seconds:.3f} s" if seconds > 0.3 else 0)
EOF2

header=$(sed -nE 's/^#define EPX_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' "$OLDPWD/include/epx/epx.h" | paste -sd.)
version=$("$python" -c 'import importlib.metadata as m, epx
assert m.version("epx-moe") == epx.__version__; print(epx.__version__)')
[ "$version" = "$header" ] || fail "epx.__version__: expected $header as in epx.h, got $version"
"$(dirname "$python")/epx" doctor >doctor.txt || fail "the command epx of the wheel: epx doctor failed"
[ "$("$python" -m epx version)" = "$("$(dirname "$python")/epx" version)" ] || fail "python -m epx is not epx"
[ -e "$("$python" -c 'import epx; print(epx.__path__[0])')/py.typed" ] || fail "the wheel has no epx/py.typed"
grep -q "EPX $header" doctor.txt || fail "epx doctor: expected \"EPX $header\", got $(head -1 doctor.txt)"

pip install --no-deps "$scratch"/epx_moe_deep_ep-*.whl
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
! grep -lE '\.pth,' "$site"/epx_moe*.dist-info/RECORD || fail "a wheel has a .pth file"
"$python" -c '
import importlib.metadata, deep_ep
from deep_ep.utils import EventHandle, EventOverlap
import deep_ep_cpp
import hybrid_ep_cpp
assert deep_ep_cpp.EventHandle is EventHandle and "/epx/dropins/" in deep_ep_cpp.__file__
assert "/epx/dropins/" in hybrid_ep_cpp.__file__ and EventOverlap is deep_ep.EventOverlap'

# Installed in place: Python's files are the source tree's, the library is what was built.
cd "$OLDPWD"
"$python" -m venv "$scratch/editable"
echo "import site; site.addsitedir('$site')" >"$(echo "$scratch"/editable/lib/python*/site-packages)/site.pth"
"$scratch/editable/bin/python" -m pip --quiet --disable-pip-version-check install --no-build-isolation --no-deps \
    --config-settings build-dir="$cmake_dir" --config-settings cmake.define.EPX_CUDA=OFF \
    --config-settings cmake.define.EPX_WERROR=ON -e . -e ./python
cd "$scratch"
"$scratch/editable/bin/python" -c '
import deep_ep, epx, sys
assert epx.__file__ == sys.argv[1] + "/epx/__init__.py" and deep_ep.__file__ == sys.argv[1] + "/deep_ep/__init__.py"
print("editable: epx", epx.library_version(), "and deep_ep", deep_ep.__version__)' "$OLDPWD/python"

# An sdist is what git has, and a wheel built from it needs nothing else.
cd "$OLDPWD"
"$python" -c "
import scikit_build_core.build as backend, sys
print(backend.build_sdist(sys.argv[1]))" "$scratch" >"$scratch/name"
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    tar tzf "$scratch/$(tail -1 "$scratch/name")" | sed 's|^[^/]*/||' | sort >"$scratch/packed"
    missing=$(git ls-files -- CMakeLists.txt LICENSE README.md bench cmake include sim src standin tests/lib tools \
        python pyproject.toml | sort |
        comm -23 - "$scratch/packed")
    [ -z "$missing" ] || fail "the sdist lacks: $missing"
fi
echo "wheels epx-moe $version and epx-moe-deep-ep installed into $1"
