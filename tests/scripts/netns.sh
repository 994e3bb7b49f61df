#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Hosts are network namespaces, joined by veth pairs in a switch, which is the script's own namespace:
#
#        h0                      switch                      h1
#        eth0 10.78.0.1 -------- p0 |        | p1 -------- eth0 10.78.0.2
#                                   | bridge |               h2
#                                   |        | p2 -------- eth0 10.78.0.3      (three hosts)
#
# Each host runs ranks of tests/exchange, which meet at 10.78.0.1, send tokens in both modes over libfabric's TCP and
# compare everything with the oracle: over a good wire; over one that delays, loses and reorders packets (netem on p0,
# p1, or where the kernel has no netem, netns_wire.py in place of the bridge); and with a link that goes down in the
# middle, after which every rank must name a peer in time, and go on once the link is back. With EPX_TEST_LONG=1 a cable
# is also out for 30 s, less than the deadline, and again until all have noticed (2 minutes more).
#
# Nothing outside is touched: all of it, processes included, lives in namespaces of its own that end with the script.
# ctest: labels=slow serial
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
. "$(dirname "$0")/../lib/namespaces.sh"
in_namespaces "${1:-}"

here=$root/tests/scripts exchange=$build/tests/exchange
[ -x "$exchange" ] || die "there is no $exchange"
own_run_folder
begin=$SECONDS HANGS_S=200
. "$(dirname "$0")/../lib/slow.sh"

# ---- The network

hosts_up() { # number of hosts
    local i
    hosts=$1
    for ((i = 0; i < hosts; i++)); do
        ip netns add "h$i" && ip link add "p$i" type veth peer name eth0 netns "h$i" || skip "no veth pairs here"
        ip -n "h$i" addr add "10.78.0.$((i + 1))/24" dev eth0
        ip -n "h$i" link set lo up
        # One packet at a time, so that single packets are lost and overtaken.
        ip -n "h$i" link set eth0 gso_max_size 1500 2>/dev/null
        ip -n "h$i" link set eth0 up
        ip link set "p$i" up
    done
}

hosts_down() {
    local i
    bad_wire_off
    ip link del br0 2>/dev/null
    for ((i = 0; i < hosts; i++)); do
        ip link del "p$i"
        ip netns del "h$i"
    done
}

bridge_up() {
    local i
    ip link add br0 type bridge 2>/dev/null || return 1
    for ((i = 0; i < hosts; i++)); do
        ip link set "p$i" master br0
    done
    ip link set br0 up
}

wire=
mkfifo "$work/commands"
exec 8<>"$work/commands"
wire_up() { # options of netns_wire.py
    local i ports=()
    for ((i = 0; i < hosts; i++)); do
        ports+=("p$i")
    done
    python3 "$here/netns_wire.py" --commands "$@" "${ports[@]}" >"$work/wire" 2>&1 <&8 &
    wire=$!
    for ((i = 0; i < 1200; i++)); do
        kill -0 $wire 2>/dev/null || break
        grep -qs ready "$work/wire" && return 0
        sleep 0.05
    done
    sed 's/^/    /' "$work/wire"
    return 1
}

wire_does() { # a command of netns_wire.py
    local tries
    : >"$work/wire"
    echo "$*" >&8
    for ((tries = 0; tries < 1200; tries++)); do
        grep -qsx -- "$*" "$work/wire" && return 0
        sleep 0.05
    done
    die "the wire does not do: $*"
}

