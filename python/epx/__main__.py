# SPDX-License-Identifier: Apache-2.0
"""Runs the program ``epx`` of this package, for ``python -m epx doctor`` and the command ``epx`` of a wheel."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Replaces this process by the program ``epx`` (run, bench, sim, doctor), with the same arguments."""
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "epx")
    if not os.path.exists(program):
        sys.exit(f"epx: the program is not in this package: expected {program}. "
                 "In a source tree, `make` builds it as build/epx; `pip install .` puts it into the package.")
    os.execv(program, [program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
