#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count_tests.py REPORT.xml: prints "passed failed skipped" of a ctest JUnit report, then a line for each skip and failure.

A cmocka program counts as its cases (its output names them); anything else that ctest runs counts as one.
"""
import re
import sys
import xml.etree.ElementTree as xml

CASE = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] ([A-Za-z_]\w*)", re.MULTILINE)


def count(case):
    """(passed, [failed names], [skipped names]) of one ctest test."""
    name = case.get("name")
    output = case.findtext("system-out") or ""
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        reason = output.strip().splitlines()
        return 0, [], [name + (": " + reason[-1] if reason else "")]
    # cmocka prints each case once as it ends, and some once more in a list at the end: names are a set.
    kinds = {}
    for kind, test in CASE.findall(output):
        kinds[test] = kind
    passed = sum(kind == "OK" for kind in kinds.values())
    failed = [f"{name}.{test}" for test, kind in kinds.items() if kind == "FAILED"]
    skipped = [f"{name}.{test}" for test, kind in kinds.items() if kind == "SKIPPED"]
    if case.find("failure") is not None or case.get("status") == "fail":
        return passed, failed or [name], skipped
    return (passed or (0 if skipped else 1)), failed, skipped


def main():
    passed, failed, skipped = 0, [], []
    for case in xml.parse(sys.argv[1]).getroot().iter("testcase"):
        p, f, s = count(case)
        passed += p
        failed += f
        skipped += s
    print(passed, len(failed), len(skipped))
    for line in skipped:
        print("skipped:", line)
    for line in failed:
        print("FAILED:", line)


main()
