"""Which model families can a tree be verified on, and which recurrences that nobody named are proven?

    python -m bench.families [--families qwen3_5,kimi_linear] [--codegen] [--no-variants]

A small model of each family with random weights, unmodified code of transformers, verifies a tree of 13 nodes in each of two
rows of different lengths, commits a path, and verifies another; the error is the worst node's against the plain model with
its path run alone. Then the written-out recurrences of tests/ (``variants``) and those that must be refused (``near misses``).

Columns: layers with a recurrent state, those proven, relative error in float32, graphs compiled, seconds from the first call
to its result (without code generation unless ``--codegen``). A family that is refused says at which layer and why.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.machine import machine_line
from bench.path_oracle import path_logits, path_to, relative_error
from tests.recurrence_closed_forms import CLOSED_FORMS, HalfPrecisionInputs
from tests.recurrence_loops import LOOPS
from tests.recurrence_near_misses import NEAR_MISSES
from tests.recurrences import WIDTH, Recurrence, TreeSlot
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model
from treewy_inductor import DraftTree, TreeCache, records
from treewy_inductor.backend import treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.errors import UnprovenRecurrence

LIMIT = 1e-5
LENGTHS = (7, 18)
WIDE = DraftTree.from_widths((3, 3))
DEEP = DraftTree.from_parents([-1, 0, 1, 1, 3, 4, 4, 0, 7, 8, 9, 2, 11])


def measure(family: str, codegen: bool) -> dict[str, Any]:
    """Verify two trees on one family; return counts, the worst error and the time of the first call, or the refusal."""
    torch._dynamo.reset()
    model = tiny_model(family, initializer_range=0.05)
    graphs = 0

    def counting(*args: Any, **options: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return treewy(*args, **options)

    try:
        cache = TreeCache(model.config, len(LENGTHS), 96, len(WIDE), dtype=model.dtype)
    except NotImplementedError as error:
        return {"layers": _state_layers(model), "proven": 0, "refused": str(error)}
    step = torch.compile(model, backend=counting, fullgraph=True, dynamic=False, options={"treewy.codegen": codegen})
    torch.manual_seed(1)
    held = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS]
    for row, tokens in enumerate(held):
        cache.prefill(model, tokens[None], rows=[row])
    worst = seconds = 0.0
    with torch.no_grad(), records.collect() as found:
        started = time.perf_counter()
        for trees in ((WIDE, DEEP), (DEEP, WIDE)):
            tokens = torch.randint(0, VOCABULARY, (len(LENGTHS), len(WIDE)))
            cache.set_tree(list(trees))
            try:
                logits = step(**cache.inputs(tokens)).logits.clone()
            except Exception as error:
                refusal = next((each for each in found if isinstance(each, records.Refused)), None)
                return {"layers": cache.linear_layers, "proven": 0, "refused": refusal.sentence() if refusal else str(error)}
            seconds = seconds or time.perf_counter() - started
            path = torch.full(tokens.shape, -1, dtype=torch.int32)
            for row, tree in enumerate(trees):
                expected = path_logits(model, held[row], tokens[row], tree.parents)
                worst = max(worst, relative_error(logits[row], expected).max().item())
                accepted = path_to(tree.parents, 5 + row)
                path[row, : len(accepted)] = torch.tensor(accepted)
                held[row] = torch.cat([held[row], tokens[row, accepted]])
            cache.commit(path)
    proven = sum(isinstance(each, records.Proven) and each.kind != "causal_conv1d" for each in found)
    return {"layers": cache.linear_layers, "proven": proven, "max_rel_fp32": worst, "graphs": graphs, "seconds": seconds}


def _state_layers(model: torch.nn.Module) -> int:
    types = getattr(model.config, "layer_types", None) or ["mamba"] * model.config.num_hidden_layers
    return sum(layer_type in ("linear_attention", "mamba") for layer_type in types)


def is_proven(variant: type[Recurrence]) -> bool:
    """Whether a written-out recurrence compiles on a tree, proven, with nothing refused."""
    layer = variant(torch.bfloat16 if variant is HalfPrecisionInputs else torch.float32)
    state = torch.randn(2, layer.value_heads, layer.key_dim, layer.value_dim)
    slot = TreeSlot(layer, state, TreeEncoding.of(WIDE, DEEP))
    hidden = torch.randn(2, len(WIDE), WIDTH, dtype=layer.projection.weight.dtype)
    torch._dynamo.reset()
    step = torch.compile(layer, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False})
    with torch.no_grad(), records.collect() as found:
        try:
            step(hidden, slot)
        except Exception as error:
            # Dynamo wraps what the backend raises.
            if not isinstance(error.__cause__ or error, UnprovenRecurrence) and "UnprovenRecurrence" not in str(error):
                raise
    return bool(found) and all(isinstance(each, records.Proven) for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--codegen", action="store_true", help="run the code that Inductor generates")
    parser.add_argument("--no-variants", action="store_true", help="families alone")
    options = parser.parse_args()
    print(machine_line("fp32"))
    print(f"{'family':18} layers  proven  worst fp32  graphs  {'compile s' if options.codegen else 'trace s':>9}")
    families = {}
    for family in options.families.split(","):
        row = measure(family, options.codegen)
        families[family] = row
        if "refused" in row:
            print(f"{family:18} {row['layers']:6}  refused: {row['refused']}", flush=True)
            continue
        wrong = "" if row["max_rel_fp32"] <= LIMIT and row["proven"] == row["layers"] else "  wrong"
        print(
            f"{family:18} {row['layers']:6}  {row['proven']:6}  {row['max_rel_fp32']:10.1e}  {row['graphs']:6}  "
            f"{row['seconds']:9.1f}{wrong}",
            flush=True,
        )
    summary: dict[str, Any] = {
        "families": {name: {key: value for key, value in row.items() if key != "seconds"} for name, row in families.items()}
    }
    holds = all(row.get("max_rel_fp32", 1) <= LIMIT and row["proven"] == row["layers"] for row in families.values())
    if not options.no_variants:
        variants = LOOPS + CLOSED_FORMS
        summary |= {"variants": len(variants), "variants_proven": sum(map(is_proven, variants))}
        summary |= {"near_misses": len(NEAR_MISSES), "near_misses_refused": sum(not is_proven(each) for each in NEAR_MISSES)}
        print(f"{summary['variants_proven']} of {summary['variants']} variants proven", end=", ")
        print(f"{summary['near_misses_refused']} of {summary['near_misses']} near misses refused")
        holds &= summary["variants_proven"] == len(variants) and summary["near_misses_refused"] == len(NEAR_MISSES)
    supported = sum("refused" not in row for row in families.values())
    print(
        f"{supported} of {len(families)} families verify trees; {'every' if holds else 'not every'} bound of this bench holds."
    )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
