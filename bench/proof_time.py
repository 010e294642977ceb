"""How long do the passes take on a model of 48 layers, whose equal layers are proven once?

    python -m bench.proof_time [--layers 48] [--nodes 40]

The layers have the heads of Qwen3-Next-80B-A3B: 16 for keys, 32 for values, of 128 channels each, three layers of linear
attention to one of softmax. Width, experts and vocabulary, which no proof looks at, are small. Nothing is run or generated:
the model is traced, and the passes that find, prove and rewrite are timed by the clock, those of convolutions included.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import transformers

import treewy_inductor as treewy
from bench.machine import machine_line

LIMIT = 5.0
HEADS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
REST = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}


def measure(layers: int, nodes: int) -> dict[str, Any]:
    """Explain a model of so many layers on a tree of so many nodes; return counts and seconds."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(num_hidden_layers=layers, **HEADS, **REST)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    cache = treewy.TreeCache(config, 1, 2 * nodes, nodes, dtype=model.dtype)
    cache.set_tree(treewy.DraftTree.from_parents([(t + 2) // 3 - 1 for t in range(nodes)]))
    torch._dynamo.reset()
    explanation = treewy.explain(model, **cache.inputs(torch.zeros(1, nodes, dtype=torch.int64)))
    return {
        "layers": layers,
        "recurrent": cache.linear_layers,
        "proven": len(explanation.recurrences),
        "proofs": len({found.proven_by for found in explanation.recurrences}),
        "nodes": explanation.nodes_before,
        "seconds": explanation.rewrite_seconds,
        "trace_seconds": explanation.compile_seconds - explanation.rewrite_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=40, help="of the tree")
    options = parser.parse_args()
    print(machine_line("fp32"))
    row = measure(options.layers, options.nodes)
    print("layers  recurrent  proven  proofs  graph nodes  passes s  trace s")
    print(
        f"{row['layers']:6}  {row['recurrent']:9}  {row['proven']:6}  {row['proofs']:6}  {row['nodes']:11}  "
        f"{row['seconds']:8.1f}  {row['trace_seconds']:7.1f}"
    )
    holds = row["seconds"] < LIMIT and row["proven"] == row["recurrent"]
    print(
        f"Every layer is proven, in less than {LIMIT:.0f} s."
        if holds
        else f"The bound does not hold: every layer proven, in less than {LIMIT:.0f} s."
    )
    print(json.dumps(row))


if __name__ == "__main__":
    main()
