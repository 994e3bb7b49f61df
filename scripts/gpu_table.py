#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a table and a JSON file of what gpu.sh collected, line by line:

    json NAME {...}                     of epx bench
    verdict NAME ok|FAILED SECONDS

A row of the first table (epx bench --timing events) is over the ranks: the median rank's p50, the slowest rank's p50,
the largest p99.
"""
import json
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
    lines, verdicts = [], []
    for line in open(path):
        kind, name, rest = line.split(None, 2)
        if kind == "json":
            lines.append(dict(json.loads(rest), name=name))
        else:
            outcome, seconds = rest.split()
            verdicts.append(dict(name=name, ok=outcome == "ok", seconds=int(seconds)))
    return lines, verdicts


def show_times(lines):
    rows = []
    if lines:
        print("%-18s %-10s %5s %10s %10s %10s %8s %8s %8s" %
              ("", "", "ranks", "p50", "slowest", "p99", "bar", "DeepEP", "bare"))
    for o in lines:
        bar, aim, deepep, bare = BARS.get((o["name"], o["op"]), (None,) * 4)
        rows.append(dict(o, bar=bar, aim=aim, deepep=deepep, bare=bare))
        cells = ["%8s" % ("-" if v is None else v) for v in (bar, deepep, bare)]
        mark = "" if bar is None else "  ok" if o["us_slowest_p50"] <= bar else "  OVER"
        print("%-18s %-10s %5d %7.1f us %7.1f us %7.1f us %s%s" %
              (o["name"], o["op"], o["ranks"], o["us_p50"], o["us_slowest_p50"], o["us_p99"], " ".join(cells), mark))
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
    lines, verdicts = read(sys.argv[1])
    measured = [o for o in lines if o["op"] == "ring" or o.get("us_p50")]
    rows = show_times([o for o in measured if o.get("timing") == "events"])
    show_rings([o for o in measured if o["op"] == "ring"])
    show_nodes([o for o in measured if o.get("timing") == "wall" and o["op"] in ("dispatch", "combine")])
    bad = [v["name"] for v in verdicts if not v["ok"]]
    print("%d parts ok, %d failed%s" % (len(verdicts) - len(bad), len(bad), ": " + " ".join(bad) if bad else ""))
    with open(sys.argv[2], "w") as f:
        json.dump(dict(times=rows, lines=lines, verdicts=verdicts), f, indent=1)


main()
