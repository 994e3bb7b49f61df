#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# epx bench and epx run in worlds that others have started: mpirun, torchrun (TORCHRUN names one; else its variables
# are set by hand), and srun (DEBIAN_SLURM: a folder of scripts/slurm_env.sh); on this machine, and on two hosts that
# are network namespaces:
#
#        h0  eth0 10.79.0.1 ------------- eth0 10.79.0.2  h1
#
# Rank 0 alone reports; a check that fails on one rank fails the run. All of it lives in namespaces of its own.
# ctest: labels=slow,processes,noasan,notsan serial
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
. "$(dirname "$0")/../lib/namespaces.sh"
in_namespaces "${1:-}" --uts
. "$(dirname "$0")/../lib/launch.sh"

hello=$build/examples/hello
own_run_folder
ip link set lo up
export EPX_BOOT_TIMEOUT_MS=30000
small=(--tokens 16 --hidden 512 --experts 8 --topk 2 --iters 3 --timeout 30)

# ---- Two hosts

ip netns add h0 && ip netns add h1 || skip "no network namespaces here"
ip link add eth0 netns h0 type veth peer name eth0 netns h1 || skip "no veth pairs here"
for i in 0 1; do
    ip -n h$i addr add "10.79.0.$((i + 1))/24" dev eth0
    ip -n h$i link set lo up
    ip -n h$i link set eth0 up
done

for ((tries = 0; tries < 100; tries++)); do # a link is usable a moment after it is set up
    [ "$({ ip -n h0 -br link show eth0; ip -n h1 -br link show eth0; } | grep -c ' UP ')" -eq 2 ] && break
    sleep 0.05
done

# by_hand RANKS_PER_HOST COMMAND...: the variables that torchrun sets, on both hosts
by_hand() {
    local per=$1 rank pids=() status=0
    shift
    for ((rank = 0; rank < 2 * per; rank++)); do
        RANK=$rank WORLD_SIZE=$((2 * per)) LOCAL_RANK=$((rank % per)) LOCAL_WORLD_SIZE=$per MASTER_ADDR=10.79.0.1 \
            MASTER_PORT=29501 EPX_SOCKET_IFNAME="=eth0" EPX_JOB_ID=by-hand \
            nsenter --net="/run/netns/h$((rank / per))" "$@" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do
        wait "$rank" || status=$?
    done
    return $status
}
export -f by_hand

check "two hosts by hand, low latency" 0 bash -c 'by_hand 2 "$@"' - "$epx" bench ll "${small[@]}" --net tcp --check
has 1 "4 ranks, 2 nodes"
has 1 "check    ok"
check "two hosts by hand, high throughput, wall" 0 \
    bash -c 'by_hand 2 "$@"' - "$epx" bench ht "${small[@]}" --net tcp --check --timing wall --json
has 3 '"check":"ok"'
EPX_BENCH_CORRUPT=1 check "a check that fails" any \
    bash -c 'by_hand 1 "$@"' - "$epx" bench ll "${small[@]}" --net tcp --check --timing wall
has 1 "check failed"
check "--ranks against the launcher" any bash -c 'by_hand 1 "$@"' - "$epx" bench ll --ranks 4
has 2 "the launcher has started 2"
check "epx run joins" 0 bash -c 'by_hand 2 "$@"' - "$epx" run "$hello"
has 4 "of 4"

# ---- mpirun: here, and its daemons on both hosts

if command -v mpirun >/dev/null; then
    check "mpirun here" 0 mpirun --oversubscribe -n 4 "$epx" bench ll "${small[@]}" --check
    has 1 "4 ranks, 1 node"
    check "mpirun here, epx run joins" 0 mpirun --oversubscribe -n 3 "$epx" run "$hello"
    has 3 "of 3"
    cat >"$work/agent" <<'AGENT'
