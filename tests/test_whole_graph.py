"""One layer on a tree of two nodes, the whole graph as it comes from Dynamo and as the passes leave it."""

from __future__ import annotations

import operator

import torch
from expecttest import TestCase
from torch import Tensor, fx, nn

from treewy_inductor import ops
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

# B rows   N nodes   H heads   K key dim   V value dim   C channels of the convolution
B, N, H, K, V = 1, 2, 1, 2, 3
C = 2 * K + V


class Layer(nn.Module):
    """A short convolution over query, key and value, and the gated delta rule as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C, 1, 2))
        self.history, self.conv_inputs = torch.zeros(B, C, 2), torch.zeros(B, C, N)
        self.state = torch.zeros(B, H, K, V)
        sizes = ((B, N, H, V), (B, N, H, K), (B, N, H), (B, N, H))
        self.buffers_of_nodes = [torch.zeros(size) for size in sizes]
        self.tree = TreeEncoding.of(DraftTree.from_parents([-1, 0]), kernel_size=2)

    def forward(self, qkv: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        tree = self.tree
        self.conv_inputs.copy_(qkv)
        columns = ops.conv_in(qkv, self.history, tree.window, 0, 0)
        mixed = nn.functional.conv1d(columns, self.weight, padding=1, groups=C)[:, :, : 2 + N].relu()[:, :, -N:]
        q, k, v = (part.unflatten(-1, (H, -1)) for part in mixed.transpose(1, 2).split((K, K, V), -1))
        S = ops.state_in(self.state, tree.ancestors, tree.order, tree.internal, tree.height, 0, 0)
        outputs = []
        for t in range(N):
            S = S * log_decay[:, t, :, None, None].exp()
            u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, :, :, None]).sum(-2))
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outputs.append((S * q[:, t, :, :, None]).sum(-2))
        for buffer, new in zip(self.buffers_of_nodes, ops.state_out(S, *self.buffers_of_nodes, 0, 0), strict=True):
            buffer.copy_(new)
        return torch.stack(outputs, 1)


def _text(graph: fx.Graph) -> str:
    lines = []
    for node in graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]
            shape = f"[{', '.join(map(str, value.shape))}] " if isinstance(value, Tensor) else ""
            name = "getitem" if node.target is operator.getitem else str(node.target).removesuffix(".default")
            lines.append(f"{node.name}: {shape}= {name}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


class WholeGraph(TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.before, cls.after = "", ""

        def before(graph: fx.Graph) -> None:
            cls.before = _text(graph)

        def after(graph: fx.Graph) -> None:
            cls.after = _text(graph)

        torch._dynamo.reset()
        options = {"treewy.codegen": False, "force_disable_caches": True}
        options |= {"joint_custom_pre_pass": before, "joint_custom_post_pass": after}
        with torch.no_grad():
            step = torch.compile(Layer(), backend=treewy, fullgraph=True, dynamic=False, options=options)
            step(torch.zeros(B, C, N), torch.zeros(B, N, H), torch.zeros(B, N, H))

    def test_before(self) -> None:
        self.assertExpectedInline(
            self.before,
            """\
