#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and measures EPX on one GPU, and prints a table last. Needs nvcc (or hipcc: not run yet), gcc, make or
# ninja, CMake 3.22 and python3; for the steps across nodes also libfabric.so.1 and its headers.
#   usage: scripts/gpu.sh [STEP...]
#     steps: smoke check measure ring nodes nccl-ep graph net prop sanitize python   (default: all of these, within 8
#                                                                                    minutes)
#            bus tune
# GPU=cuda|hip, GPU_ARCH=90, GPU_BUILD=FOLDER, EPX_OFI_INCLUDE=FOLDER: as in scripts/gpu_build.sh. GPU_CASES: random
# cases of each kind in the step prop. log.txt (everything that was printed, at most 2 MB), results.json and table.txt
# go to $OUT (default: gpu-results). Each part has a time limit of its own.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$PWD/gpu-results}
mkdir -p "$OUT"
export PATH=$PATH:/usr/local/cuda/bin:/opt/rocm/bin
if ! command -v nvcc >/dev/null && command -v hipcc >/dev/null; then GPU=${GPU:-hip}; fi
export GPU=${GPU:-cuda}
build=${GPU_BUILD:-$PWD/build-gpu}
steps=${*:-smoke check measure ring nodes nccl-ep graph net prop sanitize python}
work=$(mktemp -d)
log=$OUT/log.txt
results=$work/results.txt
: >"$log"; : >"$results"; : >"$work/verdicts.txt"
export CUDA_MODULE_LOADING=EAGER EPX_LOG=${EPX_LOG:-warn}
began=$SECONDS
LOG_MOST=2000000 PART_MOST=60000

note() { echo "[$((SECONDS - began)) s] $*" | tee -a "$log"; }
step() { [[ " $steps " == *" $1 "* ]]; }

# Begin and end of what is long, all of what is not.
keep() {
    local size
    size=$(stat -c %s "$1")
    if [ "$(stat -c %s "$log")" -gt $LOG_MOST ]; then
        echo "(the log is full)"
    elif [ "$size" -le $PART_MOST ]; then
        cat "$1"
    else
        head -c $((PART_MOST / 2)) "$1"
        echo; echo "... $((size - PART_MOST)) bytes left out ..."
        tail -c $((PART_MOST / 2)) "$1"
    fi
}

# try NAME SECONDS COMMAND...: one line of verdict; what it printed goes to the log, JSON lines to the results.
try() {
    local name=$1 limit=$2 start=$SECONDS out=$work/$1.txt rc verdict=ok
    shift 2
    timeout -k 5 "$limit" "$@" >"$out" 2>&1
    rc=$?
    grep '^{' "$out" | sed "s/^/json $name /" >>"$results"
    { echo "==== $name: $* (exit $rc, $((SECONDS - start)) s)"; keep "$out"; } >>"$log"
    [ $rc = 0 ] || verdict=FAILED
    echo "verdict $name $verdict $((SECONDS - start))" >>"$results"
    if [ $rc = 0 ]; then
        echo "ok      $name ($((SECONDS - start)) s)" | tee -a "$work/verdicts.txt"
    else
        echo "FAILED  $name (exit $rc, $((SECONDS - start)) s)" | tee -a "$work/verdicts.txt"
        grep -v '^{' "$out" | tail -n 6 | cut -c1-300 | sed 's/^/        /'
    fi
    return $rc
}
# procs|threads NAME SECONDS RANKS MODE OPTIONS...: epx bench, ranks as processes, or as threads of one process.
procs() {
    local name=$1 limit=$2 n=$3 mode=$4
    shift 4
    try "$name" "$limit" "$build/epx" bench "$mode" --device "$GPU" --ranks "$n" "$@" --json
}
threads() { procs "$@" --threads; }

