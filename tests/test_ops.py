"""The ops: opcheck where they may run, the errors of their fake kernels, and markers that refuse to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.trees import BRANCHES, FOREST, batch_of
from treewy_inductor import ops, reference
from treewy_inductor.encoding import TreeEncoding

L, B, N, HK, HV, K, V, C, T, TAPS = 2, 2, 9, 2, 4, 6, 5, 7, 30, 4
ENCODING = TreeEncoding(B, N).fill(batch_of(BRANCHES, FOREST))
PATH = torch.tensor([[0, 2, 5, -1, -1], [-1] * 5], dtype=torch.int32)


def tree_arguments(*, by_channel: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    encoding = {name: ENCODING.tensors()[name] for name in ("ancestors", "order", "internal", "height")}
    return {
        "query": torch.randn(B, N, HK, K, dtype=dtype),
        "key": torch.randn(B, N, HK, K, dtype=dtype),
        "value": torch.randn(B, N, HV, V, dtype=dtype),
        "log_decay": -torch.rand(B, N, HV, *((K,) if by_channel else ())),
        "beta": torch.rand(B, N, HV),
        "state": torch.randn(B, HV, K, V),
        **encoding,
        "scale": K**-0.5,
        "norm_eps": 1e-6,
        "out_dtype": dtype,
    }


def conv_arguments() -> dict[str, Any]:
    return {
        "inputs": torch.randn(B, C, N),
        "history": torch.randn(B, C, TAPS),
        "weight": torch.randn(C, TAPS),
        "bias": torch.randn(C),
        "window": ENCODING.window,
    }


def commit_arguments(*, by_channel: bool = False) -> dict[str, Any]:
    return {
        "state": torch.randn(L, B, HV, K, V),
        "keys": torch.randn(L, B, N, HK, K),
        "key_scale": torch.rand(L, B, N, HK),
        "pseudo_values": torch.randn(L, B, N, HV, V),
        "path_decay": -torch.rand(L, B, N, HV, *((K,) if by_channel else ())),
        "path": PATH,
    }


def history_arguments() -> dict[str, Any]:
    return {"history": torch.randn(L, B, C, TAPS), "inputs": torch.randn(L, B, C, N), "path": PATH}


def rows_arguments() -> dict[str, Any]:
    rows = torch.randn(L, B, HK, T, K)
    return {"keys": rows, "values": rows.clone(), "lengths": torch.tensor([4, 11]), "path": PATH}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        pytest.param(ops.tree_gated_delta, tree_arguments, id="tree_gated_delta"),
        pytest.param(ops.tree_gated_delta, lambda: tree_arguments(by_channel=True), id="tree_gated_delta-by_channel"),
        pytest.param(ops.tree_gated_delta, lambda: tree_arguments(dtype=torch.bfloat16), id="tree_gated_delta-bf16"),
        pytest.param(ops.tree_causal_conv1d, conv_arguments, id="tree_causal_conv1d"),
        pytest.param(ops.tree_causal_conv1d, lambda: conv_arguments() | {"bias": None}, id="tree_causal_conv1d-no_bias"),
        pytest.param(ops.commit_state, commit_arguments, id="commit_state"),
        pytest.param(ops.commit_state, lambda: commit_arguments(by_channel=True), id="commit_state-by_channel"),
        pytest.param(ops.commit_conv, history_arguments, id="commit_conv"),
        pytest.param(ops.commit_keys_values, rows_arguments, id="commit_keys_values"),
    ],
)
def test_schema_and_fake_kernel_agree_with_the_reference(op: Any, arguments: Callable[[], dict[str, Any]]) -> None:
    # Without gradients: verification has no backward pass, and the ops declare none.
    passed = torch.library.opcheck(
        op, tuple(arguments().values()), test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )
    assert set(passed.values()) == {"SUCCESS"}


def test_results_have_the_layouts_that_the_fakes_promise() -> None:
    arguments = tree_arguments(dtype=torch.float16)
    real = [*ops.tree_gated_delta(*arguments.values()), ops.tree_causal_conv1d(*conv_arguments().values())]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [*ops.tree_gated_delta(*arguments.values()), ops.tree_causal_conv1d(*conv_arguments().values())]
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_a_float64_state_is_computed_in_float64() -> None:
    arguments = tree_arguments(dtype=torch.float64)
    arguments["state"] = arguments["state"].double()
    assert {tensor.dtype for tensor in ops.tree_gated_delta(*arguments.values())} == {torch.float64}


def fake_call(op: Any, arguments: dict[str, Any]) -> None:
    """Call the op's fake kernel alone."""
    with FakeTensorMode() as mode:
        op(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments.values()))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (B, N, HK, K + 1), r"query is \[2, 9, 2, 7\], expected \[2, 9, 2, 6\]"),
        ("value", (B, N, HK + 1, V), "3 value heads are not a multiple of 2 key heads"),
        ("log_decay", (B, N, HV, V), r"log_decay is \[2, 9, 4, 5\], expected \[2, 9, 4\] or \[2, 9, 4, 6\]"),
        ("beta", (B, HV, N), r"beta is \[2, 4, 9\], expected \[2, 9, 4\]"),
        ("state", (B, HV, V, K), r"state is \[2, 4, 5, 6\], expected \[2, 4, 6, 5\]"),
        ("ancestors", (B, N, 2), r"ancestors is \[2, 9, 2\], expected \[2, 9, 1\]"),
        ("order", (B, N + 1), r"order is \[2, 10\], expected \[2, 9\]"),
        ("internal", (B, 1), r"internal is \[2, 1\], expected \[2\]"),
        ("height", (1,), r"height is \[1\], expected \[2\]"),
    ],
)
def test_wrong_shape_of_the_recurrence_is_named(name: str, shape: tuple[int, ...], message: str) -> None:
    arguments = tree_arguments()
    arguments[name] = torch.zeros(shape, dtype=arguments[name].dtype)
    with pytest.raises(RuntimeError, match=message):
        fake_call(ops.tree_gated_delta, arguments)


