#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The HIP module compiles without a warning and links, for every architecture it is meant for; each kernel is in it,
# and one symbol is all that it shows. The library opens it and, without an AMD GPU, refuses politely. One architecture
# will do for flavours of a kernel (kernel/flavour.h), which are that kernel with less in it, and for kernels that only
# combine or notify: what differs between architectures, the cast to FP8 (gpu/hip/hardware.h), is in dispatch. With
# EPX_TEST_SCALE of 8 or more all kernels but flavours are compiled for all.
# ctest: cost=90 timeout=1800 labels=hip,slow,noasan,notsan
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
command -v hipcc >/dev/null || skip "no hipcc"

single='_(one_node|marks|combine|notify|logfmt)$' # as Python and CMake read it
awk "BEGIN { exit !(${EPX_TEST_SCALE:-1} >= 8) }" && single='_(one_node|marks)$'
began=$SECONDS
{ cmake -S "$root" -B "$work" -DCMAKE_BUILD_TYPE=Release -DEPX_WERROR=ON -DEPX_HIP=ON -DEPX_CUDA=OFF \
    -DEPX_HIP_FLAVOUR_ARCHITECTURES=gfx940 -DEPX_HIP_FLAVOURS="$single" -DEPX_BUILD_TESTS=OFF &&
    cmake --build "$work" -j2 --target epx_hip; } >"$work/log" 2>&1 ||
    { tail -40 "$work/log"; die "the build"; }
echo "ok: built in $((SECONDS - began)) s"
module=$work/libepx_hip.so

# Code for GPUs lies in the module as bundles: a magic, then per piece its offset, size and target.
python3 - "$module" "$single" "$root"/src/device/gpu/*.cu <<'PY' || fail "kernels"
import pathlib, re, struct, sys

data = open(sys.argv[1], "rb").read()
magic, found, at = b"__CLANG_OFFLOAD_BUNDLE__", {}, 0
while (at := data.find(magic, at)) >= 0:
    (count,) = struct.unpack_from("<Q", data, at + len(magic))
    entry = at + len(magic) + 8
    for _ in range(count):
        offset, size, length = struct.unpack_from("<3Q", data, entry)
        target = data[entry + 24 : entry + 24 + length].decode()
        code = data[at + offset : at + offset + size]
        if target.startswith("hip"):
            assert code[:4] == b"\x7fELF" and struct.unpack_from("<H", code, 18)[0] == 224, f"{target}: no AMD GPU code"
            found.setdefault(target.split("-")[-1], []).append(code)
        entry += 24 + length
    at += len(magic)
names = [pathlib.Path(file).stem for file in sys.argv[3:]]
assert all(any(part in name for name in names) for part in ("dispatch", "combine", "notify")), names
for gpu in ("gfx90a", "gfx940"):
    here_names = [name for name in names if gpu == "gfx940" or not re.search(sys.argv[2], name)]
    for name in here_names:
        space, verb = (f"epx_{name[:2]}", name[3:]) if name[:3] in ("ll_", "ht_") else ("epx", name)
        for flavour in ("_one_node", "_marks"): # kernel/flavour.h: the same name in a space of its own
            if verb.endswith(flavour):
                space, verb = space + flavour, verb.removesuffix(flavour)
        symbol = f"epx_{name}" if name in ("first", "clock") else f"_ZN{len(space)}{space}{len(verb)}{verb}E\\w+"
        here = sum(bool(re.search(f"\0{symbol}\\.kd\0".encode(), code)) for code in found.get(gpu, []))
        assert here == 1, f"{gpu}: {space}::{verb} is there {here} times, expected once"
    print(f"ok: {len(here_names)} kernels for {gpu}")
PY

symbols=$(nm -D --defined-only "$module" | awk '{print $3}')
[ "$symbols" = epx_device_module ] && echo "ok: one symbol" || fail "exported: $symbols"

if [ -e /dev/kfd ]; then
    echo "skipped: refusals: this machine may have an AMD GPU"
else
    EPX_MODULE_DIR=$work timeout 200 "$epx" bench ll --device hip --ranks 2 --tokens 4 >"$work/out" 2>&1
    rc=$?
    [ $rc -eq 2 ] && grep -q "device hip: expected a GPU, found none: " "$work/out" &&
        echo "ok: refused without a GPU" ||
        fail "without a GPU: exit code $rc, expected 2 and the reason"
    EPX_MODULE_DIR=$work EPX_DEVICE=hip timeout 200 "$epx" doctor >"$work/out" 2>&1
    grep -q "libepx_hip.so can be opened" "$work/out" && echo "ok: doctor opens it" ||
        fail "doctor"
    EPX_MODULE_DIR=$work/nowhere timeout 200 "$epx" bench ll --device hip --ranks 2 --tokens 4 >"$work/out" 2>&1
    rc=$?
    [ $rc -eq 2 ] && grep -q "device hip: expected a GPU, found none: " "$work/out" &&
        echo "ok: refused without the module" ||
        fail "without the module: exit code $rc, expected 2 and the reason"
fi
finish
