"""What torch's own tools show of the rewriting: logs, the trace directory that tlparse reads, and where nodes came from."""

from __future__ import annotations

import json
import logging
import os
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
        # TORCH_LOGS takes the package's name although torch registered no such artifact.
        self.assertIn("rewrite_gated_delta: 1 rewrites", ran.stderr)
        lines = [line.split("] ", 1)[-1] for line in text.splitlines() if '"artifact"' in line]
        names = [json.loads(line)["artifact"]["name"] for line in lines if line.startswith("{")]
        ours = [name for name in names if name.startswith("treewy_")]
        self.assertEqual(ours, ["treewy_before", "treewy_after"])
        self.assertIn("treewy.state_in", text)
        self.assertIn("treewy.tree_gated_delta", text)
