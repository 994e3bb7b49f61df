#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a table and a JSON file of what gpu.sh collected, line by line:

    result NAME OP RANK p50 p99 min     of gpu_bench, in microseconds, one per rank
    json NAME {...}                     of epx bench
    verdict NAME ok|FAILED SECONDS

A line of the first table is over the ranks: the median rank's p50, the slowest rank's p50, the largest p99.
"""
import collections
import json
import statistics
import sys

BARS = {  # us: must, aim, DeepEP 1.2.1 in the same setting, a bare kernel without protocol
    ("ht-fp8", "dispatch"): (560, None, 1307, 446),
    ("ht-bf16", "dispatch"): (1000, None, 2423, 807),
    ("ht-bf16", "combine"): (1100, None, 2294, 887),
    ("ll-fp8", "dispatch"): (77, 50, 77, None),
    ("ll-fp8", "combine"): (100, 65, 114, None),
    ("ll-fp8", "dispatches"): (77, 50, 77, None),  # in a row, with an event after every tenth
    ("ll-fp8", "combines"): (100, 65, 114, None),
}
RING_RATE, RING_TRIP = 100e6, 3.0  # commands per second over 8 rings; us


def read(path):
    ranks, lines, verdicts = collections.defaultdict(list), [], []
    for line in open(path):
        kind, rest = line.split(None, 1)
        if kind == "result":
            name, op, _, p50, p99, least = rest.split()
            ranks[name, op].append((float(p50), float(p99), float(least)))
        elif kind == "json":
            name, text = rest.split(None, 1)
            lines.append(dict(json.loads(text), name=name))
        else:
            name, outcome, seconds = rest.split()
            verdicts.append(dict(name=name, ok=outcome == "ok", seconds=int(seconds)))
    return ranks, lines, verdicts


def show_times(ranks):
    rows = []
    if ranks:
        print("%-18s %-9s %5s %10s %10s %10s %8s %8s %8s" %
              ("", "", "ranks", "p50", "slowest", "p99", "bar", "DeepEP", "bare"))
    for (name, op), values in ranks.items():
        p50 = [v[0] for v in values]
        bar, aim, deepep, bare = BARS.get((name, op), (None,) * 4)
        row = dict(name=name, op=op, ranks=len(values), us_p50=statistics.median(p50), us_slowest_p50=max(p50),
                   us_p99=max(v[1] for v in values), us_min=min(v[2] for v in values), bar=bar, aim=aim, deepep=deepep,
                   bare=bare)
        rows.append(row)
        cells = ["%8s" % ("-" if v is None else v) for v in (bar, deepep, bare)]
        mark = "" if bar is None else "  ok" if row["us_slowest_p50"] <= bar else "  OVER"
        print("%-18s %-9s %5d %7.1f us %7.1f us %7.1f us %s%s" %
              (name, op, len(values), row["us_p50"], row["us_slowest_p50"], row["us_p99"], " ".join(cells), mark))
    return rows


def show_rings(lines):
    for o in lines:
        judged = o["rings"] == 8
        print("%-18s %d rings, %d agents each: %.0f M commands/s (%.0f ns of a proxy each)%s; merged %.0f M/s; "
              "round trip %.2f us (push %.2f), p99 %.2f%s" %
              (o["name"], o["rings"], o["agents"], o["cmds_per_s"] / 1e6, o["proxy_ns_per_cmd"],
               "" if not judged else "  ok" if o["cmds_per_s"] >= RING_RATE else "  UNDER 100",
               o["merged_cmds_per_s"] / 1e6, o["rtt_us_p50"], o["push_us_p50"], o["rtt_us_p99"],
               "  ok" if o["rtt_us_p50"] <= RING_TRIP else "  OVER 3"))


def show_nodes(lines):
    for o in lines:
        print("%-18s %-9s %9.1f us p50, %6.2f GB/s between nodes; plain fi_write of 1 MiB: %6.2f GB/s: share %.2f; "
              "check %s" % (o["name"], o["op"], o["us_p50"], o.get("wire_GBps", 0), o.get("ofi_large_GBps", 0),
                            o.get("vs_ofi_large", 0), o.get("check", "-")))


def main():
    ranks, lines, verdicts = read(sys.argv[1])
    rows = show_times(ranks)
    show_rings([o for o in lines if o["op"] == "ring"])
    show_nodes([o for o in lines if o["op"] in ("dispatch", "combine")])
    bad = [v["name"] for v in verdicts if not v["ok"]]
    print("%d parts ok, %d failed%s" % (len(verdicts) - len(bad), len(bad), ": " + " ".join(bad) if bad else ""))
    with open(sys.argv[2], "w") as f:
        json.dump(dict(times=rows, lines=lines, verdicts=verdicts), f, indent=1)


main()
