#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel_files.py [--source] NAME==VERSION FOLDER FILE...: single files of a wheel, into FOLDER, without the rest of it.
A FILE may be a pattern, whose * has slashes too.

pip says where the wheel is; its directory and the files are read by HTTP ranges. A wheel of 500 MB costs some 100 kB.
--source: of a source archive, for projects that publish nothing else. pip would run its setup.py before it says where
the archive is, so the index is asked here; the whole archive is read, and nothing of it is run.
"""

import fnmatch
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from typing import List

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


def _index() -> str:
    """The index that pip is configured to ask."""
    configured = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "get",
                                 "global.index-url"], capture_output=True, text=True).stdout.strip()
    from pip._internal.models.index import PyPI  # pylint: disable=import-outside-toplevel
    return os.environ.get("PIP_INDEX_URL") or configured or PyPI.simple_url


def _source_address_of(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    page = "%s/%s/" % (_index().rstrip("/"), name)
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    found = re.search(r'href="([^"#]*/%s-%s\.tar\.gz)[#"]' % (re.escape(name), re.escape(version)), text)
    if found is None:
        raise OSError("%s: no source archive" % requirement)
    return urllib.parse.urljoin(page, html.unescape(found.group(1)))


def _source_files(requirement: str, folder: str, names: List[str]) -> None:
    """The files, without the archive's own folder in front of their names."""
    with urllib.request.urlopen(_source_address_of(requirement), timeout=60) as answer:
        archive = io.BytesIO(answer.read())
    with tarfile.open(fileobj=archive) as files:
        members = {member.name.partition("/")[2]: member for member in files.getmembers() if member.isfile()}
        for name in names:
            found = fnmatch.filter(members, name)
            if not found or any(".." in one.split("/") for one in found):
                raise OSError("%s: no file %s" % (requirement, name))
            for one in found:
                path = os.path.join(folder, one)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(files.extractfile(members[one]).read())


def main() -> int:
    source = sys.argv[1:2] == ["--source"]
    requirement, folder, *names = sys.argv[1 + source:]
    if source:
        _source_files(requirement, folder, names)
        return 0
    with zipfile.ZipFile(io.BufferedReader(Remote(_address_of(requirement)), _CHUNK)) as wheel:
        for name in names:
            found = fnmatch.filter(wheel.namelist(), name)
            if not found:
                raise OSError("%s: no file %s" % (requirement, name))
            wheel.extractall(folder, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
