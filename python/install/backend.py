# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel of deep_ep: scikit-build-core's, and epx_deep_ep.pth beside it.

The packages are installed as epx_deep_ep/deep_ep, epx_deep_ep/deep_ep_cpp and epx_deep_ep/hybrid_ep_cpp, so that they
share no file with another distribution that has a deep_ep (sgl-deep-ep, say), or compiled modules of these names.

Python reads the .pth file when it starts: it puts that folder at the end of the search path, where
another deep_ep comes first, or at its beginning if EPX_DEEP_EP=1 is set.
"""

import base64
import hashlib
import os
import zipfile
from typing import Any, Dict, Optional

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F401,F403: what is not defined here

_PTH = "epx_deep_ep.pth"


def _with_file(wheel: str, name: str, data: bytes) -> None:
    """Adds a file to a wheel, and to its list of files."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(wheel + ".new", "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = ("%s,sha256=%s,%d\n" % (name, digest, len(data))).encode() + content
            new.writestr(entry, content)
        new.writestr(zipfile.ZipInfo(name), data)
    os.replace(wheel + ".new", wheel)


def build_editable(*_arguments: Any) -> str:
    """PEP 660's, refused: an editable wheel has no folder epx_deep_ep, and `import deep_ep` would find nothing."""
    raise NotImplementedError("deep_ep: expected an installation without -e; to use the sources in place, run make and "
                              "put the repository's folder python first in PYTHONPATH")


def build_wheel(wheel_directory: str, config_settings: Optional[Dict[str, Any]] = None,
                metadata_directory: Optional[str] = None) -> str:
    """PEP 517's."""
    name = _build.build_wheel(wheel_directory, config_settings, metadata_directory)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), _PTH), "rb") as file:
        _with_file(os.path.join(wheel_directory, name), _PTH, file.read())
    return name
