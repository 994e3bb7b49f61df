# SPDX-License-Identifier: Apache-2.0
"""Random programs for deep_ep's rules for memory of a GPU's heap. A failure names its seed: EPX_TEST_SEED runs the
programs from that one on, EPX_TEST_SCALE times as many."""

import unittest

from played_cuda import Played
from random_heap import Program
from seeds import drawn

PROGRAMS = 150


class RandomHeap(Played):
    def test_programs(self) -> None:
        for seed in drawn(PROGRAMS):
            try:
                Program(seed).run()
            except AssertionError as failure:
                raise AssertionError("EPX_TEST_SEED=%d: %s" % (seed, failure)) from failure


if __name__ == "__main__":
    unittest.main()
