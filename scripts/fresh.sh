#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A machine that has nothing: makes a bare Debian in a folder (debootstrap's minbase, git, make, ca-certificates),
# clones the project's HEAD into it and runs commands in the clone.
#
#   scripts/fresh.sh [SUITE] [COMMAND]...    SUITE: bookworm (Debian 12, the default) or trixie (Debian 13)
#                                            COMMAND: a line of shell; default: README's two, "make demo" "make test"
#
#   EPX_FRESH_ROOT=FOLDER    the Debian is made here, and kept; one that is there already is used as it is
#   EPX_FRESH_CACHE=FOLDER   keeps the bare Debian and the downloads of apt and pip between runs
#   EPX_FRESH_TMP=FOLDER     where a Debian that is not kept is made (/var/tmp)
#   EPX_FRESH_FILES=FOLDER   its files are copied to /files there
#
# Of this machine it gets the package mirror, apt's settings for downloads, certificates, pip's settings and the proxy
# variables; nothing else. Ends with a line for each command, and with the status of the last one that failed.
#
# All mounts are made in a mount namespace of their own, which ends with the processes in it. The folder is removed
# after that, from outside, where nothing was ever mounted in it. Exit 77: this machine cannot do it (not root, no
# debootstrap).
set -euo pipefail

cannot() {
    echo "fresh: $1"
    exit 77
}

packages=git,make,ca-certificates

# ---- Outside: the folder

# The first mirror of Debian (not of its security updates) that this machine's apt uses.
mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
        sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *([^ ]*debian)\/?( .*)?$/\3/p' | sed -n '1p' || true
}

