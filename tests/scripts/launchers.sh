#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Ranks started by Open MPI's mpirun, and by small launchers that set the variables of srun, MPICH and torchrun.
#
#     launcher        starts       examples/hello and a group in Python, which both compare rank and number of ranks
#     --------        ------       with what the launcher has set
#     mpirun          is the real one; the others are functions below, because CI has no Slurm and no MPICH
set -u
. "$(dirname "$0")/../lib/script.sh"
. "$(dirname "$0")/../lib/launch.sh"
hello=$build/examples/hello
export EPX_BOOT_TIMEOUT_MS=60000 EPX_LIBRARY=$build/libepx.so PYTHONPATH=$root/python
no_leak_checks
if ! command -v mpirun >/dev/null; then
    echo "mpirun is not installed (Debian: openmpi-bin)"
    exit 77
fi

cat >"$work/group.py" <<'PYTHON'
import epx

with epx.Group(num_experts=8, max_tokens_per_rank=4, max_hidden_bytes=64, max_topk=2) as group:
    print("python rank %d of %d: created" % (group.info.rank, group.info.nranks))
PYTHON

# complete N WORD: one line for each of N ranks.
complete() {
    local rank
    for ((rank = 0; rank < $1; rank++)); do
        has 1 "$2 $rank of $1:"
    done
}

# start N VARIABLES COMMAND...: N processes; VARIABLES is a function that sets the variables of rank $1 of $2.
start() {
    local n=$1 variables=$2 rank pids=() pid code=0
    shift 2
    for ((rank = 0; rank < n; rank++)); do
        (
            "$variables" "$rank" "$n"
            exec timeout -k 1 200 "$@"
        ) &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" || code=$?
    done
    return $code
}

# A library with a sanitizer cannot be loaded into Debian's Python.
in_python() {
    if grep -qE '__(asan|tsan)_init' "$EPX_LIBRARY"; then
        echo "not run: $1 (the library has a sanitizer)"
        return 1
    fi
}

# both_at_a_time COMMAND -- COMMAND: at the same time; succeeds when both do.
both_at_a_time() {
    local first=() pid code=0
    while [ "$1" != -- ]; do
        first+=("$1")
        shift
    done
    shift
    "${first[@]}" >"$work/first" 2>&1 &
    pid=$!
    "$@" || code=$?
    wait "$pid" || code=$?
    cat "$work/first"
    return $code
}

# A port that nobody uses now: another run of this script may be under way.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free_port)
# A folder for each: mpirun removes that of all of a user's jobs when it ends, also while another one begins in it.
mpi() { timeout -k 1 200 mpirun --oversubscribe --mca orte_tmpdir_base "$(mktemp -d "$work/ompi.XXXXXX")" "$@"; }

# ---- Open MPI ----------------------------------------------------------------------------------------------------

check "mpirun, no variable set" 0 mpi -n 4 "$hello"
complete 4 "rank"

EPX_LOG=info check "mpirun is named in the log" 0 mpi -n 2 "$hello"
has 2 "from Open MPI; rank 0 is at 127.0.0.1, port"

check "two mpiruns at a time" 0 both_at_a_time mpi -n 3 "$hello" -- mpi -n 2 "$hello"
complete 2 "rank"
complete 3 "rank"

check "mpirun with MASTER_ADDR and MASTER_PORT" 0 mpi -n 2 -x MASTER_ADDR=localhost -x MASTER_PORT="$port" "$hello"
complete 2 "rank"

if in_python "mpirun, Python"; then
    check "mpirun, Python" 0 mpi -n 3 python3 "$work/group.py"
    complete 3 "python rank"
fi

RANK=0 WORLD_SIZE=1 check "a RANK that contradicts mpirun" any mpi -n 2 "$hello"
grep -q "RANK is 0 and WORLD_SIZE is 1, but Open MPI has set OMPI_COMM_WORLD_RANK to" "$work/out" ||
    fail "the message does not name both"

check "epx run inside mpirun" 0 mpi -n 1 "$EPX_BUILD_DIR/epx" run -n 2 "$hello"
complete 2 "rank"

# Two machines: an agent in the place of ssh gives each a host name of its own (plm rsh: some containers set
# OMPI_MCA_plm=isolated, with which mpirun calls all other machines filled). The ranks then know mpirun's address
# only.
cat >"$work/agent" <<'SHELL'
#!/bin/sh
host=$1
shift
exec unshare --uts -- sh -c 'hostname "$0" && exec sh -c "$*"' "$host" "$@"
SHELL
chmod +x "$work/agent"
two_machines() {
    mpi -n 4 --host node-a:2,node-b:2 --mca plm rsh --mca plm_rsh_agent "$work/agent" \
        --mca oob_tcp_if_include lo "$@"
}
if ! mpirun --version 2>/dev/null | grep -q "(Open MPI) 4\."; then
    echo "not run: mpirun on two machines (only daemons of Open MPI 4 talk over the loopback)"
