#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""wheel_files.py [--source] NAME==VERSION FOLDER FILE...: single files of a wheel, into FOLDER, without the rest of it.
A FILE may be a pattern, whose * has slashes too.

pip's own finder and session (those of pip 21 to 26) look for it, so that all settings of pip count: indexes, folders,
passwords, certificates, proxies. The wheel's directory and the files are read by HTTP ranges: a wheel of 500 MB costs
some 100 kB. Python files are the same in the wheels of all machines: where this machine or its Python has no wheel,
one for x86_64 or for Python 3.11 to 3.13 is taken.
--source: of a source archive, for projects that publish nothing else. The whole archive is read, and nothing of it is
run, as pip would run its setup.py.

No message has an address, which may have a password in it.
"""

import fnmatch
import hashlib
import io
import logging
import os
import sys
import tarfile
import zipfile
from typing import Any, List, Tuple

from pip._internal.commands import create_command
from pip._internal.models.target_python import TargetPython
from pip._internal.utils.compatibility_tags import get_supported
from pip._vendor.packaging.specifiers import SpecifierSet

_CHUNK, _MOST_AHEAD = 1 << 18, 64
_ELSEWHERE = ["manylinux_2_%d_x86_64" % minor for minor in range(40, 4, -1)]
_ELSEWHERE += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


class Refused(Exception):
    """A reason in a sentence."""


def _ask(session: Any, address: str, status: int, **headers: str) -> Tuple[Any, bytes]:
    """(headers, body) of an answer with that status."""
    headers.update({"Accept-Encoding": "identity", "Cache-Control": "no-cache"})
    with session.get(address, headers=headers, stream=True) as answer:
        if answer.status_code != status:
            raise Refused("expected status %d, got %d" % (status, answer.status_code))
        return answer.headers, answer.raw.read(decode_content=False)


class Remote(io.RawIOBase):
    """A file behind an address, read in chunks that are kept. What is read on and on comes in longer pieces: a file of
    300 MB took three minutes."""

    def __init__(self, session: Any, address: str) -> None:
        self._session, self._address, self._at, self._chunks, self._ahead = session, address, 0, {}, 1
        headers, _byte = _ask(session, address, 206, Range="bytes=0-0")
        self._size = int(headers["Content-Range"].rpartition("/")[2])

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
            self._ahead = min(2 * self._ahead, _MOST_AHEAD) if number - 1 in self._chunks else 1
            first = number * _CHUNK
            span = "bytes=%d-%d" % (first, min(first + self._ahead * _CHUNK, self._size) - 1)
            body = _ask(self._session, self._address, 206, Range=span)[1]
            for i in range(0, len(body), _CHUNK):
                self._chunks[number + i // _CHUNK] = body[i:i + _CHUNK]
        part = self._chunks[number][skip:skip + len(to)]
        to[:len(part)] = part
        self._at += len(part)
        return len(part)


def _target() -> TargetPython:
    """This machine and its Python, then others."""
    target, tags = TargetPython(), get_supported()
    platforms = [*dict.fromkeys(tag.platform for tag in tags if tag.platform != "any"), *_ELSEWHERE]
    for version in (None, "313", "312", "311"):
        tags += get_supported(version, platforms=platforms)
    target._valid_tags = list(dict.fromkeys(tags))
    return target


def _find(requirement: str, source: bool) -> Tuple[Any, Any]:
    """(pip's session, the link it would take)."""
    name, _, version = requirement.partition("==")
    command: Any = create_command("install")
    options, _rest = command.parse_args(["--no-input", "--no-binary" if source else "--only-binary", ":all:"])
    session = command._build_session(options)
    finder = command._build_package_finder(options, session, target_python=_target(), ignore_requires_python=True)
    best = finder.find_best_candidate(name, SpecifierSet("==" + version)).best_candidate
    if best is None:
        raise Refused("pip finds no %s, or cannot reach an index" % ("source archive" if source else "wheel"))
    return session, best.link


def _wheel_files(requirement: str, folder: str, names: List[str]) -> None:
    session, link = _find(requirement, False)
    remote = open(link.file_path, "rb") if link.is_file else \
        io.BufferedReader(Remote(session, link.url_without_fragment), _CHUNK)
    with remote, zipfile.ZipFile(remote) as wheel:
        for name in names:
            found = fnmatch.filter(wheel.namelist(), name)
            if not found:
                raise Refused("no file %s" % name)
            wheel.extractall(folder, found)


def _source_archive(requirement: str) -> bytes:
    """The archive, with the hash that the index gives."""
    session, link = _find(requirement, True)
    if link.is_file:
        with open(link.file_path, "rb") as file:
            archive = file.read()
    else:
        archive = _ask(session, link.url_without_fragment, 200)[1]
    if link.hash_name and hashlib.new(link.hash_name, archive).hexdigest() != link.hash:
        raise Refused("the archive's %s is not the one that the index gives" % link.hash_name)
    return archive


def _source_files(requirement: str, folder: str, names: List[str]) -> None:
    """The files, without the archive's own folder in front of their names."""
    with tarfile.open(fileobj=io.BytesIO(_source_archive(requirement))) as files:
        members = {member.name.partition("/")[2]: member for member in files.getmembers() if member.isfile()}
        for name in names:
            found = fnmatch.filter(members, name)
            if not found or any(".." in one.split("/") for one in found):
                raise Refused("no file %s" % name)
            for one in found:
                path = os.path.join(folder, one)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(files.extractfile(members[one]).read())


def main() -> int:
    source = sys.argv[1:2] == ["--source"]
    requirement, folder, *names = sys.argv[1 + source:]
    logging.disable()  # pip's warnings have addresses
    try:
        (_source_files if source else _wheel_files)(requirement, folder, names)
    except Refused as reason:
        print("wheel_files.py: %s: %s" % (requirement, reason), file=sys.stderr)
        return 1
    except Exception as error:  # nor its text
        print("wheel_files.py: %s: %s" % (requirement, type(error).__name__), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
