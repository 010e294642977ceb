"""A progress bar of a generation on standard error."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class GenerationProgress:
    """A progress bar over all rows that counts tokens; also passes them on."""

    def __init__(self, total: int, on_tokens: Callable[[int, list[int], int], None] | None) -> None:
        self.also = on_tokens
        self.steps, self.tokens = 0, 0
        columns = [TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
        self.bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("", total=total, rate="")
        self.bar.start()

    def __call__(self, row: int, tokens: list[int], accepted: int) -> None:
        self.steps, self.tokens = self.steps + 1, self.tokens + len(tokens)
        self.bar.update(self.task, advance=len(tokens), rate=f"{self.tokens / self.steps:.2f} tokens a step")
        if self.also is not None:
            self.also(row, tokens, accepted)

    def stop(self) -> None:
        self.bar.stop()
