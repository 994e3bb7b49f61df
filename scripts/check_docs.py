#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_docs.py [--build DIR] [--list] [PAGE...]: runs the commands that README and the documentation show.

A fenced block of shell commands is run line by line in one shell, in a copy-free checkout, with DIR (default: build)
first in PATH. The word behind `sh` says what is done with the block:

    ```sh           run here
    ```sh ci        run by another stage of scripts/test.sh, or it is CI itself (make test, pip install)
    ```sh gpu       needs a GPU, or a machine that has one (scripts/gpu.sh runs these there)
    ```sh cluster   needs several machines, a batch system or a network card
    ```sh long      takes hours
    ```sh change    changes the reader's machine or environment (apt-get, pip uninstall)
    ```console      commands behind "$ ", each followed by what it printed; the commands are run, the output is not
                    compared

Benchmarks are run with few iterations, small rows and few ranks: nobody looks at their figures here.

Every page is also checked for: shell commands in indented blocks (which would not be run), commands of `epx` that it
does not have and options that its --help does not list, links to files or headings that do not exist, variables EPX_*
and functions epx_* that do not exist, and in all code: targets and variables of make, options of CMake, files of the
tree and below folders that are made, options of its scripts and of other projects' launchers, modes of commands, manual
pages, and in blocks of text files and folders of the tree (docs_names.py); C that does not compile, and Python that
python/ does not have (docs_code.py). Of programs in examples/ the opening comments are checked, of CHANGELOG.md the
links. An option that --help lists has to be tried by a test, or by a command that is run here. Tables of rules name
tests that exist (docs_rules.py).
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import time

import docs_code
import docs_rules
from docs_names import FILE, WORD, Names, read, tree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NOT_RUN = {"ci", "gpu", "cluster", "long", "change"}
LESS = ("--iters 4", "--warmup 1", "--tokens 64", "--hidden 1024", "--ranks 4")  # for benchmarks
LIMIT_S = 300  # of a block that hangs: on a busy machine the longest takes a minute or two
COMMAND = re.compile(r"^ {4,}(?:\$ )?(?:[A-Z_]+=\S+ )*(?:make|cmake|pip|python3?|torchrun|mpirun|srun|epx|bash|ctest|"
                     r"(?:build|scripts|tests|python)/\S+)(?: |$)")
OPTION = re.compile(r"(?:^|[\s`/])epx ([a-z][a-z-]*)\b(?=([^`\n|#]*))")  # epx run may start epx bench
EPX = re.compile(r"(?:^(?:\$ |#+ )?|[`/])epx ([a-z][a-z-]*)\b")  # in code: prose may say "epx and ..."


def pages(names):
    if names:
        return names
    found = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    found += sorted(os.path.relpath(path, ROOT) for path in glob.glob(os.path.join(ROOT, "examples", "*.*")))
    for folder in ("docs", "docs/guides", "docs/notes"):
        path = os.path.join(ROOT, folder)
        if os.path.isdir(path):
            found += sorted(f"{folder}/{name}" for name in os.listdir(path) if name.endswith(".md"))
    return found


def blocks(text):
    """(first line number, info words, lines) of every fenced block; and the text without them, line by line."""
    fenced, plain, inside = [], [], None
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            if inside:
                fenced.append(inside)
                inside = None
            else:
                inside = (number + 1, line.strip().lstrip("`").split(), [])
            plain.append("")
        elif inside:
            inside[2].append(line)
            plain.append("")
        else:
            plain.append(line)
    return fenced, plain


def script_of(info, lines):
    """The commands of a block, or None where it holds none or is run elsewhere."""
    if info[:1] == ["sh"]:
        unknown = set(info[1:]) - NOT_RUN
        if unknown:
            raise ValueError(f"unknown word behind sh: {' '.join(sorted(unknown))}")
        return None if info[1:] else "\n".join(lines)
    if info[:1] == ["console"] and not set(info[1:]) & NOT_RUN:
        return "\n".join(line[2:] for line in lines if line.startswith("$ "))
    return None


def fresh_lines(script, done):
    """Are there commands that no earlier block had? Remembers them."""
    lines = {re.sub(r"\s+#.*", "", line).strip() for line in script.split("\n")} - {""}
    new = lines - done
    done |= lines
    return bool(new)


def hurried(script):
    """The commands, with less work where they measure and do not say how much."""
    def less(match):
        line = match.string[match.string.rfind("\n", 0, match.start()) + 1:match.end()]
        more = [word for word in LESS if word.split()[0] not in line and not ("mpirun" in line and "ranks" in word)]
        return " ".join([match[1], *more]) + match[2]
    script = re.sub(r"(epx bench sweep\b)(?!.*--over)", r"\1 --over-tokens 1,32 --over-ranks 2,4", script)
    script = re.sub(r"(epx bench sweep\b)(?!.*--hidden)", r"\1 --hidden 512 --iters 4", script)
    return re.sub(r"((?:build/)?epx bench (?:layer|ll|ht)\b[^#\n]*?)(\s*(?:#.*)?)$", less, script, flags=re.MULTILINE)


def run(script, build):
    environment = dict(os.environ, PATH=os.path.abspath(build) + os.pathsep + os.environ.get("PATH", ""))
    try:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", hurried(script)], cwd=ROOT, env=environment,
                              timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired as late:
        return f"did not end within {LIMIT_S} s", late.stdout or b""
    return (f"exit status {done.returncode}" if done.returncode else None), done.stdout


def known_options(build):
    """What each command's --help lists, of the commands that `epx help` lists: its options, and modes ("ll") of it."""
    options = {}
    listed = subprocess.run([os.path.join(build, "epx"), "help"], cwd=ROOT, capture_output=True, text=True,
                            timeout=LIMIT_S, check=True).stdout.split("\nBegin with:")[0]
    for command in re.findall(r"^  ([a-z][a-z-]*) ", listed, re.MULTILINE):
        if command in ("help", "version"):
            continue
        text = subprocess.run([os.path.join(build, "epx"), command, "--help"], cwd=ROOT, capture_output=True, text=True,
                              timeout=LIMIT_S, check=False)
        text = text.stdout + text.stderr
        listed = re.findall(r"^ +(?:(-\w), )?(--[a-z][a-z0-9-]*)", text, re.MULTILINE)
        options[command] = {word for pair in listed for word in pair if word} | {"--help", "-h"}
        options[command] |= set(re.findall(rf"^(?:usage:|      ) epx {command} ([a-z]+)\b", text, re.MULTILINE))
    return options


def joined(text):
    """Lines that end with a backslash have what follows them, and all others their numbers."""
    return re.sub(r"(?:[^\n]*\\\n)+[^\n]*", lambda lines: lines[0].replace("\\\n", " ") + "\n" * lines[0].count("\n"),
                  text)


def wrong_options(text, options):
    for number, line in enumerate(joined(text).split("\n"), 1):
        for command in EPX.findall(line):
            if command not in options and command not in ("help", "version"):
                yield number, f"epx has no command {command}"
        for command, rest in OPTION.findall(line):
            if command not in options:
                continue
            rest = re.split(r"\s--\s|\s\./|\spython|\sbuild/|\sepx\s", rest)[0]
            for option in re.findall(r"(?<=\s)(?:--[a-z][a-z0-9-]*|-[a-zA-Z]\b)", " " + rest):
                if option not in options[command]:
                    yield number, f"epx {command} has no option {option}"
        for command, mode in re.findall(r"(?:^(?:\$ )?|[`/])epx ([a-z-]+) ([a-z]+)(?=[ `]|$)", line):
            modes = {word for word in options.get(command, ()) if not word.startswith("-")}
            if modes and mode not in modes:
                yield number, f"epx {command} has no mode {mode}"


def untried(options):
    """Options that --help lists and that no test and no command of a page has: (command, option)."""
    tests = [body for name, body in tree().items() if re.match(r"tests/|python/tests/", name)]
    found = [line for page in pages([]) if page.endswith(".md") for _, info, block in blocks(read(page))[0]
             if info[:1] == ["sh"] and not set(info[1:]) - {"long"} for line in block]
    words = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", "\n".join(tests + found))) | {"--help"}
    for command, known in sorted(options.items()):
        yield from ((command, option) for option in sorted(known) if option.startswith("--") and option not in words)


def wrong_names(text, names):
    """In blocks of shell and C and in code spans: (line, fault)."""
    fenced, plain = blocks(joined(text))
    lines = [(number + i, line) for number, info, block in fenced if info[:1] in (["sh"], ["console"], ["c"])
             for i, line in enumerate(block)]
    spans = [(number, span) for number, line in enumerate(plain, 1) for span in re.findall(r"`([^`]+)`", line)]
    lines += spans
    for number, code in lines:
        for what in names.wrong(code):
            yield number, what
        for what in names.wrong_words(code, WORD + r"|\b[A-Z]+_[A-Z0-9_]+(?==)|\btest_[a-z0-9_]*[a-z0-9]\b(?![*.])"):
            yield number, what
    for number, line in ((number + i, line) for number, info, block in fenced if info == ["text"]
                         for i, line in enumerate(block)):
        for what in names.wrong_folders(line):
            yield number, what
    for number, line in enumerate(plain, 1):
        for what in names.wrong_words(re.sub(r"`[^`]*`", "", line), WORD):
            yield number, what


def wrong_programs(fenced, python):
    """In blocks of C and Python: (line, fault)."""
    for number, info, lines in fenced:
        found = docs_code.wrong_c(lines) if info == ["c"] else python.wrong(lines) if info == ["python"] else ()
        for index, what in found:
            yield number + index, what


def anchors(path):
    """The anchors that a reader on the web finds in a page."""
    with open(path, encoding="utf-8") as page:
        heads = re.findall(r"^#+ +(.*)$", page.read(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page, plain):
    folder = os.path.dirname(os.path.join(ROOT, page))
    for number, line in enumerate(plain, 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line) + re.findall(r"^ *\[[^]]+\]: +(\S+)", line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = os.path.join(folder, path) if path else os.path.join(ROOT, page)
            if not os.path.exists(file):
                yield number, f"link to {target}: no such file"
            elif anchor and file.endswith(".md") and anchor not in anchors(file):
                yield number, f"link to {target}: no such heading"


def opening(text):
    """The comment that a program begins with, its lines where they were, its indented ones as code."""
    found = re.search(r'/\*\n.*?\*/|""".*?"""', text, re.DOTALL)
    lines = [re.sub(r'^ \* ?|"""', "", line) for line in found[0].split("\n")] if found else []
    return "\n" * text[:found.start()].count("\n") + "\n".join(
        f"`{line.strip()}`" if line.startswith("    ") else line for line in lines) if found else ""


def check_program(page, options, names, report):
    """Of an example: the commands in its opening comment. CI runs it."""
    text = opening(read(page))
    for number, what in [*wrong_options(text, options), *wrong_names(text, names)]:
        report(page, number, what)
    for number, line in enumerate(text.split("\n"), 1):
        for path in re.findall(FILE, line):
            if not glob.glob(os.path.join(ROOT, path.rstrip(".,"))):
                report(page, number, f"there is no {path}")


def check_page(page, options, names, args, report):
    text = read(page)
    fenced, plain = blocks(text)
    if page == "CHANGELOG.md":  # it names what is gone too
        for number, what in broken_links(page, plain):
            report(page, number, what)
        return
    for number, line in enumerate(plain, 1):
        if COMMAND.match(line):
            report(page, number, f"a command in an indented block is not run; use a fence: {line.strip()}")
    if not page.startswith("docs/notes/"):  # notes are of their day
        for number, what in [*wrong_options(text, options), *wrong_names(text, names),
                             *wrong_programs(fenced, names.python), *broken_links(page, plain),
                             *docs_rules.wrong_rules(text, names.files)]:
            report(page, number, what)
    for number, info, lines in fenced:
        try:
            script = script_of(info, lines)
        except ValueError as error:
            report(page, number, str(error))
            continue
        if not script:
            continue
        if args.list:
            print(f"{page}:{number}:\n{script}")
            continue
        if not fresh_lines(script, args.done):
            print(f"{page}:{number}: as before", flush=True)
            continue
        begin = time.monotonic()
        wrong, output = run(script, args.build)
        args.count += 1
        print(f"{page}:{number}: {'FAILED' if wrong else 'ok'} ({time.monotonic() - begin:.1f} s)", flush=True)
        if wrong:
            sys.stdout.write(output.decode(errors="replace")[-3000:] + "\n")
            report(page, number, f"{wrong}: {script.strip().splitlines()[0]} ...")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--list", action="store_true", help="print what would be run")
    parser.add_argument("page", nargs="*")
    args = parser.parse_args()
    args.count, args.done = 0, set()
    faults = []

    def report(page, number, what):
        faults.append(f"{page}:{number}: {what}")

    os.chdir(ROOT)
    options = known_options(args.build)
    known, names = Names(args.build), pages(args.page)
    known.options |= set().union(*options.values())
    for page in names:
        if page.endswith(".md"):
            check_page(page, options, known, args, report)
        else:
            check_program(page, options, known, report)
    if not args.page:
        faults += [f"epx {command} --help: {option} is tried by nothing: neither a test nor a command of a page"
                   for command, option in untried(options)]
    for fault in faults:
        print(fault)
    print(f"{args.count} blocks of commands run, {len(names)} pages checked, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
