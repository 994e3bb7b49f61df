# SPDX-License-Identifier: Apache-2.0
"""Counting, the review of skips, and the table."""
import os
import tempfile
import unittest
import unittest.mock

import results
from results import Item

REPORT = """<testsuite>
<testcase name="one" status="run"><system-out>[ RUN      ] a
[       OK ] a
[ RUN      ] b
skipped: no card here
[  SKIPPED ] b
[ RUN      ] c
[  ERROR   ] --- 1 != 2
[  FAILED  ] c
[==========] tests: 3 test(s) run.
[  SKIPPED ] tests: 1 test(s), listed below:
[  SKIPPED ] b
[  FAILED  ] c

 1 SKIPPED TEST(S)
</system-out><failure/></testcase>
<testcase name="script" status="run"><system-out>fine</system-out></testcase>
<testcase name="crashed" status="fail"><system-out>Segmentation fault</system-out><failure/></testcase>
<testcase name="left_out" status="notrun"><system-out>skipped: no hipcc</system-out><skipped/></testcase>
<testcase name="silent" status="run"><system-out>[ RUN      ] d
[  SKIPPED ] d

 1 SKIPPED TEST(S)
</system-out></testcase>
</testsuite>"""


def written(text):
    file = tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False)
    file.write(text)
    file.close()
    return file.name


class Counting(unittest.TestCase):
    def setUp(self):
        path = written(REPORT)
        self.addCleanup(os.remove, path)
        self.passed, self.failed, self.skipped = results.count_ctest(path)

    def test_cases_and_scripts_are_counted(self):
        self.assertEqual(self.passed, 2)
        self.assertEqual([item.name for item in self.failed], ["one.c", "crashed"])

    def test_skips_have_their_reasons(self):
        self.assertEqual(self.skipped, [Item("one.b", "no card here"), Item("left_out", "no hipcc"),
                                        Item("silent.d", results.NO_REASON)])

    def test_output_of_a_failed_case_is_kept(self):
        self.assertIn("1 != 2", self.failed[0].text)

    def test_unittest(self):
        output = "test_a (m.C.test_a) ... ok\ntest_b (m.C.test_b) ... skipped 'needs root'\n"
        output += "test_c (m.C.test_c)\nWhat it does. ... ok\ntest_d (m.C.test_d)\nWhat else. ... skipped 'why'\n"
        self.assertEqual(results.count_unittest(output), (2, [Item("test_b", "needs root"), Item("test_d", "why")]))

    def test_suite(self):
        output = "ok ranks_a.x (1.00 s)\nskipped ranks_a.y: no network\nFAILED ranks_b.z\n" \
            "1 passed, 1 failed, 2 skipped, 0 not run\n"
        passed, failed, skipped = results.count_suite(output)
        self.assertEqual((passed, [f.name for f in failed]), (1, ["ranks_b.z"]))
        self.assertEqual(skipped, [Item("ranks_a.y", "no network"), Item("suite", results.NO_REASON)])
        self.assertIsNone(results.count_suite("Killed"))


class Review(unittest.TestCase):
    def rules(self, text):
        path = written(text)
        self.addCleanup(os.remove, path)
        return results.read_rules(path)

    def test_a_skip_without_a_rule_is_a_failure(self):
        stage = results.Stage("gcc")
        stage.add(5, [], [Item("net_verbs.x", "no card"), Item("net_verbs.x", "no network"), Item("other", "no card")])
        accepted = results.move_unreviewed(self.rules("# why\ngcc/net_verbs.* :: no card :: rxe\n"), [stage])
        self.assertEqual(accepted, [("gcc", Item("net_verbs.x", "no card"), "rxe")])
        self.assertEqual([item.name for item in stage.failed], ["net_verbs.x", "other"])
        self.assertEqual(len(stage.skipped), 1)

    def test_patterns_are_of_the_whole_text(self):
        rules = self.rules("gcc/a :: no :: because\n")
        self.assertIsNone(results.review(rules, "gcc", Item("ab", "no")))
        self.assertIsNone(results.review(rules, "gcc", Item("a", "no network")))

    def test_some_are_accepted_outside_ci_alone(self):
        rules = self.rules("gcc/netns :: no namespaces :: a container :: not in CI\n")
        for ci, why in (("", "a container"), ("true", None)):
            with unittest.mock.patch.dict(os.environ, CI=ci):
                self.assertEqual(results.review(rules, "gcc", Item("netns", "no namespaces")), why)

    def test_a_malformed_line_is_refused(self):
        with self.assertRaisesRegex(ValueError, ":1: expected NAME :: REASON :: WHY"):
            self.rules("gcc/a :: no\n")

    def test_the_projects_own_list_is_readable(self):
        results.read_rules(os.path.join(os.path.dirname(__file__), "..", "skips.txt"))


class Table(unittest.TestCase):
    def test_rows_and_sum(self):
        stages = [results.Stage("gcc"), results.Stage("cross")]
        stages[0].add(10, [Item("x", "")], [])
        stages[1].add(4, [], [Item("y", "why")])
        stages[0].seconds, stages[0].cpu_seconds = 3, 5
        lines = results.table(stages, 2)
        self.assertEqual(lines[1].split(), ["gcc", "10", "1", "0", "3", "s", "5", "s"])
        self.assertEqual(lines[3].split(), ["all", "14", "1", "1", "2", "s", "5", "s"])

    def test_shares_of_the_cores(self):
        before = "cpu  100 20 30 400 5 0 10 50 19 0"
        after = "cpu  160 30 50 430 5 0 20 120 19 0"
        self.assertEqual(results.cpu_shares(before, after), (50.0, 15.0, 35.0))
        self.assertEqual(results.cpu_shares(before, before), (0.0, 0.0, 0.0))

    def test_skips_of_one_reason_are_one_line(self):
        accepted = [("gcc", Item(f"v.{i}", "no card"), "rxe") for i in range(3)]
        self.assertEqual(results.group_skips(accepted), ["skipped: gcc: v.0 and 2 more: no card [accepted: rxe]"])


if __name__ == "__main__":
    unittest.main()
