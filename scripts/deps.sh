#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deps.sh build|quick|test|fuzz|deb|lintian|abi|docs [CMAKE_OPTION]...: makes sure that the packages are there. As root
# it installs what is missing with apt-get; otherwise it names the packages and fails if nothing works without one of
# them. It looks for what is used, not for package names, so that other distributions and installations by hand pass
# too. The package names are those of Debian 12 and 13.
set -euo pipefail

purpose=${1:-build}
shift || true
options=" $* "
missing=()  # nothing works without
optional=() # something is left out without

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

# Whether the preprocessor finds a header, or the options say that the build is to do without or where it is.
network() { # CMake's option, header
    [[ $options != *" -DEPX_$1=OFF "* && $options != *" -DEPX_$1_INCLUDE="* ]] || return 0
    echo "#include <$2>" | "${CC:-cc}" -E -x c -
}

# Whether a program can open a library by this name.
has_library() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q "$1"; }

has_libc() { [ -e "$("$1" -print-file-name=crt1.o)" ]; }

tool() { PATH=$PATH:/usr/sbin:/sbin command -v "$1"; }

find_build() {
    local for_tests=need
    [ "$purpose" != build ] || for_tests=want
    need build-essential sh -c '${CC:-cc} --version && make --version'
    need cmake cmake --version
    need pkg-config pkg-config --version
    need libfabric-dev network OFI rdma/fabric.h
    need libibverbs-dev network VERBS infiniband/verbs.h
    want python3 python3 --version            # the manual pages: cmake/EpxManual.cmake
    want libsodium23 has_library libsodium.so # opened at run time, else libcrypto: docs/security.md
    # Without it nothing is left out, but the wheel of `make test` compiles the library once more.
    [ "$(id -u)" -ne 0 ] || want ccache tool ccache
    $for_tests libcmocka-dev pkg-config --exists cmocka
    $for_tests openmpi-bin mpirun --version
    $for_tests libopenmpi-dev mpicc --version
}

find_quick() {
    need build-essential sh -c 'gcc --version && g++ --version'
    need python3 python3 --version
    need git git --version
    want ninja-build tool ninja              # compiles instead of make, and takes less time for itself
    want mandoc tool mandoc                  # looks at the manual pages: scripts/manual/check.py
    need iproute2 tool ip                    # network namespaces as hosts: tests/scripts/netns.sh
    want clang-format clang-format --version # only version 14 (Debian 12) is asked: scripts/format.sh
}

find_test() {
    need clang clang --version
    need clang-tidy clang-tidy --version
    need python3-venv python3 -c 'import ensurepip, venv'
    want hipcc tool hipcc
    need abigail-tools tool abidiff # scripts/check_abi.py
    want zsh tool zsh             # tests/scripts/completion.sh
    want prometheus tool promtool # tests/scripts/top_prometheus.sh
    want chromium sh -c 'chromium --version || chromium-browser --version' # tests/scripts/report.sh
    # The architecture that the stage cross compiles for: compiler and C library.
    case $(uname -m) in
    aarch64)
        need gcc-x86-64-linux-gnu x86_64-linux-gnu-gcc --version
        need libc6-dev-amd64-cross has_libc x86_64-linux-gnu-gcc
        ;;
    *)
        need gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc --version
        need libc6-dev-arm64-cross has_libc aarch64-linux-gnu-gcc
        ;;
    esac
    need qemu-user sh -c 'qemu-x86_64 --version && qemu-aarch64 --version'
}

find_deb() {
    need dpkg-dev dpkg-buildpackage --version
    need debhelper tool dh
    need dh-python tool dh_python3
    need fakeroot tool fakeroot
    need python3 python3 --version
    need libopenmpi-dev mpicc --version
    need libc6-dev has_libc cc
}

# clang's libFuzzer and sanitizers, in a package that carries clang's version in its name. clang itself may come first.
has_fuzzer() {
    printf '#include <stddef.h>\nint LLVMFuzzerTestOneInput(const unsigned char *d, size_t n) { return !d && n; }' |
        clang -fsanitize=fuzzer,address -x c - -o /dev/null
}

find_fuzz() {
    local version
    want clang clang --version
    version=$(clang -dumpversion 2>/dev/null || apt-cache show clang 2>/dev/null | sed -n 's/^Version: [0-9]*:\?//p')
    version=${version%%.*}
    [ -z "$version" ] || want "libclang-rt-$version-dev" has_fuzzer
}

find_missing() {
    missing=() optional=()
    case $purpose in
    lintian) need lintian tool lintian ;;
    abi) need abigail-tools tool abidiff ;;
    docs)
        need mkdocs tool mkdocs
        need mandoc tool mandoc
        ;;
    *) find_build ;;
    esac
    case $purpose in
    quick | test) find_quick ;;
    deb) find_deb ;;
    esac
    [ "$purpose" != test ] || find_test
    [ "$purpose" != fuzz ] || find_fuzz
    mapfile -t missing < <(printf '%s\n' ${missing[@]+"${missing[@]}"} | sed '/^$/d' | sort -u)
}

install_them() { # packages...
    local log rc=0
    log=$(mktemp)
    echo "Installing: $*"
    # Nobody answers questions here: files that the machine's owner has changed stay as they are.
    { apt-get update -qq && apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold "$@"; } \
        </dev/null >"$log" 2>&1 || rc=$?
    if [ $rc -eq 0 ]; then
        sed -n 's/^Need to get \(.*\) of archives.*/Downloaded \1/p' "$log"
    else
        { cat "$log" && echo "apt-get failed"; } >&2
    fi
    rm -f "$log"
}

find_missing
mapfile -t all < <(printf '%s\n' ${missing[@]+"${missing[@]}"} ${optional[@]+"${optional[@]}"} | sed '/^$/d' | sort -u)
[ ${#all[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install_them "${all[@]}"
    find_missing
fi

if [ ${#optional[@]} -ne 0 ]; then
    echo "Not here, so some parts are left out (Debian's names): ${optional[*]}" >&2
fi
if [ ${#missing[@]} -ne 0 ]; then
    echo "EPX needs these packages (Debian's names): ${missing[*]}" >&2
    echo "Install them, for example: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
