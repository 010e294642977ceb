"""How far are a compiled tree's logits from the plain model's, each root-to-node path run as an ordinary sequence?

    python -m bench.oracle [--nodes 2,13,40,64,100] [--trees 20] [--codegen 13]

A small Qwen3.5 (3 linear layers, 1 softmax layer, 2 key heads for 4 value heads) with random weights verifies random trees in
a batch of three rows of different lengths, every row its own tree; half-way a path of each is committed. float32 is compared
with the plain model in float32, bfloat16 and plain eager bfloat16 with the same weights in float32.

Columns: worst node in float32, relative in norm, and the plain model's own rounding, measured as its worst node against
float64; what the worst node would be if one node hung below another parent; bfloat16's root mean square error and its ratio
to plain eager bfloat16's. Sizes in ``--codegen`` run as code that Inductor generated, the others op by op.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bench.machine import machine_line
from bench.path_oracle import path_logits, path_logits_of_trees, path_to, relative_error
from treewy_inductor import TreeCache, records
from treewy_inductor.backend import treewy
from treewy_inductor.errors import UnprovenRecurrence

LENGTHS = (7, 18, 33)
VOCABULARY = 256
LIMIT_FP32, LIMIT_RATIO = 1e-5, 1.1


def small_model() -> PreTrainedModel:
    """Return the float32 model; weights of 0.05 make every layer act, and keep plain float32's own rounding near 1e-6."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
        },
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).eval()


def random_parents(nodes: int, chance: random.Random) -> list[int]:
    """Return the parents of a random tree; half of them are deep, half flat, and a tenth of the nodes are inert."""
    reach = chance.choice((3, nodes))
    parents, real = [-1], [0]
    for t in range(1, nodes):
        if chance.random() < 0.1:
            parents.append(-2)
        else:
            parents.append(chance.choice(real[-reach:]))
            real.append(t)
    return parents


