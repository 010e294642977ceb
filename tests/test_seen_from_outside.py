"""What torch's own tools show of the rewriting: logs, the trace directory that tlparse reads, and where nodes came from."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from torch import fx

from tests.recurrence_loops import DecayItself
from tests.recurrences import WIDTH, Recurrence, TreeSlot
from treewy_inductor import ops
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1])


class Block(torch.nn.Module):
    """A module around the recurrence, so that its nodes have a path."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer: Recurrence = DecayItself()

    def forward(self, hidden: torch.Tensor, slot: TreeSlot) -> torch.Tensor:
        return hidden + self.mixer(hidden, slot)


def compile_once(**options: object) -> None:
    block = Block()
    layer = block.mixer
    slot = TreeSlot(layer, torch.zeros(1, layer.value_heads, layer.key_dim, layer.value_dim), TreeEncoding.of(TREE))
    torch._dynamo.reset()
    chosen = {"treewy.codegen": False, "force_disable_caches": True} | options
    with torch.no_grad():
        torch.compile(block, backend=treewy, fullgraph=True, dynamic=False, options=chosen)(
            torch.zeros(1, len(TREE), WIDTH), slot
        )


def rewritten_graph() -> fx.GraphModule:
    """Return the graph as a later pass of Inductor's sees it."""
    seen: list[fx.GraphModule] = []
    compile_once(joint_custom_post_pass=lambda graph: seen.append(fx.GraphModule(graph.owning_module, graph)))
    return seen[-1]


class Provenance(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.module = rewritten_graph()
        (cls.op,) = cls.module.graph.find_nodes(op="call_function", target=ops.tree_gated_delta)

    def test_stack_trace_module_and_origin_survive(self) -> None:
        self.assertIn("recurrence_loops.py", self.op.meta["stack_trace"])
        self.assertTrue(any("mixer" in str(path) for path, _ in self.op.meta["nn_module_stack"].values()))
        self.assertIn("from_node", self.op.meta)

    def test_every_new_node_has_a_value(self) -> None:
        missing = [node.name for node in self.module.graph.nodes if node.op == "call_function" and "val" not in node.meta]
        self.assertEqual(missing, [])

    def test_graph_prints_as_readable_code(self) -> None:
        self.assertIn("treewy.tree_gated_delta.default", self.module.print_readable(print_output=False))

    def test_graph_drawer_opens_it(self) -> None:
        try:
            import pydot  # noqa: F401
        except ImportError:
            self.skipTest("pydot is not installed")
        from torch.fx.passes.graph_drawer import FxGraphDrawer

        self.assertIn("tree_gated_delta", FxGraphDrawer(self.module, "rewritten").get_dot_graph().to_string())

    def exported(self) -> torch.export.ExportedProgram:
        """Return the rewritten graph as the format that graph viewers read."""
        values = [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]
        inputs = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in values)
        return torch.export.export(self.module, inputs)

    def test_exported_graph_still_names_the_layer(self) -> None:
        (op,) = self.exported().graph.find_nodes(op="call_function", target=ops.tree_gated_delta)
        self.assertTrue(any("mixer" in str(path) for path, _ in op.meta["nn_module_stack"].values()))
        self.assertIn("recurrence_loops.py", op.meta["stack_trace"])

    def test_model_explorer_opens_it(self) -> None:
        try:
            from model_explorer.pytorch_exported_program_adapter_impl import PytorchExportedProgramAdapterImpl
        except ImportError:
            self.skipTest("ai-edge-model-explorer is not installed")
        adapter = PytorchExportedProgramAdapterImpl(self.exported(), {"const_element_count_limit": 16})
        (graph,) = adapter.convert()["graphs"]
        (shown,) = [node for node in graph.nodes if node.label == "treewy.tree_gated_delta"]
        self.assertIn("mixer", shown.namespace)
        self.assertGreater(len(shown.incomingEdges), 5)

    def test_depyf_writes_the_graph_before_and_after_and_the_code(self) -> None:
        try:
            import depyf
        except ImportError:
            self.skipTest("depyf is not installed")
        with tempfile.TemporaryDirectory() as folder:
            with depyf.prepare_debug(folder):
                compile_once(**{"treewy.codegen": True})
            written = {path.name: path.read_text() for path in Path(folder).iterdir() if path.is_file()}
        before = [text for name, text in written.items() if "BEFORE_PRE_GRAD" in name]
        after = [text for name, text in written.items() if "AFTER_POST_GRAD" in name]
        code = [text for name, text in written.items() if "kernel" in name]
        self.assertTrue(before and all("treewy.state_in" in text for text in before))
        for texts in (after, code):
            self.assertTrue(texts and all("treewy.tree_gated_delta" in text for text in texts))
            self.assertFalse(any("state_in" in text for text in texts))


class LogsAndTraces(unittest.TestCase):
    def test_debug_log_names_each_pass_and_the_proof(self) -> None:
        with self.assertLogs("treewy_inductor", logging.DEBUG) as caught:
            compile_once()
        text = "\n".join(caught.output)
        self.assertIn("rewrite_gated_delta: 1 rewrites", text)
        self.assertIn("frontier", text)

    def test_trace_directory_holds_the_graph_before_and_after(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TORCH_TRACE": folder, "TORCH_LOGS": "+treewy_inductor"}
            code = "from tests.test_seen_from_outside import compile_once; compile_once()"
            root = Path(__file__).parents[1]
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            self.assertEqual(ran.returncode, 0, ran.stderr[-2000:])
            text = "".join(path.read_text() for path in Path(folder).iterdir())
            pages = _parsed_by_tlparse(folder)
        # TORCH_LOGS takes the package's name although torch registered no such artifact.
        self.assertIn("rewrite_gated_delta: 1 rewrites", ran.stderr)
        lines = [line.split("] ", 1)[-1] for line in text.splitlines() if '"artifact"' in line]
        names = [json.loads(line)["artifact"]["name"] for line in lines if line.startswith("{")]
        ours = [name for name in names if name.startswith("treewy_")]
        self.assertEqual(ours, ["treewy_before", "treewy_after"])
        self.assertIn("treewy.state_in", text)
        self.assertIn("treewy.tree_gated_delta", text)
        if pages is not None:
            listed = {name.rsplit("_", 1)[0]: page for name, page in pages.items() if name.startswith("treewy_")}
            self.assertEqual(set(listed), {"treewy_before", "treewy_after"})
            self.assertIn("treewy.state_in", listed["treewy_before"])
            self.assertIn("treewy.tree_gated_delta", listed["treewy_after"])
            self.assertIn("treewy_after", pages["index.html"])


def _parsed_by_tlparse(folder: str) -> dict[str, str] | None:
    """Return the pages that tlparse makes of a trace directory, none where it is not installed."""
    if shutil.which("tlparse") is None:
        return None
    (log,) = Path(folder).iterdir()
    out = Path(folder, "pages")
    subprocess.run(["tlparse", log, "-o", out, "--no-browser"], check=True, capture_output=True, timeout=60)
    return {path.name: path.read_text() for path in out.rglob("*") if path.is_file()}
