"""Kernels of trees with leaves fit a B200's tensor memory, whichever way this Triton shares it; compiled where no B200 is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.compiler import ASTSource

from bench.kernel_cases import Shape
from tests.described_launches import configuration, planned_for, verify_launches
from tests.offline_compile import B200, H200, compile_launch, resources
from treewy_inductor.lowerings import tensor_memory, tree_gated_delta
from treewy_inductor.lowerings.launch import Launch
from treewy_inductor.lowerings.tensor_memory import COLUMNS, keeps_products_apart, loops_lack_tensor_memory

# Enough leaves for all products of a loop, kept apart, to need more than there is.
NODES = 60
# The fewest keys, for the compiler's time, with two tiles.
SMALL = Shape(K=64, V=128)


@triton.jit
def five_sums_at_once_kernel(
    x,  # [steps, 128, 128] bfloat16, contiguous
    out,  # [5, 128, 128] float32 out, contiguous
    steps,
):
    """Sum five products of 128 columns each, all of them alive in the whole loop: more than there is for any Triton."""
    place = tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    first = tl.load(x + place)
    a = tl.zeros([128, 128], tl.float32)
    b = a
    c = a
    d = a
    e = a
    for step in tl.range(1, steps):
        y = tl.load(x + step * 16384 + place)
        a = tl.dot(first, y, a)
        b = tl.dot(y, first, b)
        c = tl.dot(first, tl.trans(y), c)
        d = tl.dot(tl.trans(y), first, d)
        e = tl.dot(y, y, e)
    tl.store(out + place, a)
    tl.store(out + 16384 + place, b)
    tl.store(out + 2 * 16384 + place, c)
    tl.store(out + 3 * 16384 + place, d)
    tl.store(out + 4 * 16384 + place, e)


def planned(nodes: int, lack: bool, monkeypatch: pytest.MonkeyPatch, shape: Shape | None = None, **more: int) -> Launch:
    """Return the launch of a tree's tiles on a GPU where loops do, or do not, lack tensor memory."""
    monkeypatch.setattr(tree_gated_delta, "loops_lack_tensor_memory", lambda: lack)
    return verify_launches(nodes, shape or Shape(), **more)[0]


def test_a_tree_with_leaves_is_planned_to_fit() -> None:
    with planned_for(B200):
        launch = verify_launches(NODES, SMALL)[0]
    used = resources(compile_launch(launch, B200))
    assert not used.is_trap and 0 < used.tensor <= COLUMNS, used
    assert "tcgen05.mma" in used.matrix_instructions, used


def test_a_kernel_that_does_not_fit_is_seen() -> None:
    signature = {"x": "*bf16", "out": "*fp32", "steps": "i32"}
    source = ASTSource(fn=five_sums_at_once_kernel, signature=signature, constexprs={})
    used = resources(triton.compile(source, target=B200, options={"num_warps": 4}))
    assert used.is_trap and used.tensor > COLUMNS and not used.matrix_instructions, used


@pytest.mark.parametrize("slots", [0, 16])
def test_where_loops_lack_tensor_memory_a_program_has_one_tile(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes in (17, 40, NODES):
        two, one = (planned(nodes, lack, monkeypatch, slots=slots) for lack in (False, True))
        assert (two.constants["PARTS"], one.constants["PARTS"]) == (2, 1)
        assert one.grid == 2 * two.grid
        assert one.constants == two.constants | {"PARTS": 1}


def test_three_tiles_become_one_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    three, one = (planned(NODES, lack, monkeypatch, Shape(K=96, V=192)) for lack in (False, True))
    assert (three.constants["PARTS"], one.constants["PARTS"]) == (3, 1)


def test_trees_of_one_block_keep_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (1, 8, 128):
        assert planned(15, True, monkeypatch, B=rows) == planned(15, False, monkeypatch, B=rows)


def test_a_tile_that_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_gated_delta, "loops_lack_tensor_memory", lambda: True)
    asked = tree_gated_delta.verify_tile(NODES, 128, 128, True)
    assert verify_launches(NODES, Shape(), verify=asked)[0].constants["PARTS"] == 2


def test_nothing_changes_for_an_h200() -> None:
    before = [configuration(launch) for nodes in (15, 40, NODES) for launch in verify_launches(nodes, Shape())]
    with planned_for(H200):
        assert [configuration(launch) for nodes in (15, 40, NODES) for launch in verify_launches(nodes, Shape())] == before
    assert not keeps_products_apart(90)


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], bool]:
    """Return what is found on a GPU of a capability by a Triton that keeps products apart, where there are columns."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tensor_memory, "keeps_products_apart", lambda capability: capability in (100, 103))

    def found(major: int, minor: int) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        return loops_lack_tensor_memory.__wrapped__()

    return found


def test_chips_of_capability_ten_are_asked_about(gpu_of: Callable[[int, int], bool]) -> None:
    assert gpu_of(10, 0) and gpu_of(10, 3)
    assert not gpu_of(12, 0) and not gpu_of(9, 0) and not gpu_of(8, 0)


def test_without_a_gpu_nothing_is_compiled_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tensor_memory, "keeps_products_apart", lambda capability: pytest.fail("compiled"))
    assert not loops_lack_tensor_memory.__wrapped__()
