#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make.py EPX_PROGRAM FOLDER: the manual pages, into FOLDER/man1, man3 and man7.

    man1   epx and its commands: their option tables (epx COMMAND --help=man)
    man3   a page for each section of epx.h and nccl_ep.h, and for each function a page that leads to it
    man7   epx: the header's opening comment; epx_environment: the table of variables (epx help environment)

Nothing is written here that has another source: the headers' comments, the option tables and the table of variables.
"""
import argparse
import os
import re
import subprocess

import header
import roff

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEADERS = (("epx", "include/epx/epx.h", "<epx/epx.h>"), ("nccl_ep", "include/nccl_ep/nccl_ep.h", "<nccl_ep.h>"))


def version():
    with open(os.path.join(ROOT, HEADERS[0][1]), encoding="utf-8") as file:
        return ".".join(re.findall(r"^#define EPX_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", file.read(), re.MULTILINE))


class Book:
    def __init__(self, program, folder):
        self.program, self.folder, self.version = program, folder, version()

    def ask(self, *words):
        return subprocess.run([self.program, *words], check=True, capture_output=True, text=True, timeout=60).stdout

    def write(self, name, section, body):
        self.write_raw(name, section, roff.page(name, section, self.version, body))

    def write_raw(self, name, section, content):
        path = os.path.join(self.folder, f"man{section}", f"{name}.{section}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)

    def link(self, name, section, target):
        self.write_raw(name, section, f".so man{section}/{target}.{section}\n")


def see_also(pages):
    return [".SH SEE ALSO", ",\n".join(f"\\fB{roff.escape(name)}\\fR({section})" for name, section in pages)]


# ---- man1


def commands(book):
    """(name, summary) of every command that has options."""
    found = re.findall(r"^  ([a-z][a-z-]*) +(.+)$", book.ask("help").split("\nBegin with:")[0], re.MULTILINE)
    return [(name, summary) for name, summary in found if name not in ("help", "version")]


def write_program(book, listed):
    intro = book.ask("help").split("\n\n")[1]
    body = [".SH NAME", "epx \\- Mixture\\-of\\-Experts communication: test, measure and start ranks",
            ".SH SYNOPSIS", "\\fBepx\\fR \\fICOMMAND\\fR [\\fIoptions\\fR]", ".SH DESCRIPTION", *roff.text(intro)]
    body.append(".SH COMMANDS")
    for name, summary in [*listed, ("help", "the commands; epx help COMMAND; epx help environment"),
                          ("version", "the version")]:
        body += [".TP", f"\\fB{roff.escape(name)}\\fR", roff.escape(summary)]
    body += [".SH EXIT STATUS", "0: success; 1: failure; 2: wrong usage."]
    body += see_also([(f"epx-{name}", 1) for name, _ in listed] + [("epx", 7), ("epx_environment", 7)])
    book.write("epx", 1, body)


def write_commands(book):
    listed = commands(book)
    write_program(book, listed)
    for name, summary in listed:
        body = [".SH NAME", roff.escape(f"epx-{name}") + " \\- " + roff.escape(summary)]
        body += book.ask(name, "--help=man").rstrip("\n").split("\n")
        body += see_also([("epx", 1), ("epx", 7), ("epx_environment", 7)])
        book.write(f"epx-{name}", 1, body)
    book.link("epx-mpi-baseline", 1, "epx-bench")  # the program that epx bench --vs mpi starts


# ---- man3


def page_name(prefix, title):
    """epx_group for the section "Groups"."""
    word = re.match(r"\w+", title).group(0).lower()
    return f"{prefix}_{word[:-1] if word.endswith('s') and not word.endswith('us') else word}"


def describe(item):
    """An item of DESCRIPTION."""
    if item.kind == "text":
        return [".PP", *roff.text(item.text)]
    if item.kind == "macro" and item.name().endswith("_INIT"):
        return [".PP", f"\\fB{item.name()}\\fR: the initial value.", *(roff.text(item.text) if item.text else [])]
    if item.kind == "function":
        head = [".PP", *roff.prototype(item.code)]
        return head + ([".RS 4", *roff.text(item.text), ".RE"] if item.text else [])
    return [".PP", *(roff.text(item.text) if item.text else []), *roff.verbatim(item.code.split("\n"))]


def write_family(book, prefix, include, title, items, names):
    functions = [item for item in items if item.kind == "function"]
    name = page_name(prefix, title)
    known = sorted({item.name() for item in functions} - {name})
    body = [".SH NAME", roff.escape(", ".join([name, *known])) + " \\- " + roff.escape(title[0].lower() + title[1:]),
            ".SH SYNOPSIS", ".nf", f"\\fB#include {include}\\fR", ""]
    for item in functions:
        body += roff.prototype(item.code)[1:-1]
    body += [".fi", ".SH DESCRIPTION"]
    for item in items:
        body += describe(item)
    body += see_also([(other, 3) for other in names if other != name] + [("epx", 7), ("epx_environment", 7)])
    book.write(name, 3, body)
    for other in known:
        book.link(other, 3, name)


def write_header(book, prefix, path, include):
    opening, sections = header.read(os.path.join(ROOT, path))
    names = [page_name(prefix, title) for title, _ in sections]
    for title, items in sections:
        write_family(book, prefix, include, title, items, names)
    body = [".SH NAME", f"{prefix} \\- " + ("expert\\-parallel exchange, the C library" if prefix == "epx" else
                                           "NCCL EP\\(aqs C interface over EPX"),
            ".SH DESCRIPTION", *roff.text(opening)]
    more = [("epx", 1), ("epx_environment", 7)] if prefix == "epx" else [("epx", 7)]
    book.write(prefix, 7, body + see_also([(name, 3) for name in names] + more))


# ---- man7


def write_environment(book):
    table = book.ask("help", "environment", "--markdown").strip().split("\n")[2:]
    rows = [line.strip("|").split(" | ") for line in table]
    body = [".SH NAME", "epx_environment \\- environment variables that EPX reads", ".SH DESCRIPTION",
            *roff.text("EPX reads these variables when a group is created (EPX_LOG at the first message). What the\n"
                       "configuration of a group says comes first, then the variable, then its aliases, then the\n"
                       "default. An empty variable counts as unset. A number may end in K, M or G (powers of 1024).")]
    for row in rows:
        name, aliases, fallback, meaning = (field.strip().replace("`", "") for field in row)
        body += [".TP", f"\\fB{name}\\fR", roff.escape(meaning) + "."]
        body += [".br", "Default: " + roff.escape(fallback) + "."] if fallback else []
        body += [".br", "Also: " + aliases + "."] if aliases else []
    book.write("epx_environment", 7, body + see_also([("epx", 1), ("epx-doctor", 1), ("epx", 7)]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("folder")
    args = parser.parse_args()
    book = Book(os.path.abspath(args.program), args.folder)
    write_commands(book)
    for prefix, path, include in HEADERS:
        write_header(book, prefix, path, include)
    write_environment(book)


if __name__ == "__main__":
    main()
