"""``treewy memory``: the bytes of a cache as a table, for one model buffer by buffer, for all models in one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from treewy_inductor.layer_shapes import default_flush_every
from treewy_inductor.memory import POLICIES, Buffer, bytes_of, cache_buffers, nodes_of_widths, state_blocks, state_bytes
from treewy_inductor.model_shapes import MODELS, ModelShape

_MIB = 2**20
# Lifetime -> line of the report -> parts of the cache that it sums.
_LINES: dict[str, dict[str, tuple[str, ...]]] = {
    "between two steps": {
        "recurrent state": ("recurrent state",),
        "trunk": ("trunk",),
        "convolution history": ("convolution history",),
        "keys, values, lengths": ("keys and values", "lengths"),
    },
    "for the tree in flight": {
        "states of draft nodes": ("states of draft nodes",),
        "pseudo-values": ("pseudo-values",),
        "keys of draft nodes": ("keys of draft nodes",),
        "key scales, path decays": ("key scales", "path decays"),
        "convolution inputs": ("convolution inputs",),
        "mask, encoding, inputs": ("attention mask", "tree encoding", "model inputs"),
    },
}


def one_model(
    model: ModelShape,
    *,
    batch: int,
    widths: Sequence[int],
    max_length: int,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    flush_every: int | None = None,
) -> Table:
    """Return the table of one model: a line a buffer, a column a policy, then how much more the baseline needs."""
    nodes = nodes_of_widths(widths)
    flush_every = default_flush_every(nodes, batch * model.linear.value_heads) if flush_every is None else flush_every
    policies = _by_policy(model, batch, nodes, max_length, dtype, state_dtype, flush_every)
    title = f"{model.name}, state in {state_dtype}, {_shape(widths)}: {nodes} nodes"
    table = _table(title, max_length, dtype, flush_every, ["MiB a sequence"], [*POLICIES, "ratio"])
    for lifetime, lines in _LINES.items():
        table.add_row(f"[bold]{lifetime}[/bold]")
        for line, parts in lines.items():
            found = [sum(bytes_of(policies[policy], part=part) for part in parts) / batch for policy in POLICIES]
            if any(found):
                table.add_row(f"  {line}", *_columns(found))
    table.add_row("[bold]total[/bold]")
    table.add_row("  between two steps", *_columns(_bytes_by_policy(policies, batch, is_permanent=True)))
    table.add_row("  for the tree in flight", *_columns(_bytes_by_policy(policies, batch, is_permanent=False)))
    states = [state_bytes(policies[policy]) / batch for policy in POLICIES]
    table.add_row("  states and their stand-ins", *_columns(states))
    table.add_row("  all", *_columns(_bytes_by_policy(policies, batch)))
    table.add_row(f"  all {batch} sequences", *_columns(_bytes_by_policy(policies, 1)))
    blocks = [state_blocks(policy, nodes) for policy in POLICIES]
    table.add_row("  full states a layer", *(str(count) for count in blocks), f"{blocks[0] / blocks[-1]:.1f}")
    return table


def all_models(
    *, batch: int, widths: Sequence[int], max_length: int, dtype: str = "bfloat16", flush_every: int | None = None
) -> Table:
    """Return the table of all models: a line a model and dtype of the state; what is between and during steps, by policy."""
    nodes = nodes_of_widths(widths)
    title = f"MiB a sequence for states and what stands in for them, {_shape(widths)}: {nodes} nodes"
    table = _table(title, max_length, dtype, flush_every, ["model", "state"], ["kv", *POLICIES, "ratio"])
    for model in MODELS.values():
        for state_dtype in ("bfloat16", "float32"):
            policies = _by_policy(model, batch, nodes, max_length, dtype, state_dtype, flush_every)
            keys_values = bytes_of(policies[POLICIES[0]], part="keys and values") / batch / _MIB
            states = [state_bytes(buffers) / batch for buffers in policies.values()]
            short = {"bfloat16": "bf16", "float32": "fp32"}[state_dtype]
            table.add_row(model.name, short, f"{keys_values:,.2f}", *_columns(states))
    return table


def _by_policy(
    model: ModelShape, batch: int, nodes: int, max_length: int, dtype: str, state_dtype: str, flush_every: int | None
) -> dict[str, tuple[Buffer, ...]]:
    """Return the buffers of a cache under each policy."""
    return {
        policy: cache_buffers(
            model,
            batch=batch,
            nodes=nodes,
            max_length=max_length,
            policy=policy,
            dtype=dtype,
            state_dtype=state_dtype,
            flush_every=flush_every,
        )
        for policy in POLICIES
    }


def _table(
    title: str, max_length: int, dtype: str, flush_every: int | None, names: Sequence[str], figures: Sequence[str]
) -> Table:
    """Return an empty table with a column for each of ``names`` and, to the right, of ``figures``."""
    chosen = f"trunk of {flush_every}" if flush_every != 1 else "no trunk"
    waiting = "trunks by default" if flush_every is None else chosen
    table = Table(
        title=title,
        caption=f"{max_length} tokens in {dtype}, {waiting}; ratio = store_all / reconstruct",
        box=None,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for name in names:
        table.add_column(name)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def print_report(table: Table) -> None:
    """Print ``table`` to the terminal, or as wide as it is where there is none."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(80, Console(width=1000).measure(table).maximum))
    console.print(table)


def _bytes_by_policy(policies: dict[str, tuple[Buffer, ...]], batch: int, *, is_permanent: bool | None = None) -> list[float]:
    """Return the bytes of each policy\'s buffers of this lifetime, divided by ``batch``."""
    return [bytes_of(policies[policy], is_permanent=is_permanent) / batch for policy in POLICIES]


def _columns(found: Sequence[float]) -> tuple[str, ...]:
    """Return the bytes in MiB, a dot where there are none, and the ratio of the first to the last."""
    ratio = f"{found[0] / found[-1]:.1f}" if found[0] and found[-1] else "·"
    return (*(f"{bytes_ / _MIB:,.2f}" if bytes_ else "·" for bytes_ in found), ratio)


def _shape(widths: Sequence[int]) -> str:
    return "(" + ",".join(map(str, widths)) + ")"
