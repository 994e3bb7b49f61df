# SPDX-License-Identifier: Apache-2.0
"""A process takes the place of a rank: the example, and processes that cannot join."""

import os
import subprocess
import sys
import unittest
from typing import Tuple
from unittest import mock

import epx

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "examples", "replacement.py")
DEATHS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "join_deaths.py")
CONFIG = dict(num_experts=8, max_tokens_per_rank=4, max_hidden_bytes=64, device=epx.Device.CPU)


class Join(unittest.TestCase):
    def test_killed_ranks_are_replaced(self) -> None:
        """The example kills two ranks with SIGKILL, checks all results in both modes, and ends with 0."""
        done = subprocess.run([sys.executable, EXAMPLE], stdout=subprocess.PIPE, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.count("10 steps after the last replacement, 0 wrong values"), 4, done.stdout)
        self.assertEqual(done.stdout.count("rank 2 was killed"), 2, done.stdout)

    def deaths(self, *jobs: Tuple[str, ...]) -> None:
        """Side by side: they wait for deadlines and compute little."""
        started = [subprocess.Popen([sys.executable, DEATHS, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                    text=True) for job in jobs]
        for job, process in zip(jobs, started):
            output = process.communicate(timeout=300)[0]  # join_deaths.py has a limit of its own
            self.assertEqual(process.returncode, 0, "%s: %s" % (job, output))
            self.assertIn("4 stories, 4 ranks: ok", output)

    def test_deaths_on_one_node(self) -> None:
        """Ranks die in dispatch, in combine and between; others join, and die too."""
        self.deaths(("low",), ("high",))

    def test_deaths_between_nodes(self) -> None:
        self.deaths(("low", "ofi:tcp"), ("high", "ofi:tcp"))

    def test_no_ticket(self) -> None:
        for text in ("", "epx-ticket-1:", "epx-ticket-1:00", "something else"):
            with self.assertRaisesRegex(epx.ArgumentError, "ticket: expected"):
                epx.Group.join(text, 0, enable_mask=1, **CONFIG)

    def test_no_membership(self) -> None:
        """A group of one rank, or without masks, has no tickets."""
        with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):
            group = epx.Group(**CONFIG)
        with group:
            with self.assertRaisesRegex(epx.UsageError, "enable_mask"):
                group.ticket()


if __name__ == "__main__":
    unittest.main()
