# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/check_docs.py: what it finds in a page with faults made on purpose. And of the site's own rules."""
import importlib.util
import os
import sys
import tempfile
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, SCRIPTS)
sys.path.insert(0, os.path.join(SCRIPTS, "manual"))
import check as manual  # noqa: E402
import check_docs  # noqa: E402
import docs_rules  # noqa: E402

RIGHT = """# A page
Run `make demo`, `make chaos CHAOS_SECONDS=9`, then `epx bench ll --check`, or that with `--nodes`: EPX_NET is read.
`EPX_LOG=info` and `epx_group_create` are in [README](README.md#in-python), `ncclEpDispatch` and `epx_last_error()` too.
Install `libepx-dev`; in CMake `find_package(epx)` and `epx::epx`. `kernel/abort.h` is tested by `test_ring`.
`train_moe.py --plot` draws.
`make docs` writes `build-docs/site/index.html`, `scripts/wheels.sh` writes `build-wheels/cuda`.
```text
include/epx/    the public header
src/group       groups;  tests/chaos: bad things
examples/       programs
```
```sh
EPX_LOG=info scripts/check_abi.py --record
tests/chaos/chaos.sh --seed 7
FUZZ_SECONDS=9 scripts/fuzz.sh
```
```sh cluster
torchrun --nproc-per-node 2 tools/python/ll_bench.py --device cuda
srun torchrun --nnodes 2 \\
    --node-rank 0 build/epx bench ll \\
    --check
build/epx run -n 2 epx bench ht --check
pip install . ./python
cmake -B b -DEPX_CUDA=OFF
```
```c
epx_handle *handle = NULL;
epx_group_config config;
config.num_experts = 8;
TRY(epx_handle_update(handle, &topk_idx, NULL, stream));
```
```python
from epx import autograd
buffer = deep_ep.Buffer(group, num_nvl_bytes=1)
y = autograd.moe(buffer, x)
```
"""
OPTIONS = {"bench": {"--check", "--help", "ll", "ht"}, "run": {"-n", "--ranks"}}

FAULTS = (
    ("--check`", "--chekc`", "epx bench has no option --chekc"),
    ("`epx bench", "`epx bensh", "epx has no command bensh"),
    ("bench ll", "bench lll", "epx bench has no mode lll"),
    ("    --check", "    --chekc", "epx bench has no option --chekc"),
    ("ht --check", "ht --chekc", "epx bench has no option --chekc"),
    ("run -n", "run -q", "epx run has no option -q"),
    ("--node-rank", "--node-rang", "srun has no option --node-rang"),
    ("--plot", "--plott", "nothing in the tree has an option --plott"),
    ("`--nodes`", "`--noodes`", "nothing in the tree has an option --noodes"),
    ("make demo", "make dmo", "make has no target dmo"),
    ("CHAOS_SECONDS", "CHAOS_SECOND", "make has no variable CHAOS_SECOND"),
    ("FUZZ_SECONDS", "FUZZ_SECONS", "nothing in the tree is called FUZZ_SECONS"),
    ("README.md#", "REDME.md#", "link to REDME.md#in-python: no such file"),
    ("#in-python", "#in-pithon", "link to README.md#in-pithon: no such heading"),
    ("`EPX_LOG", "`EPX_LOOG", "nothing in the tree is called EPX_LOOG"),
    ("EPX_NET is", "EPX_NETT is", "nothing in the tree is called EPX_NETT"),
    ("epx_group_create", "epx_group_creat", "nothing in the tree is called epx_group_creat"),
    ("ncclEpDispatch", "ncclEpDispach", "nothing in the tree is called ncclEpDispach"),
    ("epx_last_error()", "ep_last_errror()", "nothing in the tree is called ep_last_errror()"),
    ("`test_ring", "`test_rng", "nothing in the tree is called test_rng"),
    ("build-docs/site", "build-docs/sites", "nothing makes build-docs/sites/index.html"),
    ("index.html", "indx.html", "nothing makes build-docs/site/indx.html"),
    ("build-docs/", "build-doc/", "nothing makes build-doc/site/index.html"),
    ("build-wheels/cuda", "build-wheels/cudda", "nothing makes build-wheels/cudda"),
    ("src/group", "src/groop", "there is no src/groop"),
    ("include/epx/", "include/ep/", "there is no include/ep/"),
    ("tests/chaos:", "tests/caos:", "there is no tests/caos"),
    ("examples/", "exampels/", "there is no exampels/"),
    ("libepx-dev", "libepx-devel", "there is no package libepx-devel"),
    ("find_package(epx)", "find_package(ep)", "CMake finds no package ep"),
    ("epx::epx", "epx::ep", "CMake and kernels have no epx::ep"),
    ("-DEPX_CUDA", "-DEPX_CUDDA", "CMake has no option EPX_CUDDA"),
    ("kernel/abort.h", "kernl/abort.h", "there is no kernl/abort.h"),
    ("chaos.sh", "chaoss.sh", "there is no tests/chaos/chaoss.sh"),
    ("--record", "--recrod", "scripts/check_abi.py has no option --recrod"),
    ("--nproc-per-node", "--nproc-per-nod", "torchrun has no option --nproc-per-nod"),
    ("--device", "--devise", "tools/python/ll_bench.py has no option --devise"),
    ("./python", "./pithon", "pip finds nothing to install in ./pithon"),
    ("config.num_experts", "config.num_expert", "does not compile: "),
    ("&topk_idx, NULL", "&topk_idx", "does not compile: "),
    ("autograd.moe", "autograd.mooe", "nothing in python/ is called mooe"),
    ("import autograd", "import autogrd", "nothing in python/ is called autogrd"),
    ("num_nvl_bytes", "num_nvvl_bytes", "no function in python/ has a parameter num_nvvl_bytes"),
    ("(buffer, x)", "(buffer, x", "is not Python: "),
)