#!/bin/sh
host=$1
shift
exec unshare --uts -- nsenter --net="/run/netns/$host" sh -c 'hostname "$0" && exec sh -c "$*"' "$host" "$@"
AGENT
    chmod +x "$work/agent"
    if mpirun --version | grep -q 'Open MPI) 4'; then
        hostname h0
        export EPX_SOCKET_IFNAME==eth0
        check "mpirun on two hosts" 0 nsenter --net=/run/netns/h0 mpirun --oversubscribe -n 4 --host h0:2,h1:2 \
            --mca plm_rsh_agent "$work/agent" --mca oob_tcp_if_include eth0 -x MASTER_ADDR=10.79.0.1 \
            -x MASTER_PORT=29502 -x EPX_SOCKET_IFNAME "$epx" bench ht "${small[@]}" --net tcp --check
        has 1 "4 ranks, 2 nodes"
        unset EPX_SOCKET_IFNAME
    else
        echo "not run: mpirun on two hosts (only Open MPI 4 takes an agent like this)"
    fi
fi

# ---- torchrun: the real one, on both hosts

torchrun_host() { # host, command...
    local host=$1
    shift
    nsenter --net="/run/netns/h$host" "$TORCHRUN" --nnodes 2 --node-rank "$host" --nproc-per-node 2 \
        --master-addr 10.79.0.1 --master-port 29503 --no-python "$@"
}
export -f torchrun_host
if [ -n "${TORCHRUN:-}" ]; then
    export GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 EPX_SOCKET_IFNAME==eth0 OMP_NUM_THREADS=1
    check "torchrun on two hosts" 0 bash -c 'torchrun_host 1 "$@" & torchrun_host 0 "$@"; wait $!' - \
        "$epx" bench ll "${small[@]}" --net tcp --check
    has 1 "4 ranks, 2 nodes"
    unset EPX_SOCKET_IFNAME
fi
# ---- srun: Slurm's daemons, one for each host, from a folder of scripts/slurm_env.sh (DEBIAN_SLURM)

slurm_up() {
    local root=$DEBIAN_SLURM/root libraries i
    libraries=$(dirname "$(find "$root/usr/lib" -name slurm-wlm -type d | head -1)")
    export LD_LIBRARY_PATH=$libraries:$libraries/slurm-wlm SLURM_CONF=$work/slurm.conf
    printf '127.0.0.1 localhost\n10.79.0.1 n0\n10.79.0.2 n1\n' >"$work/hosts"
    mount --bind "$work/hosts" /etc/hosts
    hostname n0
    mkdir -p "$work/state" "$work/spool.n0" "$work/spool.n1"
    cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=n0
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/linear
PluginDir=$libraries/slurm-wlm
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmdSpoolDir=$work/spool.%n
StateSaveLocation=$work/state
ReturnToService=2
NodeName=n0 NodeHostname=n0 NodeAddr=10.79.0.1 CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname=n0 NodeAddr=10.79.0.2 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
CONF
    # slurmd looks for the version of control groups in /sys/fs/cgroup, though nothing above uses them: a bare root has
    # none mounted there.
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=%s\n' "$work/cgroup" >"$work/cgroup.conf"
    nsenter --net=/run/netns/h0 "$root/usr/sbin/slurmctld" -D >"$work/ctld.out" 2>&1 &
    sleep 0.5
    for i in 0 1; do
        nsenter --net="/run/netns/h$i" "$root/usr/sbin/slurmd" -D -N "n$i" -d "$root/usr/sbin/slurmstepd" \
            >"$work/slurmd.$i.out" 2>&1 &
    done
    for ((i = 0; i < 200; i++)); do
        nsenter --net=/run/netns/h0 "$root/usr/bin/sinfo" -h -o %D,%t 2>/dev/null | grep -qx '2,idle' && return 0
        sleep 0.1
    done
    tail -n 4 "$work/ctld.out" "$work/slurmd.0.out" "$work/slurmd.1.out"
    return 1
}

if [ -n "${DEBIAN_SLURM:-}" ]; then
    if slurm_up; then
        check "srun on two hosts" 0 nsenter --net=/run/netns/h0 "$DEBIAN_SLURM/root/usr/bin/srun" -N 2 -n 4 \
            --overcommit "$epx" bench ll "${small[@]}" --net tcp --check
        has 1 "4 ranks, 2 nodes"
        check "srun on two hosts, epx run joins" 0 nsenter --net=/run/netns/h0 "$DEBIAN_SLURM/root/usr/bin/srun" -N 2 \
            -n 4 --overcommit "$epx" run "$hello"
        has 4 "of 4"
    else
        fail "Slurm's daemons do not come up"
    fi
fi
finish
