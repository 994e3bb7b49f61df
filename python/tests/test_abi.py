# SPDX-License-Identifier: Apache-2.0
"""The ctypes mirror against include/epx/epx.h: sizes, offsets, values, functions, as a C compiler sees them."""

import ctypes
import os
import re
import shutil
import unittest

from c_program import printed_by
from epx import Device, Direction, DType, Layout, Mode, RecvPart, Status, _abi

INCLUDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "include")
PREFIXES = {Status: "EPX_ERR_", DType: "EPX_", Device: "EPX_DEVICE_", Mode: "EPX_", Layout: "EPX_",
            RecvPart: "EPX_RECV_",
            Direction: "EPX_"}
DEFINES = {"EPX_MAX_NDIM": _abi.MAX_NDIM, "EPX_MAX_TOPK": _abi.MAX_TOPK, "EPX_TICKET_BYTES": _abi.TICKET_BYTES,
           "EPX_HANDLE_COMPACT_TOPK": _abi.HANDLE_COMPACT_TOPK, "EPX_HANDLE_SOURCE_MAP": _abi.HANDLE_SOURCE_MAP,
           "EPX_SUM_TOPK_ORDER": _abi.SUM_TOPK_ORDER, "EPX_SUM_ROUND_RANKS": _abi.SUM_ROUND_RANKS,
           "EPX_SUM_ROUND_NODES": _abi.SUM_ROUND_NODES, "EPX_SUM_MXFP8": _abi.SUM_MXFP8}


def header() -> str:
    with open(os.path.join(INCLUDE, "epx", "epx.h"), encoding="utf-8") as file:
        return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)


def c_name(member) -> str:
    return "EPX_OK" if member is Status.OK else PREFIXES[type(member)] + member.name


class Abi(unittest.TestCase):
    @unittest.skipUnless(shutil.which("cc") and os.path.isdir(INCLUDE), "needs a C compiler and the header")
    def test_layouts_and_values(self) -> None:
        lines, expected = [], {}
        for name, struct in _abi.STRUCTS.items():
            lines.append('printf("%s %%zu\\n", sizeof(%s));' % (name, name))
            expected[name] = ctypes.sizeof(struct)
            for field, *_ in struct._fields_:
                key = "%s.%s" % (name, field)
                lines.append('printf("%s %%zu\\n", offsetof(%s, %s) * 1000 + sizeof(((%s *)0)->%s));' % (
                    key, name, field, name, field))
                description = getattr(struct, field)
                expected[key] = description.offset * 1000 + description.size
        for enum in PREFIXES:
            for member in enum:
                lines.append('printf("%s %%d\\n", (int)%s);' % (c_name(member), c_name(member)))
                expected[c_name(member)] = int(member)
        for name, value in DEFINES.items():
            lines.append('printf("%s %%d\\n", (int)%s);' % (name, name))
            expected[name] = value
        got = printed_by("epx/epx.h", lines, INCLUDE)
        self.assertEqual(got, expected)

    def test_nothing_of_the_header_is_missing(self) -> None:
        text = header()
        functions = set(re.findall(r"EPX_API\s+[\w\s\*]*?(epx_\w+)\(", text))
        self.assertEqual(functions, set(_abi.FUNCTIONS))
        for name, arguments in re.findall(r"EPX_API\s+[\w\s\*]*?(epx_\w+)\((.*?)\);", text, flags=re.S):
            # A comma inside a function pointer's own list does not count.
            count = 0 if arguments.strip() == "void" else re.sub(r"\([^()]*\)", "", arguments).count(",") + 1
            self.assertEqual(len(_abi.FUNCTIONS[name]), count, name)
        structs = set(re.findall(r"^typedef struct (epx_\w+) \{", text, flags=re.M))
        self.assertEqual(structs, set(_abi.STRUCTS))
        for name, body in re.findall(r"^typedef struct (epx_\w+) \{(.*?)\n\}", text, flags=re.S | re.M):
            fields = re.findall(r"(\w+)\s*(?:\[[^]]*\])?\s*[,;]", body)
            self.assertEqual([field for field, *_ in _abi.STRUCTS[name]._fields_], fields, name)
        values = set(re.findall(r"\b(EPX_[A-Z0-9_]+) = \d+", text))
        self.assertEqual(values, {c_name(member) for enum in PREFIXES for member in enum})


if __name__ == "__main__":
    unittest.main()