class Injected(unittest.TestCase):
    """Each fault is found, and the page without it has none."""

    names = check_docs.Names("no such folder")

    def found(self, text):
        fenced, plain = check_docs.blocks(text)
        faults = [*check_docs.wrong_options(text, OPTIONS), *check_docs.wrong_names(text, self.names),
                  *check_docs.wrong_programs(fenced, self.names.python), *check_docs.broken_links("README.md", plain)]
        return [what for _, what in faults]

    def test_a_right_page(self):
        self.assertEqual(self.found(RIGHT), [])

    def test_faults(self):
        for right, wrong, what in FAULTS:
            with self.subTest(wrong):
                self.assertIn(right, RIGHT)
                found = set(self.found(RIGHT.replace(right, wrong, 1)))
                self.assertTrue(any(fault.startswith(what) for fault in found), found)

    def test_untried(self):
        found = list(check_docs.untried({"bench": {"--check", "--no" + "odles"}}))
        self.assertEqual(found, [("bench", "--no" + "odles")])

    def test_an_example(self):
        text = check_docs.opening('#!/bin/x\n"""Says.\n\n    epx bensh ll\n"""\n')
        self.assertEqual(list(check_docs.wrong_options(text, OPTIONS)), [(4, "epx has no command bensh")])


class Rules(unittest.TestCase):
    """Tables of rules and tests."""

    FILES = {
        "tests/nccl_ep/a.c": "static int test_one(void)\nint test_all(void)\n    return test_one() || helper();\n"
                             "static int helper(void)\nstatic int idle(void)\n",
        "tests/scripts/b.sh": 'check "a name" 3\n',
        "python/tests/test_c.py": "    def test_two(self):\n    def unused(self):\n",
    }
    PAGE = '| rule | test |\n|---|---|\n| It is so | a.c: one, helper; b.sh: "a name"; test_c.py: two |\n'

    def test_faults(self):
        for right, wrong, what in (
                ("", "", None), ("helper", "help", "a.c has no test help that is called"),
                ("helper", "idle", "a.c has no test idle that is called"),
                ("one", "helper", "tests/nccl_ep/a.c: test_one is in no table of rules"),
                ("a name", "no name", 'b.sh has no test "no name" that is called'),
                ("two", "unused", "test_c.py has no test unused that is called"),
                ("b.sh", "d.sh", "there is no test file d.sh")):
            found = list(docs_rules.wrong_rules(self.PAGE.replace(right, wrong, 1) if right else self.PAGE, self.FILES))
            self.assertEqual([fault for _, fault in found], [what] if what else [])


class Manual(unittest.TestCase):
    """What a comment of a header or a text of an option may have wrong."""

    def test_faults(self):
        right = "\\fBepx_group_create\\fR(3) with \\-\\-check, and EPX_OK"
        for wrong in (None, "epx_group_creat", "--chekc", "EPX_OKK"):
            text = right if not wrong else right + " " + wrong
            found = list(manual.wrong_names(manual.plain(text), {"epx_group_create", "EPX_OK"}, {"--check"}))
            self.assertEqual(len(found), 1 if wrong else 0, found)


class Site(unittest.TestCase):
    def test_names_in_tables_are_broken_between_their_words(self):
        spec = importlib.util.spec_from_file_location("epx_site", os.path.join(SCRIPTS, "docs", "site.py"))
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        row = "<code>A_B</code><tr>\n<td><code>EPX_NET</code></td>\n<td><code>%s</code>, a_b</td>\n</tr>"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "page.html")
            with open(path, "w", encoding="utf-8") as page:
                page.write(row % "UCCL_NET_/x")
            site.break_names(folder)
            with open(path, encoding="utf-8") as page:
                self.assertEqual(page.read(), row % "UCCL_<wbr>NET_/<wbr>x")


if __name__ == "__main__":
    unittest.main()
