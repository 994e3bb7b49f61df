#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Programs for NCCL EP on machines without GPUs: one in C++ with MPI, compiled here against the stand-ins as NVIDIA's
# are against CUDA and NCCL; the example under mpirun, which finds its rank by the launcher; and epx ep-bench in its
# layouts and recipes, whose check must be able to fail. ctest: labels=processes,noasan,notsan
set -u
. "$(dirname "$0")/../lib/script.sh"
export EPX_ALLOC_BYTES=16M

passed() { # name, status
    if [ "$2" -eq 0 ]; then
        echo "ok $1"
    else
        fail "$1 (exit $2)"
    fi
}

mpi=(mpirun --oversubscribe --bind-to none --mca btl_vader_single_copy_mechanism none)
[ "$(id -u)" -ne 0 ] || mpi+=(--allow-run-as-root)
if command -v mpicxx >/dev/null && command -v mpirun >/dev/null; then
    mpicxx -std=c++20 -O1 -Wall -Wextra -Wno-missing-field-initializers -Wno-cast-function-type -Werror \
        -I"$root/include/nccl_ep" -I"$root/standin/include/nccl" -I"$root/standin/include/cuda" \
        "$root/tests/nccl_ep/program.cpp" \
        -L"$build" -lnccl_ep -lepx_nccl -lepx_cudart -Wl,-rpath,"$build" -o "$work/program"
    passed "C++20 with MPI, compiled" $?
    timeout 200 "${mpi[@]}" -n 4 "$work/program"
    passed "C++20 with MPI, 4 ranks" $?
    timeout 200 "${mpi[@]}" -n 3 "$build/examples/nccl_ep_hello"
    passed "the example under mpirun" $?
    timeout 200 "${mpi[@]}" -n 2 "$epx" ep-bench --tokens 8 --hidden 256 --experts 4 --top-k 2 --iters 2 \
        --warmup 1 --validate >"$work/out" && grep -q "2 ranks" "$work/out"
    passed "ep-bench joins mpirun's world" $?
else
    echo "no mpicxx or mpirun: the C++ program and mpirun are left out"
fi

bench() { # expected status, expected text, options...
    local status=$1 text=$2
    shift 2
    timeout 200 "$epx" ep-bench -n 4 --tokens 24 --hidden 512 --experts 16 --top-k 4 --warmup 1 --iters 2 "$@" \
        >"$work/out" 2>&1
    local got=$?
    [ $got -eq "$status" ] && grep -q -- "$text" "$work/out"
    passed "ep-bench $*" $?
}

bench 0 "Total (D+C)" --algorithm ll --validate
bench 0 "Combine validation: PASSED" --algorithm ll --layout rm --zcopy --expert-id-kind global --validate \
    --topk-idx-int32 --disable-token-dropping
bench 0 "Combine validation: PASSED" --algorithm ht --non-uniform-tokens --datatype fp16 --validate \
    --max-num-sms 4 --preprocess-num-sms 1
bench 0 "rdma_bw" --algorithm ht --layout em --expert-major-alignment 16 --validate \
    --ht-em-mode local_dup --shuffle-sms 2
bench 0 "Dispatch validation: PASSED" --algorithm ll --dispatch-quantization ds-fp8e3m4 --dispatch-only --validate
bench 0 "Dispatch validation: PASSED" --algorithm ht --mxfp8 --dispatch-only --validate
bench 0 "Dispatch validation: PASSED" --algorithm ll --dispatch-quantization scales-forward --dispatch-only \
    --scales-forward-token-dtype fp4x2 --scales-forward-scale-dtype uint8 --validate
bench 0 "Combine validation: PASSED" --algorithm ll --combine-quantization nvfp4 --validate
NCCL_EP_BENCH_VERBOSE_VALIDATION=1 bench 0 "worst element: token" --algorithm ht --validate
bench 0 "Mask test: PASSED" --mask-test
EPX_BENCH_CORRUPT=1 bench 2 "Mask test: FAILED" --mask-test
bench 1 "needs 4 ranks, got 3" --mask-test -n 3
bench 1 "mask-test is --algorithm ll" --algorithm ht --mask-test
bench 1 "dispatch-only" --algorithm ll --dispatch-quantization ds-fp8e3m4
bench 1 "not supported" --dynamic-tokens
bench 1 "ll's" --algorithm ht --layout rm
EPX_BENCH_CORRUPT=1 bench 2 "Dispatch validation: FAILED" --algorithm ll --validate
EPX_RANKS_PER_NODE=2 bench 0 "2 per LSA team" --algorithm ht --validate

# Byte formulae. All 24 tokens of each of 4 ranks go to all 8 experts, two on each rank: 96 (token, rank) pairs and 192
# (token, k) of a rank; rows have 7168 values.
payload() { # megabytes of dispatch and combine, the same unquantised, options...
    local expected="Mean payload/rank: dispatch $1 MB, combine $2 MB (unquantised $3 and $4)"
    shift 4
    bench 0 "$expected" --algorithm ll --experts 8 --top-k 8 --hidden 7168 --disable-token-dropping "$@"
}
payload 1.376 2.753 1.376 2.753 # x 14336 bytes; twice as many rows come back
payload 1.376 1.376 1.376 1.376 --layout rm
payload 2.753 5.505 2.753 5.505 --datatype fp32
payload 1.376 0.777 1.376 2.753 --combine-quantization nvfp4                       # 3584 + 448 + 4, in 16s: 4048
payload 0.710 0.000 1.376 0.000 --dispatch-quantization ds-fp8e3m4 --dispatch-only # 7168 + 56 floats
payload 0.710 0.000 1.376 0.000 --mxfp8 --dispatch-only                            # 7168 + 224 scales of a byte
payload 0.355 0.000 1.376 0.000 --dispatch-quantization scales-forward --dispatch-only \
    --scales-forward-token-dtype fp4x2 --scales-forward-scale-dtype bf16 # 3584 + 56 scales
# High throughput: 96 rows each way in dispatch and in combine, half of them to or from the other LSA team.
EPX_RANKS_PER_NODE=2 bench 0 "(1.38 MB, rdma 0.69)" --algorithm ht --experts 8 --top-k 8 --hidden 7168
[ "$(grep -c "total_bw .* nvl_bw .* rdma_bw .*(1.38 MB, rdma 0.69)" "$work/out")" -eq 4 ]
passed "ep-bench: the bytes of recv and send, of dispatch and combine" $?
# Tokens 24, 16, 8 and 0: rank 3 sends none, all get 48 pairs on average.
bench 0 "(0.69 MB, rdma 0.00)" --algorithm ht --experts 8 --top-k 8 --hidden 7168 --non-uniform-tokens
finish
