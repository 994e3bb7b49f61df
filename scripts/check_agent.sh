#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The agent contract and the devices name the same primitives: every one that kernel/agent.h lists is defined by the
# CPU's and the GPU's headers ("b", "s": by those with AG_BLOCKS or AG_STAGED 1; "o": by any), every one that those
# define or a kernel uses is listed, and the simulation wraps listed ones only.
set -euo pipefail
cd "$(dirname "$0")/.."

word='((ag|copy_set|word_set|sum_set|command_set|pair_set)_[a-z0-9_]+|AG_[A-Z_]+|KFN(_STEP)?|(struct|enum) [a-z_]+)'
kept='(agent|int_pair|copy_set|word_set|sum_set|command_set|pair_set|route_kept)'

listed() { # mark: the names with that mark in the first column
    sed -nE "/^ \*\//q; s/^ \* $1 $word.*/\1/p" src/kernel/agent.h | sort -u
}

defined() { # files: primitives that they define
    {
        grep -hoE '^(KFN|KFN_STEP)\b[^;=(]*\b(ag|copy_set|word_set|sum_set|command_set|pair_set)_[a-z0-9_]+\(' "$@" |
            grep -oE '(ag|copy_set|word_set|sum_set|command_set|pair_set)_[a-z0-9_]+\(' | tr -d '(' || true
        grep -hoE '^ *# *define +(AG_[A-Z_]+|ag_[a-z0-9_]+|KFN(_STEP)?)\b' "$@" | awk '{ print $NF }' || true
        grep -hoE "^(struct|enum) $kept \{" "$@" | sed 's/ {//' || true
    } | sort -u || true # a file may define none of a kind
}

bad=0
missing() { # what is wrong; names on standard input
    local name
    while read -r name; do
        echo "$name: $1"
        bad=$((bad + 1))
    done
}

cpu=(src/device/cpu/prims.h src/device/cpu/agent.h)
gpu=(src/device/gpu/*.cuh)
required=$(listed " ") blocks=$(printf "%s\n" "$(listed b)" "$(listed s)") optional=$(listed o)
all=$(printf '%s\n' "$required" "$blocks" "$optional" | sort -u)
on_cpu=$(defined "${cpu[@]}") on_gpu=$(defined "${gpu[@]}")
used=$(cat src/kernel/*.h | sed -E '/^ \*/d; s|/\*.*\*/||' |
    grep -oE '\b((ag|copy_set|word_set|sum_set|command_set|pair_set)_[a-z0-9_]+|AG_[A-Z_]+)\b' | sort -u)
in_kernel=$(defined src/kernel/*.h)
in_sim=$(defined sim/prims.h)

missing "listed in kernel/agent.h, not defined in ${cpu[*]}" < <(comm -23 <(echo "$required") <(echo "$on_cpu"))
missing "listed in kernel/agent.h, not defined in device/gpu/*.cuh" \
    < <(comm -23 <(printf '%s\n' "$required" "$blocks" | sort -u) <(echo "$on_gpu"))
missing "marked optional in kernel/agent.h, which has no default" < <(comm -23 <(echo "$optional") <(echo "$in_kernel"))
missing "defined by a device, not listed in kernel/agent.h" \
    < <(comm -13 <(echo "$all") <(printf '%s\n' "$on_cpu" "$on_gpu" | sort -u))
missing "used by a kernel, neither listed in kernel/agent.h nor defined in kernel/" \
    < <(comm -13 <(printf '%s\n' "$all" "$in_kernel" | sort -u) <(echo "$used"))
missing "wrapped in sim/prims.h, not listed in kernel/agent.h" < <(comm -13 <(echo "$all") <(echo "$in_sim"))

[ "$bad" -eq 0 ] && echo "$(wc -l <<<"$all") primitives: kernel/agent.h, cpu, gpu and sim agree"
[ "$bad" -eq 0 ]
