#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""dockerfile.py [--list | --keep FOLDER]: does what the Dockerfile says, without docker.

Each of its stages is a bare Debian in a folder (scripts/fresh.sh, whose variables count); the command of the last one
is run at the end. Exit 77: it cannot be done here. --list prints the commands instead.
--keep makes the stages in FOLDER, under their names, and leaves them there.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Stage:
    """suite and name of FROM; copies from other stages; commands, each a line of shell."""

    def __init__(self, words):
        image = re.match(r"debian:(bookworm|trixie)(-slim)?$", words[0])
        if not image:
            sys.exit(f"dockerfile: FROM {words[0]}: expected debian:bookworm or debian:trixie")
        self.suite, self.name = image.group(1), words[2] if words[1:2] == ["AS"] else ""
        self.copies, self.commands, self.folder, self.last = [], [], "/", None

    def add(self, keyword, rest):
        if keyword == "RUN":
            self.commands.append(f"cd {self.folder} && {rest}")
        elif keyword == "WORKDIR":
            self.folder = rest
        elif keyword == "COPY":
            self.copy(rest.split())
        elif keyword == "CMD":
            self.last = f"cd {self.folder} && {shlex.join(json.loads(rest))}"
        else:
            sys.exit(f"dockerfile: {keyword}: this script knows FROM, RUN, COPY, WORKDIR and CMD")

    def copy(self, words):
        """From the tree, which fresh.sh has as /clone, or from another stage, by way of /files."""
        if words[0].startswith("--from="):
            self.copies.append((words[0][len("--from="):], words[1]))
            source = f"/files/{len(self.copies)}"
        else:
            source = os.path.normpath(os.path.join("/clone", words[0]))
        self.commands.append(f"mkdir -p {os.path.dirname(words[-1])} && cp -a {source} {words[-1]}")


def read(path):
    with open(path, encoding="utf-8") as file:
        lines = "".join(line for line in file if not line.startswith("#")).replace("\\\n", "").split("\n")
    stages = []
    for line in filter(None, map(str.strip, lines)):
        keyword, rest = re.match(r"(\w+)\s+(.*)", line).groups()
        rest = re.sub(r"\s+", " ", rest)
        if keyword == "FROM":
            stages.append(Stage(rest.split()))
        else:
            stages[-1].add(keyword, rest)
    return stages


def run(stage, work, last):
    files = os.path.join(work, "files")
    shutil.rmtree(files, ignore_errors=True)
    os.mkdir(files)
    for number, (name, path) in enumerate(stage.copies, 1):
        subprocess.run(["cp", "-a", f"{work}/{name}{path}", f"{files}/{number}"], check=True)
    environment = dict(os.environ, EPX_FRESH_ROOT=os.path.join(work, stage.name or "last"), EPX_FRESH_FILES=files)
    commands = stage.commands + ([stage.last] if last and stage.last else [])
    return subprocess.run([os.path.join(ROOT, "scripts", "fresh.sh"), stage.suite, *commands], env=environment,
                          check=False).returncode


def main():
    stages = read(os.path.join(ROOT, "Dockerfile"))
    if sys.argv[1:] == ["--list"]:
        for stage in stages:
            print(f"{stage.suite} {stage.name}", *stage.commands, f"at last: {stage.last}", sep="\n    ")
        return 0
    keep = sys.argv[1:2] == ["--keep"]
    work = sys.argv[2] if keep else tempfile.mkdtemp(prefix="epx-dockerfile.",
                                                     dir=os.environ.get("EPX_FRESH_TMP", "/var/tmp"))
    os.makedirs(work, exist_ok=True)
    try:
        for stage in stages:
            rc = run(stage, work, stage is stages[-1])
            if rc:
                return rc
    finally:
        if not keep:
            subprocess.run(["rm", "-rf", "--one-file-system", work], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
