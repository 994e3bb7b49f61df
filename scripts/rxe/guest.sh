#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs inside the machine that run.sh boots: guest.sh BUILD SHELL TESTS. Ends with "EPX-RXE-RESULT passed failed
# skipped".
#
#        rxe0 (10.77.0.1)                     rxe1 (10.77.0.2)
#             |                                    |
#           veth0 ------------- wire ----------- veth1
#
# Both ends live in one network namespace (rxe of this kernel knows no other), where packets to a local address would
# never leave. The rules below look up "10.77.0.2 by veth0" and "10.77.0.1 by veth1" before the local table, which is
# asked first only for what comes in through one of the two.
set -u
build=$1 shell=$2 tests=$3
export HOME=/tmp LC_ALL=C
cd /tmp || exit 1
passed=0 failed=0 skipped=0
out=$(mktemp) # the files of the machine underneath are seen here: any fixed name may be taken

network() {
    ip link set lo up
    ip link add veth0 type veth peer name veth1
    for i in 0 1; do
        ip link set "veth$i" address "02:00:00:00:77:0$((i + 1))" mtu 4200 up
        ip addr add "10.77.0.$((i + 1))/24" dev "veth$i"
        for what in rp_filter=0 accept_local=1; do
            echo "${what#*=}" >"/proc/sys/net/ipv4/conf/veth$i/${what%=*}"
        done
    done
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for i in 0 1; do
        ip neigh replace "10.77.0.$((2 - i))" lladdr "02:00:00:00:77:0$((2 - i))" dev "veth$i" nud permanent
        ip route add "10.77.0.$((2 - i))/32" dev "veth$i" src "10.77.0.$((i + 1))" table 77
        ip rule add pref 10 iif "veth$i" lookup local
    done
    ip rule add pref 20 oif veth0 lookup 77
    ip rule add pref 20 oif veth1 lookup 77
    ip rule add pref 30 lookup local
    ip rule del pref 0
    for i in 0 1; do
        rdma link add "rxe$i" type rxe netdev "veth$i" || echo "rxe$i could not be made"
    done
    [ -e /dev/infiniband/uverbs1 ] || mknod_uverbs
}

# Without udev devtmpfs names the device files; libibverbs looks for them in /dev/infiniband.
mknod_uverbs() {
    mkdir -p /dev/infiniband
    for dir in /sys/class/infiniband_verbs/uverbs* /sys/class/misc/rdma_cm; do
        [ -f "$dir/dev" ] || continue
        mknod -m 666 "/dev/infiniband/${dir##*/}" c $(tr ':' ' ' <"$dir/dev")
    done 2>/dev/null
}

# A test is a command: exit 0 passed, 77 skipped, anything else failed. Its output is shown when it fails.
run() { # name, seconds, command...
    local name=$1 seconds=$2 rc=0 begin=$SECONDS
    shift 2
    timeout "$seconds" "$@" >"$out" 2>&1 </dev/null || rc=$?
    if [ $rc -eq 0 ]; then
        passed=$((passed + 1))
        echo "passed: $name ($((SECONDS - begin)) s)"
    elif [ $rc -eq 77 ]; then
        skipped=$((skipped + 1))
        echo "skipped: $name: $(tail -1 "$out")"
    else
        failed=$((failed + 1))
        tail -100 "$out"
        [ $rc -eq 124 ] && echo "stopped after $seconds s"
        echo "FAILED: $name (exit $rc)"
    fi
}

skip() { # name, why
    skipped=$((skipped + 1))
    echo "skipped: $1: $2"
}

network
ulimit -l unlimited
if [ "$shell" = 1 ]; then
    bash -i
    exit
fi
echo "EPX-RXE-BEGIN $(uname -r)"
ibv_devices
run devices 20 bash -c 'test $(ibv_devices | grep -c rxe) = 2'
. "$tests"
echo "EPX-RXE-RESULT $passed $failed $skipped"
