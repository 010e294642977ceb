"""The kernels of replay compiled to an H200's machine code where none is: a trunk must not cost the registers of the stream."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from bench.kernel_cases import Shape
from tests.described_launches import commit_trunk_launches, verify_launches
from tests.offline_compile import H200, compile_launch, resources

B, SLOTS = 64, 16


@pytest.mark.parametrize(("nodes", "more"), [(4, 0), (40, 448)])
def test_a_trunk_spills_little_more_than_none(nodes: int, more: int) -> None:
    launches = [verify_launches(nodes, Shape(), slots, B)[0] for slots in (0, SLOTS)]
    without, with_trunk = (resources(compile_launch(launch, H200)) for launch in launches)
    assert with_trunk.stack <= without.stack + more
    assert "wgmma.mma_async" in with_trunk.matrix_instructions


def test_a_commit_spills_nothing() -> None:
    launches = commit_trunk_launches(4, Shape(), SLOTS, B=B)
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "fold_trunk_kernel",
        "append_trunk_kernel",
        "trunk_length_kernel",
    ]
    assert all(resources(compile_launch(launch, H200)).stack == 0 for launch in launches)
