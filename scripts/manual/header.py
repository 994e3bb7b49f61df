# SPDX-License-Identifier: Apache-2.0
"""Reads a public header: its opening comment, and the sections between /* ---- Title ---- */ lines, each a list of
items in the order of the file. A comment that touches a declaration describes it; another one is a text of its own."""
import re

SECTION = re.compile(r"/\* ---- (.+?) -+ \*/$")
EXPORT = re.compile(r"\b(?:EPX_API|NCCL_EP_API)\s+")
INTERNAL = re.compile(r"^(?:NCCL_EP_STATIC_ASSERT|extern \"C\"|typedef (?:struct|enum) \w+ \w+;$)")


class Item:
    """kind: text, function, type or macro. code: the declaration. text: what its comment says."""

    def __init__(self, kind, code, text):
        self.kind, self.code, self.text = kind, code, text

    def name(self):
        if self.kind == "function":
            return re.search(r"(\w+)\s*\(", self.code).group(1)
        if self.kind == "macro":
            return re.match(r"#define (\w+)", self.code).group(1)
        pointer = re.search(r"\(\*(\w+)\)", self.code)
        return pointer.group(1) if pointer else re.search(r"(\w+);$", self.code).group(1)


def comment_text(lines):
    """The words of a comment, with the indentation that its lines have beyond the comment's own."""
    text = "\n".join(lines).strip()
    text = re.sub(r"^/\*\s?|\s*\*/$", "", text)
    return "\n".join(re.sub(r"^ \* ?", "", line).rstrip() for line in text.split("\n")).strip("\n")


def take_comment(lines, at):
    end = at
    while "*/" not in lines[end]:
        end += 1
    return lines[at:end + 1], end + 1


def take_define(lines, at):
    end = at
    while lines[end].endswith("\\"):
        end += 1
    return lines[at:end + 1], end + 1


def take_declaration(lines, at):
    """Up to the semicolon outside of braces, or the brace that ends a function's body; then a comment behind it."""
    depth, end, body = 0, at, False
    while True:
        code = re.sub(r"/\*.*?\*/", "", lines[end])
        depth += code.count("{") - code.count("}")
        body = body or (code.strip() == "{" and not lines[at].startswith("typedef"))
        if depth == 0 and (code.rstrip().endswith(";") or (body and code.startswith("}"))):
            break
        end += 1
    taken = lines[at:end + 1]
    return (taken[:taken.index("{")] if body else taken), end + 1


def declaration(lines, text):
    """The item of a declaration; None for what no reader of a manual wants."""
    code = "\n".join(lines)
    behind = re.search(r"\);\s*/\*(.*?)\*/$", code, re.DOTALL)
    if behind:
        code, text = code[:behind.start(0) + 2], text or comment_text(["/*" + behind.group(1) + "*/"])
    if INTERNAL.match(code):
        return None
    kind = "type" if code.startswith("typedef") else "function"
    if kind == "function":
        code = re.sub(r"^static inline ", "", EXPORT.sub("", re.sub(r"\s+", " ", code)))
        code = code if code.endswith(";") else code + ";"
    return Item(kind, code, text)


def read_items(lines):
    items, pending, at = [], None, 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("/*"):
            if pending:
                items.append(Item("text", "", pending))
            taken, at = take_comment(lines, at)
            pending = comment_text(taken)
            continue
        if not line.strip():
            if pending:
                items.append(Item("text", "", pending))
            pending, at = None, at + 1
        elif line.startswith("#define"):
            taken, at = take_define(lines, at)
            items.append(Item("macro", "\n".join(taken), pending))
            pending = None
        elif line.startswith("#"):
            at += 1
        else:
            taken, at = take_declaration(lines, at)
            items.append(declaration(taken, pending))
            pending = None
    return [item for item in items if item]


def read(path):
    """(the opening comment, [(title, items)])."""
    with open(path, encoding="utf-8") as file:
        lines = file.read().split("\n")
    opening, _ = take_comment(lines, 1)
    starts = [i for i, line in enumerate(lines) if SECTION.match(line)]
    ends = starts[1:] + [next(i for i in range(len(lines) - 1, 0, -1) if lines[i] == "#ifdef __cplusplus")]
    return comment_text(opening), [(SECTION.match(lines[a]).group(1), read_items(lines[a + 1:b]))
                                   for a, b in zip(starts, ends)]
