# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh: runs stages, in lanes side by side, and reports."""
import json
import os
import sys
import threading
import time
import traceback

import results
import stages
from progress import Progress
from run import LOGS, Outcome, Run, Stopped


STAGES = list(dict.fromkeys(stages.ALL + stages.QUICK + stages.TEST))


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
    if arguments == ["--check"]:
        return stages.ALL, int(os.environ.get("EPX_CHECK_BUDGET_S", 900))
    names = arguments or stages.TEST
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        sys.exit(f"no stage '{unknown[0]}'; stages: {' '.join(STAGES)}")
    if "python" in names and "venv" not in names:
        names = [*names[:names.index("python")], "venv", *names[names.index("python"):]]
    return names, None if arguments else int(os.environ.get("EPX_TEST_BUDGET_S", 480))


def run_stages(run, names):
    """One lane."""
    for name in names:
        run.stages.append(results.Stage(name))
        begin = time.monotonic()
        try:
            getattr(stages, name)(run)
        except Stopped:
            return
        except Exception:  # a fault of this program, which must not end the other lane
            run.fail(name, "the stage itself failed", traceback.format_exc())
        finally:
            run.stage.seconds = time.monotonic() - begin


def run_lanes(runs, lanes, stopping):
    """All lanes, each in its thread; returns whether they were interrupted."""
    threads = [threading.Thread(target=run_stages, args=pair) for pair in zip(runs, lanes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        stopping.set()
        for thread in threads:
            thread.join()
    return stopping.is_set()


def save_times(times, runs):
    for run in runs:
        times.update(run.taken)
    with open(os.path.join(LOGS, "times.json"), "w") as file:
        json.dump(times, file, indent=1, sort_keys=True)


def cpu_line():
    """The first line of /proc/stat: what all cores together have done so far."""
    with open("/proc/stat") as file:
        return file.readline()


def report(done, elapsed, budget, shares):
    """Prints the table and the lists; returns the exit status."""
    accepted = results.move_unreviewed(results.read_rules("scripts/skips.txt"), done)
    print()
    print("\n".join(results.table(done, elapsed)))
    print()
    for line in results.group_skips(accepted):
        print(line)
    failed = [(stage.name, item) for stage in done for item in stage.failed]
    for stage, item in failed:
        print(f"FAILED: {stage}: {item.name}: {item.text}")
    if failed:
        print(f"full logs: {LOGS}/; again: scripts/test.sh {' '.join(dict.fromkeys(stage for stage, _ in failed))}")
    if os.environ.get("EPX_TEST_SEED"):
        print(f"random tests began at EPX_TEST_SEED={os.environ['EPX_TEST_SEED']}")
    if budget:
        late = " OVER BUDGET: on 2 idle cores this must not happen." if elapsed > budget else ""
        busy, idle, stolen = shares
        print(f"took {elapsed:.0f} s of a budget of {budget} s.{late}")
        print(f"the machine's cores were {busy:.0f} % busy and {idle:.0f} % idle; a hypervisor took {stolen:.0f} %")
    passed, skipped = sum(stage.passed for stage in done), len(accepted)
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


def main():
    if sys.argv[1:] == ["--list"]:
        for name in STAGES:
            print(f"{name:10} {getattr(stages, name).__doc__}")
        return 0
    names, budget = chosen(sys.argv[1:])
    # Open MPI refuses to run as root, as CI does, unless told.
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    times, begin, cpu = expected_times(), time.monotonic(), cpu_line()
    lanes = stages.lanes(names)
    steps = [step for name in names for step in stages.STEPS.get(name, [name])]
    progress, stopping = Progress(sum(times.get(step, 3.0) for step in steps)), threading.Event()
    gcc_built, venv = threading.Event(), Outcome()
    if not {"gcc", "quick"} & set(names):
        gcc_built.set()
    runs = [Run(progress, times, lane, stopping, gcc_built, venv, nice=len(lanes) > 1 and lane == stages.LEFT_OVER)
            for lane, _ in lanes]
    interrupted = run_lanes(runs, [names for _, names in lanes], stopping)
    if interrupted:
        progress.message("interrupted")
    progress.finish()
    save_times(times, runs)
    done = sorted((stage for run in runs for stage in run.stages), key=lambda stage: names.index(stage.name))
    status = report(done, time.monotonic() - begin, budget, results.cpu_shares(cpu, cpu_line()))
    return 130 if interrupted else status


if __name__ == "__main__":
    sys.exit(main())
