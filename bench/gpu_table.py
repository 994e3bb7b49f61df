#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a table and a JSON file of gpu_bench's `result NAME OP RANK p50 p99 min` lines.

A line of the table is over the ranks: the median rank's p50, the slowest rank's p50, the largest p99.
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
}


def main():
    ranks = collections.defaultdict(list)
    for line in open(sys.argv[1]):
        _, name, op, rank, p50, p99, least = line.split()
        ranks[name, op].append((float(p50), float(p99), float(least)))
    rows = []
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
    with open(sys.argv[2], "w") as f:
        json.dump(rows, f, indent=1)


main()
