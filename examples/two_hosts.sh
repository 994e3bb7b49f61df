#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two machines on one: two network namespaces, which reach each other over a pair of virtual interfaces only.
#
#       host a                          host b
#       eth0 10.79.0.1 ---------------- eth0 10.79.0.2
#       ranks 0, 1                      ranks 2, 3
#
#   examples/two_hosts.sh [PROGRAM [ARGUMENT...]]      default: build/examples/hello
#
# What a launcher does on two machines is done by hand here: each process gets its RANK, the number of all ranks, and
# where rank 0 is. EPX_NET=tcp sends the tokens between the hosts by libfabric over TCP. Everything is gone when the
# script ends: it runs in namespaces of its own. Exit 77: this machine does not allow that.
set -euo pipefail

cannot() {
    echo "two_hosts: $1"
    exit 77
}

if [ "${1:-}" != --inside ]; then
    mine=(unshare --net --mount --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" -eq 0 ] || mine+=(--map-root-user)
    export PATH=$PATH:/usr/sbin:/sbin
    command -v ip >/dev/null || cannot "there is no ip (Debian: iproute2)"
    "${mine[@]}" ip link set lo up 2>/dev/null || cannot "may not make namespaces here"
    exec "${mine[@]}" bash "$0" --inside "$@"
fi
shift
[ $# -gt 0 ] || set -- "$(dirname "$0")/../build/examples/hello"

# The two hosts, and the wire between them.
mount -t tmpfs none /run && mkdir /run/netns
ip netns add a
ip netns add b
ip link add eth0 netns a type veth peer name eth0 netns b 2>/dev/null || cannot "no virtual interfaces here"
ip -n a addr add 10.79.0.1/24 dev eth0
ip -n b addr add 10.79.0.2/24 dev eth0
for host in a b; do
    ip -n $host link set lo up
    ip -n $host link set eth0 up
done
for host in a b; do # a link is usable a moment after it is up
    until ip -n $host link show eth0 | grep -q 'state UP'; do sleep 0.05; done
done

# All ranks have the same secret, by which they prove to each other who they are. EPX_RANKS_PER_NODE says what two
# machines would show by themselves: that ranks 0 and 1 share no memory with 2 and 3.
export WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 EPX_RANKS_PER_NODE=2 MASTER_ADDR=10.79.0.1 MASTER_PORT=29500
export EPX_NET=tcp EPX_SECRET
EPX_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
pids=()
for rank in 0 1 2 3; do
    host=$([ $rank -lt 2 ] && echo a || echo b)
    RANK=$rank LOCAL_RANK=$((rank % 2)) nsenter --net=/run/netns/$host "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit $status
