#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure that the packages are there: deps.sh build|test. As root it installs what is missing with apt-get;
# otherwise it names the packages and fails. Looks for what is used, not for package names, so that other
# distributions and hand-made installations pass too.
set -euo pipefail

missing=()

need() { # package, then a command that succeeds if the thing is there
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

find_missing() {
    missing=()
    need build-essential sh -c '${CC:-cc} --version && make --version'
    need cmake cmake --version
    need pkg-config pkg-config --version
    need libcmocka-dev pkg-config --exists cmocka
    need openmpi-bin mpirun --version
    need libopenmpi-dev mpicc --version
    if [ "$1" = test ]; then
        need build-essential sh -c 'gcc --version && g++ --version'
        need clang clang --version
        need clang-format clang-format --version
        need git git --version
        need python3 python3 --version
    fi
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sed '/^$/d' | sort -u)
}

find_missing "${1:-build}"
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "EPX needs these packages (Debian's names): ${missing[*]}" >&2
    echo "Install them, for example: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi

echo "Installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
find_missing "${1:-build}"
if [ ${#missing[@]} -ne 0 ]; then
    echo "Still missing after apt-get install: ${missing[*]}" >&2
    exit 1
fi