class Verification:
    """One compiled model and its cache, and what they gave for a series of trees.

    Attributes:
        graphs: graphs compiled for the first tree.
        recompiles: graphs compiled for later ones.
        unproven: recurrences and convolutions that were refused.
    """

    def __init__(self, model: PreTrainedModel, nodes: int, codegen: bool) -> None:
        torch._dynamo.reset()
        self.model, self.nodes = model, nodes
        self.cache = TreeCache(model.config, len(LENGTHS), max(LENGTHS) + 2 * nodes, nodes, dtype=model.dtype)
        self.compiled = self.verified = self.unproven = self.graphs = 0

        def counting(*args: Any, **options: Any) -> Callable[..., Any]:
            self.compiled += 1
            return treewy(*args, **options)

        self.step = torch.compile(model, backend=counting, fullgraph=True, dynamic=False, options={"treewy.codegen": codegen})

    @property
    def recompiles(self) -> int:
        return self.compiled - self.graphs

    def prefill(self, committed: Sequence[Tensor]) -> None:
        for row, tokens in enumerate(committed):
            self.cache.prefill(self.model, tokens[None], rows=[row])

    @torch.no_grad()
    def verify(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits ``[B, N, vocabulary]`` of one tree a row."""
        self.cache.set_tree(parents)
        if self.verified == 0:
            with records.collect() as found:
                try:
                    logits = self.step(**self.cache.inputs(tokens)).logits
                finally:
                    self.unproven = sum(isinstance(record, records.Refused) for record in found)
            self.graphs = self.compiled
        else:
            logits = self.step(**self.cache.inputs(tokens)).logits
        self.verified += 1
        return logits.clone()


def measure(nodes: int, trees: int, codegen: bool) -> dict[str, float]:
    """Verify ``trees`` trees a row in both dtypes; return errors and counts."""
    fp32 = small_model()
    bf16 = copy.deepcopy(fp32).bfloat16()
    oracle_of = {"fp32": fp32, "bf16": copy.deepcopy(bf16).float()}
    chance = random.Random(nodes)
    committed = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS]
    runs = {"fp32": Verification(fp32, nodes, codegen), "bf16": Verification(bf16, nodes, codegen)}
    result: dict[str, float] = {"graphs": 0, "recompiles": 0, "unproven": 0}
    errors: dict[str, list[Tensor]] = {name: [] for name in ("fp32", "bf16", "eager", "rounding", "moved")}
    for name, run in runs.items():
        row_tokens = list(committed)
        run.prefill(row_tokens)
        chance.seed(nodes)
        torch.manual_seed(nodes)
        for count in (trees - trees // 2, trees // 2):
            parents = torch.tensor([[random_parents(nodes, chance) for _ in LENGTHS] for _ in range(count)])
            tokens = torch.randint(0, VOCABULARY, parents.shape)
            found = torch.stack([run.verify(*batch) for batch in zip(parents, tokens, strict=True)])
            for row, held in enumerate(row_tokens):
                its = held, tokens[:, row], parents[:, row]
                is_real = parents[:, row] != -2
                expected = path_logits_of_trees(oracle_of[name], *its)
                errors[name].append(relative_error(found[:, row], expected)[is_real])
                if name == "bf16":
                    errors["eager"].append(relative_error(path_logits_of_trees(bf16, *its), expected)[is_real])
                elif count == trees // 2 and row == 0:
                    exact = path_logits_of_trees(copy.deepcopy(fp32).double(), *its)
                    errors["rounding"].append(relative_error(expected, exact)[is_real])
                    tree = next(i for i in range(count) if (parents[i, row] >= 0).any())
                    moved = _error_if_moved(fp32, held, tokens[tree, row], parents[tree, row], found[tree, row])
                    errors["moved"].append(moved)
            path = _commit_one_path(run.cache, parents[-1].tolist(), chance)
            row_tokens = [
                torch.cat([held, tokens[-1, row][path[row][path[row] >= 0].long()]]) for row, held in enumerate(row_tokens)
            ]
        result["graphs"] = max(result["graphs"], run.graphs)
        result["recompiles"] += run.recompiles
        result["unproven"] += run.unproven
    worst = {name: torch.cat(each).max().item() for name, each in errors.items()}
    rms = {name: torch.cat(errors[name]).square().mean().sqrt().item() for name in ("bf16", "eager")}
    return result | {
        "fp32": worst["fp32"],
        "rounding": worst["rounding"],
        "moved": worst["moved"],
        "bf16": rms["bf16"],
        "ratio": rms["bf16"] / rms["eager"],
    }


def _commit_one_path(cache: TreeCache, parents: list[list[int]], chance: random.Random) -> Tensor:
    """Commit the path to a random node of each row; return it, ``[B, N]``."""
    path = torch.full((len(parents), cache.max_nodes), -1, dtype=torch.int32)
    for row, tree in enumerate(parents):
        nodes = path_to(tree, chance.choice([t for t, parent in enumerate(tree) if parent != -2]))
        path[row, : len(nodes)] = torch.tensor(nodes)
    cache.commit(path)
    return path


def _error_if_moved(model: PreTrainedModel, held: Tensor, tokens: Tensor, parents: Tensor, found: Tensor) -> Tensor:
    """Return the worst error ``[1]`` against an oracle whose last node hangs below another parent."""
    moved = parents.clone()
    last = int((parents >= 0).nonzero()[-1])
    moved[last] = next(t for t in (*range(last), -1) if t != parents[last] and (t < 0 or parents[t] != -2))
    expected = path_logits(model, held, tokens, moved)
    return relative_error(found, expected)[parents != -2].max()[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,13,40,64,100", help="tree sizes")
    parser.add_argument("--trees", type=int, default=20, help="random trees of each size, in each of the three rows")
    parser.add_argument("--codegen", default="13", help="tree sizes that run as code that Inductor generated")
    parser.add_argument("--transformers", action="store_true", help="print the version of transformers and stop")
    options = parser.parse_args()
    if options.transformers:
        print(transformers.__version__)
        return
    generated = {int(size) for size in options.codegen.split(",") if size}
    print(machine_line("float32 and bfloat16"))
    print("nodes  code       worst fp32  its rounding  if moved  bf16 rms  ratio  graphs")
    rows = []
    for size in map(int, options.nodes.split(",")):
        try:
            row = measure(size, options.trees, size in generated)
        except UnprovenRecurrence as refusal:
            print(f"{size:5}  wrong: {refusal}")
            row = dict.fromkeys(("fp32", "rounding", "moved", "bf16", "ratio"), float("inf"))
            row |= {"graphs": 0, "recompiles": 0, "unproven": 1}
        rows.append(row)
        code = "Inductor" if size in generated else "op by op"
        print(
            f"{size:5}  {code:9}  {row['fp32']:10.1e}  {row['rounding']:12.1e}  {row['moved']:8.1e}  {row['bf16']:8.1e}  "
            f"{row['ratio']:5.2f}  {row['graphs']:6.0f}",
            flush=True,
        )
    summary = {
        "max_rel_fp32": max(row["fp32"] for row in rows),
        "bf16_ratio": round(max(row["ratio"] for row in rows), 4),
        "graphs": int(max(row["graphs"] for row in rows)),
        "recompiles": int(sum(row["recompiles"] for row in rows)),
        "unproven": int(sum(row["unproven"] for row in rows)),
    }
    holds = (
        summary["max_rel_fp32"] <= LIMIT_FP32
        and summary["bf16_ratio"] <= LIMIT_RATIO
        and all(row["graphs"] == 1 for row in rows)
        and summary["recompiles"] == summary["unproven"] == 0
    )
    print(
        f"Every node is within {LIMIT_FP32:.0e} of its path run alone, and bfloat16 within {LIMIT_RATIO} of eager's error."
        if holds
        else f"A bound does not hold: {LIMIT_FP32:.0e} in float32, {LIMIT_RATIO} in bfloat16, one graph a size."
    )
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
