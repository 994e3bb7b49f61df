# SPDX-License-Identifier: Apache-2.0
# What guest.sh runs once the two devices are there. Emulated cores are slow: shapes are small, deadlines long.

# The devices reach each other, both ways: without this the rest says nothing about EPX. The client starts once the
# server listens at its port, 18515 (4853 in hex); how long that takes an emulated core is not known.
listening() { grep -qsE ':4853 [0-9A-F:]+ 0A ' /proc/net/tcp /proc/net/tcp6; }
speak() { # server's device, client's device
    local server tries
    ibv_rc_pingpong -d "$1" -g 1 -n 10 &
    server=$!
    for ((tries = 0; tries < 200; tries++)); do
        ! listening || break
        sleep 0.1
    done
    ibv_rc_pingpong -d "$2" -g 1 -n 10 127.0.0.1 && wait $server
}
export -f speak listening
run rxe0-to-rxe1 60 bash -c 'speak rxe0 rxe1'
run rxe0-to-rxe0 60 bash -c 'speak rxe0 rxe0'

# Emulated cores are some ten times slower than real ones, and more when the machine has other work: long limits cost
# nothing while all goes well. Soft-RoCE drops packets then, and who repeats them seldom waits for seconds: data goes
# with repeats every 0.13 s, and without end (7 means that to Soft-RoCE), for no peer is lost here. What is about lost
# peers has an end: seven times half a second.
export EPX_TEST_TIME_SCALE=8
fast="EPX_IB_TIMEOUT=15 EPX_IB_RETRY_CNT=7"
data="all_sizes many_small many_signals four_ranks four_ranks_big both_ways_without_polling
sources_free_when_sent chains
chains_to_three"
life="open_and_close_often reopened_pairs_work own_bounds remote_bounds wrong_version peer_never_there sleeper_wakes
sleeper_sleeps death_is_told survivors_go_on silent_peer_is_given_up"

# No case may be forgotten by the two lists.
count=$("$build/tests/test_net_verbs" --list | wc -l)
run all_cases_are_listed 10 test "$count" = "$(wc -w <<<"$data $life")"
run net_verbs_data 400 env $fast "$build/tests/test_net_verbs" verbs $data
run net_verbs_life 300 env EPX_IB_TIMEOUT=17 "$build/tests/test_net_verbs" verbs $life
run net_verbs_without_srq 200 env $fast EPX_IB_SRQ=0 \
    "$build/tests/test_net_verbs" verbs many_small four_ranks remote_bounds

# libfabric's verbs provider. Its queues are sized for FI_UNIVERSE_SIZE peers, 256 unless set: too many for this device.
# Connections take it seconds here, so only cases that make few.
run net_ofi_verbs 300 env FI_UNIVERSE_SIZE=16 \
    "$build/tests/test_net_verbs" ofi all_sizes many_small four_ranks remote_bounds

# Both modes between two "nodes" of two ranks, every result compared with the oracle; packets must have left through
# the devices. With verbs ranks take turns over the two. The whole heap is registered, and thereby real memory: little.
packets() { # device
    cat "/sys/class/infiniband/$1/ports/1/hw_counters/sent_pkts"
}
# MASTER_ADDR is no loopback address: libfabric is to choose the one of a device. Three quarters of the deadline are for
# the creation: at load 23 libfabric took longer than 45 s to connect four ranks.
ranks() { # mode
    local rank pids=() rc=0
    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 EPX_RANKS_PER_NODE=2 EPX_ALLOC_BYTES=8M \
            "$build/tests/exchange" --mode "$1" --rounds 2 --tokens 8 --hidden 256 --experts 16 --timeout-ms 150000 &
        pids+=($!)
    done
    for rank in 0 1 2 3; do wait "${pids[rank]}" || rc=1; done
    return $rc
}
exchange() { # mode, device...
    local mode=$1 device before=()
    shift
    for device in "$@"; do before+=("$(packets "$device")"); done
    ranks "$mode" || return
    for device in "$@"; do
        echo "$device: packets $before -> $(packets "$device")"
        [ "$(packets "$device")" -gt "$((before + 20))" ] || return
        before=("${before[@]:1}")
    done
}
export -f packets ranks exchange
export build
for mode in ll ht; do
    run "exchange_$mode" 400 env $fast EPX_NET=verbs bash -c "exchange $mode rxe0 rxe1"
    run "exchange_${mode}_ofi" 400 env 'EPX_NET=ofi:verbs' FI_UNIVERSE_SIZE=16 bash -c "exchange $mode rxe0"
done
# The same by the other card: EPX_IB_HCA counts for libfabric too.
run exchange_ll_ofi_rxe1 400 env 'EPX_NET=ofi:verbs' EPX_IB_HCA=rxe1 FI_UNIVERSE_SIZE=16 bash -c "exchange ll rxe1"
