#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel_files.py REQUIREMENT FOLDER FILE...: single files of a wheel, into FOLDER, without the rest of it. A FILE may
be a pattern, whose * has slashes too.

pip says where the wheel is; its directory and the files are read by HTTP ranges. A wheel of 500 MB costs some 100 kB.
"""

import fnmatch
import io
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

_CHUNK = 1 << 18


class Remote(io.RawIOBase):
    """A file behind an address, read in chunks that are kept."""

    def __init__(self, address: str) -> None:
        self._address, self._at, self._chunks = address, 0, {}
        self._size = int(self._ask("bytes=0-0").headers["Content-Range"].rpartition("/")[2])

    def _ask(self, span: str):
        request = urllib.request.Request(self._address, headers={"Range": span})
        answer = urllib.request.urlopen(request, timeout=60)
        if answer.status != 206:
            raise OSError("%s: expected part of the file, got status %d" % (self._address, answer.status))
        return answer

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, to) -> int:
        number, skip = divmod(self._at, _CHUNK)
        if self._at >= self._size:
            return 0
        if number not in self._chunks:
            first = number * _CHUNK
            self._chunks[number] = self._ask("bytes=%d-%d" % (first, min(first + _CHUNK, self._size) - 1)).read()
        part = self._chunks[number][skip:skip + len(to)]
        to[:len(part)] = part
        self._at += len(part)
        return len(part)


def _address_of(requirement: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--dry-run",
                        "--ignore-installed", "--no-deps", "--ignore-requires-python", "--only-binary", ":all:",
                        "--report", report, requirement],
                       check=True, stdout=subprocess.DEVNULL)
        with open(report) as file:
            return json.load(file)["install"][0]["download_info"]["url"]


def main() -> int:
    requirement, folder, *names = sys.argv[1:]
    with zipfile.ZipFile(io.BufferedReader(Remote(_address_of(requirement)), _CHUNK)) as wheel:
        for name in names:
            found = fnmatch.filter(wheel.namelist(), name)
            if not found:
                raise OSError("%s: no file %s" % (requirement, name))
            wheel.extractall(folder, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
