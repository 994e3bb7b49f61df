# SPDX-License-Identifier: Apache-2.0
"""``python -m epx.use deep_ep -- PROGRAM ...`` runs a program that imports EPX's deep_ep, in all of its processes."""

import sys

from ._use import main, use

if __name__ == "__main__":
    main(sys.argv[1:])
else:
    sys.modules[__name__] = use  # type: ignore[assignment]  # `import epx.use` leaves epx.use the function