mps_start() {
    [ "$GPU" = cuda ] || return 0
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/epx-mps-$$ CUDA_MPS_LOG_DIRECTORY=$work/mps
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d >>"$log" 2>&1; then
        note "MPS runs"
    else
        note "MPS does not start"
        unset CUDA_MPS_PIPE_DIRECTORY
    fi
    export CUDA_MPS_CLIENT_PRIORITY=0
}
mps_stop() {
    [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && echo quit | timeout 20 nvidia-cuda-mps-control >>"$log" 2>&1
    unset CUDA_MPS_PIPE_DIRECTORY
}
trap mps_stop EXIT

{ nvidia-smi || rocm-smi; nvcc --version || hipcc --version; gcc --version; nproc; free -g; } >>"$log" 2>&1
note "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null)"
note "building"
if ! scripts/gpu_build.sh "$build" >"$work/build.txt" 2>&1; then
    tail -n 30 "$work/build.txt"
    note "the build failed"
    exit 1
fi
note "built"
grep '^gpu_build.sh: ' "$work/build.txt" | tee -a "$log"
unset EPX_OFI_INCLUDE # of the build alone
"$build/epx" doctor >>"$log" 2>&1

if step smoke; then
    # One rank, two ranks as threads, small: stops here if nothing works.
    threads t1-ll 40 1 ll --tokens 16 --hidden 1024 --experts 8 --iters 0 --check --timeout 20 &&
        threads t1-ht 40 1 ht --tokens 64 --hidden 1024 --experts 8 --iters 0 --check --timeout 20
    threads t2-ll 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
    threads t2-ht 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
fi
if step ring; then
    # Alone on the GPU: commands per second into decoding proxies, and the way there and back.
    try ring-8 30 "$build/epx" bench ring --device $GPU --rings 8 --json
    try ring-1 30 "$build/epx" bench ring --device $GPU --rings 1 --json
    try ring-8-wide 30 "$build/epx" bench ring --device $GPU --rings 8 --agents 32 --json
fi
mps_start
if step smoke; then
    procs p2-ll 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
    procs p2-ht 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
fi
if step check; then
    for how in threads procs; do
        t=${how:0:1}
        $how ${t}8-ll-bf16 40 8 ll --tokens 33 --hidden 2048 --experts 32 --iters 0 --check --timeout 20
        $how ${t}8-ll-fp8 40 8 ll --tokens 33 --hidden 2048 --experts 32 --dtype fp8 --iters 0 --check --timeout 20
        $how ${t}8-ht-bf16 40 8 ht --tokens 300 --hidden 2048 --experts 32 --iters 0 --check --timeout 20
        $how ${t}8-ht-fp8 40 8 ht --tokens 300 --hidden 2048 --experts 32 --dtype fp8 --iters 0 --check --timeout 20
    done
    threads t4-ll-logfmt 40 4 ll --tokens 33 --hidden 2000 --experts 32 --logfmt --iters 0 --check --timeout 20
    threads t4-ll-rank 40 4 ll --tokens 33 --hidden 2000 --experts 30 --layout rank --iters 0 --check --timeout 20
    threads t4-ht-expert 40 4 ht --tokens 100 --hidden 2000 --experts 30 --layout expert --iters 0 --check --timeout 20
    threads t4-ll-plain 40 4 ll --tokens 33 --hidden 2000 --experts 32 --plain-memory --iters 0 --check --timeout 20
    threads t4-ht-plain 40 4 ht --tokens 100 --hidden 2000 --experts 32 --plain-memory --iters 0 --check --timeout 20
    if [ $GPU = cuda ]; then # rows of combine in other memory than EPX's, which the others map
        procs p8-ht-registered 40 8 ht --tokens 300 --hidden 2048 --experts 32 --plain-memory --expect-zero-copy \
            --iters 0 --check --timeout 20
        procs p4-ht-expert-registered 40 4 ht --tokens 300 --hidden 2000 --experts 30 --layout expert \
            --plain-memory --expect-zero-copy --iters 0 --check --timeout 20
        EPX_GPU_HEAP=host procs p2-ht-host-registered 40 2 ht --tokens 600 --hidden 2048 --experts 16 \
            --plain-memory --expect-zero-copy --iters 0 --check --timeout 20
        EPX_REGISTER=1 threads t4-ht-registered 40 4 ht --tokens 300 --hidden 2000 --experts 32 --plain-memory \
            --expect-zero-copy --iters 0 --check --timeout 20
    fi
    if [ $GPU = cuda ]; then # a barrier of a block, without warps that have left it
        try build-leave 60 nvcc -std=c++17 "-arch=sm_${GPU_ARCH:-90}" -Iinclude -Isrc -o "$work/block_leave" \
            tests/gpu_lanes/block_leave.cu && try block-leave 30 "$work/block_leave"
    fi
    EPX_GPU_HEAP=host threads t2-ll-host 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
    EPX_GPU_HEAP=host procs p2-ht-host 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 20
fi
if step measure; then
    ht="--tokens 4096 --iters 40" ll="--experts 288 --iters 200"
    procs ht-bf16 60 8 ht $ht
    [ $GPU != cuda ] || procs ht-bf16-registered 60 8 ht --plain-memory --expect-zero-copy $ht
    procs ht-fp8 60 8 ht --dtype fp8-input $ht
    procs ht-fp8-cast 60 8 ht --dtype fp8 $ht
    procs ll-fp8 60 8 ll --dtype fp8 $ll
    procs ll-bf16 60 8 ll $ll
    threads ll-fp8-threads 60 8 ll --dtype fp8 $ll
    threads ht-bf16-threads 60 8 ht $ht
fi
if step graph; then
    # One graph, hundreds of replays with other routing in the same tensors; in halves; beside work on another stream.
    small="--agents 64 --timeout 20"
    threads g4-ll 60 4 ll --tokens 24 --hidden 1024 --experts 32 --replays 300 $small
    threads g4-ll-fp8-overlap 60 4 ll --tokens 24 --hidden 1024 --experts 32 --dtype fp8 --replays 300 --overlap $small
    threads g4-ll-staged 60 4 ll --tokens 24 --hidden 1024 --experts 32 --replays 300 --staged --overlap $small
    procs g8-ll-staged-procs 60 8 ll --tokens 24 --hidden 1024 --experts 32 --replays 200 --staged $small
    [ $GPU != cuda ] || try decode-graph 60 "$build/epx" run -n 4 "$build/examples/decode_graph_cuda"
    threads g4-ht 60 4 ht --tokens 64 --hidden 1024 --experts 32 --replays 300 $small
    threads g4-ht-expert-overlap 60 4 ht --tokens 64 --hidden 1024 --experts 32 --layout expert --replays 200 \
        --overlap $small
    [ $GPU != cuda ] || procs g8-ht-registered 60 8 ht --tokens 300 --hidden 1024 --experts 32 --plain-memory \
        --expect-zero-copy --replays 100 $small
    procs g8-ht-procs 60 8 ht --tokens 64 --hidden 1024 --experts 32 --replays 200 --overlap $small
fi
if step nodes; then
    # Two nodes of four ranks cut out of this machine: rings, proxies and a network library between them.
    for net in tcp shm; do
        for how in threads procs; do
            [ $net:$how != shm:threads ] || continue # libfabric's shm is for processes (docs/net.md)
            n=n${how:0:1}8-$net
            $how $n-ll 60 8 ll --nodes 2 --net "ofi:$net" --tokens 33 --hidden 2048 --experts 32 --iters 0 \
                --check --timeout 20
            $how $n-ht 60 8 ht --nodes 2 --net "ofi:$net" --tokens 100 --hidden 2048 --experts 32 --iters 0 \
                --check --timeout 20
        done
    done
    procs np8-tcp-ll-graph 60 8 ll --nodes 2 --net tcp --tokens 24 --hidden 1024 --experts 32 --dtype fp8 \
        --replays 100 --timeout 20
    procs np8-tcp-ht-graph 60 8 ht --nodes 2 --net tcp --tokens 64 --hidden 1024 --experts 32 --replays 100 --timeout 20
    for net in tcp shm; do
        # What the path can carry: the same bytes by a plain loop around fi_write between the same processes.
        # Tensors in heaps, hence in host memory, and in the GPU's own.
        for mode in ll ht; do
            try nodes-$net-$mode 60 "$build/epx" bench $mode --device $GPU --nodes 2 --net "ofi:$net" --iters 20 \
                --check --vs ofi --json
            try nodes-$net-$mode-gpu 60 "$build/epx" bench $mode --device $GPU --nodes 2 --net "ofi:$net" \
                --iters 20 --check --vs ofi --json --plain-memory
        done
    done
fi
if step bus; then
    # High throughput between nodes, few ranks: what crossing the bus costs (make bus counts it without a GPU). With few
    # slots, hence many turns; then without MPS, where processes take turns on the GPU and every meeting of ranks waits
    # for a time slice of each.
    two="--device $GPU --nodes 2 --ranks 4 --tokens 512 --net ofi:shm --iters 20 --check --json"
    try bus-mps 60 "$build/epx" bench ht $two
    EPX_HT_BUFFER_BYTES=8M try bus-mps-few-slots 60 "$build/epx" bench ht $two
    mps_stop
    try bus-slices 60 "$build/epx" bench ht $two
    EPX_HT_BUFFER_BYTES=8M try bus-slices-few-slots 60 "$build/epx" bench ht $two
    mps_start
fi
if step nccl-ep && [ $GPU = cuda ]; then
    # NCCL EP's interface: the tests of tests/scripts/nccl_ep.sh with GPU memory, on the stand-in for NCCL.
    nccl_ep() {
        local name=$1 n=$2
        shift 2
        try "$name" 60 "$build/epx" run -n "$n" --timeout 55 -- "$build/nccl_ep_ranks_cuda" "$@"
    }
    export EPX_DEVICE=cuda EPX_ALLOC_BYTES=64M
    nccl_ep nccl-ep-1 1 layouts misuse runtime
    nccl_ep nccl-ep-8 8 standin runtime layouts misuse masks
    nccl_ep nccl-ep-4 4 rules drop recipes eager memory nvfp4 elastic counts mxfp8
    EPX_RANKS_PER_NODE=2 nccl_ep nccl-ep-nodes-4 4 rules drop recipes eager memory counts
    EPX_RANKS_PER_NODE=4 nccl_ep nccl-ep-nodes 8 layouts
    for bench in "ll" "ll --layout rm" "ht --tokens 1024" "ht --layout em --tokens 1024"; do
        try "ep-bench-${bench// /}" 60 "$build/epx" ep-bench -n 8 --algorithm $bench --iters 20 --validate
    done
    # NCCL's own communicators: one rank, for NCCL refuses several on one GPU.
    try nccl-ep-real 60 scripts/gpu_nccl.sh "$build"
    unset EPX_DEVICE EPX_ALLOC_BYTES
fi
if step net; then
    # The conformance suite of networks with heaps in memory that the GPU maps.
    EPX_DEVICE=$GPU try net-memory 20 "$build/gpu_net" memory
    for net in tcp shm; do
        EPX_DEVICE=$GPU try net-$net 100 "$build/gpu_net" "ofi:$net"
    done
fi
if step prop; then
    # Random configurations against the oracle, ranks as threads; heaps and tensors in memory that the host reaches too.
    mps_stop
    # late: one rank comes after the deadline; its peers must end, and go on without it.
    for mode in ll:40 ht:40 mixed:40 nodes:40 late:10 late-nodes:5; do
        EPX_GPU_HEAP=host EPX_TEST_DEVICE=$GPU EPX_TEST_VERBOSE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 \
            try prop-${mode%:*} 100 "$build/gpu_prop" ${mode%:*} "${GPU_CASES:-${mode#*:}}"
    done
fi
if step sanitize; then
    mps_stop
    # The tools make kernels of one process run one after the other: ranks that wait for each other are processes there.
    small="--tokens 4 --hidden 512 --experts 4 --topk 4 --agents 4 --iters 0 --check --timeout 60"
    check="compute-sanitizer --error-exitcode 9 --print-limit 20 --target-processes all"
    for mode in ll ht; do
        bench="$build/epx bench $mode --device $GPU $small"
        try memcheck-$mode 100 $check --tool memcheck $bench --ranks 1 --threads
        try memcheck-$mode-2 100 $check --tool memcheck $bench --ranks 2
        try racecheck-$mode 100 $check --tool racecheck $bench --ranks 1 --threads
    done
fi
if step python; then
    mps_stop # run_gpu.sh starts its own
    if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>>"$log"; then
        try python-tests 180 env OUT="$OUT" GPU_BUILD="$build" bash python/tests/run_gpu.sh tests
        try python-bench 120 env OUT="$OUT" GPU_BUILD="$build" bash python/tests/run_gpu.sh bench
        cat "$work/python-bench.txt"
    else
        note "skipped: python: no torch that sees a GPU"
    fi
fi
if step tune; then
    # Variants of the constants that matter, ranks as threads.
    variant() { # NAME FLAGS...: builds everything with other constants, and measures
        local name=$1; shift
        scripts/gpu_build.sh "$build-$name" "-DCMAKE_C_FLAGS=$*" "-DCMAKE_CUDA_FLAGS=$*" >>"$log" 2>&1 ||
            { note "variant $name does not build"; return; }
        "$build-$name/epx" bench ht --device $GPU --threads --tokens 4096 --iters 40 --json 2>>"$log" |
            sed "s/^/json $name-ht /" >>"$results"
        "$build-$name/epx" bench ll --device $GPU --threads --experts 288 --dtype fp8 --iters 40 --json 2>>"$log" |
            sed "s/^/json $name-ll /" >>"$results"
    }
    for v in "store-cs -DSTORE_KIND=1" "store-plain -DSTORE_KIND=2" \
        "rows4x2 -DSUM_ROWS=4 -DSUM_WIDE=2" "rows6x2 -DSUM_ROWS=6 -DSUM_WIDE=2" "flight14 -DCOPY_FLIGHT=14" \
        "warps24 -DLAUNCH_WARPS=24"; do
        variant $v
    done
fi
grep -h -E "Function properties for epx_|spill" "$build"/ptxas/*.txt 2>/dev/null |
    grep -A1 "for epx_" | grep -v '^--' >>"$log"
note "done"
python3 scripts/gpu_table.py "$results" "$OUT/results.json" | tee "$OUT/table.txt"
! grep -q FAILED "$work/verdicts.txt"
