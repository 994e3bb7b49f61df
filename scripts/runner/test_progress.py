# SPDX-License-Identifier: Apache-2.0
"""The progress line: never silent for long, percent and time left."""
import io
import os
import tempfile
import unittest

from progress import EVERY_S, Progress
from run import CtestParser, MakeParser, generator


class Terminal(io.StringIO):
    def isatty(self):
        return True


class ProgressTest(unittest.TestCase):
    def make(self, out):
        self.now = 0.0
        return Progress(100, out, lambda: self.now)

    def test_a_line_every_20_seconds_where_there_is_no_terminal(self):
        out = io.StringIO()
        progress = self.make(out)
        progress.step("gcc-build", 100)
        for _ in range(130):
            self.now += 1
            progress.tick()
        self.assertEqual(len(out.getvalue().splitlines()), 1 + 130 // int(EVERY_S))

    def test_one_line_that_is_rewritten_on_a_terminal(self):
        out = Terminal()
        progress = self.make(out)
        progress.step("gcc", 50)
        self.now = 25
        progress.update(0.5, "3 of 6 tests")
        self.assertNotIn("\n", out.getvalue())
        self.assertIn("[25 %, about 75 s left] gcc: 3 of 6 tests", out.getvalue())

    def test_what_is_left_grows_on_a_slow_machine(self):
        progress = self.make(io.StringIO())
        progress.step("gcc", 50)
        self.now = 150  # three times as long as expected
        progress.step("clang", 50)
        self.assertAlmostEqual(progress.left_s(), 150)
        self.assertEqual(progress.percent(), 50)

    def test_steps_of_two_lanes_are_in_one_line(self):
        progress = self.make(io.StringIO())
        progress.step("gcc", 60, 0)
        progress.step("clang", 20, 1)
        progress.update(0.5, "1 of 2 tests", 0)
        self.now = 30
        self.assertIn("[30 %, about 70 s left] gcc: 1 of 2 tests | clang", progress.line())
        progress.end_step(0)
        self.assertEqual(progress.percent(), 60)
        self.assertTrue(progress.line().endswith("left] clang"))

    def test_messages_stay(self):
        out = Terminal()
        progress = self.make(out)
        progress.step("gcc", 50)
        progress.message("gcc: ok")
        self.assertTrue(out.getvalue().endswith("\r\x1b[Kgcc: ok\n"))


class Parsers(unittest.TestCase):
    def test_make(self):
        self.assertEqual(MakeParser()("[ 42%] Building C object x.o"), (0.42, ""))
        self.assertIsNone(MakeParser()("warning"))

    def test_a_folder_keeps_its_generator(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn(generator(folder), ([], ["-G", "Ninja"]))
            open(os.path.join(folder, "CMakeCache.txt"), "w").close()
            self.assertEqual(generator(folder), [])

    def test_ctest(self):
        parser = CtestParser()
        parser("      Start  3: ring")
        parser("      Start 12: math")
        found = parser(" 1/40 Test  #3: ring .................   Passed    1.25 sec")
        self.assertEqual(found, (1 / 40, "1 of 40 tests; running: math"))
        self.assertEqual(parser.slowest(), "ring 1.2 s")


if __name__ == "__main__":
    unittest.main()
