# SPDX-License-Identifier: Apache-2.0
"""Rows that dispatches are queued for before their number is known."""

import random
import unittest
from typing import Any

import torch
from deep_ep._fresh import _SPARE, RowGuess

NONE = len(_SPARE)  # of a guess: no rows to spare


class Guesses(unittest.TestCase):
    """Rows that dispatches are queued for before their number is known."""

    def test_a_guess_comes_down_to_the_last_row(self) -> None:
        guess = RowGuess()
        self.assertEqual(guess.rows(9999), 0)
        for high, low in ((1015, 1000), (40000, 1000), (1001, 1000)):
            guess.learn(high)
            for _ in range(150):
                guess.learn(low)
            self.assertEqual(guess.rows(9999, NONE), low)
        guess.learn(40000)
        guess.learn(1000)
        self.assertGreater(guess.rows(99999, NONE), 37000)

    def test_fewer_rows_to_spare_where_memory_is_missing(self) -> None:
        """And ordinary memory where there is none in the heap."""
        guess, asked = RowGuess(), []

        def try_reserve(rows: int) -> Any:
            asked.append(rows)
            return "memory" if rows <= room else None

        def reserve(limit: int) -> Any:
            return guess.reserve(limit, try_reserve, lambda rows: "ordinary")

        self.assertIsNone(reserve(99999))
        guess.learn(32000)
        levels = [guess.rows(99999, level) for level in range(NONE + 1)]
        self.assertTrue(33000 <= levels[0] < 33200 and 32250 <= levels[2] < 32400 and levels[NONE] == 32000)
        room = 32400
        self.assertEqual(reserve(99999), (levels[2], "memory"))
        self.assertEqual(asked, levels[:3])
        last = levels[NONE]
        for room, expected in ((32400, [levels[2]]), (32000, [levels[2], last]), (32000, [levels[3], last]),
                               (32000, [last])):
            asked.clear()
            reserve(99999)
            self.assertEqual(asked, expected)
        room = 31000
        asked.clear()
        self.assertEqual((reserve(99999), asked), ((levels[0], "ordinary"), [last]))
        room = 99999
        given = [reserve(99999) for _ in range(64)]
        self.assertEqual([one[0] for one in given if one], [last] * 2 + [levels[0]] * 62)
        asked.clear()
        self.assertEqual(reserve(32000), (32000, "memory"))
        room = 31000
        for _ in range(8):  # the same number is tried once
            asked.clear()
            self.assertEqual(reserve(32000), (32000, "ordinary"))
            self.assertEqual(len(asked), 1)

    def test_torchs_memory_only_for_rows_that_are_much_alike(self) -> None:
        """Who holds a result keeps all of its memory: no more than about a quarter of that is for nothing."""
        def ordinary(rows: int) -> Any:
            if rows > room:
                raise torch.cuda.OutOfMemoryError
            return None if rows > 90000 else "ordinary"

        guess, room = RowGuess(), 99999
        reserve = lambda: guess.reserve(99999, lambda rows: None, ordinary)  # noqa: E731
        rng = random.Random(1)
        for rows in [rng.randint(9000, 11000) for _ in range(64)]:
            guess.learn(rows)
            self.assertIsNotNone(reserve())
        for rows in [rng.choice((40000, 10000)) for _ in range(64)]:
            guess.learn(rows)
            given = reserve()
            self.assertIsNone(given and given[0] > 13000 and given)
        for _ in range(150):
            guess.learn(10000)
        self.assertEqual(reserve(), (10432, "ordinary"))
        room = 10200  # of torch: not for rows to spare
        self.assertIsNone(reserve())
        room = 99999
        for _ in range(64):
            guess.learn(89000)
        self.assertIsNone(reserve())  # more than the receive buffer holds


if __name__ == "__main__":
    unittest.main()
