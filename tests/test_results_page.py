"""docs/results.md holds what bench/results holds: its tables are those that the script writes."""

from __future__ import annotations

from bench.results_kernels import check_lines, kernel_lines, peer_lines, sanitizer_lines
from bench.results_page import PAGE, REGION, TABLES, filled, table


def test_the_page_holds_the_results_that_are_there() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "run python -m bench.results_page"


def test_every_region_names_a_table_and_every_table_has_a_region() -> None:
    names = [match["name"] for match in REGION.finditer(PAGE.read_text())]
    assert sorted(names) == sorted(TABLES)


def test_a_table_is_rewritten_and_the_text_around_it_stays() -> None:
    page = "before\n<!-- memory from memory -->\nan old table\n<!-- end -->\nafter\n"
    new = filled(page)
    assert "an old table" not in new
    assert "| (3,3,3) | 40 | float32 | 2,400.00 |" in new
    assert new.startswith("before\n<!-- memory from memory -->\n")
    assert new.endswith("<!-- end -->\nafter\n")


def test_a_table_whose_file_is_not_there_is_left_as_it_is() -> None:
    page = "<!-- layers from a_file_that_is_not_there -->\nas it was\n<!-- end -->"
    assert filled(page) == page


def test_numbers_are_written_with_two_digits() -> None:
    assert table(["a", "b"], [[1234.5678, 7]]) == "| a | b |\n| --- | --- |\n| 1,234.57 | 7 |\n"


def test_a_kernel_that_was_wrong_has_no_time() -> None:
    wrong = {"tree": "w222", "batch": 8, "right": False, "u_err": 2e-2, "o_err": 3e-2}
    (line,) = kernel_lines({"rows": [wrong]})
    assert line[:3] == ["(2,2,2)", "8", "wrong"] and len(line) == 13
    assert peer_lines({"rows": [wrong]}, ["SGLang"]) == []


def test_a_peer_that_was_wrong_or_absent_has_no_time() -> None:
    peers = {"SGLang": {"right": False}, "store_all": {"right": True, "us": 12.3}}
    row = {"tree": "w222", "batch": 8, "right": True, "verify_us": 4.0, "peers": peers, "snapshots_by": "store_all"}
    row["snapshots_over_verify"] = 3.1
    (line,) = peer_lines({"rows": [row]}, ["store_all", "SGLang", "vLLM"])
    assert line == ["(2,2,2)", "8", "4.0", "12.3", "wrong", "·", "3.1 (store_all)"]


def test_what_was_not_checked_or_was_wrong_counts_as_not_right() -> None:
    kind = {"kernel": "verify", "dtype": "bfloat16", "state_dtype": "float32"}
    right = {**kind, "trunk": 0, "is_right": True, "errors": [2e-3, 3e-7, 0.0, 0.0], "state_err": 2e-6}
    wrong = {**kind, "trunk": 0, "is_right": False, "errors": [1.0, 1.0, 0.0, 0.0], "state_err": 1.0}
    timed = {**kind, "is_right": True, "us": 3.0}
    assert check_lines({"rows": [right, wrong, timed]}) == [["verify", "bfloat16", "float32", "1 of 2", "3e-07", "2e-06"]]
    assert check_lines({"rows": [timed]}) == []


def test_a_tool_that_said_nothing_is_told() -> None:
    data = {"machine": "a GPU", "memcheck": {"passed": 3, "tests": 4, "found": 0, "silent": 1}}
    assert sanitizer_lines(data) == [["memcheck", "3 of 4", "0, 1 processes said nothing"]]
