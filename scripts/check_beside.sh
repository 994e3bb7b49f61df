#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_beside.sh VENV [WHEELS]: EPX's distributions beside others, with real wheels from PyPI (17 MB): sgl-deep-ep,
# which has a deep_ep too, uccl, and the other project's epx. Whatever is installed or removed first, every file of
# sgl-deep-ep and uccl is as it was, and `import deep_ep` takes theirs until EPX's is asked for. The two commands that
# EPX names mend what the other epx has done. WHEELS has EPX's wheels (default: they are built). Exit 77 where nothing
# can be downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1/bin/python")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH EPX_LIBRARY
wheels=${2:-}
if [ -z "$wheels" ]; then
    wheels=$scratch/wheels
    "$python" -m pip --quiet --disable-pip-version-check wheel --no-build-isolation --no-deps -w "$wheels" \
        --config-settings build-dir=build/wheel --config-settings cmake.define.EPX_CUDA=OFF \
        --config-settings cmake.define.EPX_WERROR=ON . ./python
fi
wheels=$(realpath "$wheels")
venv=$scratch/venv
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
fail() { echo "FAILED: $1" && exit 1; }

timeout 300 "$venv/bin/python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
    -d "$scratch/others" sgl-deep-ep uccl epx >"$scratch/log" 2>&1 ||
    { echo "sgl-deep-ep, uccl and epx cannot be downloaded here" && exit 77; }
cd "$scratch"
others() { pip install --no-deps others/sgl_deep_ep-*.whl others/uccl-*.whl; }
ours() { pip install --no-deps "$wheels"/epx_moe-*.whl "$wheels"/epx_moe_deep_ep-*.whl; }

# Every file that a distribution has installed is there, with the hash in its list.
whole() { # DISTRIBUTION...
    "$venv/bin/python" - "$@" <<'EOF'
import base64, hashlib, importlib.metadata, sys
for name in sys.argv[1:]:
    for file in importlib.metadata.files(name):
        if file.hash is None:
            continue
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, file.locate().read_bytes()).digest())
        if digest.rstrip(b"=").decode() != file.hash.value:
            sys.exit("%s of %s is another file" % (file, name))
EOF
}
finds() { # NAME FILE COMMAND...: import NAME finds that file of site-packages; COMMAND comes before Python's
    local name=$1 file=$2 got
    shift 2
    got=$("$@" "$venv/bin/python" -c '
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print(spec.origin.split("site-packages/")[1] if spec else "none")' "$name")
    [[ "$got" = $file ]] || fail "import $name: expected $file, got $got"
}
use=("$venv/bin/python" -m epx.use deep_ep --)

others && ours
whole sgl-deep-ep uccl epx-moe epx-moe-deep-ep || fail "installed second, EPX has changed files of others"
finds deep_ep deep_ep/__init__.py
finds deep_ep epx/dropins/deep_ep/deep_ep/__init__.py "${use[@]}"
finds deep_ep_cpp epx/dropins/deep_ep/deep_ep_cpp/__init__.py "${use[@]}"
pip uninstall -y epx-moe-deep-ep && whole sgl-deep-ep uccl || fail "removing EPX's has changed files of others"
finds deep_ep deep_ep/__init__.py
finds deep_ep epx/dropins/deep_ep/deep_ep/__init__.py "${use[@]}" # epx-moe alone is enough for that
ours && pip uninstall -y sgl-deep-ep && whole uccl epx-moe epx-moe-deep-ep || fail "removing theirs has changed EPX's"
finds deep_ep deep_ep.py
finds deep_ep_cpp 'deep_ep_cpp.*'
others && whole sgl-deep-ep uccl epx-moe epx-moe-deep-ep || fail "installed first, EPX was changed by others"
finds deep_ep deep_ep/__init__.py
pip uninstall -y epx-moe-deep-ep sgl-deep-ep uccl
finds deep_ep none

# The other project's epx, after EPX and before it.
imports() { "$venv/bin/python" -W error -c 'import epx; print(epx.Group)' 2>&1; }
mend() {
    pip uninstall -y epx epx-moe && pip install --no-deps "$wheels"/epx_moe-*.whl # as the message names them
    imports >log || { cat log && fail "the two commands did not mend EPX"; }
    whole epx-moe
}
imports >log || { cat log && fail "import epx of epx-moe alone"; }
pip install --no-deps others/epx-*.whl
! whole epx-moe >log 2>&1 || fail "the other epx has no file of EPX's: nothing is left to be noticed"
echo >"$(echo "$venv"/lib/python*/site-packages/epx/__init__.py)" # what it imports needs other distributions
"$venv/bin/epx" version >log 2>&1 || { cat log && fail "epx version beside the other epx"; }
grep -q 'pip uninstall -y epx epx-moe; pip install epx-moe' log || fail "epx under the other epx: got $(cat log)"
mend
pip uninstall -y epx-moe && pip install --no-deps others/epx-*.whl && ours
! imports >log || fail "import epx over the other epx: expected a warning"
grep -q 'pip uninstall -y epx epx-moe; pip install epx-moe' log || fail "import epx over the other: got $(cat log)"
mend
names=$(cd others && ls | sed -E 's/^([^-]*-[^-]*)-.*/\1/' | paste -sd' ')
echo "epx-moe beside $names: no file of sgl-deep-ep or uccl is changed; the other epx is noticed"
