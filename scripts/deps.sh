#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deps.sh [--install] PURPOSE [CMAKE_OPTION]...: looks for what is used, not for package names, so that other
# distributions and installations by hand pass too. Names what is missing (packages of Debian 12 and 13, and what each
# is for), and fails if nothing works without one of them. With --install, root gets them by apt-get: it first prints
# what, how much and why.
#
#   PURPOSE   build, demo, quick, test, check, fuzz, deb, lintian, abi or docs
set -euo pipefail

install=0
[ "${1:-}" != --install ] || { install=1 && shift; }
purpose=${1:-build}
shift || true
options=" $* "
missing=()  # nothing works without: "package: what for"
optional=() # something is left out without

need() { # package, what for, then a command that succeeds if the thing is there
    local package=$1 why=$2
    shift 2
    "$@" >/dev/null 2>&1 || missing+=("$package: $why")
}

want() {
    local package=$1 why=$2
    shift 2
    "$@" >/dev/null 2>&1 || optional+=("$package: $why")
}

# Whether the preprocessor finds a header, or the options say that the build is to do without or where it is.
network() { # CMake's option, header
    [[ $options != *" -DEPX_$1=OFF "* && $options != *" -DEPX_$1_INCLUDE="* ]] || return 0
    "${CC:-cc}" -E -x c - <<<"#include <$2>"
}

# Whether a program can open a library by this name.
has_library() { [[ $(PATH=$PATH:/usr/sbin:/sbin ldconfig -p) == *"$1"* ]]; }

# Those of the python3 that CMake finds.
python_headers() {
    python3 -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'
}

has_libc() { [ -e "$("$1" -print-file-name=crt1.o)" ]; }

tool() { PATH=$PATH:/usr/sbin:/sbin command -v "$1"; }

find_library() {
    need build-essential "C compiler and make" sh -c '${CC:-cc} --version && make --version'
    need cmake "the build" cmake --version
    need pkg-config "the build" pkg-config --version
    need libfabric-dev "network between nodes: ofi (-DEPX_OFI=OFF does without)" network OFI rdma/fabric.h
    need libibverbs-dev "network between nodes: verbs (-DEPX_VERBS=OFF does without)" \
        network VERBS infiniband/verbs.h
}

find_build() {
    local for_tests=need
    [ "$purpose" != build ] || for_tests=want
    find_library
    want python3 "manual pages" python3 --version # cmake/EpxManual.cmake
    want python3-dev "deep_ep" python_headers # cmake/EpxCalls.cmake
    want libsodium23 "sealed connections; without it by libcrypto" has_library libsodium.so # docs/security.md
    $for_tests libcmocka-dev "tests in C" pkg-config --exists cmocka
    $for_tests openmpi-bin "epx bench --vs mpi" mpirun --version
    $for_tests libopenmpi-dev "epx bench --vs mpi" mpicc --version
}

find_quick() {
    need build-essential "compilers" sh -c 'gcc --version && g++ --version'
    need python3 "the program that runs tests" python3 --version
    need git "checks of files and commits" git --version
    # Without it nothing is left out, but the wheel of the tests compiles the library once more.
    [ "$(id -u)" -ne 0 ] || want ccache "no file is compiled twice" tool ccache
    want ninja-build "a build that takes less time for itself" tool ninja
    want mandoc "check of the manual pages" tool mandoc # scripts/manual/check.py
    need iproute2 "network namespaces as hosts" tool ip # tests/scripts/netns.sh
    want clang-format "format of the sources" clang-format --version # of Debian 12: scripts/format.sh
}

find_test() {
    need python3-venv "Python tests" python3 -c 'import ensurepip, venv'
    want spin "check of the models" tool spin # scripts/check_models.sh
}

find_check() {
    need clang "the second compiler" clang --version
    need clang-tidy "lint" clang-tidy --version
    want hipcc "compile the module for AMD GPUs" tool hipcc
    need abigail-tools "check of the ABI" tool abidiff # scripts/check_abi.py
    want zsh "check of its completion" tool zsh               # tests/scripts/completion.sh
    want prometheus "check of the metrics" tool promtool      # tests/scripts/top_prometheus.sh
    want chromium "look at reports" sh -c 'chromium --version || chromium-browser --version' # tests/scripts/report.sh
    # The architecture that the stage cross compiles for: compiler and C library.
    case $(uname -m) in
    aarch64)
        need gcc-x86-64-linux-gnu "compile for the other architecture" x86_64-linux-gnu-gcc --version
        need libc6-dev-amd64-cross "compile for the other architecture" has_libc x86_64-linux-gnu-gcc
        ;;
    *)
        need gcc-aarch64-linux-gnu "compile for the other architecture" aarch64-linux-gnu-gcc --version
        need libc6-dev-arm64-cross "compile for the other architecture" has_libc aarch64-linux-gnu-gcc
        ;;
    esac
    need qemu-user "run programs of the other architecture" sh -c 'qemu-x86_64 --version && qemu-aarch64 --version'
}

