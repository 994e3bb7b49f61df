# SPDX-License-Identifier: Apache-2.0
"""Tests of what is compiled ahead of its stage (run.py)."""
import os
import tempfile
import time
import unittest
from unittest import mock

import run


class AheadTest(unittest.TestCase):
    """Folders are built by commands of the test: "slow" takes for ever, others leave a file."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        building = lambda folder, jobs: ["sleep", "100"] if folder == "slow" else ["touch", self.made(folder)]
        for name, value in ("configuring", lambda folder, options: ["true"]), ("building", building):
            patch = mock.patch.object(run, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.ahead = run.Ahead("1")
        self.addCleanup(self.ahead.stop)

    def made(self, folder):
        return os.path.join(self.folder.name, folder)

    def follow(self, folder):
        """Polls until the folder is built."""
        limit = time.monotonic() + 20
        while not os.path.exists(self.made(folder)) and time.monotonic() < limit:
            self.ahead.poll()
            time.sleep(0.01)
        self.assertTrue(os.path.exists(self.made(folder)), folder)

    def test_builds_one_after_the_other(self):
        self.ahead.start([("a", []), ("b", [])])
        self.follow("b")
        self.assertTrue(os.path.exists(self.made("a")))

    def test_a_stage_takes_its_folder_over(self):
        self.ahead.start([("slow", []), ("b", [])])
        self.ahead.release("slow")
        self.assertIsNone(self.ahead.process)
        self.ahead.resume()
        self.follow("b")

    def test_what_was_under_way_is_resumed(self):
        self.ahead.start([("slow", []), ("b", [])])
        self.ahead.release("b")
        self.ahead.resume()
        self.assertEqual(self.ahead.folder, "slow")
        self.assertEqual(self.ahead.queue, [])

    def test_nothing_to_do(self):
        self.ahead.release("a")
        self.ahead.resume()
        self.ahead.poll()
        self.assertIsNone(self.ahead.process)


if __name__ == "__main__":
    unittest.main()
