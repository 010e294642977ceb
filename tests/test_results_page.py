"""docs/results.md holds what bench/results holds: its tables are those that the script writes."""

from __future__ import annotations

from bench.results_kernels import kernel_lines, peer_lines
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
