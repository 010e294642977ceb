"""``treewy doctor`` finds what is missing, names it, and says what to do."""

from __future__ import annotations

import json
import unittest
from unittest import mock

from treewy_inductor import doctor
from treewy_inductor.doctor import GOOD, LESS, WRONG, Check


class ThisMachine(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.checks = doctor.examine()
        cls.by_name = {check.name: check for check in cls.checks}

    def test_nothing_is_wrong_where_the_tests_run(self) -> None:
        self.assertEqual([check for check in self.checks if check.status == WRONG], [])

    def test_a_tree_was_compiled_and_compared(self) -> None:
        self.assertRegex(self.by_name["a tree, compiled"].detail, r"^7 nodes, relative error \de-0[6-9]")

    def test_private_parts_of_torch_are_read_from_compat(self) -> None:
        for name in (
            "torch._inductor.compile_fx.compile_fx",
            "torch._inductor.pattern_matcher.stable_topological_sort",
            "torch._higher_order_ops.triton_kernel_wrap.kernel_side_table",
        ):
            self.assertEqual(self.by_name[name].status, GOOD)

    def test_whatever_is_not_good_has_a_remedy(self) -> None:
        self.assertEqual([check.name for check in self.checks if check.status != GOOD and not check.remedy], [])

    def test_report_ends_with_the_verdict_and_the_dict_is_json(self) -> None:
        self.assertEqual(doctor.report(self.checks).splitlines()[-1], doctor.verdict(self.checks))
        self.assertEqual(json.loads(json.dumps(doctor.to_dict(self.checks)))["status"], doctor.worst(self.checks))


class WhatIsMissing(unittest.TestCase):
    def test_a_private_name_that_torch_lost_is_wrong_and_says_which_function_needs_it(self) -> None:
        from torch._inductor import pattern_matcher

        # Modules of torch that import the name themselves have to be there before it is gone.
        list(doctor._private_apis())
        with mock.patch.object(pattern_matcher, "stable_topological_sort", create=False):
            del pattern_matcher.stable_topological_sort
            lost = [check for check in doctor._private_apis() if check.status == WRONG]
        self.assertEqual([check.name for check in lost], ["torch._inductor.pattern_matcher.stable_topological_sort"])
        self.assertIn("compat.sort_nodes", lost[0].remedy)

    def test_wrong_numbers_are_found(self) -> None:
        literal = doctor.reference.literal_gated_delta
        fake = mock.Mock(literal_gated_delta=lambda *args: (literal(*args)[0] + 1, None))
        with mock.patch.object(doctor, "reference", fake):
            check = doctor._proof()
        self.assertEqual(check.status, WRONG)
        self.assertIn("relative error", check.detail)

    def test_verdict_names_what_is_wrong_before_what_is_less(self) -> None:
        checks = [Check("a", GOOD, ""), Check("b", LESS, "", "x"), Check("c", WRONG, "", "y")]
        self.assertEqual(doctor.verdict(checks), "The backend will not work here: c.")
        self.assertEqual(doctor.verdict(checks[:2]), "The backend works; without b.")
        self.assertEqual(doctor.worst(checks[:1]), GOOD)