elif ! unshare --uts true 2>/dev/null; then
    echo "not run: mpirun on two machines (no right to give a host name)"
elif [ -z "${CI:-}" ] && ! two_machines true >"$work/out" 2>&1 </dev/null; then
    # Some installations and sandboxes have other rules for what counts as a free machine; that is not EPX's.
    echo "not run: mpirun on two machines (it does not start even true): $(grep -m1 '[a-z]' "$work/out")"
else
    EPX_LOG=info check "mpirun on two machines" 0 two_machines "$hello"
    complete 4 "rank"
    has 4 "from Open MPI; rank 0 is at 127.0.0.1, port"
    has 4 "OMPI_MCA_orte_hnp_uri"
fi

# ---- srun --------------------------------------------------------------------------------------------------------

slurm_one_node() {
    export SLURM_PROCID=$1 SLURM_NTASKS=$2 SLURM_LOCALID=$1 SLURM_JOB_ID=$$ SLURM_STEP_ID=${step:-0}
    export SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=node7
}
# Two nodes whose names are loopback addresses: the first one, from the expanded list, is where rank 0 is.
slurm_two_nodes() {
    slurm_one_node "$1" "$2"
    export SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST="127.0.0.[1-2]"
}
slurm_with_pmi2() {
    slurm_two_nodes "$1" "$2"
    export PMI_RANK=$1 PMI_SIZE=$2 PMI_JOBID=$$.0
}
slurm_batch() {
    export SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=$$ SLURM_NODELIST="node[1-4]"
}
slurm_step_1() { step=1 slurm_one_node "$@"; }
check "srun on one node" 0 start 4 slurm_one_node "$hello"
complete 4 "rank"
check "srun on two nodes" 0 start 4 slurm_two_nodes "$hello"
complete 4 "rank"
check "srun --mpi=pmi2" 0 start 2 slurm_with_pmi2 "$hello"
complete 2 "rank"
check "two steps of a job at a time" 0 \
    both_at_a_time start 3 slurm_one_node "$hello" -- start 2 slurm_step_1 "$hello"
complete 2 "rank"
complete 3 "rank"
if in_python "srun, Python"; then
    check "srun, Python" 0 start 2 slurm_one_node python3 "$work/group.py"
    complete 2 "python rank"
fi
check "a batch script without srun" any start 1 slurm_batch "$hello"
has 1 "start the ranks with srun"

# ---- PMI ---------------------------------------------------------------------------------------------------------

# As MPICH's daemon does: one process starts all ranks of the machine, each with a socket to it.
cat >"$work/hydra.py" <<'PYTHON'
import os
import socket
import subprocess
import sys

n = int(sys.argv[1])
pairs = [socket.socketpair() for _ in range(n)]
ranks = [subprocess.Popen(sys.argv[2:], pass_fds=[pairs[rank][1].fileno()],
                          env=dict(os.environ, PMI_RANK=str(rank), PMI_SIZE=str(n), PMI_FD=str(pairs[rank][1].fileno()),
                                   MPI_LOCALRANKID=str(rank), MPI_LOCALNRANKS=str(n)))
         for rank in range(n)]
sys.exit(max(rank.wait(90) for rank in ranks))
PYTHON
check "mpiexec of MPICH" 0 python3 "$work/hydra.py" 4 "$hello"
complete 4 "rank"
check "two mpiexecs at a time" 0 \
    both_at_a_time python3 "$work/hydra.py" 3 "$hello" -- python3 "$work/hydra.py" 2 "$hello"
complete 2 "rank"
complete 3 "rank"

pmi_elsewhere() { export PMI_RANK=$1 PMI_SIZE=$2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1; }
check "mpiexec on several machines says what to pass" any start 2 pmi_elsewhere "$hello"
grep -qF "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT" "$work/out" || fail "no hint"

# ---- torchrun, by hand -------------------------------------------------------------------------------------------

# Inside srun, once per node: SLURM_PROCID is the node's then. Python's suite runs under the real torchrun.
torchrun_in_srun() {
    slurm_one_node 0 1
    export RANK=$1 WORLD_SIZE=$2 LOCAL_RANK=$1 LOCAL_WORLD_SIZE=$2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
    export TORCHELASTIC_RUN_ID=$$
}
by_hand() { export RANK=$1 WORLD_SIZE=$2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port EPX_JOB_ID=$$; }
check "torchrun inside srun" 0 start 3 torchrun_in_srun "$hello"
complete 3 "rank"
check "by hand" 0 start 2 by_hand "$hello"
complete 2 "rank"
check "no launcher" any "$hello"
has 1 "no launcher was found"

finish
