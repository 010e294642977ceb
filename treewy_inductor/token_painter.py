"""Print tokens as they come, accepted drafts in colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

ACCEPTED, DECIDED, PROMPT = "bold green", "default", "dim"


class TokenPainter:
    """Prints one row's text; pass it as ``on_tokens``.

    Args:
        console: where to; it leaves the colours out where there are none.
        decode: from tokens to text.
    """

    def __init__(self, console: Console, decode: Callable[[Sequence[int]], str]) -> None:
        self.console, self.decode = console, decode
        self._tokens: list[int] = []
        self._printed = 0

    def prompt(self, tokens: Sequence[int]) -> None:
        """Print the prompt."""
        for token in tokens:
            self._print(token, PROMPT)

    def __call__(self, row: int, tokens: list[int], accepted: int) -> None:
        for i, token in enumerate(tokens):
            self._print(token, ACCEPTED if i < accepted else DECIDED)

    def end(self) -> None:
        """Print what a last incomplete character held back, and end the line."""
        self._show(self.decode(self._tokens), DECIDED)
        self.console.print()

    def _print(self, token: int, style: str) -> None:
        self._tokens.append(token)
        text = self.decode(self._tokens)
        # A character of several bytes may be spread over several tokens.
        if not text.endswith("�"):
            self._show(text, style)

    def _show(self, text: str, style: str) -> None:
        self.console.print(Text(text[self._printed :], style), end="", soft_wrap=True, highlight=False)
        self._printed = max(self._printed, len(text))


def show_legend(console: Console) -> None:
    """Print what the colours mean, where there are any."""
    if console.color_system is not None and not console.no_color:
        meanings = (("prompt", PROMPT), "  ", ("accepted draft", ACCEPTED), "  ", ("decided by the model", DECIDED), "\n")
        console.print(Text.assemble(*meanings))
