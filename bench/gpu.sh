#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds, tests and measures EPX on one GPU, and prints a table last. Needs nvcc (or hipcc: EPX_BENCH_GPU=hip, the default where
# there is hipcc and no nvcc; not run yet), gcc, make, python3; for the steps across
# nodes also libfabric.so.1 and its headers (/usr/include, or EPX_OFI_INCLUDE=FOLDER that has rdma/fabric.h).
#   usage: bench/gpu.sh [STEP...]
#     steps: smoke check measure ring nodes nccl-ep graph net prop sanitize python   (default: all of these, within 8 minutes)
#            tune
# log.txt (everything that was printed, at most 2 MB), results.json and table.txt go to $OUT (default: gpu-results). Each
# part has a time limit of its own.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-$PWD/gpu-results}
mkdir -p "$OUT"
export PATH=$PATH:/usr/local/cuda/bin:/opt/rocm/bin
if ! command -v nvcc >/dev/null && command -v hipcc >/dev/null; then EPX_BENCH_GPU=${EPX_BENCH_GPU:-hip}; fi
export EPX_BENCH_GPU=${EPX_BENCH_GPU:-cuda}
build=${EPX_GPU_BUILD:-$PWD/build-gpu}
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

# try NAME SECONDS COMMAND...: one line of verdict; what it printed goes to the log, `result` and JSON lines to the results.
try() {
    local name=$1 limit=$2 start=$SECONDS out=$work/$1.txt rc verdict=ok
    shift 2
    timeout -k 5 "$limit" "$@" >"$out" 2>&1
    rc=$?
    grep '^result ' "$out" >>"$results"
    grep '^{' "$out" | sed "s/^/json $name /" >>"$results"
    { echo "==== $name: $* (exit $rc, $((SECONDS - start)) s)"; keep "$out"; } >>"$log"
    [ $rc = 0 ] || verdict=FAILED
    echo "verdict $name $verdict $((SECONDS - start))" >>"$results"
    if [ $rc = 0 ]; then
        echo "ok      $name ($((SECONDS - start)) s)" | tee -a "$work/verdicts.txt"
    else
        echo "FAILED  $name (exit $rc, $((SECONDS - start)) s)" | tee -a "$work/verdicts.txt"
        grep -v '^result ' "$out" | tail -n 6 | cut -c1-300 | sed 's/^/        /'
    fi
    return $rc
}
procs() { local name=$1 limit=$2 n=$3; shift 3; try "$name" "$limit" "$build/epx" run -n "$n" --timeout "$limit" -- "$build/gpu_bench" "$@" --name "$name"; }
threads() { local name=$1 limit=$2 n=$3; shift 3; try "$name" "$limit" "$build/gpu_bench" "$@" --threads "$n" --name "$name"; }

