#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Real verbs without a card: boots Debian's own kernel in QEMU, with this machine's root file system read-only
# underneath, makes two Soft-RoCE devices there and runs guest.sh. Needs no privileges, changes nothing outside the
# cache directory. See docs/verbs.md.
#
#   scripts/rxe/run.sh [BUILD]      0: all passed, 77: skipped (the last line says why), else failed
#
#   EPX_RXE_CACHE    where the kernel is kept          (~/.cache/epx-rxe)
#   EPX_RXE_LIMIT_S  seconds until the machine is stopped (1500)
#   EPX_RXE_ACCEL    tcg or kvm                         (kvm where it boots the machine)
#   EPX_RXE_TESTS    what to run there                  (tests.sh)
#   EPX_RXE_SHELL=1  a shell in the machine instead of the tests
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$(cd "$root" && realpath -m "${1:-build}")
. "$here/../wait_shown.sh"
cache=${EPX_RXE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/epx-rxe}
limit_s=${EPX_RXE_LIMIT_S:-1500}

skip() {
    echo "Soft-RoCE skipped: $1"
    exit 77
}

case $(uname -m) in
aarch64) arch=arm64 qemu=qemu-system-aarch64 qemu_package=qemu-system-arm console=ttyAMA0 ;;
x86_64) arch=amd64 qemu=qemu-system-x86_64 qemu_package=qemu-system-x86 console=ttyS0 ;;
*) skip "no recipe for $(uname -m)" ;;
esac
export PATH=$PATH:/usr/sbin:/sbin

missing=()
need() { # package, file or command
    [ -e "$2" ] || command -v "$2" >/dev/null || missing+=("$1")
}

find_missing() {
    local provider=
    missing=()
    need "$qemu_package" "$qemu"
    need busybox-static busybox
    need cpio cpio
    need kmod depmod
    need iproute2 rdma
    provider=$(find /usr/lib* -path '*libibverbs*' -name 'librxe-rdmav*.so' -print -quit 2>/dev/null || true)
    need ibverbs-providers "${provider:-/nowhere}"
    need ibverbs-utils ibv_devinfo
}

find_missing
if [ ${#missing[@]} -ne 0 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "Installing: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
        </dev/null >/dev/null 2>&1 || true
    find_missing
fi
[ ${#missing[@]} -eq 0 ] || skip "needs the packages (Debian's names) ${missing[*]}"
[ -x "$build/tests/test_net_verbs" ] || { echo "$build/tests/test_net_verbs is not there: run make first" && exit 1; }

mkdir -p "$cache"
exec 9>"$cache/lock"
flock -w 300 9 || skip "another run holds $cache/lock"
work=$(mktemp -d "$cache/run.XXXXXX")
trap 'rm -rf "$work"' EXIT

"$here/kernel.sh" "$arch" "$cache" >"$work/kernel.log" 2>&1 ||
    skip "no kernel for the machine: $(tail -1 "$work/kernel.log")"
kernel=$cache/kernel-$arch
"$here/initramfs.sh" "$kernel" "$work/initramfs" >"$work/initramfs.log" 2>&1 ||
    { cat "$work/initramfs.log" && echo "the initramfs could not be made" && exit 1; }
flock -u 9

accel=${EPX_RXE_ACCEL:-tcg}
[ -z "${EPX_RXE_ACCEL:-}" ] && [ -r /dev/kvm ] && [ -w /dev/kvm ] && accel=kvm

# Arguments reach the guest on the kernel's command line, spelled without spaces.
append="console=$console quiet panic=-1 epx.build=$build epx.tests=${EPX_RXE_TESTS:-$here/tests.sh}"
append+=" epx.root=$root epx.shell=${EPX_RXE_SHELL:-0}"
set_command() { # tcg or kvm
    local cpu=max machine=q35 how=$1
    [ "$1" = kvm ] && cpu=host
    if [ $arch = arm64 ]; then
        machine=virt
        [ "$1" = tcg ] && cpu=max,pauth-impdef=on # the architected algorithm costs half the time
        [ "$1" = kvm ] && machine=virt,gic-version=host
    fi
    [ "$1" = tcg ] && how=tcg,thread=multi
    command=("$qemu" -M "$machine" -accel "$how" -cpu "$cpu" -smp 2 -m 2048 -nographic -nic none -no-reboot
        -kernel "$kernel/vmlinuz" -initrd "$work/initramfs" -append "$append"
        -fsdev local,id=fs0,path=/,security_model=none,readonly=on,multidevs=remap
        -device virtio-9p-pci,fsdev=fs0,mount_tag=hostfs)
}
set_command "$accel"
if [ "${EPX_RXE_SHELL:-0}" = 1 ]; then
    "${command[@]}"
    exit
fi

rc=0
start() {
    timeout "$limit_s" "${command[@]}" </dev/null >"$work/console" 2>&1 &
    guest=$!
}
# Whether the guest's own program has begun within a minute. A kvm inside another virtual machine may never get so far.
begun() {
    local until=$((SECONDS + 60))
    while kill -0 "$guest" 2>/dev/null && [ $SECONDS -lt $until ]; do
        grep -q EPX-RXE-BEGIN "$work/console" && return
        sleep 0.5
    done
    grep -q EPX-RXE-BEGIN "$work/console"
}
start
trap 'kill "$guest" 2>/dev/null || true; rm -rf "$work"' EXIT
if [ "$accel" = kvm ] && [ -z "${EPX_RXE_ACCEL:-}" ] && ! begun; then
    echo "kvm does not start the machine here: it is emulated"
    kill "$guest" 2>/dev/null || true
    wait "$guest" 2>/dev/null || true
    set_command tcg
    start
fi
trap 'exit 143' INT TERM # a wait is interrupted, a command in the foreground is not: the machine must not outlive us
ended() { tr -d '\r' <"$work/console" | grep -E '^(passed|FAILED|skipped): '; }
wait_shown "$guest" Soft-RoCE ended || rc=$?
tr -d '\r' <"$work/console" >"$work/log"
result=$(sed -n 's/^EPX-RXE-RESULT \([0-9]*\) \([0-9]*\) \([0-9]*\)$/\1 \2 \3/p' "$work/log" | tail -1)
if [ -z "$result" ]; then
    tail -80 "$work/log"
    [ $rc -eq 124 ] && echo "the machine was stopped after $limit_s s"
    echo "Soft-RoCE FAILED: the machine ended without a result (qemu's exit status $rc)"
    exit 1
fi
read -r passed failed skipped <<<"$result"
if [ "$failed" -ne 0 ] || [ -n "${EPX_RXE_TESTS:-}" ]; then
    sed -n '/EPX-RXE-BEGIN/,$p' "$work/log" | tail -300
else
    grep -E '^(passed|skipped): ' "$work/log" || true
fi
echo "Soft-RoCE: $passed passed, $failed failed, $skipped skipped, in $SECONDS s"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