copy: [1, 7, 2] = aten.copy(arg0_1, arg1_1)
conv_in: [1, 7, 4] = treewy.conv_in(arg1_1, arg2_1, arg3_1, 0, 0)
convolution: [1, 7, 5] = aten.convolution(conv_in, arg4_1, None, [1], [1], [1], False, [0], 7)
slice_1: [1, 7, 4] = aten.slice.Tensor(convolution, 2, 0, 4)
relu: [1, 7, 4] = aten.relu(slice_1)
slice_2: [1, 7, 2] = aten.slice.Tensor(relu, 2, -2, 9223372036854775807)
permute: [1, 2, 7] = aten.permute(slice_2, [0, 2, 1])
split_with_sizes: = aten.split_with_sizes(permute, [2, 2, 3], -1)
getitem: [1, 2, 2] = getitem(split_with_sizes, 0)
getitem_1: [1, 2, 2] = getitem(split_with_sizes, 1)
getitem_2: [1, 2, 3] = getitem(split_with_sizes, 2)
view: [1, 2, 1, 2] = aten.view(getitem, [1, 2, 1, 2])
view_1: [1, 2, 1, 2] = aten.view(getitem_1, [1, 2, 1, 2])
view_2: [1, 2, 1, 3] = aten.view(getitem_2, [1, 2, 1, 3])
state_in: [1, 1, 2, 3] = treewy.state_in(arg5_1, arg6_1, arg7_1, arg8_1, arg9_1, 0, 0)
select: [1, 1] = aten.select.int(arg10_1, 1, 0)
unsqueeze: [1, 1, 1] = aten.unsqueeze(select, 2)
unsqueeze_1: [1, 1, 1, 1] = aten.unsqueeze(unsqueeze, 3)
exp: [1, 1, 1, 1] = aten.exp(unsqueeze_1)
mul: [1, 1, 2, 3] = aten.mul.Tensor(state_in, exp)
select_1: [1, 1] = aten.select.int(arg11_1, 1, 0)
unsqueeze_2: [1, 1, 1] = aten.unsqueeze(select_1, 2)
select_2: [1, 1, 3] = aten.select.int(view_2, 1, 0)
select_3: [1, 1, 2] = aten.select.int(view_1, 1, 0)
unsqueeze_3: [1, 1, 2, 1] = aten.unsqueeze(select_3, 3)
mul_1: [1, 1, 2, 3] = aten.mul.Tensor(mul, unsqueeze_3)
sum_1: [1, 1, 3] = aten.sum.dim_IntList(mul_1, [-2])
sub: [1, 1, 3] = aten.sub.Tensor(select_2, sum_1)
mul_2: [1, 1, 3] = aten.mul.Tensor(unsqueeze_2, sub)
select_4: [1, 1, 2] = aten.select.int(view_1, 1, 0)
unsqueeze_4: [1, 1, 2, 1] = aten.unsqueeze(select_4, 3)
unsqueeze_5: [1, 1, 1, 3] = aten.unsqueeze(mul_2, 2)
mul_3: [1, 1, 2, 3] = aten.mul.Tensor(unsqueeze_4, unsqueeze_5)
add: [1, 1, 2, 3] = aten.add.Tensor(mul, mul_3)
select_5: [1, 1, 2] = aten.select.int(view, 1, 0)
unsqueeze_6: [1, 1, 2, 1] = aten.unsqueeze(select_5, 3)
mul_4: [1, 1, 2, 3] = aten.mul.Tensor(add, unsqueeze_6)
sum_2: [1, 1, 3] = aten.sum.dim_IntList(mul_4, [-2])
select_6: [1, 1] = aten.select.int(arg10_1, 1, 1)
unsqueeze_7: [1, 1, 1] = aten.unsqueeze(select_6, 2)
unsqueeze_8: [1, 1, 1, 1] = aten.unsqueeze(unsqueeze_7, 3)
exp_1: [1, 1, 1, 1] = aten.exp(unsqueeze_8)
mul_5: [1, 1, 2, 3] = aten.mul.Tensor(add, exp_1)
select_7: [1, 1] = aten.select.int(arg11_1, 1, 1)
unsqueeze_9: [1, 1, 1] = aten.unsqueeze(select_7, 2)
select_8: [1, 1, 3] = aten.select.int(view_2, 1, 1)
select_9: [1, 1, 2] = aten.select.int(view_1, 1, 1)
unsqueeze_10: [1, 1, 2, 1] = aten.unsqueeze(select_9, 3)
mul_6: [1, 1, 2, 3] = aten.mul.Tensor(mul_5, unsqueeze_10)
sum_3: [1, 1, 3] = aten.sum.dim_IntList(mul_6, [-2])
sub_1: [1, 1, 3] = aten.sub.Tensor(select_8, sum_3)
mul_7: [1, 1, 3] = aten.mul.Tensor(unsqueeze_9, sub_1)
select_10: [1, 1, 2] = aten.select.int(view_1, 1, 1)
unsqueeze_11: [1, 1, 2, 1] = aten.unsqueeze(select_10, 3)
unsqueeze_12: [1, 1, 1, 3] = aten.unsqueeze(mul_7, 2)
mul_8: [1, 1, 2, 3] = aten.mul.Tensor(unsqueeze_11, unsqueeze_12)
add_1: [1, 1, 2, 3] = aten.add.Tensor(mul_5, mul_8)
select_11: [1, 1, 2] = aten.select.int(view, 1, 1)
unsqueeze_13: [1, 1, 2, 1] = aten.unsqueeze(select_11, 3)
mul_9: [1, 1, 2, 3] = aten.mul.Tensor(add_1, unsqueeze_13)
sum_4: [1, 1, 3] = aten.sum.dim_IntList(mul_9, [-2])
state_out: = treewy.state_out(add_1, arg12_1, arg13_1, arg14_1, arg15_1, 0, 0)
getitem_3: [1, 2, 1, 3] = getitem(state_out, 0)
getitem_4: [1, 2, 1, 2] = getitem(state_out, 1)
getitem_5: [1, 2, 1] = getitem(state_out, 2)
getitem_6: [1, 2, 1] = getitem(state_out, 3)
copy_1: [1, 2, 1, 3] = aten.copy(arg12_1, getitem_3)
copy_2: [1, 2, 1, 2] = aten.copy(arg13_1, getitem_4)
copy_3: [1, 2, 1] = aten.copy(arg14_1, getitem_5)
copy_4: [1, 2, 1] = aten.copy(arg15_1, getitem_6)
cat: [1, 2, 3] = aten.cat([sum_2, sum_4], 1)
view_3: [1, 2, 1, 3] = aten.view(cat, [1, 2, 1, 3])
copy_: [1, 7, 2] = aten.copy_(arg0_1, copy)
copy__1: [1, 2, 1, 3] = aten.copy_(arg12_1, copy_1)
copy__2: [1, 2, 1, 2] = aten.copy_(arg13_1, copy_2)
copy__3: [1, 2, 1] = aten.copy_(arg14_1, copy_3)
copy__4: [1, 2, 1] = aten.copy_(arg15_1, copy_4)""",
        )

    def test_after(self) -> None:
        self.assertExpectedInline(
            self.after,
            """\
