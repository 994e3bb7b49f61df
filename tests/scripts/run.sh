#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# epx run: what ranks get, how failures are told, and that nothing is left behind. ctest: cost=12
set -u
. "$(dirname "$0")/../lib/script.sh"
# A leak check at every exit costs seconds on some machines: the run with tags, which uses the most, does it alone.
leak_checked=${ASAN_OPTIONS:-}
no_leak_checks

# check NAME EXPECTED_CODE COMMAND...: runs it with a time limit; output in $work/out and $work/err.
check() {
    local name=$1 expected=$2
    shift 2
    timeout -k 1 240 "$@" >"$work/out" 2>"$work/err" </dev/null
    local code=$?
    [ $code -eq "$expected" ] || fail "$name: exit code $code, expected $expected"
    echo "ran: $name"
}

said() { grep -qF -- "$1" "$work/err" || fail "stderr does not say: $1"; }
printed() { grep -qxF -- "$1" "$work/out" || fail "stdout has no line: $1"; }
seconds_since() { echo $((SECONDS - $1)); }
# Whether any process has the marker in its environment (of ours: the marker holds our process id).
left_over() { grep -lsz "EPX_RUN_TEST=$1" /proc/[0-9]*/environ 2>/dev/null | grep -v "/proc/$$/" | head -1; }
# gone PID: waits a little until the process has ended (a zombie that nobody reaps has).
gone() {
    local i
    for i in $(seq 600); do
        [ -e "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null || return 0
        sleep 0.1
    done
    return 1
}

check "each rank has its environment" 0 "$epx" run -n 3 sh -c \
    'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:+port} ${EPX_JOB_ID:+job}"'
for rank in 0 1 2; do
    printed "$rank $rank 3 3 127.0.0.1 port job"
done

check "the port can be given" 0 "$epx" run -n 1 --port 23456 sh -c 'echo $MASTER_PORT'
printed 23456

check "arguments reach the program as they are" 0 "$epx" run -n 1 -- printf '<%s>\n' -n 'a b' --tag
printed '<-n>'
printed '<a b>'
printed '<--tag>'

ASAN_OPTIONS=$leak_checked check "tags" 0 "$epx" run -n 2 --tag sh -c 'echo one; echo two >&2; printf three'
printed '[0] one'
printed '[1] one'
printed '[1] three'
said '[0] two'

check "a failing rank is named, its code returned" 7 "$epx" run -n 3 sh -c '[ $RANK != 2 ] || exit 7'
said 'rank 2 failed with exit code 7'

start=$SECONDS
check "a signal is named, the others ended after the grace" 139 "$epx" run -n 3 --grace 0.5 sh -c \
    'if [ $RANK = 1 ]; then kill -SEGV $$; fi; sleep 250'
said 'rank 1 was ended by SIGSEGV'
said 'ending ranks 0 2, still running'
[ "$(seconds_since $start)" -lt 120 ] || fail "the grace took $(seconds_since $start) s"

check "within the grace others may finish" 3 "$epx" run -n 2 --grace 200 sh -c \
    'if [ $RANK = 1 ]; then exit 3; fi; sleep 0.5; echo finished'
printed finished

check "a rank that ignores SIGTERM is killed" 4 "$epx" run -n 2 --grace 0.1 bash -c \
    'if [ $RANK = 1 ]; then sleep 0.3; exit 4; fi; trap "" TERM; while :; do sleep 0.1; done'

check "a limit in time" 124 "$epx" run -n 2 --timeout 0.3 sleep 250
said 'not finished after 300 ms'

check "a program that does not exist" 127 "$epx" run -n 2 /no/such/program
said 'cannot start /no/such/program'
check "a program that may not be started" 126 "$epx" run -n 2 /etc/passwd
said 'Permission denied'

# A wrong command line: exit status 2, the program's own name, what was expected, where to read more.
check "no ranks" 2 "$epx" run -n 0 true
said "epx run: --ranks is '0'; expected a number from 1 to 1024; see epx run --help"
check "no program" 2 "$epx" run -n 2
said 'epx run: the program is missing; see epx run --help'
check "no number of ranks" 2 "$epx" run true
said 'epx run: -n RANKS is missing'
check "mpirun's name of an option" 2 "$epx" run --np 2 true
said "epx run: unknown option '--np' (did you mean '--ranks'?); see epx run --help"
check "a typing error" 2 "$epx" run -n 2 --timout 3 true
said "unknown option '--timout' (did you mean '--timeout'?)"
check "an unknown letter" 2 "$epx" run -z 2 true
said "epx run: unknown option '-z'; see epx run --help"
check "abbreviations are refused" 2 "$epx" run --rank 2 true
said "unknown option '--rank' (did you mean '--ranks'?)"
check "an option without its value" 2 "$epx" run -n
said '-n needs a value'
check "a flag with a value" 2 "$epx" run -n 1 --tag=yes true
said '--tag takes no value'
check "seconds that are none" 2 "$epx" run -n 1 --timeout soon true
said "--timeout is 'soon'; expected seconds"
check "options of a start where a launcher has started the ranks" 2 \
    env RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400 "$epx" run --timeout 5 true
said "epx run: --timeout belongs to -n RANKS; here "
check "values after an equal sign, and after a letter" 0 "$epx" run -n2 --timeout=20 true
check "unknown command" 2 "$epx" frobnicate
said "epx: unknown command 'frobnicate'; see epx --help"
for command in bench "bench ring" ep-bench sim run predict top trace doctor; do # lines fit a window
    # shellcheck disable=SC2086
    long=$("$epx" $command --help | awk 'length > 110')
    [ -z "$long" ] || fail "epx $command --help has a line that is too long: $long"
done
check "a command with a typing error" 2 "$epx" bnech
said "(did you mean 'bench'?)"
check "no command at all" 2 "$epx"
said 'usage: epx COMMAND'
check "version" 0 "$epx" version
check "help" 0 "$epx" help run
printed 'usage: epx run -n RANKS [options] [--] PROGRAM [ARGUMENTS...]'
check "help of the program" 0 "$epx" --help
printed 'usage: epx COMMAND [options]'

check "sim: abbreviations are refused" 2 "$epx" sim --seed 3
said "epx sim: unknown option '--seed' (did you mean '--seeds'?); see epx sim --help"
check "sim: more nodes than ranks" 2 "$epx" sim --ranks 2 --nodes 3
said '--nodes is 3; expected at most the number of ranks, 2'
check "sim: an unknown mode" 2 "$epx" sim --mode sideways
said "--mode is 'sideways'; expected one of ll, ht, mixed"
check "sim: a word too many" 2 "$epx" sim 5
said "unexpected argument '5'"
check "sim: passes" 0 "$epx" sim --seeds 2

# The table of docs/run.md is the one that --help prints.
"$epx" run --help=markdown >"$work/out"
[ -s "$work/out" ] || fail "no table"
while IFS= read -r row; do
    grep -qxF -- "$row" "$root/docs/run.md" || fail "docs/run.md lacks: $row"
done <"$work/out"

# Progress: on a terminal, after two seconds, and never in a file. The ranks end when it was seen on the terminal.
if command -v script >/dev/null; then
    until_seen="until [ -e $work/seen ]; do sleep 0.1; done"
    "$epx" run -n 2 --tag sh -c "$until_seen" >"$work/out" 2>"$work/err" & elsewhere=$!
    script -qefc "$epx run -n 2 --tag sh -c '$until_seen'" "$work/typescript" >/dev/null 2>&1 & terminal=$!
    for _ in $(seq 1000); do
        ! grep -q 'epx run: 2 of 2 ranks running' "$work/typescript" 2>/dev/null || break
        sleep 0.1
    done
    touch "$work/seen"
    wait $terminal || fail "progress on a terminal: exit code $?"
    grep -q 'epx run: 2 of 2 ranks running' "$work/typescript" || fail "no progress on a terminal"
    wait $elsewhere || fail "no progress elsewhere: exit code $?"
    [ ! -s "$work/err" ] || fail "progress was written to a file"
    echo "ran: progress on a terminal, and none elsewhere"
else
    echo "skipped: progress on a terminal: no script(1)"
fi

# Signals are passed on: the ranks end by them, and so does the run.
for signal in INT TERM; do
    : >"$work/out" # of the signal before: the loop below must not see it
    env --default-signal=INT "$epx" run -n 2 --grace 200 \
        bash -c "trap 'echo got $signal; exit 5' $signal; echo ready; while :; do sleep 0.05; done" \
        >"$work/out" 2>"$work/err" &
    runner=$!
    while [ "$(grep -c ready "$work/out")" != 2 ] && kill -0 $runner 2>/dev/null; do
        sleep 0.05
    done
    kill -$signal $runner
    wait $runner
    code=$?
    [ $code -eq 5 ] || fail "SIG$signal: exit code $code, expected 5"
    [ "$(grep -c "got $signal" "$work/out")" = 2 ] || fail "SIG$signal was not passed on to both ranks"
    echo "ran: SIG$signal is passed on"
done

# Nothing stays behind, neither of a run that was killed itself nor what a rank started.
"$epx" run -n 2 sh -c "echo \$\$ >$work/pid.\$RANK; exec sleep 250" 2>"$work/err" &
runner=$!
while [ ! -s "$work/pid.0" ] || [ ! -s "$work/pid.1" ] && kill -0 $runner 2>/dev/null; do
    sleep 0.05
done
kill -KILL $runner
wait $runner 2>/dev/null # bash reports the kill
for rank in 0 1; do
    gone "$(cat "$work/pid.$rank")" || fail "rank $rank outlived a killed epx run"
done
echo "ran: ranks do not outlive epx run"

marker=$$.$RANDOM
EPX_RUN_TEST=$marker check "what ranks started is ended with them" 6 "$epx" run -n 2 --grace 0.1 sh -c \
    'if [ $RANK = 1 ]; then sleep 0.3; exit 6; fi; sleep 250; true'
for _ in $(seq 300); do
    [ -n "$(left_over "$marker")" ] || break
    sleep 0.1
done
[ -z "$(left_over "$marker")" ] || fail "a process of a rank is left: $(left_over "$marker")"

finish
