# SPDX-License-Identifier: Apache-2.0
"""Tables of rules and tests (`| rule | test |`): the tests exist and are called. A part of check_docs.py.

A cell names files, each with a colon and the functions in it (with or without `test_`), or of a script texts in quotes:
`rules.c: tail, destroy; nccl_ep.sh: "without NVFP4"`. A file alone stands for all of it.
"""
import os
import re

FOLDERS = ["tests/nccl_ep", "tests/unit", "tests/scripts", "python/tests"]
WHOLE = "tests/nccl_ep"  # every test of these files has a rule


def rows(text):
    """(number, cell of tests) of each row of such tables."""
    inside = False
    for number, line in enumerate(text.split("\n"), 1):
        if line == "| rule | test |":
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            yield number, re.split(r"(?<!\\)\|", line)[2].strip()


def references(cell):
    """(file, [name or "text"]) of a cell."""
    for part in re.split(r"; (?=\w+\.\w+(?:[:;]|$))", cell):
        file, _, names = part.partition(": ")
        yield file.strip(), re.findall(r'"[^"]*"|\w+', names)


def defined(body, name, python):
    """The name of that function, where it is defined and called; else None."""
    for full in ("test_" + name, name):
        if python and re.search(rf"^ *def {full}\(", body, re.MULTILINE):
            called = full.startswith("test_") or len(re.findall(rf"\b{full}\b", body)) > 1
            return full if called else None
        if not python and re.search(rf"^(?:static )?\w[\w ]*[ *]{full}\(", body, re.MULTILINE):
            static = re.search(rf"^static \w[\w ]*[ *]{full}\(", body, re.MULTILINE)
            return full if not static or len(re.findall(rf"\b{full}\(", body)) > 1 else None
    return None


def wrong_rules(text, files):
    """(number, fault) of a page's tables; `files` is {name: text} of the tree."""
    named = set()
    for number, cell in rows(text):
        for file, names in references(cell):
            path = next((f"{folder}/{file}" for folder in FOLDERS if f"{folder}/{file}" in files), None)
            if path is None:
                yield number, f"there is no test file {file}"
                continue
            for name in names:
                if name.startswith('"'):
                    found = name if name[1:-1] in files[path] else None
                else:
                    found = defined(files[path], name, path.endswith(".py"))
                if found is None:
                    yield number, f"{file} has no test {name} that is called"
                named.add((os.path.basename(path), found))
    if not named:
        return
    for path, body in files.items():
        if os.path.dirname(path) == WHOLE:
            for test in re.findall(r"^static int (test_\w+)\(", body, re.MULTILINE):
                if (os.path.basename(path), test) not in named:
                    yield 1, f"{path}: {test} is in no table of rules"