reshape_default: [7, 2] = aten.reshape(arg4_1, [7, 2])
tree_causal_conv1d_default: [1, 7, 2] = treewy.tree_causal_conv1d(arg1_1, arg2_1, reshape_default, None, arg3_1)
relu_default: [1, 7, 2] = aten.relu(tree_causal_conv1d_default)
permute: [1, 2, 7] = aten.permute(relu_default, [0, 2, 1])
split_with_sizes: = aten.split_with_sizes(permute, [2, 2, 3], -1)
getitem: [1, 2, 2] = getitem(split_with_sizes, 0)
getitem_1: [1, 2, 2] = getitem(split_with_sizes, 1)
getitem_2: [1, 2, 3] = getitem(split_with_sizes, 2)
reshape_default_1: [1, 2, 1, 2] = aten.reshape(getitem, [1, 2, 1, 2])
reshape_default_2: [1, 2, 1, 2] = aten.reshape(getitem_1, [1, 2, 1, 2])
copy_2: [1, 2, 1, 2] = aten.copy(arg13_1, reshape_default_2)
reshape_default_3: [1, 2, 1, 3] = aten.reshape(getitem_2, [1, 2, 1, 3])
tree_gated_delta_default: = treewy.tree_gated_delta(reshape_default_1, reshape_default_2, reshape_default_3, arg10_1, arg11_1, arg5_1, arg6_1, arg7_1, arg8_1, arg9_1, 1.0, -1.0, torch.float32)
getitem_7: [1, 2, 1, 3] = getitem(tree_gated_delta_default, 0)
getitem_8: [1, 2, 1, 3] = getitem(tree_gated_delta_default, 1)
getitem_9: [1, 2, 1] = getitem(tree_gated_delta_default, 2)
getitem_10: [1, 2, 1] = getitem(tree_gated_delta_default, 3)
copy_: [1, 7, 2] = aten.copy_(arg0_1, arg1_1)
copy__1: [1, 2, 1, 3] = aten.copy_(arg12_1, getitem_8)
copy__2: [1, 2, 1, 2] = aten.copy_(arg13_1, copy_2)
copy__3: [1, 2, 1] = aten.copy_(arg14_1, getitem_9)
copy__4: [1, 2, 1] = aten.copy_(arg15_1, getitem_10)""",
        )
