# SPDX-License-Identifier: Apache-2.0
"""Runs the program ``epx`` of this package, for ``python -m epx doctor`` and the command ``epx`` of a wheel."""

from __future__ import annotations

import os
import sys

from . import _library, _other


def main() -> None:
    """Replaces this process by the program ``epx`` (run, bench, sim, doctor), with the same arguments."""
    if _other.instead():
        print(_other.instead(), file=sys.stderr)
    programs = _library.places("epx")
    if not programs:
        sys.exit("epx: expected the program in epx/lib of this package or in build/ of the source tree, got none; "
                 "`make` or `pip install .` builds it")
    os.execv(programs[0], [programs[0], *sys.argv[1:]])


if __name__ == "__main__":
    main()
