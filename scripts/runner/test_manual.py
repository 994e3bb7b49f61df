# SPDX-License-Identifier: Apache-2.0
"""Tests of what reads headers: scripts/manual and scripts/check_abi.py."""
import os
import sys
import tempfile
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
sys.path[:0] = [os.path.join(SCRIPTS, "manual"), SCRIPTS]
import check_abi  # noqa: E402
import doc_tables  # noqa: E402
import header  # noqa: E402
import roff  # noqa: E402

SOURCE = """/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The opening.
 *  - a rule
 *    of two lines
 */
#define NOT_IN_A_SECTION 1

/* ---- Things: what they are ---------- */

/* Stands for itself. */

typedef struct epx_thing epx_thing;
/* A pair. */
typedef struct epx_pair {
    int a; /* first */
    int b;
} epx_pair;
/* Makes
 * one. */
EPX_API epx_status epx_thing_make(epx_thing **thing,
                                  int size);
EPX_API size_t epx_thing_size(void); /* 0 for none */
static inline int epx_twice(int x)
{
    return 2 * x;
}

#ifdef __cplusplus
}
#endif
"""

ADDED = """Functions changes summary: 0 Removed, 1 Changed (4 filtered out), 0 Added functions
Variables changes summary: 0 Removed, 0 Changed, 0 Added variable

1 function with some indirect sub-type change:

  [C] 'function epx_status epx_group_create(const epx_group_config*)' has some indirect sub-type changes:
    parameter 1 of type 'const epx_group_config*' has sub-type changes:
      in pointed to type 'const epx_group_config':
        in unqualified underlying type 'typedef epx_group_config':
          underlying type 'struct epx_group_config' changed:
            type size changed from 960 to 1024 (in bits)
            1 data member insertion:
              'int32_t newer', at offset 960 (in bits)
"""


class Headers(unittest.TestCase):
    def setUp(self):
        with tempfile.NamedTemporaryFile("w", suffix=".h", delete=False) as file:
            file.write(SOURCE)
        self.addCleanup(os.unlink, file.name)
        self.opening, self.sections = header.read(file.name)

    def test_comments_belong_to_what_they_touch(self):
        self.assertEqual(len(self.sections), 1)
        title, items = self.sections[0]
        self.assertEqual(title, "Things: what they are")
        self.assertEqual([(item.kind, item.text) for item in items],
                         [("text", "Stands for itself."), ("type", "A pair."), ("function", "Makes\none."),
                          ("function", "0 for none"), ("function", None)])
        self.assertEqual([item.name() for item in items[1:]],
                         ["epx_pair", "epx_thing_make", "epx_thing_size", "epx_twice"])
        self.assertEqual(items[2].code, "epx_status epx_thing_make(epx_thing **thing, int size);")
        self.assertEqual(items[4].code, "int epx_twice(int x);")

    def test_lists_and_dashes_in_roff(self):
        self.assertEqual(roff.text(self.opening), ["The opening.", ".IP \\(bu 2", "a rule", "of two lines"])
        self.assertEqual(roff.escape("--help"), "\\-\\-help")
        self.assertEqual(roff.escape(".so x"), "\\&.so x")


class Interface(unittest.TestCase):
    def accepted(self, report):
        return all(check_abi.ADDITION.match(line) for line in report.split("\n"))

    def test_additions_are_accepted(self):
        self.assertTrue(self.accepted(ADDED))

    def test_everything_else_is_not(self):
        for line in ("            1 data member deletion:", "            1 data member change:",
                     "  'function epx_status epx_complete(epx_handle*)'    {epx_complete}",
                     "    parameter 2 of type 'int' was added", "        type name changed from 'int' to 'long int'",
                     "Functions changes summary: 1 Removed, 0 Changed, 0 Added function"):
            self.assertFalse(self.accepted(ADDED + line), line)


class Tables(unittest.TestCase):
    def test_rows_are_replaced_and_the_head_stays(self):
        page = "before\n<!-- made by: epx x -->\n\n| A |\n|---|\n| old |\n| older |\n\nafter"
        doc_tables.printed = lambda build, words: ["| new |"]
        self.assertEqual(doc_tables.remade(page, "build"),
                         ("before\n<!-- made by: epx x -->\n\n| A |\n|---|\n| new |\n\nafter", 1))


if __name__ == "__main__":
    unittest.main()
