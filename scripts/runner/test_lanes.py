# SPDX-License-Identifier: Apache-2.0
"""Tests of stages that run side by side (main.py, run.py)."""
import io
import os
import tempfile
import threading
import time
import unittest
from unittest import mock

import main
import run
import stages
from progress import Progress


class Lanes(unittest.TestCase):
    """Two lanes of stages that are commands of the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        patch = mock.patch.object(run, "LOGS", folder.name)
        patch.start()
        self.addCleanup(patch.stop)
        self.out = io.StringIO()
        self.stopping, progress = threading.Event(), Progress(10, self.out)
        self.runs = [run.Run(progress, {}, lane, self.stopping) for lane in (0, 1)]

    def stage(self, name, *argv):
        """Makes a stage of one command."""
        patch = mock.patch.object(stages, name, lambda lane: lane.check(name, argv), create=True)
        patch.start()
        self.addCleanup(patch.stop)

    def test_they_run_at_the_same_time(self):
        gate = os.path.join(run.LOGS, "gate")
        os.mkfifo(gate)  # each end waits for the other
        self.stage("writer", "sh", "-c", f"echo word >{gate}")
        self.stage("reader", "sh", "-c", f"cat <{gate}")
        self.stage("last", "true")
        self.assertFalse(main.run_lanes(self.runs, [["writer", "last"], ["reader"]], self.stopping))
        self.assertEqual([stage.passed for lane in self.runs for stage in lane.stages], [1, 1, 1])

    def test_cpu_time_is_that_of_the_stage(self):
        self.stage("busy", "python3", "-c", "import time\nwhile time.process_time() < 0.3: pass")
        self.stage("lazy", "sleep", "0.3")
        main.run_lanes(self.runs, [["busy"], ["lazy"]], self.stopping)
        self.assertGreaterEqual(self.runs[0].stage.cpu_seconds, 0.3)
        self.assertLess(self.runs[1].stage.cpu_seconds, 0.2)

    def test_a_fault_of_a_stage_fails_it_alone(self):
        self.stage("good", "true")
        with mock.patch.object(stages, "bad", lambda lane: lane.nothing, create=True):
            main.run_lanes(self.runs, [["bad", "good"], ["good"]], self.stopping)
        self.assertEqual([len(stage.failed) for stage in self.runs[0].stages], [1, 0])
        self.assertEqual([len(stage.failed) for stage in self.runs[1].stages], [0])

    def test_all_end_when_one_is_stopped(self):
        self.stage("long", "sleep", "100")
        begin = time.monotonic()
        threading.Timer(0.3, self.stopping.set).start()
        self.assertTrue(main.run_lanes(self.runs, [["long", "long"], ["long"]], self.stopping))
        self.assertLess(time.monotonic() - begin, 50)
        self.assertEqual([len(lane.stages) for lane in self.runs], [1, 1])

    def test_which_stage_is_in_which_lane(self):
        found = stages.lanes(["scripts", "gcc", "python", "thread"])
        self.assertEqual(found, [(0, ["gcc", "python"]), (1, ["thread"]), (2, ["scripts"])])
        self.assertEqual(stages.lanes(["thread"]), [(1, ["thread"])])
        self.assertEqual(sorted(sum(stages.LANES, [])), sorted({*stages.ALL, *stages.QUICK, *stages.TEST}))

    def test_stages_of_other_lanes_wait_for_gcc(self):
        built, order = threading.Event(), []
        for lane in self.runs:
            lane.gcc_built = built

        def gcc(lane):
            lane.check("gcc", ["sleep", "0.3"])
            order.append("gcc")
            built.set()

        def docs(lane):
            lane.await_event(lane.gcc_built)
            order.append("docs")

        with mock.patch.multiple(stages, gcc=gcc, docs=docs):
            main.run_lanes(self.runs, [["gcc"], ["docs"]], self.stopping)
        self.assertEqual(order, ["gcc", "docs"])

    def test_python_waits_for_its_environment(self):
        for passed in (False, True):
            outcome, ran = run.Outcome(), []
            for lane in self.runs:
                lane.venv, lane.stages = outcome, []
            script = f"echo downloading 3 GB; sleep 0.2; echo made; {str(passed).lower()}"
            make = mock.patch.object(stages, "MAKE_VENV", ["sh", "-c", script])
            wheel = mock.patch.object(self.runs[0], "check", lambda step, _: ran.append(outcome.is_set()))
            with make, wheel:
                main.run_lanes(self.runs, [["python"], ["venv"]], self.stopping)
            self.assertEqual(ran, [True] if passed else [])
        self.assertEqual(self.out.getvalue().count("venv: downloading 3 GB\n"), 2)

    def test_python_alone_makes_its_environment(self):
        self.assertEqual(main.chosen(["gcc", "python"])[0], ["gcc", "venv", "python"])
        self.assertEqual(main.chosen(["venv", "python"])[0], ["venv", "python"])

    def test_a_lane_of_low_priority(self):
        self.runs[1].prefix = run.Run(self.runs[0].progress, {}, nice=True).prefix
        for name in ("usual", "low"):
            self.stage(name, "nice")
        main.run_lanes(self.runs, [["usual"], ["low"]], self.stopping)
        found = []
        for name in ("usual", "low"):
            with open(os.path.join(run.LOGS, name + ".log"), encoding="ascii") as log:
                found.append(int(log.read()))
        self.assertEqual(found[1], min(found[0] + 10, 19))


if __name__ == "__main__":
    unittest.main()
