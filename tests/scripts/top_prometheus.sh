#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx top --prometheus`: promtool accepts what it prints, with and without groups; counters agree with --json; the
# dashboard asks for metrics that are there.
set -uo pipefail

. "$(dirname "$0")/../lib/script.sh"
command -v promtool >/dev/null || skip "no promtool here (Debian's package prometheus)"
bench=
trap '[ -z "$bench" ] || kill -KILL -- -"$bench" 2>/dev/null; rm -rf "$work"' EXIT

metrics() { # FILE: what epx top prints, and that promtool has nothing against it
    "$epx" top --prometheus >"$1" || die "epx top --prometheus"
    promtool check metrics <"$1" >"$work/lint" 2>&1 || die "promtool: $(cat "$work/lint")"
}

metrics "$work/before"
echo "ok: promtool, whatever runs here"

set -m
"$epx" bench ll --ranks 2 --tokens 8 --hidden 512 --experts 16 --topk 4 --iters 10000 --timing events --timeout 60 \
    >"$work/bench" 2>&1 &
bench=$!
set +m
group=$(python3 "$(dirname "$0")/top_look.py" "$epx" "$bench" \
    "len(r) == 2 and all(h['operations'] for h in r.values())" "g['group']") ||
    die "a group that runs: $(cat "$work/bench")"
metrics "$work/during"
python3 - "$work/during" "$group" "$root/examples/grafana/epx.json" <<'EOF' || die "the metrics of a group that runs"
import json, re, sys

lines = open(sys.argv[1], encoding="ascii").read().splitlines()
mine = [line for line in lines if f'group="{sys.argv[2]}"' in line]
names = {re.match(r"\w+", line).group() for line in mine}


def values(name, **labels):
    return [float(line.rsplit(" ", 1)[1]) for line in mine if re.match(name + r"\{", line)
            and all(f'{key}="{value}"' in line for key, value in labels.items())]


assert len(values("epx_rank_info", device="cpu", ranks=2)) == 2, mine
for rank in 0, 1:
    for operation in "ll dispatch", "ll combine":
        where = {"rank": rank, "operation": operation}
        assert values("epx_operation_duration_seconds_count", **where)[0] > 0
        low, high = (values("epx_operation_duration_seconds", quantile=q, **where)[0] for q in ("0.5", "0.99"))
        assert 0 < low <= high < 100
        count, total = (values("epx_operation_duration_seconds" + end, **where)[0] for end in ("_count", "_sum"))
        assert 0 < total < 100 * count
    assert values("epx_sent_bytes_total", rank=rank, to="node")[0] > 0
    assert values("epx_group_failed", rank=rank) == values("epx_masked_ranks", rank=rank) == [0]
panels = json.load(open(sys.argv[3], encoding="ascii"))["panels"]
asked = set(re.findall(r"epx_\w+", " ".join(target["expr"] for panel in panels for target in panel["targets"])))
assert len(asked) >= 5 and not asked - names, asked - names
EOF
echo "ok: metrics of a group that runs; the dashboard's are among them"
"$epx" top --prometheus --json >"$work/out" 2>&1
[ $? = 2 ] && grep -q 'expected one of them' "$work/out" || fail "--prometheus with --json"
echo "ok: one format at a time"
finish
