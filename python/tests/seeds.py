# SPDX-License-Identifier: Apache-2.0
"""Seeds of random programs: EPX_TEST_SEED is the first one, EPX_TEST_SCALE multiplies their number."""

import os
from typing import Iterable


def drawn(programs: int, usual: int = 1) -> Iterable[int]:
    """The seeds of a test, from EPX_TEST_SEED or the usual one on."""
    first = int(os.environ.get("EPX_TEST_SEED", usual))
    return range(first, first + max(1, int(programs * float(os.environ.get("EPX_TEST_SCALE", "1")))))
