"""What some rows of a cache have committed, taken out of it: to go back to, to continue in other rows, or to keep in a file.

    lengths        [R] int64              tokens of each row
    state          [L, R, HV, K, V]       recurrent states
    history        [L, R, C, K]           inputs of the convolution
    keys, values   [La, R, H, T', D]      T' = tokens of the longest row

A draft that was verified and not committed is no part of it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treewy_inductor.cache_buffers import CacheBuffers

_FORMAT = "treewy_inductor.cache_snapshot.1"


@dataclass(frozen=True)
class CacheSnapshot:
    """Copies of the committed rows; later steps of the cache do not reach them."""

    lengths: Tensor
    state: Tensor
    history: Tensor
    keys: Tensor
    values: Tensor

    @property
    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in astuple(self))

    def save(self, path: str | Path) -> None:
        """Write the snapshot to a safetensors file."""
        tensors = {field.name: getattr(self, field.name).contiguous() for field in fields(self)}
        save_file(tensors, path, metadata={"format": _FORMAT})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> CacheSnapshot:
        """Read a snapshot from the file that :meth:`save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            found = (file.metadata() or {}).get("format")
            if found != _FORMAT:
                raise ValueError(f"{path} has format {found!r}, expected {_FORMAT!r}: pass a file of CacheSnapshot.save")
            return cls(**{field.name: file.get_tensor(field.name) for field in fields(cls)})


def take_rows(buffers: CacheBuffers, rows: Tensor, longest: int) -> CacheSnapshot:
    """Return copies of ``rows`` ``[R]`` int64, whose longest has ``longest`` tokens."""
    buffers.states.settle(rows)
    return CacheSnapshot(
        buffers.lengths[rows],
        buffers.state[:, rows],
        buffers.history[:, rows],
        buffers.keys[:, rows, :, :longest],
        buffers.values[:, rows, :, :longest],
    )


def put_rows(buffers: CacheBuffers, snapshot: CacheSnapshot, rows: Tensor) -> None:
    """Make ``rows`` ``[R]`` int64 hold what ``snapshot`` holds, in place.

    Raises:
        ValueError: if the snapshot has another number of rows, is of another model or dtype, or is too long. Nothing is
            written then.
    """
    longest = snapshot.keys.shape[3]
    if len(snapshot.lengths) != len(rows):
        raise ValueError(f"a snapshot of {len(snapshot.lengths)} rows for {len(rows)} rows: name one row for each")
    if longest > buffers.max_length:
        raise ValueError(f"a snapshot of {longest} tokens in a cache of {buffers.max_length}: use a larger max_length")
    for name in ("state", "history", "keys", "values"):
        theirs, ours = getattr(snapshot, name), getattr(buffers, name)
        expected = [*ours.shape[:1], len(rows), *ours.shape[2:]]
        if name in ("keys", "values"):
            expected[3] = longest
        if list(theirs.shape) != expected or theirs.dtype != ours.dtype:
            raise ValueError(
                f"{name} of the snapshot is {theirs.dtype} {list(theirs.shape)}, this cache takes {ours.dtype} {expected}: "
                "restore it into a cache of the same model and dtype"
            )
    buffers.states.settle(rows)
    for name in ("state", "history"):
        getattr(buffers, name)[:, rows] = getattr(snapshot, name).to(buffers.device)
    for name in ("keys", "values"):
        tensor = getattr(buffers, name)
        tensor[:, rows, :, :longest] = getattr(snapshot, name).to(buffers.device)
        # What the row held beyond is masked, but a NaN among it would still reach the softmax's sums.
        tensor[:, rows, :, longest:] = 0
    buffers.lengths[rows] = snapshot.lengths.to(buffers.device)
