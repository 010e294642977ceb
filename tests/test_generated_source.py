"""The lowering as Inductor writes it for an H200: one launch a layer, no copy of the state, nothing left to the reference."""

from __future__ import annotations

import re
import unittest.mock
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.generated_source import source_for
from treewy_inductor import compat, ops
from treewy_inductor.lowerings.on_gpu import register_once
from treewy_inductor.lowerings.register import register_lowerings
from treewy_inductor.passes import join_conv_silu, join_narrow_products

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a CUDA build of torch asks the driver, which is not here; a CPU build takes the answers that it is given",
)
B, N, HK, HV, K, V = 2, 15, 2, 4, 128, 128


def arguments() -> tuple[Tensor, ...]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype)

    floats = empty(B, N, 2 * HK * K + HV * V), empty(B, N, HV, dtype=torch.float32), empty(B, N, HV)
    tree = empty(B, N, 1, dtype=torch.int64), empty(B, N, dtype=torch.int32), *(empty(B, dtype=torch.int32) for _ in range(2))
    return *floats, empty(B, HV, V, K, dtype=torch.float32), *tree


def layer(mixed: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *tree: Tensor) -> tuple[Tensor, ...]:
    query, key, value = mixed.split((HK * K, HK * K, HV * V), -1)
    heads = query.unflatten(-1, (HK, K)), key.unflatten(-1, (HK, K)), value.unflatten(-1, (HV, V))
    decay, share = -log_decay.exp(), beta.sigmoid()
    output, *rest = ops.tree_gated_delta(*heads, decay, share, state.transpose(2, 3), *tree, K**-0.5, 1e-6, torch.bfloat16)
    return (torch.relu(output), *rest)


@pytest.fixture(scope="module")
def generated() -> tuple[str, set[str]]:
    register_once()
    try:
        return source_for(layer, arguments)
    except (AttributeError, unittest.mock.InvalidSpecError) as error:
        pytest.skip(f"this torch asks for its device elsewhere: {error}")


@pytest.fixture
def source(generated: tuple[str, set[str]]) -> str:
    return generated[0]


def test_one_launch_a_layer(source: str) -> None:
    assert len(re.findall(r"tree_gated_delta_kernel_\d+\.run\(", source)) == 1
    assert "torch.ops.treewy" not in source


def test_inputs_are_read_where_they_stand(source: str) -> None:
    call = source[source.index("def call(") :]
    launch = re.search(r"tree_gated_delta_kernel_\d+\.run\((.*)\)", call)[1]  # type: ignore[index]
    # Query, key, value are parts of one projection and the state a transposed view: none is copied.
    for offset in (0, HK * K, 2 * HK * K):
        assert (
            f"reinterpret_tensor(arg0_1, ({B}, {N}, {HV if offset == 2 * HK * K else HK}, {K}), (15360, 1024, 128, 1), {offset})"
            in launch
        )
    assert f"reinterpret_tensor(arg3_1, ({B}, {HV}, {K}, {V}), (65536, 16384, 1, 128), 0)" in launch
    assert f"empty_strided_cuda(({B}, {HV}, {K}, {V})" not in call


def test_no_input_is_taken_for_overwritten(generated: tuple[str, set[str]]) -> None:
    # Were the kernel's writes unknown, all its arguments would count, the state among them, and no CUDA graph be allowed.
    assert generated[1] == set()


def test_decays_become_part_of_inductors_own_kernels(source: str) -> None:
    assert re.search(r"triton_poi_fused_exp\w*\.run\(", source)


def kept_arguments() -> tuple[Tensor, ...]:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=torch.float32)

    return *arguments(), empty(B, N, HV, V), empty(B, N, HV), empty(B, N, HK)


def keeping_layer(*inputs: Tensor) -> Tensor:
    *rest, pseudo_values, path_decay, key_scale = inputs
    output, *kept = layer(*rest)
    for buffer, value in zip((pseudo_values, path_decay, key_scale), kept, strict=True):
        buffer.copy_(value)
    return output


