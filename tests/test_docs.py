"""What the documents quote is what the code says."""

from __future__ import annotations

import inspect
import json
import re
import unittest
from pathlib import Path
from typing import Any

import pytest

from treewy_inductor import backend, errors
from treewy_inductor.models import kimi_linear, model_verifier
from treewy_inductor.passes import certify

ROOT = Path(__file__).parents[1]
SAYING = [*(ROOT / "passes").glob("*.py"), *(ROOT / "treewy_inductor" / name for name in ("backend.py", "errors.py"))]
SOURCES = "".join(path.read_text() for path in SAYING)


def _document(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


class Quotations(unittest.TestCase):
    def test_every_reason_of_the_table_is_one_that_the_passes_give(self) -> None:
        rows = re.findall(r"^\| ([^|]+) \|", _document("refusals.md"), re.MULTILINE)[1:]
        self.assertGreater(len(rows), 8)
        for row in rows:
            # What the code fills in stands as dots, X, x or a number in the table.
            words = re.split(r" \.\.\.,?|: | X\b| x$| bfloat16| float32| 1e\+09", row)[0]
            self.assertIn(words.strip(), SOURCES, row)

    def test_the_error_names_the_document_that_explains_it(self) -> None:
        self.assertIn("docs/refusals.md", str(errors.UnprovenRecurrence([])))

    def test_the_worked_family_is_the_family_file(self) -> None:
        body = inspect.getsource(kimi_linear.layer_shapes).splitlines()
        quoted = {line.strip() for line in _document("families.md").splitlines()}
        missing = [line for line in body if not line.strip().startswith(('"""', "def ")) and line.strip() not in quoted]
        self.assertEqual(missing, [])

    def test_the_table_of_families_is_the_measured_result(self) -> None:
        result, text = json.loads((ROOT / "bench" / "results" / "families.json").read_text()), _document("families.md")
        (other,) = result["others"].values()
        for name, found in result["families"].items():
            first, second = (f"{row['max_rel_fp32']:.1e}" for row in (found, other[name]))
            self.assertIn(f"| {name} | {found['proven']} of {found['layers']} | {first} | {second} | {found['graphs']} |", text)
        for name in ("variants", "near_misses"):
            self.assertIn(f"{result[name + ('_proven' if name == 'variants' else '_refused')]} of {result[name]} were", text)
        self.assertIn(f"{result['proof_seconds_48_layers']:.1f} s for all passes", text)

    def test_bounds_and_options_are_those_of_the_code(self) -> None:
        text = _document("recognition.md")
        self.assertEqual((certify.AGREES, certify.DISAGREES, certify.SIZES[1]), (1e-9, 1e-3, 1e9))
        for quoted in ("agree to 1e-9", "more than 1e-3", "1e9 times as large"):
            self.assertIn(quoted, text)
        for option in re.findall(r'"treewy\.(\w+)"', text):
            self.assertIn(option, backend.OWN_OPTIONS)

    def test_files_and_links_that_are_named_exist(self) -> None:
        for document in (ROOT / "docs").glob("*.md"):
            text = document.read_text()
            for path in re.findall(r"`((?:passes|models|tests|treewy_inductor)/\w+\.py)`", text):
                self.assertTrue((ROOT / path).exists(), f"{document.name}: {path}")
            for link in re.findall(r"\]\(([^)#:]+\.md)", text):
                self.assertTrue((document.parent / link).exists(), f"{document.name}: {link}")


def test_the_examples_of_generation_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_verifier.compiled_step

    def op_by_op(model: Any, cache: Any, with_hidden: bool, options: dict[str, Any]) -> Any:
        # Generating C++ here would only take time.
        return real(model, cache, with_hidden, {"options": {"treewy.codegen": False}} | options)

    monkeypatch.setattr(model_verifier, "compiled_step", op_by_op)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", _document("generation.md"), re.DOTALL)
    assert len(examples) == 6
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["seen"].tokens > 0
