"""What does attention over a 40-node tree cost, by batch and cache, beside scaled dot product attention under a dense mask?

``python -m bench.attention`` takes the heads of Qwen3.5-0.8B (8 query and 2 key heads of 256) in bf16. A time is printed only
if the output agrees with the reference in float64; ``--tune`` sweeps the kernel's tiles instead, each checked at its shape.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bench.graph_timing import Timing, time_calls
from bench.kernel_cases import relative_error, tree_parents
from bench.machine import machine_line
from treewy_inductor import reference_attention
from treewy_inductor.encoding import attention_mask, derive
from treewy_inductor.lowerings.attention_tiles import AttentionTile, attention_tile
from treewy_inductor.lowerings.launch import EAGER
from treewy_inductor.lowerings.tree_attention import launch_tree_attention

RESULTS = Path(__file__).parent / "results"
HEADS, KEY_HEADS, DIM = 8, 2, 256
# Of an output stored in bfloat16: half a unit in the last place is 2^-9, and the weights are rounded as much once more.
BOUND = 6e-3
# batch, tokens in each row, positions of the cache
CASES = ((1, 1024, 2048), (1, 1024, 32768), (1, 32000, 32768), (16, 1024, 2048), (16, 1024, 32768), (16, 8000, 8192))
TILES = ((64, 64, 8, 256, 2), (64, 32, 8, 256, 3), (64, 32, 4, 256, 3), (128, 64, 8, 256, 2), (32, 64, 4, 256, 2))


def operands(batch: int, length: int, positions: int) -> list[Any]:
    """Return the op's arguments: a (3,3,3) tree in every row, NaN beyond it."""
    torch.manual_seed(0)
    links = torch.tensor(tree_parents("w333"), dtype=torch.int32, device="cuda").expand(batch, -1).contiguous()
    nodes = links.shape[1]
    query = torch.randn(batch, nodes, HEADS, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    keys, values = torch.randn(2, batch, KEY_HEADS, positions, DIM, device="cuda", dtype=torch.bfloat16)
    for rows in (keys, values):
        rows[:, :, length + nodes :] = torch.nan
    return [query, keys, values, derive(links, 4)[0], torch.full((batch,), length, device="cuda"), DIM**-0.5]


def exact(case: list[Any]) -> Tensor:
    """Return the first row's output in float64, from the positions that count."""
    end = int(case[4][0]) + case[0].shape[2]
    query, keys, values = (x[:1].double() for x in (case[0], case[1][:, :, :end], case[2][:, :, :end]))
    return reference_attention.tree_attention(query, keys, values, case[3][:1], case[4][:1], case[5])


def time_sdpa(case: list[Any]) -> Timing:
    """Return the time of what transformers' ``sdpa`` does: keys and values repeated for the query heads, a dense mask."""
    query, keys, values, ancestors, lengths, scale = case
    mask = attention_mask(lengths, ancestors, keys.shape[2])
    keys, values = (x.nan_to_num() for x in (keys, values))

    def run() -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (keys, values))
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)

    return time_calls([run])


def measure(case: list[Any], tile: AttentionTile | None, wanted: Tensor) -> tuple[Timing | None, float]:
    """Return time and error of the kernel; no time if the error is over the bound or a second run differs in a bit."""

    def run() -> Tensor:
        return launch_tree_attention(EAGER, *case, tile=tile).handle

    found, again = run(), run()
    error = relative_error(found[:1], wanted)
    is_right = error <= BOUND and torch.equal(found, again) and bool(found.isfinite().all())
    return (time_calls([run]) if is_right else None), error


def tune() -> None:
    """Print one line a tile and number of parts."""
    for batch, length, positions in CASES:
        case = operands(batch, length, positions)
        wanted = exact(case)
        for choice in TILES:
            for splits in (1, 2, 4, 8) if batch > 1 else (8, 16, 24, 32):
                tile = AttentionTile(*choice, splits)
                try:
                    timing, error = measure(case, tile, wanted)
                except OutOfResources as refused:
                    print(f"{batch:>5} {length:>6} {positions:>6} {tuple(tile)}  {str(refused)[:60]}", flush=True)
                    break
                told = f"{timing.median:8.1f} us" if timing else "wrong"
                print(f"{batch:>5} {length:>6} {positions:>6} {tuple(tile)}  {told}  error {error:.1e}", flush=True)


def main() -> None:
    """Measure the cases and write bench/results/attention.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="sweep tiles instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    print(machine_line("bf16"), flush=True)
    if options.tune:
        tune()
        return
    print("batch tokens  cache   sdpa us  treewy us (p10-p90)  ratio", flush=True)
    rows = []
    for batch, length, positions in CASES:
        case = operands(batch, length, positions)
        timing, error = measure(case, None, exact(case))
        row: dict[str, Any] = {"batch": batch, "tokens": length, "cache": positions, "err": error}
        if timing is not None:
            stock = time_sdpa(case)
            row |= {"sdpa_us": stock.median, "us": timing.median, "p10": timing.p10, "p90": timing.p90}
            row |= {"over_sdpa": timing.median / stock.median}
            row["tile"] = list(attention_tile(40 * HEADS // KEY_HEADS, batch * KEY_HEADS, positions, DIM, 2))
            told = f"{stock.median:9.1f} {timing.median:8.1f} ({timing.p10:.1f}-{timing.p90:.1f}) {row['over_sdpa']:6.2f}"
        else:
            told = f"wrong: error {error:.1e}"
        print(f"{batch:>5} {length:>6} {positions:>6} {told}", flush=True)
        rows.append(row)
    timed = {(row["batch"], row["tokens"], row["cache"]): row["us"] for row in rows if "us" in row}
    if {CASES[0], CASES[1]} <= set(timed):
        ratio = timed[CASES[1]] / timed[CASES[0]]
        print(f"1024 tokens in a cache of 32768 positions cost {ratio:.2f} times those in one of 2048.")
    report = {"machine": machine_line("bf16"), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
