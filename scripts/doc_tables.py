#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""doc_tables.py [--check] [--build DIR]: writes the tables of the documentation that have their source in the program.

A page marks such a table by a comment with the command that prints it, in the line before the table (and a blank one):

    <!-- made by: epx bench --help=markdown -->

The rows become what the command prints; the two lines of the table's head stay unless the command prints them too.
--check changes nothing, and fails if a table is not as the program has it (tests/scripts/environment.sh).
"""
import argparse
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MARK = re.compile(r"^<!-- made by: epx (.*) -->$")


def printed(build, words):
    program = os.path.join(build, "epx")
    return subprocess.run([program, *words.split()], check=True, capture_output=True, text=True,
                          timeout=60).stdout.rstrip("\n").split("\n")


def table_after(lines, at):
    """(first, end) of the table's lines behind a mark."""
    first = at + 1
    while first < len(lines) and not lines[first].strip():
        first += 1
    end = first
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    if end < first + 2:
        sys.exit(f"doc_tables: no table behind {lines[at]}")
    return first, end


def remade(text, build):
    """The page with its tables made again, and how many they are."""
    lines, count, at = text.split("\n"), 0, 0
    while at < len(lines):
        mark = MARK.match(lines[at])
        if mark:
            first, end = table_after(lines, at)
            rows = printed(build, mark.group(1))
            head = [] if rows[1:2] and rows[1].startswith("|---") else lines[first:first + 2]
            lines[first:end] = head + rows
            count += 1
        at += 1
    return "\n".join(lines), count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--build", default="build")
    args = parser.parse_args()
    total, old = 0, []
    for path in sorted(glob.glob(os.path.join(ROOT, "docs", "**", "*.md"), recursive=True)):
        with open(path, encoding="utf-8") as page:
            text = page.read()
        new, count = remade(text, args.build)
        total += count
        if new != text:
            old.append(os.path.relpath(path, ROOT))
            if not args.check:
                with open(path, "w", encoding="utf-8") as page:
                    page.write(new)
    if not total:
        sys.exit("doc_tables: expected tables that are made by epx, found none")
    print(f"{total} tables are made by epx" + (f"; not as the program has them: {' '.join(old)}" if old else ""))
    if args.check and old:
        sys.exit("doc_tables: write them with make tables")


if __name__ == "__main__":
    main()
