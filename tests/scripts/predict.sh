#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# epx predict: the same answer twice, slower cards give slower operations, results are checked, figures that were
# measured come out near what was measured, and bad machine files are refused. ctest: cost=9
set -eu
. "$(dirname "$0")/../lib/script.sh"
[ "${EPX_SANITIZE:-none}" = none ] ||
    skip "fibers of hundreds of agents are slow under sanitizers; unit tests run there"

# Whatever is not the time or memory of the prediction itself is the same on every machine.
same() { sed -E 's/"(seconds|peak_bytes)":[0-9.]+,?//g' "$1"; }
for mode in ll ht; do
    for run in 1 2; do
        "$epx" predict --machine h800-cx7 --mode $mode --ranks 16 --tokens 64 --iters 2 --json >"$work/$mode.$run"
    done
    [ "$(same "$work/$mode.1")" = "$(same "$work/$mode.2")" ] || die "two predictions of $mode differ"
done

printf 'like h800-cx7\ncard_rate 4850\nmessage_ns 1000\n' >"$work/slow.machine"
"$epx" predict --machine "$work/slow.machine" --mode ll --ranks 16 --tokens 64 --iters 2 --json >"$work/slow"
python3 - "$work/ll.1" "$work/slow" <<'PY' || die "cards of a tenth of the speed do not show, or combine waits too long"
import json, sys
fast, slow = (json.load(open(f)) for f in sys.argv[1:])
assert fast["dispatch"]["net_bytes"] == slow["dispatch"]["net_bytes"] > 0
for op in ("dispatch", "combine"):
    wire = slow[op]["net_bytes"] / 4850
    assert slow[op]["us_median"] > max(wire, 1.5 * fast[op]["us_median"]), (op, wire, slow[op], fast[op])
# A card begins a message while it sends the bytes of the last one: 121 us beside the bytes, and 203 if it does not.
assert slow["dispatch"]["us_median"] - slow["dispatch"]["net_bytes"] / 4850 < 160, slow["dispatch"]
# Combine between nodes of GPUs waits for its rows, and neither for who reads its own nor for its card: 52 us beside the
# bytes, and 88 if ranks of the node read in place.
assert fast["combine"]["us_median"] - fast["combine"]["net_bytes"] / 48500 < 70, fast["combine"]
PY

"$epx" predict --calibration --json >"$work/calibration"
python3 - "$work/calibration" <<'PY' || die "the calibration is off"
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    for op in ("dispatch", "combine"):
        assert abs(row[op]["error_percent"]) < 30, row
PY

"$epx" predict --machine h200-shared --mode ll --ranks 8,4 --tokens 16 --report "$work/page.html" \
    --svg "$work/plot.svg" >"$work/said"
grep -qF "The report is in $work/page.html" "$work/said" || die "it does not say where the report is"
python3 -c 'import sys, xml.dom.minidom; assert xml.dom.minidom.parse(sys.argv[1]).getElementsByTagName("circle")' \
    "$work/plot.svg" || die "the plot is no SVG with points"
python3 - "$work/page.html" <<'PY' || die "the page has no points, or not the numbers"
import json, re, sys
page = open(sys.argv[1]).read()
rows = json.loads(re.search(r'id="epx-numbers">(.*?)</script>', page, re.S).group(1))
points = [float(y) for y in re.findall(r'data-y="([^"]*)"', page)]
assert rows[0]['ranks'] == 8 and page.count('<circle') >= 4
assert any(abs(y - rows[0]['dispatch']['us_median']) <= 0.01 for y in points)
PY

# Tokens that draw one group of experts go to one node each.
"$epx" predict --ranks 16 --mode ll --tokens 4 --hidden 512 --iters 1 --routing groups --groups 2 --topk-groups 1 \
    --json >"$work/groups"
grep -q '"node_rows":4.0,' "$work/groups" || die "--topk-groups 1: $(cat "$work/groups")"

# One number of ranks has no lines: bars.
"$epx" predict --machine h200-shared --mode ll --ranks 4 --tokens 4 --report "$work/bars.html" >/dev/null
grep -q "<h3>Time of the median rank (4 ranks)" "$work/bars.html" &&
    ! grep -q "<circle\|over ranks" "$work/bars.html" || die "one prediction has no bars, or lines"

# The oracle looks at what was predicted: a result that is spoilt is an error.
EPX_BENCH_CORRUPT=1 "$epx" predict --machine h200-shared --mode ll --ranks 8 --tokens 16 >/dev/null 2>"$work/spoilt" &&
    die "a wrong result was not found"
grep -q "results are wrong" "$work/spoilt" || die "a wrong result gave: $(cat "$work/spoilt")"

unused() { # expected words, options that would not count together: exit status 2, before anything is predicted
    local rc=0
    "$epx" predict "${@:2}" >/dev/null 2>"$work/message" || rc=$?
    [ $rc = 2 ] && grep -qF -- "epx predict: $1; see epx predict --help" "$work/message" ||
        die "predict ${*:2}: exit status $rc, $(cat "$work/message")"
}
unused "cannot write '/no/such/page.html': No such file or directory" --report /no/such/page.html
unused "cannot write '/no/such/plot.svg': No such file or directory" --svg /no/such/plot.svg
unused "--groups belongs to --routing groups" --groups 2
unused "--topk-groups belongs to --routing groups" --routing hot --topk-groups 2
unused "--ranks has no meaning with --calibration" --calibration --ranks 8
unused "--machine has no meaning with --published" --published --machine h200-efa
unused "--published has no meaning with --calibration" --published --calibration
unused "--json has no meaning with --machines" --machines --json
unused "--agents is '4'; expected a number from 8 to 1024" --agents 4
unused "--agents is 257; expected at most the 256 warps of 16 SMs" --machine h200-shared --agents 257
unused "--agents is 17; expected at most the 16 warps of 1 SMs" --machine h200-shared --sms 1 --agents 17

refused() { # text of a machine file, expected words
    printf '%b' "$1" >"$work/bad.machine"
    if "$epx" predict --machine "$work/bad.machine" 2>"$work/message"; then die "accepted: $1"; fi
    grep -q "$2" "$work/message" || die "$1 gave: $(cat "$work/message")"
}
refused 'sms 4\n' 'is missing'
refused 'like h800-cx7\nsms many\n' 'expected a number'
refused 'like h800-cx7\ncards 4\n' "unknown value 'cards'"
refused 'like nobody\n' 'expected a built-in one'
echo "predictions are repeatable, checked, and near what was measured"
