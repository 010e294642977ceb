"""Linear attention with a decay and no correction (Mamba2): its op against the literal recurrence, and its recognition."""

from __future__ import annotations

import unittest

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.recurrences import WIDTH, ChainSlot, Recurrence, TreeSlot, log_decay_of
from treewy_inductor import ops_linear, records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.passes.slice_before_add import slice_before_add
from treewy_inductor.tree import DraftTree

aten = torch.ops.aten
TREE = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 3])
FOREST = DraftTree.from_parents([-1, -1, 0, 2, 2])
NODES = len(TREE)


class DecayedSum(Recurrence):
    """Mamba2's rule in chunks of four: the skip is added while outputs are padded to whole chunks."""

    value_heads = 4

    def extra_parameters(self) -> None:
        self.skip = torch.nn.Parameter(torch.empty(self.value_heads, 1))

    def recur(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        N, C = k.shape[1], 4
        step = torch.nn.functional.softplus(b)[..., None]
        pad = (0, 0, 0, 0, 0, -N % C)
        log_a = torch.nn.functional.pad(log_decay_of(a), pad[2:])
        residual = self.skip * torch.nn.functional.pad(v, pad)
        q, k = (torch.nn.functional.pad(x.repeat_interleave(2, 2), pad).transpose(1, 2) for x in (q, k))
        v = torch.nn.functional.pad(v * step, pad).transpose(1, 2)
        outputs = []
        for start in range(0, N + -N % C, C):
            rows = slice(start, start + C)
            g = log_a[:, rows].transpose(1, 2).cumsum(-1)
            D = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
            outputs.append((q[:, :, rows] * g.exp()[..., None]) @ S + (q[:, :, rows] @ k[:, :, rows].mT * D) @ v[:, :, rows])
            last = (g[..., -1:] - g).exp()[..., None]
            S = S * g[..., -1].exp()[..., None, None] + (k[:, :, rows] * last).mT @ v[:, :, rows]
        return (torch.cat(outputs, 2).transpose(1, 2) + residual)[:, :N], S


class TreeOp(unittest.TestCase):
    def setUp(self) -> None:
        torch.manual_seed(0)
        self.q, self.k = torch.randn(2, 2, NODES, 2, 5, dtype=torch.float64)
        self.v = torch.randn(2, NODES, 4, 3, dtype=torch.float64)
        self.log_a = -torch.rand(2, NODES, 4, dtype=torch.float64)
        self.b = torch.rand(2, NODES, 4, dtype=torch.float64)
        self.S = torch.randn(2, 4, 5, 3, dtype=torch.float64)
        self.encoding = TreeEncoding.of(TREE, FOREST)

    def run_op(self) -> tuple[Tensor, ...]:
        operands = (self.q, self.k, self.v, self.log_a, self.b, self.S, self.encoding.ancestors, 0.5, torch.float64)
        return ops_linear.tree_linear_attention(*operands)

    def test_every_node_equals_the_recurrence_along_its_path(self) -> None:
        o, u, g, _ = self.run_op()
        for row, tree in enumerate((TREE, FOREST)):
            for node in range(len(tree)):
                S = self.S[row].clone()
                for t in tree.path_to(node):
                    k = self.k[row, t].repeat_interleave(2, 0)
                    S = self.log_a[row, t].exp()[:, None, None] * S
                    S = S + k[:, :, None] * (self.b[row, t, :, None] * self.v[row, t])[:, None]
                q = self.q[row, node].repeat_interleave(2, 0)
                torch.testing.assert_close(o[row, node], 0.5 * (S * q[:, :, None]).sum(1))
                torch.testing.assert_close(g[row, node], self.log_a[row, tree.path_to(node)].sum(0))
        torch.testing.assert_close(u, torch.where((self.encoding.depth >= 0)[..., None, None], self.b[..., None] * self.v, 0))

    def test_nan_in_a_leaf_reaches_no_other_node(self) -> None:
        clean = self.run_op()[0]
        for x in (self.q, self.k, self.v, self.log_a, self.b):
            x[0, 5] = x[1, 5:] = float("nan")
        poisoned = self.run_op()[0]
        keep = torch.tensor([t != 5 for t in range(NODES)])
        self.assertTrue(torch.equal(poisoned[0, keep], clean[0, keep]) and torch.equal(poisoned[1], clean[1]))

    def test_schema_fake_and_errors(self) -> None:
        operands = (self.q, self.k, self.v, self.log_a, self.b, self.S, self.encoding.ancestors, 0.5, torch.float64)
        torch.library.opcheck(ops_linear.tree_linear_attention, operands)
        with self.assertRaisesRegex(RuntimeError, r"beta is \[2, 7, 2\], expected \[2, 7, 4\]"):
            make_fx(ops_linear.tree_linear_attention, tracing_mode="fake")(*operands[:4], self.b[..., :2], *operands[5:])


class Recognition(unittest.TestCase):
    def test_proven_and_equal_to_the_users_code_along_every_path(self) -> None:
        layer = DecayedSum()
        torch.manual_seed(1)
        hidden, state = torch.randn(2, NODES, WIDTH), torch.randn(2, 4, 4, 6)
        slot = TreeSlot(layer, state, TreeEncoding.of(TREE, FOREST))
        torch._dynamo.reset()
        options = {"treewy.codegen": False, "treewy.check": True}
        with torch.no_grad(), records.collect() as found:
            step = torch.compile(layer, backend=treewy, fullgraph=True, dynamic=False, options=options)
            outputs = step(hidden, slot)
        self.assertEqual([record.kind for record in found], ["linear_attention"])
        for row, tree in enumerate((TREE, FOREST)):
            for node in range(len(tree)):
                with torch.no_grad():
                    alone = layer(hidden[row : row + 1, tree.path_to(node)], ChainSlot(state[row : row + 1]))
                torch.testing.assert_close(outputs[row, node], alone[0, -1], rtol=1e-4, atol=1e-5)


class SliceBeforeAdd(unittest.TestCase):
    def test_a_slice_of_a_sum_becomes_a_sum_of_slices(self) -> None:
        def sliced(a: Tensor, b: Tensor) -> Tensor:
            return aten.slice(aten.add(a, b), 1, 0, 3)

        args = torch.randn(2, 5), torch.randn(2, 5)
        module = make_fx(sliced, tracing_mode="fake")(*args)
        self.assertEqual(slice_before_add(module.graph), 1)
        module.graph.lint()
        module.recompile()
        self.assertEqual([node.target for node in module.graph.nodes][2:5], [aten.slice.Tensor] * 2 + [aten.add.Tensor])
        torch.testing.assert_close(module(*args), sliced(*args))

    def test_a_sum_that_broadcasts_along_the_slice_or_has_another_reader_stays(self) -> None:
        def broadcasts(a: Tensor, b: Tensor) -> Tensor:
            return aten.slice(aten.add(a, b), 1, 0, 3)

        def is_read_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            total = aten.add(a, b)
            return aten.slice(total, 1, 0, 3), total.sum()

        for function, b in ((broadcasts, torch.randn(2, 1)), (is_read_twice, torch.randn(2, 5))):
            module = make_fx(function, tracing_mode="fake")(torch.randn(2, 5), b)
            self.assertEqual(slice_before_add(module.graph), 0)
