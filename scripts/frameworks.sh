#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks.sh [VENV]: the frameworks' own code on deep_ep, with CPU tensors (make frameworks; some minutes).
# megatron-core is in VENV (scripts/python_env.sh). Of SGLang's wheel (38 MB, kept in build-frameworks) three Python
# files are used. RANKS="4 8" says with how many ranks. python/tests/run_gpu.sh frameworks runs the same on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -s "${1:-.venv-test}") kept=$PWD/build-frameworks sglang=0.5.23
failures=0 out=$(mktemp)
trap 'rm -f "$out"' EXIT
scripts/python_env.sh "$venv" || exit
mkdir -p "$kept"

# Three files of the wheel, which has compiled parts for other uses.
unpack_sglang() {
    [ -d "$kept/sglang-$sglang" ] && return
    timeout 300 "$venv/bin/python" -m pip --quiet --disable-pip-version-check download --no-deps \
        --only-binary :all: -d "$kept" "sglang==$sglang" || return
    "$venv/bin/python" - "$kept" "$sglang" <<'EOF'
import glob, os, sys, zipfile
kept, version = sys.argv[1:]
with zipfile.ZipFile(glob.glob(os.path.join(kept, "sglang-%s-*.whl" % version))[0]) as wheel:
    for name in ("token_dispatcher/base.py", "token_dispatcher/deepep.py", "utils.py"):
        wheel.extract("sglang/srt/layers/moe/" + name, os.path.join(kept, "sglang-" + version))
EOF
}

try() { # NAME COMMAND...
    local name=$1
    shift
    if timeout 900 "$@" >"$out" 2>&1; then
        echo "ok: $name"
    else
        grep -E '^(ok|skipped|on [0-9]+ ranks)|Error' "$out" | tail -20
        echo "FAILED: $name"
        failures=$((failures + 1))
    fi
}

export PYTHONPATH=$PWD/python OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
export EPX_LIBRARY=${EPX_LIBRARY:-$PWD/build/libepx.so}
modules="ranks_megatron ranks_hybrid ranks_frameworks ranks_elastic_frameworks"
if unpack_sglang; then
    export EPX_SGLANG=$kept/sglang-$sglang
    modules="$modules sglang_modules"
else
    echo "sglang $sglang cannot be downloaded here: its modules are left out"
fi
for ranks in ${RANKS:-4 8}; do
    for module in $modules; do
        try "$module, $ranks ranks" "$venv/bin/python" -m torch.distributed.run --standalone \
            --nproc-per-node "$ranks" python/tests/suite.py "$module"
    done
done
unset PYTHONPATH
scripts/check_beside.sh "$venv" >"$out" 2>&1
case $? in
0 | 77) tail -1 "$out" ;;
*) tail -5 "$out" && failures=$((failures + 1)) ;;
esac
echo "$failures failures"
[ "$failures" -eq 0 ]
