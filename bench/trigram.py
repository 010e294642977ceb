"""An interpolated trigram model over token ids: the baseline that a trained model's held-out loss is printed beside.

    p(c | a b) = max(n(abc) - D, 0) / n(ab) + D t(ab) / n(ab) p(c | b)

``n`` counts occurrences, ``t`` the different continuations of a context; the bigram backs off to the unigram and that to
the uniform distribution in the same way (absolute discounting, one D for all). An unseen context has p of the next order.
"""

from __future__ import annotations

import numpy as np


class Trigram:
    """Counts of a token sequence, held as sorted keys so that a lookup is a binary search.

    Args:
        tokens: ``[T]`` integers in ``[0, vocab_size)``.
        vocab_size: number of token ids; its cube must fit int64.
        discount: D above, in (0, 1).
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, discount: float = 0.75) -> None:
        self.vocab_size, self.discount = vocab_size, discount
        ids = tokens.astype(np.int64)
        self._orders = [
            _Counts(ids, 1, vocab_size),
            _Counts(ids[:-1] * vocab_size + ids[1:], vocab_size, vocab_size),
            _Counts((ids[:-2] * vocab_size + ids[1:-1]) * vocab_size + ids[2:], vocab_size**2, vocab_size),
        ]

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """Return ``[..., T]`` float64, ``-log p`` in nats of each token of ``tokens [..., T]`` given the two before it.

        The first two of a row have less context and use the lower orders.
        """
        ids = tokens.astype(np.int64)
        probability = np.full(ids.shape, 1.0 / self.vocab_size)
        keys = ids.copy()
        for order, counts in enumerate(self._orders):
            known = np.zeros(ids.shape, dtype=bool)
            known[..., order:] = True
            if order:
                keys = keys.copy()
                keys[..., order:] += ids[..., : ids.shape[-1] - order] * self.vocab_size**order
            probability = np.where(known, counts.interpolate(keys, probability, self.discount), probability)
        return -np.log(probability)


class _Counts:
    """How often each n-gram occurred, and per context the total and the number of different continuations."""

    def __init__(self, keys: np.ndarray, contexts: int, vocab_size: int) -> None:
        self.vocab_size, self.has_context = vocab_size, contexts > 1
        self.keys, self.counts = np.unique(keys, return_counts=True)
        context_of = self.keys // vocab_size if self.has_context else np.zeros_like(self.keys)
        self.contexts, start = np.unique(context_of, return_index=True)
        self.totals = np.add.reduceat(self.counts, start)
        self.kinds = np.diff(np.append(start, len(self.keys)))

    def interpolate(self, keys: np.ndarray, lower: np.ndarray, discount: float) -> np.ndarray:
        context = keys // self.vocab_size if self.has_context else np.zeros_like(keys)
        count = _look_up(self.keys, self.counts, keys)
        total = _look_up(self.contexts, self.totals, context)
        kinds = _look_up(self.contexts, self.kinds, context)
        seen = total > 0
        total = np.maximum(total, 1)
        mixed = np.maximum(count - discount, 0.0) / total + discount * kinds / total * lower
        return np.where(seen, mixed, lower)


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
