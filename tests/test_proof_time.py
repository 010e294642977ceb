"""Equal layers are proven once, so that what the passes take hardly grows with the number of layers."""

from __future__ import annotations

from bench import proof_time


def test_layers_of_full_size_need_one_proof_and_a_fraction_of_the_bound() -> None:
    row = proof_time.measure(layers=4, nodes=40)
    assert (row["recurrent"], row["proven"], row["proofs"]) == (3, 3, 1)
    # 48 layers, measured by the bench, must stay below the bound; the proof itself is here already.
    assert 0 < row["seconds"] < proof_time.LIMIT
