# SPDX-License-Identifier: Apache-2.0
"""Another project publishes a distribution `epx`, which has a folder epx too: pip writes the files of both into one.
Each has an `__init__.py`; what was installed last has replaced the other's."""

import os
import sys

_MEND = "do: pip uninstall -y epx epx-moe; pip install epx-moe"


def beside() -> str:
    """What is wrong, or "": the other distribution is installed where this package is."""
    site = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        found = [name for name in os.listdir(site) if name.startswith("epx-") and name.endswith(".dist-info")]
    except OSError:  # in a zip file
        return ""
    if not found:
        return ""
    return "epx: expected epx-moe alone in %s, got another project's epx beside it (%s); %s" % (site, found[0], _MEND)


def instead() -> str:
    """What is wrong, or "": `import epx` has run the other project's `__init__.py`."""
    package = sys.modules[__name__.rpartition(".")[0]]
    if hasattr(package, "Group"):
        return ""
    return "epx: expected EPX's %s, got another project's over it; %s" % (package.__file__, _MEND)
