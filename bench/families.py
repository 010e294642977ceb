"""Which model families can a tree be verified on, and which recurrences that nobody named are proven?

    python -m bench.families [--families qwen3_5,kimi_linear] [--codegen] [--also FOLDER] [--quick] [--out FILE]

A small model of each family with random weights, unmodified code of transformers, verifies a tree of 13 nodes in each of two
rows of different lengths, commits a path, and verifies another; the error is the worst node's against the plain model with
its path run alone. Then the written-out recurrences of tests/ (``variants``), those that must be refused (``near misses``),
and the time that the passes take on 48 layers (bench/proof_time.py).

Columns: version of transformers, layers with a recurrent state, those proven, relative error in float32, graphs compiled,
seconds from the first call to its result (without code generation unless ``--codegen``). A family that is refused says at
which layer and why. ``--also`` runs the families with another version of transformers as well, one that
``pip install --target FOLDER`` put into a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from bench import proof_time
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


def measure(family: str, codegen: bool, device: str = "cpu") -> dict[str, Any]:
    """Verify two trees on one family; return counts, the worst error and the time of the first call, or the refusal."""
    torch._dynamo.reset()
    config_name = FAMILIES[family][0]
    if not hasattr(transformers, config_name):
        return {"layers": 0, "proven": 0, "refused": f"transformers {transformers.__version__} has no {config_name}"}
    model = tiny_model(family, initializer_range=0.05).to(device)
    graphs = 0

    def counting(*args: Any, **options: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return treewy(*args, **options)

    try:
        cache = TreeCache(model.config, len(LENGTHS), 96, len(WIDE), dtype=model.dtype, device=device)
    except NotImplementedError as error:
        return {"layers": _state_layers(model), "proven": 0, "refused": str(error)}
    step = torch.compile(model, backend=counting, fullgraph=True, dynamic=False, options={"treewy.codegen": codegen})
    torch.manual_seed(1)
    held = [torch.randint(0, VOCABULARY, (length,)).to(device) for length in LENGTHS]
    for row, tokens in enumerate(held):
        cache.prefill(model, tokens[None], rows=[row])
    worst = seconds = 0.0
    with torch.no_grad(), records.collect() as found:
        started = time.perf_counter()
        for trees in ((WIDE, DEEP), (DEEP, WIDE)):
            tokens = torch.randint(0, VOCABULARY, (len(LENGTHS), len(WIDE))).to(device)
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
            cache.commit(path.to(device))
    proven = sum(isinstance(each, records.Proven) and each.kind != "causal_conv1d" for each in found)
    return {"layers": cache.linear_layers, "proven": proven, "max_rel_fp32": worst, "graphs": graphs, "compile_s": seconds}


def _state_layers(model: torch.nn.Module) -> int:
    types = getattr(model.config, "layer_types", None) or ["mamba"] * model.config.num_hidden_layers
    return sum(layer_type in ("linear_attention", "mamba") for layer_type in types)


def is_good(row: dict[str, Any]) -> bool:
    """Whether a family's row keeps every bound: all layers proven, one graph, the error within the limit."""
    return "refused" not in row and row["max_rel_fp32"] <= LIMIT and row["proven"] == row["layers"] and row["graphs"] == 1


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


def families_of_this_version(names: list[str], codegen: bool) -> dict[str, dict[str, Any]]:
    """Measure families with the transformers that is imported, and print a row for each."""
    rows = {}
    for family in names:
        rows[family] = row = measure(family, codegen)
        start = f"{transformers.__version__:12}  {family:16}  {row['layers']:6}"
        if "refused" in row:
            print(f"{start}  refused: {row['refused']}", flush=True)
            continue
        wrong = "" if is_good(row) else "  wrong"
        print(
            f"{start}  {row['proven']:6}  {row['max_rel_fp32']:10.1e}  {row['graphs']:6}  {row['compile_s']:9.1f}{wrong}",
            flush=True,
        )
    return rows


def families_of_another_version(folder: Path, names: list[str], codegen: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    """Measure families with the transformers in a folder, in a process of its own; return its version and its rows."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.families", "--rows-alone", "--families", ",".join(names)]
    path = os.pathsep.join(filter(None, (str(folder.resolve()), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    asked = subprocess.Popen(
        [*command, *(["--codegen"] if codegen else [])], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert asked.stdout is not None
    last = ""
    for line in asked.stdout:
        if last:
            print(last, end="", flush=True)
        last = line
    if asked.wait() != 0:
        raise RuntimeError(
            f"the families could not be measured with the transformers of {folder}: exit status {asked.returncode}"
        )
    found = json.loads(last)
    return found["transformers"], found["families"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--codegen", action="store_true", help="run the code that Inductor generates")
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="FOLDER", help="another transformers")
    parser.add_argument("--quick", action="store_true", help="families alone")
    parser.add_argument("--rows-alone", action="store_true", help="no header and no verdict: for --also")
    parser.add_argument("--out", type=Path, help="write the last line to this file as well, with machine and date")
    options = parser.parse_args()
    names = options.families.split(",")
    if options.rows_alone:
        rows = families_of_this_version(names, options.codegen)
        print(json.dumps({"transformers": transformers.__version__, "families": rows}))
        return
    machine = machine_line(f"fp32, {'generated code' if options.codegen else 'op by op'}")
    print(machine)
    print("transformers  family            layers  proven  worst fp32  graphs  compile s", flush=True)
    summary: dict[str, Any] = {
        "transformers": transformers.__version__,
        "families": families_of_this_version(names, options.codegen),
        "others": dict(families_of_another_version(folder, names, options.codegen) for folder in options.also),
    }
    rows = [row for version in (summary["families"], *summary["others"].values()) for row in version.values()]
    holds = all(map(is_good, rows))
    if not options.quick:
        variants = LOOPS + CLOSED_FORMS
        summary |= {"variants": len(variants), "variants_proven": sum(map(is_proven, variants))}
        summary |= {"near_misses": len(NEAR_MISSES), "near_misses_refused": sum(not is_proven(each) for each in NEAR_MISSES)}
        print(f"{summary['variants_proven']} of {summary['variants']} variants proven", end=", ")
        print(f"{summary['near_misses_refused']} of {summary['near_misses']} near misses refused", flush=True)
        deep = proof_time.measure(layers=48, nodes=40)
        summary["proof_seconds_48_layers"] = deep["seconds"]
        print(f"48 layers, {deep['recurrent']} recurrences, {deep['proofs']} proof: {deep['seconds']:.1f} s of passes")
        holds &= summary["variants_proven"] == len(variants) and summary["near_misses_refused"] == len(NEAR_MISSES)
        holds &= deep["seconds"] < proof_time.LIMIT and deep["proven"] == deep["recurrent"]
    supported = sum("refused" not in row for row in rows)
    print(f"{supported} of {len(rows)} rows verify trees; {'every' if holds else 'not every'} bound of this bench holds.")
    if options.out is not None:
        text = json.dumps({"machine": machine, "date": date.today().isoformat(), **summary}, indent=1)
        options.out.write_text(text + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