# The bare Debian. With a cache it comes from a file there; base-SUITE-ARCHITECTURE.tar is made by the first run.
make_root() {
    local stored=${EPX_FRESH_CACHE:+$EPX_FRESH_CACHE/base-$suite-$(uname -m).tar} from
    mkdir -p "$root"
    if [ -n "$stored" ] && [ -e "$stored" ]; then
        echo "fresh: $suite from $stored"
        tar -C "$root" --numeric-owner -xpf "$stored"
        return
    fi
    from=$(mirror)
    echo "fresh: debootstrap $suite ${from:-from its default mirror}"
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${from:+"$from"} >"$root.log" 2>&1 ||
        { tail -20 "$root.log"; cannot "debootstrap failed"; }
    rm -f "$root.log" "$root"/var/cache/apt/archives/*.deb
    if [ -n "$stored" ]; then
        tar -C "$root" --numeric-owner --one-file-system -cpf "$stored.$$" . && mv "$stored.$$" "$stored"
    fi
}

# What a user of this network has to set up on any machine: certificates, proxies, where pip looks.
copy_settings() {
    local file
    while read -r file; do
        cp "$file" "$root/etc/apt/apt.conf.d/"
    done < <(grep -lE '^[[:space:]]*Acquire::' /etc/apt/apt.conf.d/* 2>/dev/null || true)
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
    for file in /etc/pip.conf /etc/resolv.conf /etc/hosts; do
        [ ! -e "$file" ] || cp --remove-destination -L "$file" "$root$file"
    done
    if [ -n "${EPX_FRESH_CACHE:-}" ]; then
        echo 'Binary::apt-get::APT::Keep-Downloaded-Packages "true"; APT::Keep-Downloaded-Packages "true";' \
            >"$root/etc/apt/apt.conf.d/90epx-fresh"
    fi
}

outside() {
    local here project
    here=$(cd "$(dirname "$0")" && pwd)
    project=$(git -C "$here" rev-parse --show-toplevel)
    suite=bookworm
    case ${1:-} in bookworm | trixie) suite=$1 && shift ;; esac
    [ $# -gt 0 ] || set -- "make demo" "make test"
    [ "$(id -u)" -eq 0 ] || cannot "needs root, for chroot and mount"
    unshare --mount --pid --fork true 2>/dev/null || cannot "may not make namespaces here"
    if ! command -v debootstrap >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap; } </dev/null >/dev/null \
            2>&1 ||
            cannot "there is no debootstrap, and apt-get could not install it"
    fi
    git -C "$project" diff --quiet HEAD 2>/dev/null ||
        echo "fresh: there are changes that are not committed: they are not tested"

    kept=${EPX_FRESH_ROOT:-}
    if [ -n "$kept" ]; then
        root=$kept
    else
        work=$(mktemp -d "${EPX_FRESH_TMP:-/var/tmp}/epx-fresh.XXXXXX")
        root=$work/root
        trap 'rm -rf --one-file-system "$work"' EXIT
    fi
    [ -z "${EPX_FRESH_CACHE:-}" ] || mkdir -p "$EPX_FRESH_CACHE/apt-$suite/partial" "$EPX_FRESH_CACHE/pip"
    [ -e "$root/etc/debian_version" ] || make_root
    root=$(cd "$root" && pwd)
    copy_settings
    rm -rf --one-file-system "$root/clone"
    git clone -q "$project" "$root/clone"
    [ -z "${EPX_FRESH_FILES:-}" ] || cp -r "$EPX_FRESH_FILES" "$root/files"
    # unshare ignores signals but this one, which ends (--kill-child) all that runs inside.
    EPX_FRESH_INSIDE=$root unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
        bash "$here/fresh.sh" "$suite" "$@" &
    inner=$!
    trap 'kill -KILL "$inner" 2>/dev/null || true; wait "$inner" || true; exit 143' INT TERM
    wait "$inner"
}

# ---- Inside the namespaces: mounts, then the commands

# The chroot's root has to be a mount point: programs in it make mount namespaces, and cannot change the root's
# propagation otherwise.
mount_all() {
    local node
    mount --bind "$root" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sys "$root/sys" 2>/dev/null || mount --rbind /sys "$root/sys"
    mount -t tmpfs -o mode=755 dev "$root/dev"
    for node in null zero full random urandom tty; do
        touch "$root/dev/$node"
        mount --bind "/dev/$node" "$root/dev/$node"
    done
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    for node in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${node%:*}" "$root/dev/${node#*:}"; done
    mount -t tmpfs -o mode=755 run "$root/run"
    mkdir "$root/run/lock" && chmod 1777 "$root/run/lock"
    if [ -n "${EPX_FRESH_CACHE:-}" ]; then
        mkdir -p "$root/root/.cache/pip"
        mount --bind "$EPX_FRESH_CACHE/apt-$suite" "$root/var/cache/apt/archives"
        mount --bind "$EPX_FRESH_CACHE/pip" "$root/root/.cache/pip"
    fi
    # Wheels in a folder of this machine.
    if [ -d "${PIP_FIND_LINKS:-}" ]; then
        mkdir -p "$root$PIP_FIND_LINKS"
        mount --bind "$PIP_FIND_LINKS" "$root$PIP_FIND_LINKS"
    fi
}

inside() {
    suite=$1 root=$EPX_FRESH_INSIDE
    shift
    mount_all
    local settings=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        "TERM=${TERM:-dumb}" LANG=C.UTF-8
        SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt) name command began rc status=0 lines=()
    for name in $(compgen -e | grep -E \
        '^(PIP_|CI$|JOBS$|EPX_TEST_|(http|https|no|all)_proxy$|(HTTP|HTTPS|NO|ALL)_PROXY$)' || true); do
        settings+=("$name=${!name}")
    done
    for command; do
        began=$SECONDS rc=0
        echo "fresh: $suite: $command"
        env -i "${settings[@]}" chroot "$root" /bin/bash -c "cd /clone && $command" </dev/null || rc=$?
        lines+=("fresh: $suite: $command: exit $rc, $((SECONDS - began)) s")
        [ $rc -eq 0 ] || status=$rc
    done
    printf '%s\n' "${lines[@]}"
    exit $status
}

if [ -n "${EPX_FRESH_INSIDE:-}" ]; then
    inside "$@"
else
    outside "$@"
fi
