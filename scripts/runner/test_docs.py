# SPDX-License-Identifier: Apache-2.0
"""Tests of scripts/check_docs.py: what it finds in a page with planted faults."""
import os
import sys
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path.insert(0, SCRIPTS)
import check_docs  # noqa: E402

RIGHT = """# A page
Run `make demo`, then `epx bench ll --check`.
`EPX_LOG=info` and `epx_group_create` are in [README](README.md#in-python).
```sh
EPX_LOG=info scripts/check_abi.py --record
tests/chaos/chaos.sh --seed 7
```
"""
OPTIONS = {"bench": {"--check", "--help"}}


class Planted(unittest.TestCase):
    """Each fault is found, and the page without it has none."""

    names = check_docs.Names("no such folder")

    def found(self, text):
        faults = [*check_docs.wrong_options(text, OPTIONS), *check_docs.wrong_names(text, self.names),
                  *check_docs.broken_links("README.md", check_docs.blocks(text)[1])]
        return [what for _, what in faults]

    def test_a_right_page(self):
        self.assertEqual(self.found(RIGHT), [])

    def test_faults(self):
        for right, wrong, what in (
                ("--check`", "--chekc`", "epx bench has no option --chekc"),
                ("`epx bench", "`epx bensh", "epx has no command bensh"),
                ("make demo", "make dmo", "make has no target dmo"),
                ("README.md#", "REDME.md#", "link to REDME.md#in-python: no such file"),
                ("#in-python", "#in-pithon", "link to README.md#in-pithon: no such heading"),
                ("`EPX_LOG", "`EPX_" + "LOOG", "nothing in the tree is called EPX_" + "LOOG"),
                ("epx_group_create", "epx_" + "group_creat", "nothing in the tree is called epx_" + "group_creat"),
                ("chaos.sh", "chaoss.sh", "there is no tests/chaos/chaoss.sh"),
                ("--record", "--recrod", "scripts/check_abi.py has no option --recrod")):
            with self.subTest(wrong):
                self.assertIn(right, RIGHT)
                self.assertEqual(self.found(RIGHT.replace(right, wrong)), [what])


if __name__ == "__main__":
    unittest.main()
