#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kernel.sh ARCH CACHE: Debian's kernel for ARCH in CACHE/kernel-ARCH: vmlinuz, release, lib/modules. Fetched once,
# never installed. EPX_RXE_KERNEL may name a .deb to use instead of a download.
set -euo pipefail
arch=$1 cache=$2
to=$cache/kernel-$arch
[ -f "$to/release" ] && exit 0

work=$(mktemp -d "$cache/kernel.XXXXXX")
trap 'rm -rf "$work"' EXIT
if [ -n "${EPX_RXE_KERNEL:-}" ]; then
    deb=$EPX_RXE_KERNEL
else
    command -v apt-get >/dev/null || { echo "no apt-get to fetch it with; EPX_RXE_KERNEL may name a .deb" && exit 1; }
    package=$(apt-cache depends "linux-image-$arch" 2>/dev/null |
        sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
    if [ -z "$package" ] && [ "$(id -u)" -eq 0 ]; then
        apt-get update -qq
        package=$(apt-cache depends "linux-image-$arch" | sed -n 's/^ *Depends: \(linux-image-[^ ]*\)$/\1/p' | head -1)
    fi
    [ -n "$package" ] || { echo "apt knows no linux-image-$arch" && exit 1; }
    # As root, apt fetches as another user, who may not write here: its warning is harmless.
    (cd "$work" && apt-get download "$package") || { echo "apt-get download $package failed" && exit 1; }
    deb=$(echo "$work"/linux-image-*.deb)
fi

mkdir "$work/tree"
dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/tree" --wildcards './boot/vmlinuz-*' './lib/modules/*' ||
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/tree"
image=$(echo "$work"/tree/boot/vmlinuz-*)
release=${image##*/vmlinuz-}
mv "$image" "$work/tree/vmlinuz"
rm -rf "$work/tree/boot"
# Debian 13 and later have moved /lib to /usr/lib.
[ -d "$work/tree/lib/modules" ] || mv "$work/tree/usr/lib" "$work/tree/lib"
depmod -b "$work/tree" "$release"
chmod -R u+rwX "$work/tree"
echo "$release" >"$work/tree/release"
rm -rf "$to"
mv "$work/tree" "$to"
