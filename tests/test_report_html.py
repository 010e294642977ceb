"""The HTML report needs nothing but itself, shows what was found, and opens in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import unittest
from html.parser import HTMLParser
from pathlib import Path

from treewy_inductor.findings import Explanation, FoundRecurrence, RefusedRegion
from treewy_inductor.report_graph import MOST_NODES, GraphNode, draw

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "br", "rect", "path", "circle"}
BEFORE = (
    GraphNode("key", "input", (), "f32[1, 3, 2, 4]", role="key"),
    GraphNode("state", "treewy.state_in.default", (), "f32[1, 2, 4, 6]", role="state"),
    GraphNode("mul", "aten.mul.Tensor", ("state", "key"), "f32[1, 2, 4, 6]", "layer.py:7", "S = S * k  # <loop & more>"),
)
PROVEN = FoundRecurrence(
    layer=0,
    module="model.layers.0.mixer",
    source="/home/user/layer.py:7",
    code="S = S * k  # <loop & more>",
    rule="gated delta rule",
    roles={"key": "key f32[1, 3, 2, 4]"},
    error=3e-16,
    runner_up=float("inf"),
    proof_seconds=0.1,
    proven_by=0,
    nodes_before=140,
    nodes_after=9,
    bytes_kept=100,
    bytes_of_state=4000,
    before=BEFORE,
    after=BEFORE[:2],
)
REFUSED = RefusedRegion(
    layer=3,
    node="tanh_2",
    op="aten.tanh.default",
    module="model.layers.3.mixer",
    source="/home/user/layer.py:19",
    code="u = tanh(u)",
    reason="differs from the gated delta rule by 2.6e-01",
)
EXPLANATION = Explanation("Model<1>", (PROVEN,), (REFUSED,), 1, 300, 150, 1, 2.5, 0.5, 1e-9, 1e-3, {"torch": "2.13.0"})


class _Page(HTMLParser):
    """Collect the text, what is loaded from elsewhere, and tags that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.loaded: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)
        self.close()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "xlink:href")]
        if tag in ("script", "link", "iframe", "img"):
            self.loaded.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


class ReportPage(unittest.TestCase):
    def setUp(self) -> None:
        self.html = EXPLANATION.html()
        self.page = _Page(self.html)

    def test_tags_nest_and_nothing_is_loaded(self) -> None:
        self.assertEqual((self.page.open, self.page.wrong, self.page.loaded), ([], [], []))
        self.assertNotRegex(self.html, r"url\(|@import|https?://")

    def test_every_fact_of_a_proof_and_of_a_refusal_is_on_the_page(self) -> None:
        text = " ".join(self.page.words)
        for fact in ("model.layers.0.mixer", "layer.py:7", "3.0e-16", "140", "4,000", "40×"):
            self.assertIn(fact, text)
        for fact in ("tanh_2", "aten.tanh.default", "layer.py:19", "u = tanh(u)", REFUSED.reason):
            self.assertIn(fact, text)

    def test_users_text_is_escaped(self) -> None:
        self.assertIn("S = S * k  # <loop & more>", self.page.words)
        self.assertNotIn("<loop", self.html)
        self.assertNotIn("Model<1>", self.html)

    def test_text_and_dict_name_the_same_layers(self) -> None:
        self.assertIn("refused, layer 3 (model.layers.3.mixer)", EXPLANATION.text())
        self.assertEqual([found["layer"] for found in EXPLANATION.to_dict()["recurrences"]], [0])
        self.assertNotIn("before", EXPLANATION.to_dict()["recurrences"][0])

    def test_browser_lays_the_page_out(self) -> None:
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            self.skipTest("no browser on this machine: the parser's tests above stand")
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "report.html")
            opened = self.html.replace("<details>", "<details open>").replace(
                "</body>",
                "<script>document.title = document.querySelector('svg.graph').getBoundingClientRect().height;</script></body>",
            )
            page.write_text(opened, encoding="utf-8")
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
            command += ["--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
            dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        height = re.search(r"<title>([\d.]+)</title>", dom)
        assert height is not None, dom[:300]
        # Two layers of boxes and their gap: the picture is there, and has its own size.
        self.assertGreater(float(height[1]), 80)


class GraphPicture(unittest.TestCase):
    def test_a_node_stands_below_what_it_reads(self) -> None:
        picture = draw(BEFORE)
        tops = [float(top) for top in re.findall(r'<rect x="\d+" y="(\d+)"', picture)]
        self.assertEqual(len(tops), 3)
        self.assertGreater(tops[2], max(tops[:2]))
        self.assertEqual(picture.count('class="edge"'), 2)

    def test_a_graph_too_long_to_look_at_has_no_picture(self) -> None:
        chain = [GraphNode(str(i), "aten.neg.default", (str(i - 1),)) for i in range(MOST_NODES + 1)]
        self.assertEqual(draw(chain), "")
        self.assertIn("<svg", draw(chain[:-1]))
