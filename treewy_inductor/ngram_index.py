"""Find where the last tokens of a context occurred before.

index.find([.., 5, 6, 7])    every place after 5 6 7, then after 6 7, then after 7
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NgramIndex:
    """Every place at which each run of up to ``longest`` tokens ends, in a text that may grow.

    A negative token separates texts: no run holds one, and no continuation goes beyond one.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for length in range(1, min(self.longest, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - length :]), []).append(end)

    def find(self, context: Sequence[int], most: int) -> list[tuple[int, int]]:
        """Return up to ``most`` finds ``(length of the run, place after it)`` of the last tokens of ``context``.

        Longest run first, then latest place; a place found by a longer run is not named again for a shorter one.
        """
        found: dict[int, int] = {}
        for length in range(min(self.longest, len(context)), 0, -1):
            for end in reversed(self._ends.get(tuple(context[len(context) - length :]), ())):
                if len(found) == most:
                    break
                if end < len(self.tokens):
                    found.setdefault(end, length)
        return [(length, end) for end, length in found.items()]

    def continuation(self, place: int, depth: int) -> list[int]:
        """Return up to ``depth`` tokens from ``place`` on."""
        tokens = self.tokens[place : place + max(depth, 0)]
        return tokens[: next((i for i, token in enumerate(tokens) if token < 0), len(tokens))]
