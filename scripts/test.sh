#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that CI checks, stage by stage; goes on after a failure and ends with "N passed, M failed, K skipped".
#
#   scripts/test.sh [STAGE...]   all stages, or those named
#
# Budget: 15 minutes on 2 cores, sanitizer builds included. Random tests multiply the number
# of their cases by EPX_TEST_SCALE; the numbers below keep the whole within the budget:
#
#   gcc      EPX_TEST_SCALE=1     all tests
#   clang    EPX_TEST_SCALE=0.1   all tests but those labelled slow
#   address  EPX_TEST_SCALE=0.25  AddressSanitizer, LeakSanitizer, UBSan; without the labels slow, noasan
#   thread   EPX_TEST_SCALE=0.1   ThreadSanitizer; without the labels slow, notsan
#
# The stage python keeps a virtual environment in build/venv (scripts/python_env.sh); making it takes half a minute.
set -uo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

budget_s=${EPX_TEST_BUDGET_S:-900}
jobs=${JOBS:-$(nproc)}
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
passed=0 failed=0 skipped=0
summary=()
ctest_prefix=()
export PYTHONDONTWRITEBYTECODE=1
# Open MPI refuses to run as root, as CI does, unless told.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

stages_all="deps format layers noexit gcc symbols cxx install demo python clang address thread"

note() { # sentence to repeat before the last line
    summary+=("$1")
    echo "$1"
}

# One check that is a command: exit 0 passed, 77 skipped, anything else failed.
check() { # name, command...
    local name=$1 rc=0
    shift
    "$@" >"$log/$name" 2>&1 || rc=$?
    if [ $rc -eq 0 ]; then
        passed=$((passed + 1))
        sed '/^[[:space:]]*$/d' "$log/$name" | tail -1
    elif [ $rc -eq 77 ]; then
        skipped=$((skipped + 1))
        note "skipped: $name: $(tail -1 "$log/$name")"
    else
        failed=$((failed + 1))
        tail -60 "$log/$name"
        note "FAILED: $name (exit $rc)"
    fi
    return $rc
}

build() { # name, directory, cmake arguments...
    local name=$1 dir=$2
    shift 2
    check "$name-build" build_quietly "$dir" "$@"
}

build_quietly() {
    local dir=$1
    shift
    cmake -S . -B "$dir" -DCMAKE_BUILD_TYPE=Release -DEPX_WERROR=ON "$@" && cmake --build "$dir" -j"$jobs"
}

slowest() { # a ctest log -> "name 12.3 s, name 4.5 s, name 1.2 s"
    sed -nE 's|^ *[0-9]+/[0-9]+ Test +#[0-9]+: ([^ ]+) .* ([0-9.]+) sec.*$|\2 \1|p' "$1" | sort -rn | head -3 |
        awk '{printf "%s%s %s s", (NR > 1 ? ", " : ""), $2, $1}'
}

run_ctest() { # name, directory, scale, ctest arguments...
    local name=$1 dir=$2 scale=$3 rc=0 counts report
    shift 3
    report=$log/$name.xml
    EPX_TEST_SCALE=$scale ${ctest_prefix[@]+"${ctest_prefix[@]}"} ctest --test-dir "$dir" -j$((2 * jobs + 1)) --no-tests=ignore --output-on-failure \
        --test-output-size-passed 1000000 --test-output-size-failed 1000000 --output-junit "$report" \
        "$@" >"$log/$name" 2>&1 || rc=$?
    [ $rc -eq 0 ] || cat "$log/$name"
    if [ ! -f "$report" ]; then
        echo "$name: ctest ran no tests"
        [ $rc -eq 0 ] || failed=$((failed + 1))
        return
    fi
    counts=$(python3 scripts/count_tests.py "$report") || counts="0 1 0"
    read -r p f s < <(head -1 <<<"$counts")
    [ $rc -ne 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    echo "$name: $p passed, $f failed, $s skipped; slowest: $(slowest "$log/$name")"
    while read -r line; do
        [ -z "$line" ] || note "$name: $line"
    done < <(tail -n +2 <<<"$counts")
}

stage_deps() {
    scripts/deps.sh test || {
        echo "0 passed, 1 failed, 0 skipped"
        exit 1
    }
}
stage_format() { check format scripts/format.sh; }
stage_layers() { check layers scripts/check_layers.sh; }
stage_noexit() { check noexit scripts/check_no_exit.sh; }
stage_gcc() {
    # Where nvcc is, the CUDA module is built too; one architecture will do.
    build gcc build -DCMAKE_C_COMPILER="${EPX_GCC:-gcc}" -DEPX_CUDA_ARCHITECTURES=90 && run_ctest gcc build 1
}
stage_symbols() {
    check symbols scripts/check_symbols.sh build
    check imports scripts/check_no_exit.sh build/libepx.so build/libnccl_ep.so build/libepx_nccl.so build/libepx_cudart.so
}
stage_cxx() { check cxx scripts/check_cxx.sh; }
stage_install() { check install scripts/check_install.sh build; }
stage_demo() { check demo timeout 60 scripts/demo.sh build; }
# Python programs, each on several ranks: of the wheel that was just installed, not of the source tree.
torchrun() { # ranks, program, arguments...
    local ranks=$1
    shift
    OMP_NUM_THREADS=1 timeout 120 build/venv/bin/python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
}

# python/tests/suite.py prints "ok NAME (1.23 s)" for each test, what failed, and ends with the counts.
run_python_suite() {
    local rc=0 p f s
    torchrun 8 python/tests/suite.py >"$log/python" 2>&1 || rc=$?
    read -r p f s < <(sed -nE 's/^([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped.*/\1 \2 \3/p' "$log/python" | tail -1)
    p=${p:-0} f=${f:-0} s=${s:-0}
    [ $rc -eq 0 ] || grep -v '^[WE][0-9]* ' "$log/python"
    [ $rc -ne 0 ] && [ "$f" -eq 0 ] && f=1
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    while read -r line; do note "python: $line"; done < <(grep '^skipped ' "$log/python")
    echo "python: $p passed, $f failed, $s skipped; slowest: $(sed -nE 's/^ok (.*) \((.*) s\)$/\2 \1/p' "$log/python" | sort -rn | head -3 |
        awk '{printf "%s%s %s s", (NR > 1 ? ", " : ""), $2, $1}')"
    [ $rc -eq 0 ] || note "FAILED: python: $(grep -ho 'FAILED ranks_[^ ]*' "$log/python" | paste -sd' ') (exit $rc)"
}

