"""How far a value is from another, relative to the other's norm: what proofs and checks compare with their bounds."""

from __future__ import annotations

from torch import Tensor


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return ``|got - expected| / |expected|`` in float64, infinite if their shapes differ or either holds a NaN."""
    if got.shape != expected.shape:
        return float("inf")
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")
