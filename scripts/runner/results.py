# SPDX-License-Identifier: Apache-2.0
"""What a run of tests has given: counts per stage, skips with their reasons and their review, and the table at the
end."""
import collections
import os
import re
import xml.etree.ElementTree as xml

Item = collections.namedtuple("Item", "name text")  # a test, and why it was skipped or how it failed
Rule = collections.namedtuple("Rule", "name reason why not_in_ci")

CASE = re.compile(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] ([A-Za-z_]\w*)")
NO_REASON = "no reason given"


class Stage:
    """Results of one stage."""

    def __init__(self, name):
        self.name = name
        self.passed = 0
        self.failed, self.skipped = [], []
        self.seconds = 0.0
        self.cpu_seconds = 0.0  # of all processes: what the stage costs on any machine, loaded or not

    def add(self, passed, failed, skipped):
        self.passed += passed
        self.failed += failed
        self.skipped += skipped


# ---- Reading what tests print


def reason_of(lines):
    """The last line that says something, without "skipped: " in front."""
    for line in reversed(lines):
        text = line.strip()
        if text and not CASE.match(text):
            return re.sub(r"^(skipped|SKIPPED)[: ]+", "", text)
    return NO_REASON


def cmocka_cases(output):
    """{case: (outcome, the lines it printed)} of a cmocka program. It repeats failed and skipped cases in a list at the
    end, where none is running."""
    cases, running, printed = {}, None, []
    for line in output.splitlines():
        match = CASE.match(line)
        if not match:
            printed.append(line)
        elif match.group(1) == "RUN":
            running, printed = match.group(2), []
        elif match.group(2) == running:
            cases[running] = (match.group(1), printed)
            running, printed = None, []
    return cases


def count_case(case):
    """(passed, failed, skipped) of one <testcase> of ctest: a cmocka program counts as its cases, another test as
    one."""
    name, output = case.get("name"), case.findtext("system-out") or ""
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        return 0, [], [Item(name, reason_of(output.splitlines()))]
    cases = cmocka_cases(output)
    passed = sum(outcome == "OK" for outcome, _ in cases.values())
    failed = [Item(f"{name}.{test}", "\n".join(lines))
              for test, (outcome, lines) in cases.items() if outcome == "FAILED"]
    skipped = [Item(f"{name}.{test}", reason_of(lines))
               for test, (outcome, lines) in cases.items() if outcome == "SKIPPED"]
    if case.find("failure") is not None or case.get("status") == "fail":
        return passed, failed or [Item(name, output)], skipped
    return passed or (0 if skipped else 1), failed, skipped


def count_ctest(report):
    """(passed, failed, skipped) of a JUnit report that ctest has written."""
    passed, failed, skipped = 0, [], []
    for case in xml.parse(report).getroot().iter("testcase"):
        p, f, s = count_case(case)
        passed, failed, skipped = passed + p, failed + f, skipped + s
    return passed, failed, skipped


def count_unittest(output):
    """(passed, skipped) of `python -m unittest -v`: "test_x (where) ... ok" and "... skipped 'why'"."""
    passed = len(re.findall(r" \.\.\. ok$", output, re.MULTILINE))
    # A test with a docstring has it on a second line.
    skips = re.findall(r"^(\w+) \([\w.]+\)(?:\n.*)? \.\.\. skipped ['\"](.*)['\"]$", output, re.MULTILINE)
    return passed, [Item(name, reason or NO_REASON) for name, reason in skips]


def count_suite(output):
    """(passed, failed, skipped items) of python/tests/suite.py, or None if it printed no counts."""
    counts = re.findall(r"^(\d+) passed, (\d+) failed, (\d+) skipped", output, re.MULTILINE)
    if not counts:
        return None
    passed, failed = int(counts[-1][0]), int(counts[-1][1])
    names = list(dict.fromkeys(re.findall(r"FAILED (ranks_\S+)", output)))
    skipped = [Item(name.rstrip(":"), text.lstrip(": ") or NO_REASON)
               for name, text in re.findall(r"^skipped (\S+)(.*)$", output, re.MULTILINE)]
    missing = int(counts[-1][2]) - len(skipped)
    skipped += [Item("suite", NO_REASON)] * max(missing, 0)
    return passed, [Item(name, "") for name in names] + [Item("suite", "")] * max(failed - len(names), 0), skipped


# ---- Skips


def read_rules(path):
    """scripts/skips.txt: NAME :: REASON :: WHY [:: not in CI], the first two as regular expressions of the whole
    text."""
    rules = []
    with open(path) as file:
        lines = file.read().splitlines()
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("::")]
        if len(parts) not in (3, 4) or not all(parts) or parts[3:] not in ([], ["not in CI"]):
            raise ValueError(f"{path}:{number}: expected NAME :: REASON :: WHY [:: not in CI], got {line}")
        rules.append(Rule(re.compile(parts[0]), re.compile(parts[1]), parts[2], len(parts) == 4))
    return rules


def review(rules, stage, item):
    """Why this skip is accepted, or None. Rules name a test as STAGE/TEST. CI is told by the variable CI, as usual."""
    in_ci = bool(os.environ.get("CI"))
    for rule in rules:
        if (rule.name.fullmatch(f"{stage}/{item.name}") and rule.reason.fullmatch(item.text)
                and not (rule.not_in_ci and in_ci)):
            return rule.why
    return None


def move_unreviewed(rules, stages):
    """Skips that no rule accepts become failures; returns [(stage, item, why)] of the others."""
    accepted = []
    for stage in stages:
        kept = []
        for item in stage.skipped:
            why = review(rules, stage.name, item)
            if why:
                kept.append(item)
                accepted.append((stage.name, item, why))
            else:
                stage.failed.append(Item(item.name, f"skipped, and scripts/skips.txt does not accept it: {item.text}"))
        stage.skipped = kept
    return accepted


# ---- The end of a run


def table(stages, elapsed):
    """Lines: a row per stage, and one for all, whose time is less than the sum where stages ran side by side."""
    rows = [(s.name, s.passed, len(s.failed), len(s.skipped), s.seconds, s.cpu_seconds) for s in stages]
    passed, failed, skipped, _, cpu = (sum(column) for column in list(zip(*rows))[1:])
    rows.append(("all", passed, failed, skipped, elapsed, cpu))
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"{'stage':{width}}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>9}{'CPU time':>11}"]
    for name, passed, failed, skipped, seconds, cpu in rows:
        lines.append(f"{name:{width}}{passed:8d}{failed:8d}{skipped:9d}{seconds:7.0f} s{cpu:9.0f} s")
    return lines


def group_skips(accepted):
    """Lines: skips of one stage and one reason together."""
    groups = {}
    for stage, item, why in accepted:
        groups.setdefault((stage, item.text, why), []).append(item.name)
    lines = []
    for (stage, text, why), names in groups.items():
        first = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        lines.append(f"skipped: {stage}: {first}: {text} [accepted: {why}]")
    return lines


def cpu_shares(before, after):
    """What became of all cores' time between two first lines of /proc/stat: (busy, idle, stolen), in per cent. Stolen
    is what a hypervisor gave to other machines."""
    user, nice, system, idle, io, irq, softirq, steal = (
        int(b) - int(a) for a, b in zip(before.split()[1:9], after.split()[1:9]))
    parts = user + nice + system + irq + softirq, idle + io, steal
    return tuple(100 * part / max(sum(parts), 1) for part in parts)
