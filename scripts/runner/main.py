# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh: runs stages, one after the other, and reports."""
import json
import os
import resource
import sys
import time

import results
import stages
from progress import Progress
from run import LOGS, Run


def expected_times():
    """Seconds per step: those of the last run here, else those in stages.py."""
    times = dict(stages.TIMES)
    try:
        times.update(json.load(open(os.path.join(LOGS, "times.json"))))
    except (OSError, ValueError):
        pass
    return times


def chosen(arguments):
    if arguments == ["--quick"]:
        return stages.QUICK, int(os.environ.get("EPX_QUICK_BUDGET_S", 180))
    names = arguments or stages.ALL
    unknown = [name for name in names if name not in stages.ALL + stages.QUICK]
    if unknown:
        sys.exit(f"no stage '{unknown[0]}'; stages: {' '.join(stages.ALL)} quick")
    return names, None if arguments else int(os.environ.get("EPX_TEST_BUDGET_S", 900))


def cpu_of_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_stages(run, names):
    for name in names:
        run.stages.append(results.Stage(name))
        begin, cpu = time.monotonic(), cpu_of_children()
        try:
            getattr(stages, name)(run)
        finally:
            run.stage.seconds = time.monotonic() - begin
            run.stage.cpu_seconds = cpu_of_children() - cpu


def report(run, elapsed, budget):
    """Prints the table and the lists; returns the exit status."""
    accepted = results.move_unreviewed(results.read_rules("scripts/skips.txt"), run.stages)
    print()
    print("\n".join(results.table(run.stages)))
    print()
    for line in results.group_skips(accepted):
        print(line)
    failed = [(stage.name, item) for stage in run.stages for item in stage.failed]
    for stage, item in failed:
        print(f"FAILED: {stage}: {item.name}: {item.text}")
    if failed:
        print(f"full logs: {LOGS}/; again: scripts/test.sh {' '.join(dict.fromkeys(stage for stage, _ in failed))}")
    if budget:
        late = " OVER BUDGET: on 2 idle cores this must not happen." if elapsed > budget else ""
        print(f"took {elapsed:.0f} s of a budget of {budget} s.{late}")
    passed, skipped = sum(stage.passed for stage in run.stages), len(accepted)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


def main():
    if sys.argv[1:] == ["--list"]:
        for name in dict.fromkeys(stages.ALL + stages.QUICK):
            print(f"{name:10} {getattr(stages, name).__doc__}")
        return 0
    names, budget = chosen(sys.argv[1:])
    # Open MPI refuses to run as root, as CI does, unless told.
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    times, begin = expected_times(), time.monotonic()
    steps = [step for name in names for step in stages.STEPS.get(name, [name])]
    run = Run(Progress(sum(times.get(step, 3.0) for step in steps)), times, stages.ahead(names))
    interrupted = False
    try:
        run_stages(run, names)
    except KeyboardInterrupt:
        interrupted = True
        run.progress.message("interrupted")
    finally:
        run.ahead.stop()
    run.progress.finish()
    run.save_times()
    status = report(run, time.monotonic() - begin, budget)
    return 130 if interrupted else status


if __name__ == "__main__":
    sys.exit(main())
