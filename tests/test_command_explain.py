"""``treewy explain`` and ``treewy doctor``: what they print, write and return."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path

from typer.testing import CliRunner

from tests.tiny_models import tiny_model
from treewy_inductor.cli import app


class Explain(unittest.TestCase):
    def test_a_configuration_alone_is_explained_and_the_page_written(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(
                "qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
            ).config.save_pretrained(folder)
            page = Path(folder, "report.html")
            ran = CliRunner().invoke(app, ["explain", "--model", folder, "--widths", "2,1", "--html", str(page)])
            self.assertEqual(ran.exit_code, 0, ran.output)
            self.assertTrue(page.read_text().startswith("<!doctype html>"))
        found = json.loads(ran.output.strip().splitlines()[-1])
        self.assertEqual([each["layer"] for each in found["recurrences"]], [0])

    def test_without_a_model_it_explains_the_small_one(self) -> None:
        ran = CliRunner().invoke(app, ["explain", "--widths", "2"])
        self.assertEqual(ran.exit_code, 0, ran.output)
        self.assertIn("6 recurrences proven with 1 proof: trees can be verified.", ran.output)

    def test_a_folder_without_a_model_is_named(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ran = CliRunner().invoke(app, ["explain", "--model", folder])
        self.assertEqual(ran.exit_code, 2)
        self.assertIn(Path(folder).name, ran.output.replace("\n", "").replace("│", "").replace(" ", ""))


class Doctor(unittest.TestCase):
    def test_the_last_line_is_json(self) -> None:
        ran = CliRunner().invoke(app, ["doctor"])
        self.assertEqual(ran.exit_code, 0, ran.output)
        self.assertIn(json.loads(ran.output.strip().splitlines()[-1])["status"], ("good", "less"))