mps_start() {
    [ "$EPX_BENCH_GPU" = cuda ] || return 0
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/epx-mps-$$ CUDA_MPS_LOG_DIRECTORY=$work/mps
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    if nvidia-cuda-mps-control -d >>"$log" 2>&1; then note "MPS runs"; else note "MPS does not start"; unset CUDA_MPS_PIPE_DIRECTORY; fi
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
if ! bash bench/gpu_build.sh "$build" ${EPX_GPU_ARCH:-} >"$work/build.txt" 2>&1; then
    tail -n 30 "$work/build.txt"
    note "the build failed"
    exit 1
fi
note "built"
"$build/epx" doctor >>"$log" 2>&1

if step smoke; then
    # One rank, two ranks as threads, small: stops here if nothing works.
    threads t1-ll 40 1 ll --tokens 16 --hidden 1024 --experts 8 --iters 0 --check --timeout 5000 &&
        threads t1-ht 40 1 ht --tokens 64 --hidden 1024 --experts 8 --iters 0 --check --timeout 5000
    threads t2-ll 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
    threads t2-ht 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
fi
if step ring; then
    # Alone on the GPU: commands per second into decoding proxies, and the way there and back.
    try ring-8 30 "$build/epx" bench ring --device $EPX_BENCH_GPU --rings 8 --json
    try ring-1 30 "$build/epx" bench ring --device $EPX_BENCH_GPU --rings 1 --json
    try ring-8-wide 30 "$build/epx" bench ring --device $EPX_BENCH_GPU --rings 8 --agents 32 --json
fi
mps_start
if step smoke; then
    procs p2-ll 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
    procs p2-ht 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
fi
if step check; then
    for how in threads procs; do
        t=${how:0:1}
        $how ${t}8-ll-bf16 40 8 ll --tokens 33 --hidden 2048 --experts 32 --iters 0 --check --timeout 5000
        $how ${t}8-ll-fp8 40 8 ll --tokens 33 --hidden 2048 --experts 32 --fp8 --iters 0 --check --timeout 5000
        $how ${t}8-ht-bf16 40 8 ht --tokens 300 --hidden 2048 --experts 32 --iters 0 --check --timeout 5000
        $how ${t}8-ht-fp8 40 8 ht --tokens 300 --hidden 2048 --experts 32 --fp8 --iters 0 --check --timeout 5000
    done
    threads t4-ll-logfmt 40 4 ll --tokens 33 --hidden 2000 --experts 32 --logfmt --iters 0 --check --timeout 5000
    threads t4-ll-rank 40 4 ll --tokens 33 --hidden 2000 --experts 30 --rank-major --iters 0 --check --timeout 5000
    threads t4-ht-expert 40 4 ht --tokens 100 --hidden 2000 --experts 30 --expert-major --iters 0 --check --timeout 5000
    threads t4-ll-plain 40 4 ll --tokens 33 --hidden 2000 --experts 32 --plain --iters 0 --check --timeout 5000
    threads t4-ht-plain 40 4 ht --tokens 100 --hidden 2000 --experts 32 --plain --iters 0 --check --timeout 5000
    if [ $EPX_BENCH_GPU = cuda ]; then # rows of combine in other memory than EPX's, which the others map
        procs p8-ht-registered 40 8 ht --tokens 300 --hidden 2048 --experts 32 --plain --registered --iters 0 --check --timeout 5000
        procs p4-ht-expert-registered 40 4 ht --tokens 300 --hidden 2000 --experts 30 --expert-major --plain --registered --iters 0 --check --timeout 5000
        EPX_GPU_HEAP=host procs p2-ht-host-registered 40 2 ht --tokens 600 --hidden 2048 --experts 16 --plain --registered --iters 0 --check --timeout 5000
        EPX_REGISTER=1 threads t4-ht-registered 40 4 ht --tokens 300 --hidden 2000 --experts 32 --plain --registered --iters 0 --check --timeout 5000
    fi
    EPX_GPU_HEAP=host threads t2-ll-host 40 2 ll --tokens 16 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
    EPX_GPU_HEAP=host procs p2-ht-host 40 2 ht --tokens 64 --hidden 1024 --experts 16 --iters 0 --check --timeout 5000
fi
if step measure; then
    procs ht-bf16 60 8 ht --iters 40
    [ $EPX_BENCH_GPU != cuda ] || procs ht-bf16-registered 60 8 ht --plain --registered --iters 40
    procs ht-fp8 60 8 ht --raw-fp8 --iters 40
    procs ht-fp8-cast 60 8 ht --fp8 --iters 40
    procs ll-fp8 60 8 ll --fp8 --iters 200
    procs ll-bf16 60 8 ll --iters 200
    threads ll-fp8-threads 60 8 ll --fp8 --iters 200
    threads ht-bf16-threads 60 8 ht --iters 40
fi
if step graph; then
    # One graph, hundreds of replays with other routing in the same tensors; in halves; beside work on another stream.
    small="--check --agents 64 --timeout 5000"
    threads g4-ll 60 4 ll --tokens 24 --hidden 1024 --experts 32 --replays 300 $small
    threads g4-ll-fp8-overlap 60 4 ll --tokens 24 --hidden 1024 --experts 32 --fp8 --replays 300 --overlap $small
    threads g4-ll-staged 60 4 ll --tokens 24 --hidden 1024 --experts 32 --replays 300 --staged --overlap $small
    procs g8-ll-staged-procs 60 8 ll --tokens 24 --hidden 1024 --experts 32 --replays 200 --staged $small
    threads g4-ht 60 4 ht --tokens 64 --hidden 1024 --experts 32 --replays 300 $small
    threads g4-ht-expert-overlap 60 4 ht --tokens 64 --hidden 1024 --experts 32 --expert-major --replays 200 --overlap $small
    [ $EPX_BENCH_GPU != cuda ] || procs g8-ht-registered 60 8 ht --tokens 300 --hidden 1024 --experts 32 --plain --registered --replays 100 $small
    procs g8-ht-procs 60 8 ht --tokens 64 --hidden 1024 --experts 32 --replays 200 --overlap $small
fi
if step nodes; then
    # Two nodes of four ranks cut out of this machine: rings, proxies and a network library between them.
    for net in tcp shm; do
        for how in threads procs; do
            n=n${how:0:1}8-$net
            $how $n-ll 60 8 ll --nodes 2 --net "ofi:$net" --tokens 33 --hidden 2048 --experts 32 --iters 0 --check --timeout 10000
            $how $n-ht 60 8 ht --nodes 2 --net "ofi:$net" --tokens 100 --hidden 2048 --experts 32 --iters 0 --check --timeout 10000
        done
    done
    procs np8-tcp-ll-graph 60 8 ll --nodes 2 --net tcp --tokens 24 --hidden 1024 --experts 32 --fp8 --replays 100 --check --timeout 10000
    procs np8-tcp-ht-graph 60 8 ht --nodes 2 --net tcp --tokens 64 --hidden 1024 --experts 32 --replays 100 --check --timeout 10000
    for net in tcp shm; do
        # What the path can carry: the same bytes by a plain loop around fi_write between the same processes.
        # Tensors in heaps, hence in host memory, and in the GPU's own.
        for mode in ll ht; do
            try nodes-$net-$mode 60 "$build/epx" bench $mode --device $EPX_BENCH_GPU --nodes 2 --net "ofi:$net" --iters 20 --check --vs ofi --json
            try nodes-$net-$mode-gpu 60 "$build/epx" bench $mode --device $EPX_BENCH_GPU --nodes 2 --net "ofi:$net" --iters 20 --check --vs ofi --json --plain-memory
        done
    done
fi
if step nccl-ep && [ $EPX_BENCH_GPU = cuda ]; then
    # NCCL EP's interface: the tests of tests/scripts/nccl_ep.sh with GPU memory, on the stand-in for NCCL.
    nccl_ep() { local name=$1 n=$2; shift 2; try "$name" 60 "$build/epx" run -n "$n" --timeout 55 -- "$build/nccl_ep_ranks" "$@"; }
    export EPX_DEVICE=cuda EPX_ALLOC_BYTES=64M
    nccl_ep nccl-ep-1 1 layouts misuse
    nccl_ep nccl-ep-8 8 standin layouts misuse masks
    EPX_RANKS_PER_NODE=4 nccl_ep nccl-ep-nodes 8 layouts
    unset EPX_DEVICE EPX_ALLOC_BYTES
fi
if step net; then
    # The conformance suite of networks with heaps in memory that the GPU maps.
    EPX_DEVICE=$EPX_BENCH_GPU try net-memory 20 "$build/gpu_net" memory
    for net in tcp shm; do
        EPX_DEVICE=$EPX_BENCH_GPU try net-$net 100 "$build/gpu_net" "ofi:$net"
    done
fi
if step prop; then
    # Random configurations against the oracle, ranks as threads; heaps and tensors in memory that the host reaches too.
    mps_stop
    # late: one rank comes after the deadline; its peers must end, and go on without it.
    for mode in ll:40 ht:40 mixed:40 nodes:40 late:10 late-nodes:5; do
        EPX_GPU_HEAP=host EPX_TEST_DEVICE=$EPX_BENCH_GPU EPX_TEST_VERBOSE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 \
            try prop-${mode%:*} 100 "$build/gpu_prop" ${mode%:*} "${EPX_GPU_CASES:-${mode#*:}}"
    done
fi
if step sanitize; then
    mps_stop
    # The tools make kernels of one process run one after the other: ranks that wait for each other are processes there.
    small="--tokens 4 --hidden 512 --experts 4 --agents 4 --iters 0 --check --timeout 60000"
    check="compute-sanitizer --error-exitcode 9 --print-limit 20"
    for mode in ll ht; do
        try memcheck-$mode 100 $check --tool memcheck "$build/gpu_bench" $mode --threads 1 $small
        try memcheck-$mode-2 100 $check --tool memcheck --target-processes all "$build/epx" run -n 2 --timeout 90 -- "$build/gpu_bench" $mode $small
        try racecheck-$mode 100 $check --tool racecheck "$build/gpu_bench" $mode --threads 1 $small
    done
fi
if step python; then
    mps_stop # run_gpu.sh starts its own
    if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>>"$log"; then
        try python-tests 180 env OUT="$OUT" EPX_GPU_BUILD="$build" bash python/tests/run_gpu.sh tests
        try python-bench 120 env OUT="$OUT" EPX_GPU_BUILD="$build" bash python/tests/run_gpu.sh bench
        cat "$work/python-bench.txt"
    else
        note "skipped: python: no torch that sees a GPU"
    fi
fi
if step tune; then
    # Variants of the constants that matter, ranks as threads.
    variant() { # NAME FLAGS...: builds the two kernels anew and measures
        local name=$1; shift
        rm -rf "$build-$name"; cp -a "$build" "$build-$name"; rm -f "$build-$name"/o/src_device_cuda_*
        EPX_NVCC_FLAGS="$*" bash bench/gpu_build.sh "$build-$name" ${EPX_GPU_ARCH:-} >>"$log" 2>&1 || { note "variant $name does not build"; return; }
        for mode in "ht" "ll --fp8"; do
            timeout 40 "$build-$name/gpu_bench" $mode --threads 8 --iters 40 --name "$name-${mode%% *}" 2>>"$log" | grep '^result ' | grep -v update >>"$results"
        done
    }
    for v in "store-cs -DSTORE_KIND=1" "store-plain -DSTORE_KIND=2" "rows4x2 -DSUM_ROWS=4 -DSUM_WIDE=2" "rows6x2 -DSUM_ROWS=6 -DSUM_WIDE=2" "flight14 -DCOPY_FLIGHT=14" \
        "warps24 -DLAUNCH_WARPS=24"; do
        variant $v
    done
fi
grep -h -E "Function properties for epx_|spill" "$build"/o/*.cu.o.log 2>/dev/null | grep -A1 "for epx_" | grep -v '^--' >>"$log"
note "done"
python3 bench/gpu_table.py "$results" "$OUT/results.json" | tee "$OUT/table.txt"
! grep -q FAILED "$work/verdicts.txt"
