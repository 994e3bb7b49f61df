#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check.py BUILD: the manual pages of a build are whole.

Every function that a library exports has a page, and so has every command of epx; references and links lead to pages
that exist; options of epx, functions, constants and variables that pages mention exist, and so do those that `epx help`
mentions; mandoc, where it is there, finds no error in them.
"""
import glob
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import check_docs  # noqa: E402
import docs_names  # noqa: E402

LIBRARIES = ("libepx.so", "libnccl_ep.so")
REFERENCE = re.compile(r"\\fB([\w\\-]+)\\fR\((\d)\)")


def read(folder):
    """{(name, section): text}"""
    pages = {}
    for path in glob.glob(os.path.join(folder, "man?", "*.?")):
        name, section = os.path.basename(path).rsplit(".", 1)
        with open(path, encoding="utf-8") as page:
            pages[name, int(section)] = page.read()
    return pages


def exported(build):
    for library in LIBRARIES:
        path = os.path.join(build, library)
        text = subprocess.run(["nm", "-D", "--defined-only", path], check=True, capture_output=True, text=True).stdout
        for line in text.split("\n"):
            words = line.split()
            if len(words) == 3 and words[1] == "T":
                yield words[2].split("@")[0]


def ask(build, *words):
    return subprocess.run([os.path.join(build, "epx"), *words], check=True, capture_output=True, text=True).stdout


def commands(build):
    names = re.findall(r"^  ([a-z][a-z-]*) ", ask(build, "help").split("\nBegin with:")[0], re.MULTILINE)
    return [name for name in names if name not in ("help", "version")]


def declared(build):
    """Names that code has: not comments, which the pages repeat. And the variables, from their table."""
    names = set(re.findall(r"^\| `(\w+)`", ask(build, "help", "environment", "--markdown"), re.MULTILINE))
    sources = glob.glob(os.path.join(docs_names.ROOT, "include", "*", "*.h"))
    for folder in ("src", "standin"):
        sources += glob.glob(os.path.join(docs_names.ROOT, folder, "**", "*.[ch]"), recursive=True)
    for path in sources:
        with open(path, encoding="utf-8") as source:
            names |= set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", source.read(), flags=re.DOTALL)))
    return names


def plain(text):
    """A page without roff's own words."""
    return re.sub(r"\\f[BIR]", "", text.replace("\\-", "-").replace("\\_", "_").replace("\\(aq", "'"))


def wrong_names(text, names, options):
    for word in re.findall(docs_names.WORD, text):
        if word not in names:
            yield f"nothing is called {word}"
    for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text):
        if option not in options:
            yield f"there is no option {option}"


def faults(build, pages):
    for name in exported(build):
        if (name, 3) not in pages:
            yield f"{name}(3): exported, but there is no page"
    for name in commands(build):
        if (f"epx-{name}", 1) not in pages:
            yield f"epx-{name}(1): a command without a page"
    options, names = check_docs.known_options(build), declared(build)
    names |= {word for name, _ in pages for word in (name, name.upper())}
    known = set().union({"--its-option"}, *options.values())  # of a program that epx run starts
    begin = re.sub("^ +", "", ask(build, "help"), flags=re.MULTILINE)
    for what in [*[what for _, what in check_docs.wrong_options(begin, options)], *wrong_names(begin, names, known)]:
        yield f"epx help: {what}"
    for (name, section), text in sorted(pages.items()):
        link = re.match(r"\.so man(\d)/(\S+)\.\d$", text.strip())
        targets = [(link.group(2), int(link.group(1)))] if link else []
        targets += [(word.replace("\\", ""), int(number)) for word, number in REFERENCE.findall(text)]
        for target in targets:
            if target not in pages:
                yield f"{name}({section}): refers to {target[0]}({target[1]}), which does not exist"
        text = plain(text)
        for what in [*[what for _, what in check_docs.wrong_options(text, options)], *wrong_names(text, names, known)]:
            yield f"{name}({section}): {what}"


def lint(folder):
    if not shutil.which("mandoc"):
        return
    argv = ["mandoc", "-T", "lint", "-W", "error", *sorted(glob.glob("man?/*.?", root_dir=folder))]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    yield from done.stdout.strip().split("\n") if done.returncode else []


def main():
    build = os.path.abspath(sys.argv[1])
    folder = os.path.join(build, "man")
    pages = read(folder)
    if not pages:
        sys.exit(f"no manual pages in {folder}: was there a python3 when it was configured?")
    found = [*faults(build, pages), *lint(folder)]
    for fault in found:
        print(fault)
    print(f"{len(pages)} manual pages, {len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
