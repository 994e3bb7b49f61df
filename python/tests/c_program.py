# SPDX-License-Identifier: Apache-2.0
"""Programs in C that print numbers: what a compiler makes of a header."""

import os
import subprocess
import tempfile
from typing import Dict, List


def printed_by(header: str, lines: List[str], *include: str) -> Dict[str, int]:
    """What `lines`, statements of main() after #include <header>, print: a name and a number per line."""
    source = "#include <%s>\n#include <stdio.h>\nint main(void) {\n%s\nreturn 0; }\n" % (header, "\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "abi")
        with open(path + ".c", "w", encoding="utf-8") as file:
            file.write(source)
        subprocess.run(["cc", *("-I" + folder for folder in include), path + ".c", "-o", path], check=True)
        output = subprocess.run([path], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, output.splitlines())}