def reading_layer(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    before = inputs[-3] * 2
    return keeping_layer(*inputs), before


@pytest.mark.parametrize(("function", "copies"), [(keeping_layer, 0), (reading_layer, 1)])
def test_what_a_commit_needs_is_written_where_it_is_kept(function: Callable[..., object], copies: int) -> None:
    # A buffer that is also read must keep what it held until then: that one is copied into after all.
    register_once()
    try:
        source, written = source_for(function, kept_arguments)
    except (AttributeError, unittest.mock.InvalidSpecError) as error:
        pytest.skip(f"this torch asks for its device elsewhere: {error}")
    call = source[source.index("def call(") :]
    launch = re.search(r"tree_gated_delta_kernel_\d+\.run\((.*)\)", call)[1]  # type: ignore[index]
    assert len(written) == 3
    assert sum(name in launch.split(", ") for name in written) == 3 - copies
    assert len(re.findall(r"triton_poi_fused\w*copy\w*\.run\(", call)) == copies


def convolved_layer(mixed: Tensor, history: Tensor, weight: Tensor, window: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    convolved = ops.tree_causal_conv1d(mixed.transpose(1, 2), history, weight, None, window)
    return layer(torch.nn.functional.silu(convolved).transpose(1, 2), *rest)


def convolved_arguments() -> tuple[Tensor, ...]:
    mixed, *rest = arguments()
    history, weight = mixed.new_empty(B, mixed.shape[2], 4), mixed.new_empty(mixed.shape[2], 4)
    return mixed, history, weight, torch.empty(B, N, 3, device="cuda", dtype=torch.int32), *rest


def test_what_a_convolution_computes_is_read_where_it_stands() -> None:
    # The activation behind it is elementwise over channels times nodes: laid out so, query, key and value would be copied.
    register_lowerings()
    try:
        source, _ = source_for(convolved_layer, convolved_arguments)
    except (AttributeError, unittest.mock.InvalidSpecError) as error:
        pytest.skip(f"this torch asks for its device elsewhere: {error}")
    call = source[source.index("def call(") :]
    convolution = re.search(r"triton_poi_fused_\w*silu\w*\.run\(.*?(buf\d+),", call)[1]  # type: ignore[index]
    launch = re.search(r"tree_gated_delta_kernel_\d+\.run\((.*)\)", call)[1]  # type: ignore[index]
    for offset in (0, HK * K, 2 * HK * K):
        assert re.search(rf"reinterpret_tensor\({convolution}, [^)]*\), \(15360, 1024, 128, 1\), {offset}\)", launch)


class Joined(compat.CustomGraphPass):  # type: ignore[misc]
    """The passes that the backend runs on a graph for a GPU."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        assert (join_conv_silu(graph), join_narrow_products(graph)) == (1, 1)

    def uuid(self) -> None:
        return None


def joined_layer(x: Tensor, weights: Tensor, gates: Tensor, buffer: Tensor, keys: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    history, weight, window, _, _, *state_and_tree = rest
    log_decay, beta = (torch.nn.functional.linear(x, gate) for gate in gates.unbind())
    mixed = torch.nn.functional.linear(x, weights).transpose(1, 2)
    buffer.copy_(mixed)
    convolved = torch.nn.functional.silu(ops.tree_causal_conv1d(mixed, history, weight, None, window)).transpose(1, 2)
    keys.copy_(convolved.split((HK * K, HK * K, HV * V), -1)[1].reshape(B, N, HK, K))
    return layer(convolved, log_decay.float(), beta, *state_and_tree)


def joined_arguments() -> tuple[Tensor, ...]:
    mixed, *rest = convolved_arguments()
    channels = mixed.shape[2]
    x, weights, gates = mixed.new_empty(B, N, 512), mixed.new_empty(channels, 512), mixed.new_empty(2, HV, 512)
    return x, weights, gates, mixed.new_empty(B, N, channels).transpose(1, 2), mixed.new_empty(B, N, HK, K), *rest


def test_a_layer_is_few_launches() -> None:
    register_lowerings()
    try:
        with torch._inductor.config.patch(joint_custom_pre_pass=Joined()):
            source, written = source_for(joined_layer, joined_arguments)
    except (AttributeError, unittest.mock.InvalidSpecError) as error:
        pytest.skip(f"this torch asks for its device elsewhere: {error}")
    call = source[source.index("def call(") :]
    # One product for the projection; both gates in one kernel, which what reads them sums up; nothing copies.
    assert len(re.findall(r"extern_kernels\.mm\(", call)) == 1
    assert len(re.findall(r"narrow_products_kernel_\d+\.run\(", call)) == 1
    launch = re.search(r"tree_conv_silu_kernel_\d+\.run\((.*)\)", call)[1]  # type: ignore[index]
    assert len(written) == 2 and written <= set(launch.split(", "))
    # The decay, beta, and the output's activation.
    assert len(re.findall(r"triton_poi_fused\w*\.run\(", call)) == 3
    verify = re.search(r"tree_gated_delta_kernel_\d+\.run\((.*)\)", call)[1]  # type: ignore[index]
    for offset in (0, HK * K, 2 * HK * K):
        assert re.search(rf"reinterpret_tensor\(buf\d+, [^)]*\), \(15360, 1024, 128, 1\), {offset}\)", verify)