@pytest.mark.parametrize(
    ("op", "arguments", "name", "shape", "message"),
    [
        (ops.tree_causal_conv1d, conv_arguments, "weight", (C, 3), r"weight \[7, 3\] for inputs \[2, 7, 9\]"),
        (ops.tree_causal_conv1d, conv_arguments, "window", (B, N, 4), r"window is \[2, 9, 4\], expected \[2, 9, 3\]"),
        (ops.commit_state, commit_arguments, "path", (B + 1, 5), r"path \[3, 5\] do not agree"),
        (ops.commit_state, commit_arguments, "key_scale", (L, B, N, HV), r"key_scale \[2, 2, 9, 4\]"),
        (ops.commit_conv, history_arguments, "inputs", (L, B, C + 1, N), r"inputs \[2, 2, 8, 9\]"),
        (ops.commit_keys_values, rows_arguments, "lengths", (B + 1,), r"lengths \[3\]"),
    ],
)
def test_wrong_shape_of_the_other_ops_is_named(
    op: Any, arguments: Callable[[], dict[str, Any]], name: str, shape: tuple[int, ...], message: str
) -> None:
    changed = arguments()
    changed[name] = torch.zeros(shape, dtype=changed[name].dtype)
    with pytest.raises(RuntimeError, match=message):
        fake_call(op, changed)


def test_markers_trace_but_refuse_to_run() -> None:
    encoding = [ENCODING.tensors()[name] for name in ("ancestors", "order", "internal", "height")]
    calls: list[tuple[Any, list[Any]]] = [
        (ops.state_in, [torch.randn(B, HV, K, V), *encoding, 0, 0]),
        (
            ops.state_out,
            [
                torch.randn(B, HV, K, V),
                *(value[0] for name, value in commit_arguments().items() if name not in ("state", "path")),
                0,
                0,
            ],
        ),
        (ops.conv_in, [torch.randn(B, C, N), torch.randn(B, C, TAPS), ENCODING.window, 0, 0]),
    ]
    assert {op for op, _ in calls} == set(ops.MARKERS)
    for op, arguments in calls:
        fake_call(op, dict(enumerate(arguments)))  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r'compiled with torch\.compile\(model, backend="treewy"'):
            op(*arguments)


def test_convolution_marker_is_history_then_inputs() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        columns = ops.conv_in(torch.randn(B, C, N), torch.randn(B, C, TAPS), ENCODING.window, 0, 0)
    assert columns.shape == (B, C, TAPS + N)


def test_eager_meaning_is_the_reference() -> None:
    arguments = tree_arguments()
    for a, b in zip(ops.tree_gated_delta(*arguments.values()), reference.tree_gated_delta(**arguments), strict=True):
        assert torch.equal(a, b)
