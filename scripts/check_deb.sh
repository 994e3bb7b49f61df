#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_deb.sh FOLDER: installs the packages in FOLDER on this machine, uses each of them, and purges them: nothing of
# them may remain. It changes the machine, so it runs where nobody minds: scripts/packages.sh starts it in a bare
# Debian, and it refuses to run elsewhere.
set -euo pipefail
debs=$(realpath "$1")
if [ -z "${EPX_TEST_DISPOSABLE:-}" ]; then
    echo "check_deb: set EPX_TEST_DISPOSABLE=1 if this machine may be changed"
    exit 2
fi
export DEBIAN_FRONTEND=noninteractive
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=(libepx0 libepx-dev epx-tools python3-epx) # what production installs

quietly() { # command...
    "$@" </dev/null >"$work/log" 2>&1 || { cat "$work/log" && echo "check_deb: failed: $*" && exit 1; }
}

fail() {
    echo "check_deb: $1"
    exit 1
}

files() { find / -xdev \( -path /proc -o -path /tmp -o -path /clone -o -path /root -o -path /var/cache \
    -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /var/log -o -path /files \) -prune -o -print | sort; }

cd "$work"
# What the test itself needs, and what the packages depend on: they are not what is looked for afterwards.
quietly apt-get update
quietly apt-get install -y --no-install-recommends gcc libc6-dev pkg-config python3
quietly apt-get install -y --no-install-recommends $(dpkg-deb -f "$debs"/libepx0_*.deb Recommends | tr ',' ' ')
files >"$work/before"

# Nothing that takes the place of NCCL or CUDA is in them.
for package in "${packages[@]}"; do
    files_of=$(dpkg-deb -c "$debs/$package"_*.deb)
    ! grep -E 'libnccl\.so|libepx_(nccl|cudart)|/(nccl|cuda[a-z_0-9]*|nvToolsExt)\.h' <<<"$files_of" ||
        fail "a stand-in is in $package"
done
mapfile -t given < <(printf "$debs/%s_*.deb\n" "${packages[@]}")
# shellcheck disable=SC2068
quietly apt-get install -y --no-install-recommends ${given[@]}
echo "installed: $(dpkg-query -W -f '${Package} ${Version}, ' "${packages[@]}")"

# epx-tools
quietly epx doctor
quietly epx bench ll --ranks 4 --tokens 16 --hidden 512 --iters 2 --check
quietly epx bench ht --ranks 4 --nodes 2 --tokens 16 --hidden 512 --iters 2 --check
ep_bench=(epx ep-bench -n 2 --tokens 4 --hidden 256 --experts 4 --top-k 2 --iters 1 --warmup 0 --validate)
! "${ep_bench[@]}" 2>"$work/err" || fail "epx ep-bench runs without epx-standin"
grep -q epx-standin "$work/err" || fail "epx ep-bench without epx-standin: got $(cat "$work/err")"
echo "ok: epx doctor and bench"

# libepx-dev: the example that is installed, compiled as its reader would
example=/usr/share/doc/libepx-dev/examples/hello.c
[ -e "$example" ] || { gunzip -c "$example.gz" >hello.c && example=hello.c; }
# shellcheck disable=SC2046
quietly cc "$example" $(pkg-config --cflags --libs epx) -o hello
quietly epx run -n 4 ./hello
for page in man1/epx.1 man1/epx-bench.1 man3/epx_group_create.3 man7/epx.7 man7/epx_environment.7; do
    [ -e "/usr/share/man/$page.gz" ] || [ -L "/usr/share/man/$page.gz" ] || fail "no $page"
done
echo "ok: hello.c, compiled and run; the manual pages"

# python3-epx
cat >ranks.py <<'PYTHON'
import array, epx, importlib.metadata
assert importlib.metadata.version("epx-moe") == epx.__version__
group = epx.Group(num_experts=4, max_tokens_per_rank=4, max_hidden_bytes=64, max_topk=1)
info = group.info
print("rank", info.rank, "of", info.nranks)
group.destroy()
PYTHON
quietly epx run -n 2 python3 ranks.py
grep -q "rank 1 of 2" "$work/log" || fail "two ranks in Python: got $(cat "$work/log")"
echo "ok: two ranks in Python"

# epx-standin: ep-bench, and the example for nccl_ep.h
quietly apt-get install -y --no-install-recommends "$debs"/epx-standin_*.deb
packages+=(epx-standin)
quietly "${ep_bench[@]}"
example=/usr/share/doc/libepx-dev/examples/nccl_ep_hello.c
[ -e "$example" ] || { gunzip -c "$example.gz" >nccl_ep_hello.c && example=nccl_ep_hello.c; }
# shellcheck disable=SC2046
quietly cc "$example" $(pkg-config --cflags --libs epx-nccl-ep epx-standin epx) -o nccl_ep_hello
quietly epx run -n 4 ./nccl_ep_hello
echo "ok: epx ep-bench, and nccl_ep_hello.c on the stand-ins"

quietly apt-get purge -y "${packages[@]}"
quietly apt-get autoremove -y --purge
! dpkg -l "${packages[@]}" 2>/dev/null | grep -q '^[^nu]n\|^rc' || fail "dpkg still knows one of ${packages[*]}"
files >"$work/after"
left=$(comm -13 "$work/before" "$work/after" | grep -v '/__pycache__\(/\|$\)' || true)
[ -z "$left" ] || fail "left behind after purge: $left"
left=$(find / -xdev -path /proc -prune -o -path /clone -prune -o -path /files -prune -o -path "$work" -prune \
    -o -path '*/epx/__pycache__*' -print)
[ -z "$left" ] || fail "left behind after purge: $left"
echo "check_deb: installed, used and purged"
