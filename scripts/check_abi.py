#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_abi.py [--record]: the interface of libepx.so and libnccl_ep.so against that of the last release.

The interface is what the headers declare (scripts/check_symbols.sh: the libraries export exactly that). A library of
empty functions is compiled from each header, and abidiff (Debian: abigail-tools) compares it with the one of the last
tag v*; where there is no tag, with the file scripts/abi/NAME.abi, which --record writes. New functions, new values of
enumerations and new fields at the end of a struct are accepted: structs begin with their size. Anything else needs
another major version, which the soname carries.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "manual"))
import header  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STANDINS = [os.path.join(ROOT, "standin/include", name) for name in ("nccl", "cuda")]
INCLUDES = ["include/nccl_ep", "include"]
HEADERS = {"epx": "include/epx/epx.h", "nccl_ep": "include/nccl_ep/nccl_ep.h"}
# The lines of abidiff's report that tell of additions, and those that lead to them.
ADDITION = re.compile(r"""\s*(
    (Functions|Variables)\ changes\ summary:\ 0\ Removed,.*
    |\d+\ functions?\ with\ some\ indirect\ sub-type\ changes?:
    |\[C\]\ 'function\ .*has\ some\ indirect\ sub-type\ changes:
    |parameter\ \d+\ of\ type\ .*\ has\ sub-type\ changes:
    |return\ type\ changed:
    |in\ (pointed\ to|unqualified\ underlying)\ type\ .*:
    |underlying\ type\ '(struct|enum)\ .*'.*\ changed:
    |type\ size\ (hasn't\ changed|changed\ from\ \d+\ to\ \d+\ \(in\ bits\))
    |\d+\ (data\ member|enumerator)\ insertions?:
    |no\ data\ member\ changes?\ \(\d+\ filtered\);
    |'.*',\ at\ offset\ \d+\ \(in\ bits\).*
    |'.*::.*'\ value\ '\d+'
    )?$""", re.VERBOSE)


def run(*argv, **options):
    return subprocess.run(argv, check=True, capture_output=True, text=True, **options).stdout


def empty_library(tree, name, folder):
    """A library with the functions that the header in `tree` declares, and their types in its debug information."""
    path = os.path.join(tree, HEADERS[name])
    functions = [item.code for _, items in header.read(path)[1] for item in items
                 if item.kind == "function" and item.name() != "epx_tensor_make"]
    source = os.path.join(folder, name + ".c")
    with open(source, "w", encoding="utf-8") as file:
        file.write(f'#include "{path}"\n' + "\n".join(f"{code[:-1]} {{ __builtin_trap(); }}" for code in functions))
    library = os.path.join(folder, f"lib{name}.so")
    includes = [f"-I{folder}" for folder in STANDINS + [os.path.join(tree, include) for include in INCLUDES]]
    run("cc", "-g", "-O0", "-w", "-shared", "-fPIC", "-fvisibility=hidden", *includes, source, "-o", library)
    return library, len(functions)


def recorded(name):
    return os.path.join(ROOT, "scripts", "abi", name + ".abi")


def record(name, library):
    os.makedirs(os.path.dirname(recorded(name)), exist_ok=True)
    run("abidw", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--no-architecture", "--no-elf-needed",
        "--out-file", recorded(name), library)


def last_tag():
    done = subprocess.run(["git", "-C", ROOT, "describe", "--tags", "--abbrev=0", "--match", "v*"], check=False,
                          capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def previous(name, tag, folder):
    """What is compared with: the library of the last tag's header, or the recorded file."""
    if not tag:
        return recorded(name)
    tree = os.path.join(folder, "tag")
    if not os.path.isdir(tree):
        os.mkdir(tree)
        archive = subprocess.run(["git", "-C", ROOT, "archive", tag, "include"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-C", tree, "-xf", "-"], input=archive, check=True)
    os.makedirs(os.path.join(folder, "before"), exist_ok=True)
    return empty_library(tree, name, os.path.join(folder, "before"))[0]


def major(path):
    with open(path, encoding="utf-8") as file:
        return next(line.split()[2] for line in file if line.startswith("#define EPX_VERSION_MAJOR"))


def differences(before, after):
    """abidiff's report if it tells of more than additions, else nothing."""
    argv = ["abidiff", "--no-architecture", "--no-added-syms", "--no-show-locs", before, after]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    report = done.stdout + done.stderr
    only_additions = done.returncode & ~4 == 0 and all(ADDITION.match(line) for line in report.split("\n"))
    return "" if only_additions else report


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    tag, failed = last_tag(), False
    with tempfile.TemporaryDirectory() as folder:
        for name in HEADERS:
            library, count = empty_library(ROOT, name, folder)
            if args.record:
                record(name, library)
                continue
            different = differences(previous(name, tag, folder), library)
            new_major = tag and major(os.path.join(folder, "tag", HEADERS["epx"])) != major(HEADERS["epx"])
            print(f"lib{name}.so: {count} functions, {'as' if not different else 'NOT as'} "
                  f"{tag or 'recorded'} has them")
            if different and not new_major:
                print(different)
                failed = True
    if failed:
        print("check_abi: programs that were linked with the library before may not run with this one. Change it back, "
              "or raise the major version" + ("" if tag else ", or, before a first release, record it: --record"))
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
