# SPDX-License-Identifier: Apache-2.0
# What guest.sh runs once the two devices are there.

# The devices reach each other, both ways: without this the rest says nothing about EPX.
speak() { # server's device, client's device
    ibv_rc_pingpong -d "$1" -g 1 -n 10 &
    sleep 1
    ibv_rc_pingpong -d "$2" -g 1 -n 10 127.0.0.1 && wait $!
}
export -f speak
run rxe0-to-rxe1 30 bash -c 'speak rxe0 rxe1'
run rxe0-to-rxe0 30 bash -c 'speak rxe0 rxe0'
run net_ofi_verbs 240 "$build/tests/test_net_verbs" ofi
run net_verbs 240 "$build/tests/test_net_verbs"