bad_wire_off() {
    local i
    for ((i = 0; i < hosts; i++)); do
        tc qdisc del dev "p$i" root 2>/dev/null
    done
    [ -n "$wire" ] || return 0
    kill "$wire" && wait "$wire"
    wire=
    tail -1 "$work/wire"
    # A wire that was to be bad has lost packets and changed their order, or the test has shown nothing.
    [ $# -eq 0 ] || ! grep -qE " 0 ($1)" "$work/wire" || fail "the wire was too good"
}

# A switch that does its work, by whichever means this kernel has.
good_wire() { bridge_up || wire_up; }

# bad_wire MILLISECONDS LOST% OVERTAKING%
bad_wire() {
    local i
    if tc qdisc add dev p0 root netem delay "$1ms" loss "$2%" reorder "$3%" 2>/dev/null; then
        for ((i = 1; i < hosts; i++)); do
            tc qdisc add dev "p$i" root netem delay "$1ms" loss "$2%" reorder "$3%"
        done
        bridge_up && how=netem && return 0
    fi
    ip link del br0 2>/dev/null
    how="netns_wire.py (this kernel has no netem)"
    wire_up --delay-ms "$1" --loss "$2" --reorder "$3"
}

# ---- The ranks

pids=() boot=120000
start() { # ranks per host, arguments of exchange
    local per=$1 rank
    shift
    rm -f "$work"/out.*
    pids=()
    for ((rank = 0; rank < hosts * per; rank++)); do
        RANK=$rank WORLD_SIZE=$((hosts * per)) MASTER_ADDR=10.78.0.1 MASTER_PORT=29500 EPX_RANKS_PER_NODE=$per \
            EPX_SOCKET_IFNAME="=eth0" EPX_NET="ofi:tcp" EPX_BOOT_TIMEOUT_MS=$boot \
            nsenter --net="/run/netns/h$((rank / per))" "$exchange" "$@" >"$work/out.$rank" 2>&1 &
        pids+=($!)
    done
}

said() { cat "$work"/out.* | grep -c -- "$1"; }

# until_said TEXT: every rank has said it. Whether in time is for the ranks to say; here only what hangs is ended.
until_said() {
    local tries
    for ((tries = 0; tries < HANGS_S * 20; tries++)); do
        [ "$(said "$1")" -eq ${#pids[@]} ] && return 0
        sleep 0.05
    done
    return 1
}

# finish NAME: every rank ends by itself, well
finish() {
    local name=$1 since=$SECONDS pid
    if ! until_said '^exchange: rank [0-9]* \(ok\|FAILED\)'; then
        fail "$name: ranks hang: $(said ' ok$') of ${#pids[@]} have ended after $HANGS_S s"
        kill -9 "${pids[@]}" 2>/dev/null
    fi
    for pid in "${pids[@]}"; do
        wait "$pid" || name+=" (exit $?)"
    done
    if [ "$name" = "$1" ] && [ "$(said ' ok$')" -eq ${#pids[@]} ] &&
        grep -q "on $hosts nodes over ofi" "$work/out.0"; then
        echo "ok: $name ($((SECONDS - since)) s)"
    else
        fail "$name"
    fi
}

# ---- The tests

for hosts in 2 3; do
    hosts_up $hosts
    good_wire || skip "neither a bridge nor packet sockets here"
    start 2 --rounds 3 --cases 8 --seed "$hosts"
    finish "$hosts hosts with 2 ranks each"
    hosts_down
done

hosts_up 2
if bad_wire 5 1 25; then
    start 2 --rounds 3 --cases 2 --tokens 16 --hidden 512
    finish "2 hosts, 5 ms, 1 % of the packets lost, 25 % overtaking by $how"
    bad_wire_off "lost|overtook"
else
    echo "skipped: delay, loss and reordering: no netem, and no packet sockets to do without"
fi
hosts_down

# link_fails NAME DOWN UP [DEADLINE_MS]: commands that cut the link of the last host and mend it
# The link is down until all ranks have noticed.
link_fails() {
    local deadline
    deadline=$(slow "${4:-3000}")
    start 2 --until-fault $HANGS_S --timeout-ms "$deadline" --tokens 16 --hidden 512 --recover --rounds 2
    if ! until_said running; then
        fail "$1: the ranks did not start"
        kill -9 "${pids[@]}"
        wait
        return
    fi
    eval "$2"
    until_said ' fault: ' || fail "$1: $(said ' fault: ') of ${#pids[@]} ranks have noticed after $HANGS_S s"
    sed -n 's/^exchange: \(.* fault:.*\)/    \1/p' "$work"/out.*
    eval "$3"
    finish "$1: every rank names a peer in time, and goes on when the link is back"
}

hosts_up 2
if wire_up --delay-ms 1 --double 10 --corrupt 0.5; then
    start 2 --rounds 3 --cases 2 --tokens 16 --hidden 512
    finish "2 hosts, 10 % of the packets arrive twice, 0.5 % are corrupt"
    bad_wire_off "doubled|corrupted"

    # The connections of the rendezvous do not outlive this: they end after EPX_BOOT_TIMEOUT_MS without an answer. The
    # ranks see that at different times, try to recover meanwhile, and meet again once they can.
    wire_up --delay-ms 1 || die "no second wire"
    boot=$(slow 4000)
    for what in "cut" "cut p1" ${EPX_TEST_LONG:+"swallow 200"}; do
        link_fails "a cable is out for twice as long as connections last ($what)" "wire_does $what" \
            "sleep $((2 * boot / 1000)); wire_does mend; wire_does swallow 0" 2000
    done
    boot=120000
    if [ -n "${EPX_TEST_LONG:-}" ]; then
        link_fails "a cable is out for 30 s, and again" \
            "wire_does cut; sleep 30; wire_does mend; sleep 20; wire_does cut" "wire_does mend" 40000
    fi
    bad_wire_off
else
    echo "skipped: cables that are out, packets that are doubled or corrupt: no packet sockets"
fi
hosts_down

hosts_up 3
good_wire
link_fails "a host's interface goes down" "ip -n h2 link set eth0 down" "ip -n h2 link set eth0 up"
link_fails "a port of the switch goes down" "ip link set p2 down" "ip link set p2 up"
hosts_down

echo "$failures failures, $((SECONDS - begin)) s"
[ "$failures" -eq 0 ]