stage_python() {
    check python-env scripts/python_env.sh build/venv || return
    check python-wheel scripts/check_wheel.sh build/venv || return
    check python-alone timeout 100 build/venv/bin/python -m unittest discover -s python/tests -p 'test_*.py'
    run_python_suite
    check python-hf torchrun 2 examples/hf_moe.py --model qwen3 mixtral --prompts 1 --length 16 --decode 3
    check python-train torchrun 4 examples/train_moe.py --steps 20 --batch 8 --length 32
}
stage_clang() {
    build clang build-clang -DCMAKE_C_COMPILER=clang && run_ctest clang build-clang 0.1 -LE '^slow$'
}

# Compiles and runs a program that does nothing: says whether a sanitizer can run on this machine.
probe() { # flags, then a prefix for the run
    local flags=$1
    shift
    echo 'int main(void) { return 0; }' >"$log/probe.c"
    gcc $flags "$log/probe.c" -o "$log/probe" && "$@" "$log/probe"
} >"$log/probe.out" 2>&1

# Not detect_stack_use_after_return: it makes tests of small functions hundreds of times slower.
# On some machines (aarch64 with gcc 12) LeakSanitizer takes seconds at the end of every process. There it looks at the
# test programs, whose ranks are threads, and not at the ranks that tests start as processes of their own.
stage_address() {
    local leaks=1 process_leaks=1 begin=$SECONDS
    if ! probe -fsanitize=address env ASAN_OPTIONS=detect_leaks=1; then
        leaks=0 process_leaks=0
        skipped=$((skipped + 1))
        note "skipped: LeakSanitizer cannot run here (it needs ptrace): leaks not checked"
    elif [ $((SECONDS - begin)) -ge 2 ]; then
        process_leaks=0
        note "address: LeakSanitizer takes $((SECONDS - begin)) s per process here: on in test programs, off in started ranks"
    fi
    export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
    build address build-asan -DCMAKE_C_COMPILER=gcc -DEPX_SANITIZE=address || return
    export ASAN_OPTIONS=detect_leaks=$leaks
    export LSAN_OPTIONS=suppressions=$PWD/scripts/lsan.supp:print_suppressions=0
    run_ctest address build-asan 0.25 -L '^program$' -LE '^(slow|noasan)$'
    export ASAN_OPTIONS=detect_leaks=$process_leaks
    run_ctest address-processes build-asan 0.25 -LE '^(slow|noasan|program)$'
}

stage_thread() {
    if ! probe -fsanitize=thread env; then
        # Some kernels place memory where ThreadSanitizer does not expect it; without randomisation they do not.
        if probe -fsanitize=thread setarch -R; then
            ctest_prefix=(setarch -R)
        else
            skipped=$((skipped + 1))
            note "skipped: ThreadSanitizer cannot run here: $(head -1 "$log/probe.out")"
            return
        fi
    fi
    export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:second_deadlock_stack=1
    build thread build-tsan -DCMAKE_C_COMPILER=gcc -DEPX_SANITIZE=thread || return
    run_ctest thread build-tsan 0.1 -LE '^(slow|notsan)$'
    ctest_prefix=()
}

main() {
    local stages=${*:-$stages_all} started=$SECONDS stage begin
    for stage in $stages; do
        if ! declare -F "stage_$stage" >/dev/null; then
            echo "no stage '$stage'; stages: $stages_all" >&2
            exit 2
        fi
        begin=$SECONDS
        echo "== $stage"
        "stage_$stage"
        echo "-- $stage: $((SECONDS - begin)) s"
    done
    echo
    [ ${#summary[@]} -eq 0 ] || printf '%s\n' "${summary[@]}"
    echo "make test took $((SECONDS - started)) s of a budget of $budget_s s"
    [ $((SECONDS - started)) -le "$budget_s" ] || echo "OVER BUDGET: on 2 free cores this must not happen"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}

main "$@"
