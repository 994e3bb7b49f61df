# SPDX-License-Identifier: Apache-2.0
"""Is the C and Python that documentation shows still what the library has? Parts of check_docs.py.

C is compiled against the headers, with what a snippet takes for granted declared before it. Python is parsed: every
attribute and every keyword argument that is not of another project must be defined somewhere in python/.
"""
import ast
import glob
import os
import re
import shutil
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# What snippets in C use without declaring it.
GIVEN = """
#include <stdio.h>
#include <epx/epx.h>
#ifndef TRY
#define TRY(call) if ((call) != EPX_OK) return 1
#endif
extern epx_stream stream;
extern epx_tensor topk_idx;
extern epx_dispatch_inputs dispatch_in;
extern epx_dispatch_outputs dispatch_out;
extern epx_layout_info layout;
extern epx_combine_inputs combine_in;
extern epx_combine_outputs combine_out;
void run_my_experts(epx_stream s);
"""


def wrong_c(lines):
    """What the compiler says of a snippet: (index of the line, message). The body of a function, after its #lines."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return []
    head, i = [], 0
    while i < len(lines) and (not lines[i].strip() or lines[i].startswith("#") or (i and lines[i - 1].endswith("\\"))):
        head.append(lines[i])
        i += 1
    text = "\n".join(["#line 1", *head, GIVEN, "int snippet(void);", "int snippet(void) {", f"#line {i + 1}",
                      *lines[i:], "return 0; }"])
    done = subprocess.run([compiler, "-std=c11", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused", "-x", "c", "-I",
                           os.path.join(ROOT, "include"), "-"], input=text, capture_output=True, text=True, check=False)
    return [(int(number) - 1, f"does not compile: {what}")
            for number, what in re.findall(r"^<stdin>:(\d+):\d+: error: (.*)$", done.stderr, re.MULTILINE)]


class Python:
    """What is defined in python/."""

    FOREIGN = {"torch", "dist", "np", "numpy", "os", "sys"}
    METHODS = {"bfloat16", "float", "shape", "sum"}  # of tensors

    def __init__(self, folder=os.path.join(ROOT, "python")):
        self.defined = set()
        for path in glob.glob(os.path.join(folder, "**", "*.py"), recursive=True):
            if os.sep + "tests" + os.sep not in path:
                with open(path, encoding="utf-8") as file:
                    self.add(ast.parse(file.read()))
                self.defined.add(os.path.basename(path)[:-3])

    def add(self, module):
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                self.defined.add(node.name)
            elif isinstance(node, ast.arg):
                self.defined.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.defined.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                self.defined.add(node.value)  # fields of structures

    @staticmethod
    def root(node):
        """The name that a chain of attributes and calls begins with."""
        while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) else None

    def wrong(self, lines):
        """(index of the line, fault) of a snippet. What it gets from torch or NumPy is not looked at."""
        try:
            module = ast.parse("\n".join(lines))
        except SyntaxError as error:
            yield (error.lineno or 1) - 1, f"is not Python: {error.msg}"
            return
        foreign = set(self.FOREIGN)
        for node in ast.walk(module):
            if isinstance(node, ast.Assign) and self.root(node.value) in foreign:
                foreign |= {name.id for target in node.targets for name in ast.walk(target)
                            if isinstance(name, ast.Name)}
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and self.root(node) not in foreign | {None}:
                if node.attr not in self.defined | self.METHODS:
                    yield node.lineno - 1, f"nothing in python/ is called {node.attr}"
            if isinstance(node, ast.Call) and self.root(node) not in foreign | {None}:
                for word in node.keywords:
                    if word.arg and word.arg not in self.defined:
                        yield node.lineno - 1, f"no function in python/ has a parameter {word.arg}"
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("epx", "deep_ep"):
                for name in node.names:
                    if name.name not in self.defined:
                        yield node.lineno - 1, f"nothing in python/ is called {name.name}"
