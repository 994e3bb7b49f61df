#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx doctor`: the verdict comes first (EPX can run here or not, what works, what does not, what to do), the details
# after it; --json is one object that has every variable; misspelt, shadowed and useless variables are named; what
# EPX_NET asks for in vain is a warning.
set -uo pipefail
. "$(dirname "$0")/../lib/script.sh"
for name in $(compgen -e EPX_); do
    case $name in EPX_BUILD_DIR | EPX_SANITIZE | EPX_TEST_*) ;; *) unset "$name" ;; esac
done

# expect CODE NAME COMMAND...
expect() {
    local code=$1 name=$2 got
    shift 2
    timeout 200 "$@" >"$work/out" 2>"$work/err"
    got=$?
    [ "$got" -eq "$code" ] && echo "ok: $name" || fail "$name: exit code $got, expected $code"
}

says() { # NAME TEXT
    grep -qF -- "$2" "$work/out" "$work/err" && echo "ok: $1" || fail "$1: '$2' is not in the output"
}

json() { # NAME CONDITION: the output is one object o, for which the Python expression holds
    python3 - "$work/out" "$2" "$root/docs/environment.md" <<'PY' && echo "ok: $1" || fail "$1"
import json, re, sys
o = json.load(open(sys.argv[1]))
documented = re.findall(r"^\| `(EPX_\w+)`", open(sys.argv[3]).read(), re.M)
variables = {v["name"]: v for v in o["environment"]}
assert eval(sys.argv[2]), sys.argv[2]
PY
}

first() { # NAME PATTERN: the first line matches
    head -1 "$work/out" | grep -qE -- "$2" && echo "ok: $1" || fail "$1: the first line is '$(head -1 "$work/out")'"
}
verdict() { # NAME TITLE PATTERN: a row under this title, before the details, matches
    sed '/^---- details/,$d' "$work/out" | awk -v title="$2" '/^[a-z]/ { on = $0 == title } on' | grep -qE -- "$3" &&
        echo "ok: $1" ||
        fail "$1: no '$3' under '$2'"
}

expect 0 "EPX runs here" "$epx" doctor && first "and the first line says so" '^EPX [0-9.]+ can run here\.$'
verdict "the CPU works" "what works" "^  cpu device +ranks of this machine share memory"
[ -e /dev/nvidiactl ] || verdict "there is no GPU" "what does not work" \
    "^  cuda device +(no GPU found|EPX's module is here, but no GPU)"
says "memory was shared with a process" "a second process mapped a heap"
[ "$(awk 'length > 110' "$work/out" | wc -l)" -eq 0 ] && echo "ok: lines of at most 110 columns" || fail "long lines"

expect 0 "as JSON" "$epx" doctor --json
json "one object" "o['can_run'] is True and o['cannot_run_because'] is None and o['sections']['cpu device']"
json "every variable" \
    "documented and list(variables) == documented and all(v['value'] is None for v in variables.values())"
json "no warnings about the environment" "not any('EPX_' in w for w in o['warnings'])"

EPX_NTE=1 EPX_PROXY_THRAEDS=1 EPX_XYZZY=1 NCCL_IB_HCA='a"b' UCCL_IB_HCA=mlx5_0 EPX_IB_SL=4 NCCL_IB_SL=5 \
    EP_DEFAULT_RDMA_SL=6 UCCL_RDMA_ADAPTIVE_SLEEP=1 UCCL_EP_ENABLE_AGGRESSIVE_ATOMIC=0 \
    expect 0 "with variables" "$epx" doctor --json
json "misspelt" "any('EPX_NTE' in w and 'did you mean EPX_NET?' in w for w in o['warnings'])"
json "letters swapped" "any('EPX_PROXY_THRAEDS' in w and 'EPX_PROXY_THREADS' in w for w in o['warnings'])"
json "unknown" "any(w.endswith('EPX_XYZZY is set, but EPX reads no such variable') for w in o['warnings'])"
json "the alias that counts" \
    "variables['EPX_IB_HCA']['value'] == 'mlx5_0' and variables['EPX_IB_HCA']['by'] == 'UCCL_IB_HCA'"
json "the switch of UCCL-EP for AMD" \
    "variables['EPX_AGGRESSIVE_ATOMIC']['value'] == '0' and not any('AGGRESSIVE' in w for w in o['warnings'])"
json "the alias that does not" "any('NCCL_IB_HCA is \"a\"b\" to no effect' in w for w in o['warnings'])"
json "DeepEP's variable" "any('EP_DEFAULT_RDMA_SL is \"6\" to no effect: EPX_IB_SL' in w for w in o['warnings'])"
json "an alias behind the variable" "any('NCCL_IB_SL is \"5\" to no effect: EPX_IB_SL' in w for w in o['warnings'])"
json "a name without effect" "any('UCCL_RDMA_ADAPTIVE_SLEEP has no effect' in w for w in o['warnings'])"

