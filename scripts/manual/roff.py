# SPDX-License-Identifier: Apache-2.0
"""Text of comments as man(7) requests."""
import re
import textwrap


def escape(text):
    """A line in which '-' can be copied and nothing is taken for a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def verbatim(lines):
    return [".PP", ".nf", *(escape(line) for line in lines), ".fi"]


def bullets(lines):
    """Lines that begin with "- ", each followed by its deeper lines."""
    out = []
    for line in lines:
        if line.lstrip().startswith("- "):
            out += [".IP \\(bu 2", escape(line.strip()[2:])]
        else:
            out.append(escape(line.strip()))
    return out + [".PP"]


def text(source):
    """Paragraphs are filled; lists become lists; other indented lines (tables, diagrams) stay as they are."""
    out, at, lines = [], 0, source.split("\n")
    while at < len(lines):
        end = at + 1
        if not lines[at].strip():
            out.append(".PP")
        elif lines[at].startswith(" "):
            while end < len(lines) and (lines[end].startswith(" ") or
                                        (not lines[end].strip() and lines[end + 1:end + 2][:1] != [""] and
                                         lines[end + 1:] and lines[end + 1].startswith(" "))):
                end += 1
            block = lines[at:end]
            out += bullets(block) if block[0].lstrip().startswith("- ") else verbatim(block)
        else:
            out.append(escape(lines[at]))
        at = end
    while out and out[-1] == ".PP":
        out.pop()
    return out


def prototype(code):
    """A function as several bold lines, which end behind commas."""
    lines = textwrap.wrap(re.sub(r"(?<!,) ", "\0", code), 76, subsequent_indent="    ", break_long_words=False,
                          break_on_hyphens=False)
    return [".nf", *("\\fB%s\\fR" % escape(line.replace("\0", " ")) for line in lines), ".fi"]


def page(name, section, version, body):
    """Everything of a page; paragraphs that follow a heading or each other are left out."""
    lines = [f'.TH "{name.upper()}" "{section}" "" "EPX {version}" "EPX manual"', *body]
    out = []
    for line in lines:
        if line == ".PP" and out and re.match(r"\.(PP|SH|SS|RS)", out[-1]):
            continue
        if re.match(r"\.(SH|SS|RE)", line) and out[-1] == ".PP":
            out.pop()
        out.append(line)
    return "\n".join(out) + "\n"