find_deb() {
    need dpkg-dev "packages" dpkg-buildpackage --version
    need debhelper "packages" tool dh
    need dh-python "packages" tool dh_python3
    need fakeroot "packages" tool fakeroot
    need python3 "packages" python3 --version
    need libopenmpi-dev "epx bench --vs mpi" mpicc --version
    need libc6-dev "C library" has_libc cc
}

# clang's libFuzzer and sanitizers, in a package that carries clang's version in its name. clang itself may come first.
has_fuzzer() {
    printf '#include <stddef.h>\nint LLVMFuzzerTestOneInput(const unsigned char *d, size_t n) { return !d && n; }' |
        clang -fsanitize=fuzzer,address -x c - -o /dev/null
}

find_fuzz() {
    local version
    want clang "libFuzzer" clang --version
    version=$(clang -dumpversion 2>/dev/null || apt-cache show clang 2>/dev/null | sed -n 's/^Version: [0-9]*:\?//p')
    version=${version%%.*}
    [ -z "$version" ] || want "libclang-rt-$version-dev" "libFuzzer" has_fuzzer
}

find_missing() {
    missing=() optional=()
    case $purpose in
    demo) find_library ;;
    lintian) need lintian "check of the packages" tool lintian ;;
    abi) need abigail-tools "check of the ABI" tool abidiff ;;
    docs)
        find_build
        need mkdocs "the site of the documentation" tool mkdocs
        need mandoc "the site of the documentation" tool mandoc
        ;;
    *) find_build ;;
    esac
    case $purpose in
    quick | test | check) find_quick ;;
    deb) find_deb ;;
    esac
    case $purpose in test | check) find_test ;; esac
    [ "$purpose" != check ] || find_check
    [ "$purpose" != fuzz ] || find_fuzz
    mapfile -t missing < <(printf '%s\n' ${missing[@]+"${missing[@]}"} | sed '/^$/d' | sort -u -t: -k1,1)
    mapfile -t all < <(printf '%s\n' ${missing[@]+"${missing[@]}"} ${optional[@]+"${optional[@]}"} |
        sed '/^$/d' | sort -u -t: -k1,1)
}

list() { # "package: what for"...
    printf '%s\n' "$@" | awk '{ name = $1; sub(/^[^ ]* /, ""); sub(/:$/, "", name); printf "  %-24s %s\n", name, $0 }'
}

install_them() { # "package: what for"...
    local log rc=0 packages=("${@%%:*}")
    # Nobody answers questions here: files that the machine's owner has changed stay as they are.
    local get=(apt-get install --no-install-recommends -o Dpkg::Options::=--force-confold)
    log=$(mktemp)
    echo "Missing here, and installed by apt-get now (the purpose is $purpose):"
    list "$@"
    if apt-get update -qq </dev/null >"$log" 2>&1; then
        "${get[@]}" --assume-no "${packages[@]}" 2>/dev/null </dev/null |
            sed -nE 's/^[0-9]+ upgraded, ([0-9]+) newly.*/  \1 packages with those that they need/p
                     s/^Need to get (.*) of archives.*/  \1 to download/p
                     s/^After this operation, (.*) of additional disk space.*/  \1 on disk/p' || true
        "${get[@]}" -y "${packages[@]}" </dev/null >"$log" 2>&1 || rc=$?
    else
        rc=1
    fi
    [ $rc -eq 0 ] || { cat "$log" && echo "apt-get failed"; } >&2
    rm -f "$log"
}

find_missing
[ ${#all[@]} -ne 0 ] || exit 0

if [ $install -eq 1 ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install_them "${all[@]}"
    find_missing
fi

if [ ${#optional[@]} -ne 0 ]; then
    {
        echo "Not here, so some parts are left out (Debian's names):"
        list "${optional[@]}"
    } >&2
fi
if [ ${#missing[@]} -ne 0 ]; then
    {
        echo "EPX needs these packages (Debian's names):"
        list "${missing[@]}"
        echo "Install them, for example: sudo apt-get install ${missing[*]%%:*}"
    } >&2
    exit 1
fi