EPX_IB_HCA="=nosuch" EPX_OFI_PROVIDER=nowhere expect 0 "without a network" "$epx" doctor
[ "$(awk '/^[a-z]/ { on = $0 == "what does not work"; next } on { print; exit }' "$work/out" |
    grep -c 'network between nodes  none: ')" = 1 ] &&
    echo "ok: it is the first thing that does not work" ||
        fail "the missing network is not the first thing that does not work"
EPX_IB_HCA="=nosuch" EPX_OFI_PROVIDER=nowhere expect 0 "without a network, as JSON" "$epx" doctor --json
json "it is missing" \
    "o['network'] is None and 'none: ' in o['missing']['network between nodes'] and 'cpu device' in o['works']"

EPX_NET=null expect 0 "a network by name" "$epx" doctor --json
json "is chosen" "o['network'] == 'null' and 'EPX_NET is \"null\"' in o['sections']['network between nodes']['chosen']"
EPX_NET="ofi:nowhere" expect 0 "a provider that is not there" "$epx" doctor --json
json "is a warning" "any('EPX_NET is \"ofi:nowhere\", which cannot be used' in w for w in o['warnings'])"
EPX_NET=tcp FI_PROVIDER=tcp expect 0 "TCP that FI_PROVIDER leaves" "$epx" doctor
! grep -q '^  network between nodes .*ofi_rxm' "$work/out" || # with libfabric 1.18 and later there is no layer
    says "is below a layer: what to set" "expected FI_PROVIDER=net,tcp, or none"
EPX_NET=pigeons expect 0 "a network that does not exist" "$epx" doctor --json
json "is a warning, too" "o['network'] is None and any('pigeons' in w for w in o['warnings'])"
EPX_SOCKET_IFNAME="=nosuch" expect 0 "an interface that is not there" "$epx" doctor
says "is a warning, with those that are" "selects no interface that is up; interfaces: "

SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=3 SLURM_JOB_ID=4 SLURM_NNODES=1 expect 0 "as a rank of srun" "$epx" \
    doctor --json
json "is shown" \
    "'Slurm: rank 1 of 2; rank 0 is at 127.0.0.1, port ' in o['sections']['rendezvous over tcp']['launcher']"
expect 0 "a secret is used and not shown" env EPX_SECRET=nobody-may-read-this "$epx" doctor
says "where the secret is from" "of EPX_SECRET"
says "what proves it" "proved with     lib"
! grep -q nobody-may-read-this "$work/out" "$work/err" && echo "ok: no secret" || fail "the secret is shown"
expect 0 "nor in JSON" env EPX_SECRET=nobody-may-read-this "$epx" doctor --json
! grep -q nobody-may-read-this "$work/out" "$work/err" && echo "ok: no secret" || fail "the secret is shown"
RANK=0 WORLD_SIZE=1 PMI_RANK=1 PMI_SIZE=2 expect 0 "a rank by two launchers that differ" "$epx" doctor --json
json "is a warning" "any('RANK is 0' in w and 'PMI_RANK to 1' in w for w in o['warnings'])"

EPX_DEVICE=abacus expect 1 "a device that is not there" "$epx" doctor
first "is named in the first line" "cannot run here: "
if [ "${EPX_SANITIZE:-none}" = none ]; then
    expect 1 "too little address space" bash -c 'ulimit -v 2000000; exec "$0" doctor' "$epx"
    says "the way out is named" "EPX_ALLOC_BYTES makes it smaller"
    EPX_ALLOC_BYTES=64M expect 0 "a smaller heap fits" bash -c 'ulimit -v 2000000; exec "$0" doctor' "$epx"
fi
hide='mount -t tmpfs none /proc && exec "$0" doctor'
if [ "${EPX_SANITIZE:-none}" != none ]; then
    echo "skipped: without /proc and with little address space: sanitizers need both"
elif unshare --map-root-user --mount mount -t tmpfs none /proc 2>/dev/null; then
    expect 1 "no /proc to find other processes' memory in" unshare --map-root-user --mount bash -c "$hide" "$epx"
    first "is said in the first line" "cannot run here: processes cannot share memory: "
    expect 1 "mount /proc" unshare --map-root-user --mount bash -c "${hide/doctor/bench ll}" "$epx"
else
    echo "skipped: without /proc: may not make namespaces here"
fi

# Lines end where the terminal does, between words; without one they have up to 110 columns.
if command -v script >/dev/null; then
    expect 0 "a terminal of 70 columns" script -qec "stty cols 70 && $epx doctor" "$work/typescript"
    long=$(tr -d '\r' <"$work/out" | grep -vE '^Script |[^ ]{30}' | grep -E '.{71}')
    [ -z "$long" ] && echo "ok: no longer lines" || fail "longer than 70 columns: $long"
else
    echo "skipped: a terminal of 70 columns: no script(1)"
fi

expect 2 "an unknown option" "$epx" doctor --jsno &&
    says "with a hint" "epx doctor: unknown option '--jsno' (did you mean '--json'?); see epx doctor --help"
expect 0 "help" "$epx" help doctor && says "help is help" "usage: epx doctor"
expect 1 "a full disk" bash -c '"$1" doctor --json >/dev/full' bash "$epx" && says "is named" "No space left on device"

finish
