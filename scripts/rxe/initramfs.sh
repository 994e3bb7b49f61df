#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# initramfs.sh KERNEL FILE: busybox, the modules for 9p, overlay, veth and Soft-RoCE in loading order, and init.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernel=$1 file=$2
release=$(cat "$kernel/release")
tree=$(mktemp -d "$file.XXXXXX")
trap 'rm -rf "$tree"' EXIT

mkdir -p "$tree"/{bin,modules,proc,sys,dev,host,over,new}
cp "$(command -v busybox)" "$tree/bin/busybox"
cp "$here/init" "$tree/init"
chmod 755 "$tree/init" "$tree/bin/busybox"

# crc32_generic: rxe asks the crypto layer for "crc32" and fails with ENOENT without it; nothing depends on it by name.
number=100
declare -A seen=()
for module in virtio_pci 9pnet_virtio 9p overlay crc32_generic rdma_rxe ib_uverbs rdma_ucm veth; do
    while read -r word path _; do
        [ "$word" = insmod ] || continue # "builtin NAME" has nothing to load
        [ -z "${seen[$path]:-}" ] || continue
        seen[$path]=1
        name=$(basename "$path")
        case $name in
        *.xz) xz -dc "$path" >"$tree/modules/$number-${name%.xz}" ;;
        *.zst) zstd -qdc "$path" >"$tree/modules/$number-${name%.zst}" ;;
        *) cp "$path" "$tree/modules/$number-$name" ;;
        esac
        number=$((number + 1))
    done < <(modprobe -d "$kernel" -S "$release" --show-depends "$module")
done
[ ${#seen[@]} -gt 4 ] || { echo "found only ${#seen[@]} modules of kernel $release" && exit 1; }
(cd "$tree" && find . | cpio -o -H newc --quiet) | gzip -1 >"$file"
