#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_beside.sh VENV [WHEELS]: deep_ep beside other distributions, with their real wheels from PyPI: sgl-deep-ep,
# which has a deep_ep too, and uccl (together 17 MB). Whatever is installed or removed first, every file of the others
# is as it was. WHEELS has the wheel of deep_ep (default: it is built). Exit 77 where nothing can be downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1/bin/python")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH EPX_LIBRARY EPX_DEEP_EP
wheels=${2:-}
if [ -z "$wheels" ]; then
    wheels=$scratch/wheels
    "$python" -m pip --quiet --disable-pip-version-check wheel --no-build-isolation --no-deps -w "$wheels" ./python
fi
wheels=$(realpath "$wheels")
venv=$scratch/venv
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input "$@"; }
fail() { echo "FAILED: $1" && exit 1; }

timeout 300 "$venv/bin/python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
    -d "$scratch/others" sgl-deep-ep uccl >"$scratch/log" 2>&1 ||
    { echo "sgl-deep-ep and uccl cannot be downloaded here" && exit 77; }
cd "$scratch"
others() { pip install --no-deps "$scratch"/others/*.whl; }
ours() { pip install --no-deps "$wheels"/deep_ep-*.whl; }

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
found() { # the folder that `import deep_ep` takes; EPX_DEEP_EP may be set
    "$venv/bin/python" -c '
import importlib.util
spec = importlib.util.find_spec("deep_ep")
print(spec.origin.split("site-packages/")[1].split("/")[0] if spec else "none")'
}
cpp() { # whose deep_ep_cpp is found: ours, theirs (a compiled module, or none)
    "$venv/bin/python" -c '
import importlib.util
spec = importlib.util.find_spec("deep_ep_cpp")
print("ours" if spec and "/epx_deep_ep/" in spec.origin else "theirs")'
}
expect() { # WHAT GOT
    [ "$1" = "$2" ] || fail "import deep_ep: expected the one in $1, got $2"
}

others && ours
whole sgl-deep-ep uccl deep_ep || fail "installed second, deep_ep has changed files of others"
expect deep_ep "$(found)"
expect epx_deep_ep "$(EPX_DEEP_EP=1 found)"
expect ours "$(EPX_DEEP_EP=1 cpp)"
pip uninstall -y deep_ep && whole sgl-deep-ep uccl || fail "removing deep_ep has changed files of others"
expect deep_ep "$(EPX_DEEP_EP=1 found)"
expect theirs "$(EPX_DEEP_EP=1 cpp)"
ours && pip uninstall -y sgl-deep-ep && whole uccl deep_ep || fail "removing sgl-deep-ep has changed files of deep_ep"
expect epx_deep_ep "$(found)"
others && whole sgl-deep-ep uccl deep_ep || fail "installed first, deep_ep was changed by others"
expect deep_ep "$(found)"
expect epx_deep_ep "$(EPX_DEEP_EP=1 found)"
pip uninstall -y deep_ep sgl-deep-ep uccl
expect none "$(found)"
names=$(cd others && ls | sed -E 's/^([^-]*-[^-]*)-.*/\1/' | paste -sd' ')
echo "deep_ep beside $names: no file of one is changed by another"
