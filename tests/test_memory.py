"""The bytes that the arithmetic says are the bytes that a TreeCache allocates, and those that the papers and configurations say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.tiny_models import tiny_model
from treewy_inductor import TreeCache, memory
from treewy_inductor.cli import app
from treewy_inductor.memory import (
    POLICIES,
    Buffer,
    bytes_of,
    cache_buffers,
    nodes_of_widths,
    state_blocks,
    state_bytes,
)
from treewy_inductor.memory_report import one_model, print_report
from treewy_inductor.model_shapes import MODELS, model_shape
from treewy_inductor.tree import MAX_NODES, DraftTree

MIB = 2**20


def tensors_within(thing: object, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor that is reachable through attributes and containers of ``thing``, configurations left aside."""
    if isinstance(thing, Tensor):
        yield thing
    elif id(thing) not in seen and type(thing).__module__.startswith(("treewy_inductor", "builtins")):
        seen.add(id(thing))
        inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
        for part in [*inside, *getattr(thing, "__dict__", {}).values()]:
            yield from tensors_within(part, seen)


def allocated_bytes(cache: TreeCache) -> int:
    """Return the bytes of every storage that ``cache`` holds, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_within(cache, set())}
    return sum(storages.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_arithmetic_equals_allocation(name: str, policy: str) -> None:
    model, nodes = MODELS[name], 40
    for dtype, state_dtype, flush_every in (
        ("bfloat16", "float32", None),
        ("bfloat16", "bfloat16", 7 if policy == "replay" else None),
        ("float32", "float32", None),
    ):
        cache = TreeCache(
            tiny_model().config,
            3,
            128,
            nodes,
            dtype=getattr(torch, dtype),
            state_dtype=getattr(torch, state_dtype),
            device="meta",
            mamba_state_commit=policy,
            flush_every=flush_every,
            layer_shapes=model.layers(),
        )
        buffers = cache_buffers(
            model,
            batch=3,
            nodes=nodes,
            max_length=128,
            policy=policy,
            dtype=dtype,
            state_dtype=state_dtype,
            flush_every=flush_every,
        )
        assert cache.mask.dtype == torch.bool, "made when first asked for, by attention other than our own"
        assert bytes_of(buffers) == allocated_bytes(cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_buffer_has_its_name_shape_and_dtype(policy: str) -> None:
    cache = TreeCache(
        tiny_model().config,
        2,
        64,
        5,
        dtype=torch.bfloat16,
        device="meta",
        mamba_state_commit=policy,
        flush_every=9 if policy == "replay" else None,
        layer_shapes=model_shape("kimi-linear-48b-a3b").layers(),
    )
    buffers = cache_buffers(model_shape("kimi-linear-48b-a3b"), batch=2, nodes=5, max_length=64, policy=policy, flush_every=9)
    parts: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        parts.setdefault(buffer.name, []).append(buffer)
    for name, halves in parts.items():
        if name.startswith("layers."):
            continue
        owner = cache.encoding if name.startswith("encoding.") else cache if hasattr(cache, name) else cache.states
        tensor = getattr(owner, name.removeprefix("encoding."))
        assert {str(tensor.dtype)} == {f"torch.{half.dtype}" for half in halves}, name
        expected = list(halves[0].shape)
        if len(halves) == 2:
            expected[2] += halves[1].shape[2]
        assert list(tensor.shape) == expected, name


# MiB of one state per sequence in bfloat16 and float32, as the configurations give them.
STATES = {
    "qwen3.5-0.8b": (9, 18),
    "qwen3.5-2b": (9, 18),
    "qwen3.5-4b": (24, 48),
    "qwen3.5-9b": (24, 48),
    "qwen3.5-27b": (72, 144),
    "qwen3.5-35b-a3b": (30, 60),
    "qwen3.5-397b-a17b": (90, 180),
    "qwen3-next-80b-a3b": (36, 72),
    "olmo-hybrid-7b": (25.3125, 50.625),
    "kimi-linear-48b-a3b": (20, 40),
}


@pytest.mark.parametrize("name", MODELS)
def test_states_have_their_published_size(name: str) -> None:
    for state_dtype, expected in zip(("bfloat16", "float32"), STATES[name], strict=True):
        buffers = cache_buffers(MODELS[name], batch=1, nodes=4, max_length=64, state_dtype=state_dtype)
        assert bytes_of(buffers, part="recurrent state") == expected * MIB


@pytest.mark.parametrize(
    ("name", "chain_of_states", "keys_values_32k"),
    [("qwen3.5-35b-a3b", 120, 0.625 * 1024), ("qwen3.5-397b-a17b", 360, 0.9375 * 1024)],
)
def test_the_papers_figures(name: str, chain_of_states: float, keys_values_32k: float) -> None:
    buffers = cache_buffers(MODELS[name], batch=1, nodes=4, max_length=32768, policy="store_all", state_dtype="bfloat16")
    states = [buffer for buffer in buffers if buffer.name == "snapshots"]
    assert bytes_of(states) == chain_of_states * MIB
    assert bytes_of(buffers, part="keys and values") == keys_values_32k * MIB


def test_blocks_of_the_papers_trees() -> None:
    for widths, nodes in (((1, 1, 1), 4), ((2, 2, 2), 15), ((3, 3, 3), 40)):
        assert nodes_of_widths(widths) == nodes == len(DraftTree.from_widths(widths))
        assert [state_blocks(policy, nodes) for policy in POLICIES] == [nodes, 1, 1, 1]


@pytest.mark.parametrize("widths", [(0, 3), (-1,), (9, 9, 9), (256,)])
def test_trees_that_cannot_be_drafted_are_refused(widths: tuple[int, ...]) -> None:
    assert memory.MAX_NODES == MAX_NODES
    for refuse in (nodes_of_widths, DraftTree.from_widths):
        with pytest.raises(ValueError, match=r"expected at least 1|256"):
            refuse(widths)


def test_reconstructing_needs_a_tenth_of_the_state_memory_on_the_wide_tree() -> None:
    def state_memory(policy: str, widths: tuple[int, ...]) -> int:
        nodes = nodes_of_widths(widths)
        return state_bytes(cache_buffers(MODELS["qwen3.5-35b-a3b"], batch=1, nodes=nodes, max_length=4096, policy=policy))

    assert state_memory("store_all", (1, 1, 1)) > 2.4 * state_memory("reconstruct", (1, 1, 1))
    assert state_memory("store_all", (3, 3, 3)) > 10 * state_memory("reconstruct", (3, 3, 3))


def test_a_rank_holds_its_share() -> None:
    whole, rank = model_shape("Qwen/Qwen3.5-397B-A17B"), model_shape("qwen3.5-397b-a17b").shard(8)
    assert (rank.linear.key_heads, rank.linear.value_heads, rank.softmax.heads) == (2, 8, 1)
    assert rank.linear.conv_channels * 8 == whole.linear.conv_channels
    with pytest.raises(ValueError, match="30 key heads and 30 value heads, which 4 ranks cannot share"):
        model_shape("olmo-hybrid-7b").shard(4)


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model 'gpt' is not in the table of shapes: choose one of qwen3\.5-0\.8b"):
        model_shape("gpt")


def test_the_report_says_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(one_model(MODELS["qwen3.5-35b-a3b"], batch=64, widths=(3, 3, 3), max_length=4096, state_dtype="float32"))
    lines = {line.strip().split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["recurrent state"][-4:] == ["60.00", "60.00", "60.00", "1.0"]
    assert lines["states of draft nodes"][4] == f"{39 * 60:,}.00"
    whole = [
        bytes_of(cache_buffers(MODELS["qwen3.5-35b-a3b"], batch=1, nodes=40, max_length=4096, policy=policy)) / MIB
        for policy in POLICIES
    ]
    for found, expected in zip(lines["all"][1:5], whole, strict=True):
        assert float(found.replace(",", "")) == pytest.approx(expected, abs=0.01)


def test_the_command_prints_one_model_and_refuses_unknown_ones() -> None:
    runner = CliRunner()
    printed = runner.invoke(app, ["memory", "--model", "qwen3.5-35b-a3b", "--batch", "64", "--widths", "3,3,3"])
    assert printed.exit_code == 0
    assert "state in bfloat16, (3,3,3): 40 nodes" in printed.output and "2,340.00" in printed.output
    for wrong in (["--model", "gpt"], ["--widths", "wide"], ["--widths", "0,3"], ["--widths", "9,9,9"], ["--dtype", "int3"]):
        assert runner.invoke(app, ["memory", *wrong]).exit_code == 2
