"""Keys and values of one attention layer for rows of different lengths, each followed by those of a growing tree.

A row's committed tokens stand in front, in their order; whatever stands behind them is a tree's or padding and is overwritten
by the next tokens. Which of it a query sees is for the caller's mask to say.

    B rows   R rows of one call   T tokens of one call   S places that a call attends over
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class RaggedKeysValues:
    """Answers an attention layer's ``update``; buffers grow with what is written.

    Args:
        keys, values: ``[B, heads, places, dim]`` buffers to begin with, which stay as long as they are large enough.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self._keys, self._values = keys, values

    def aim(self, rows: Tensor, places: Tensor, size: int) -> None:
        """Say where the next update writes.

        Args:
            rows: ``[R]`` int64, different rows.
            places: ``[R, T]`` int64, below ``size``, different within a row.
            size: S, how many places the update returns.
        """
        self.rows, self.places, self.size = rows, places, size

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, T, dim]``; return the first S places of the same rows, ``[R, heads, S, dim]``."""
        self._keys, self._values = self._grown(self._keys, keys), self._grown(self._values, values)
        for buffer, new in ((self._keys, keys), (self._values, values)):
            buffer[self.rows[:, None], :, self.places] = new.transpose(1, 2)
        return self._keys[self.rows, :, : self.size], self._values[self.rows, :, : self.size]

    def _grown(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        """Return the buffer, or a larger one with the same content; zeros where nothing was written, since 0 * NaN is NaN."""
        held_rows, held_size = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
        rows = max(held_rows, int(self.rows.max()) + 1)
        if rows == held_rows and self.size <= held_size:
            assert buffer is not None
            return buffer
        size = max(held_size, 1 << (self.size - 1).bit_length())
        grown = new.new_zeros(rows, new.shape[1], size, new.shape[3])
        if buffer is not None:
            grown[:held_rows, :, :held_size] = buffer
        return grown
