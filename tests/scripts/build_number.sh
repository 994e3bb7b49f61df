#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The number of a build (src/util/build.h) is that of the sources: the same in another folder, and another when one of
# those changes that ranks share; documentation and stand-ins change nothing.
. "$(dirname "$0")/../lib/script.sh"

number_of() { # TREE
    cmake -DROOT="$1" -DOUT="$work/number.c" -P "$root/cmake/build_number.cmake" || fail "no number of $1"
    sed -n 's/.*| \(0x[0-9a-f]*\)u;/\1/p' "$work/number.c"
}

mkdir -p "$work/a b/tree"
cp -r "$root/src" "$root/include" "$work/a b/tree"
here=$(number_of "$root")
[[ $here =~ ^0x[0-9a-f]{8}$ ]] || fail "expected a number, got '$here'"
grep -q "${here}u" "$build/epx_build.c" || fail "the library has another number than $here"

same() {
    local now
    now=$(number_of "$work/a b/tree")
    [ "$now" = "$here" ] || fail "$1: expected the number $here, got $now"
}
differs() {
    local now
    now=$(number_of "$work/a b/tree")
    [ "$now" != "$here" ] || fail "$1: the number is the same"
}

same "a copy in another folder"
echo "/* */" >>"$work/a b/tree/src/nccl_ep/error.c"
touch "$work/a b/tree/src/kernel/params.h"
same "other libraries, and times of files"
for file in src/kernel/params.h src/device/gpu/prims.cuh src/boot/wire.h src/group/heap_layout.c include/epx/epx.h; do
    echo "/* */" >>"$work/a b/tree/$file"
    differs "$file"
    cp "$root/$file" "$work/a b/tree/$file"
done
mv "$work/a b/tree/src/kernel/params.h" "$work/a b/tree/src/kernel/params2.h"
differs "a file with another name"
finish
