#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes sure that the packages are there: deps.sh build|test. As root it installs what is missing with apt-get;
# otherwise it names the packages and fails, unless the build can do without. Looks for what is used, not for package
# names, so that other distributions and hand-made installations pass too.
set -euo pipefail

missing=()  # nothing works without
optional=() # the build leaves something out without

need() { # package, then a command that succeeds if the thing is there
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}

want() {
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || optional+=("$package")
}

find_missing() {
    local for_tests=want
    [ "$1" = test ] && for_tests=need
    missing=() optional=()
    need build-essential sh -c '${CC:-cc} --version && make --version'
    need cmake cmake --version
    need pkg-config pkg-config --version
    $for_tests libcmocka-dev pkg-config --exists cmocka
    $for_tests openmpi-bin mpirun --version
    $for_tests libopenmpi-dev mpicc --version
    [ "$1" = test ] || return 0
    need build-essential sh -c 'gcc --version && g++ --version'
    need clang clang --version
    need python3 python3 --version
    want python3-venv python3 -c 'import ensurepip, venv'
    want clang-format clang-format --version
    want hipcc sh -c "command -v hipcc"
    mapfile -t missing < <(printf "%s\n" ${missing[@]+"${missing[@]}"} | sed "/^$/d" | sort -u)
}

find_missing "${1:-build}"
all=(${missing[@]+"${missing[@]}"} ${optional[@]+"${optional[@]}"})
[ ${#all[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "Installing: ${all[*]}"
    export DEBIAN_FRONTEND=noninteractive
    log=$(mktemp)
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${all[@]}"; } </dev/null >"$log" 2>&1 ||
        { cat "$log" && echo "apt-get failed"; } >&2
    rm -f "$log"
    find_missing "${1:-build}"
fi

if [ ${#optional[@]} -ne 0 ]; then
    echo "Not here, so some parts are left out (Debian's names): ${optional[*]}" >&2
fi
if [ ${#missing[@]} -ne 0 ]; then
    echo "EPX needs these packages (Debian's names): ${missing[*]}" >&2
    echo "Install them, for example: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
