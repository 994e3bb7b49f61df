#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Machines without libsodium, and without OpenSSL's libcrypto too: in a mount namespace, where an empty file hides each
# library. With the one that is left ranks authenticate as before; with none they say what is missing and do not start;
# EPX_SECRET=none starts them all the same (docs/security.md).
set -u
. "$(dirname "$0")/../lib/script.sh"
hello=$build/examples/hello
if [ $# -eq 0 ]; then
    unshare -m true 2>/dev/null || { echo "may not make namespaces here: $(unshare -m true 2>&1)" && exit 77; }
    unshare -m bash "$0" inside
    exit
fi
unset EPX_SECRET EPX_SECRET_FILE
no_leak_checks
touch "$work/empty"

hide() { # library
    local file
    ldconfig -p | sed -n "s|.*$1\.so.* => ||p" | while read -r file; do
        mount --bind "$work/empty" "$(readlink -f "$file")"
    done
}

expect() { # code, text, name, command...
    local code=$1 text=$2 name=$3 got
    shift 3
    timeout 200 "$@" >"$work/out" 2>&1 </dev/null
    got=$?
    if [ $got -ne "$code" ] || ! grep -qF -- "$text" "$work/out"; then
        fail "$name: exit code $got, expected $code and \"$text\""
        return
    fi
    echo "ok: $name"
}

PATH=$PATH:/usr/sbin:/sbin
hide libsodium
expect 0 "authenticated by libcrypto" "libcrypto takes its place" env EPX_LOG=debug "$epx" run -n 2 "$hello"
hide libcrypto
expect 1 "neither libsodium nor libcrypto" "without both ranks do not start" "$epx" run -n 2 "$hello"
expect 0 "0 wrong values" "unless nobody proves anything" env EPX_SECRET=none "$epx" run -n 2 "$hello"
expect 0 "install libsodium" "doctor says so" "$epx" doctor
finish
