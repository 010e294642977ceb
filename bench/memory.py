"""How much state memory does each commit policy hold, and is that what a cache really allocates?

    python -m bench.memory [--model qwen3.5-35b-a3b] [--batch 64] [--max-length 4096]

Caches of the model's shapes are made on the meta device, where a tensor has a size and no memory, and their storages summed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5TextConfig

from treewy_inductor import TreeCache
from treewy_inductor.cache_buffers import CacheBuffers
from treewy_inductor.layer_shapes import default_flush_every
from treewy_inductor.memory import POLICIES, bytes_of, cache_buffers, nodes_of_widths, state_blocks, state_bytes
from treewy_inductor.memory_report import one_model, print_report
from treewy_inductor.model_shapes import MODELS, ModelShape, model_shape

RESULTS = Path(__file__).parent / "results"
WIDTHS = ((1, 1, 1), (2, 2, 2), (3, 3, 3))


def allocated_cache(model: ModelShape, batch: int, max_length: int, nodes: int, policy: str) -> CacheBuffers:
    """Return a cache of these sizes on the meta device."""
    return TreeCache(
        Qwen3_5TextConfig(),
        batch,
        max_length,
        nodes,
        dtype=torch.bfloat16,
        device="meta",
        mamba_state_commit=policy,
        layer_shapes=model.layers(),
    )


def allocated_state_bytes(cache: CacheBuffers) -> int:
    """Return the bytes of the storages of a cache's states, each counted once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in cache.states.tensors().values())


def allocated_states(cache: CacheBuffers) -> float:
    """Return how many full states a layer and row the tensors of ``cache`` hold that consist of states."""
    one = cache.state.numel()
    tensors = cache.states.tensors().values()
    return sum(tensor.numel() for tensor in tensors if tensor.shape[-3:] == cache.state.shape[-3:]) / one


def rows(model: ModelShape, batch: int, max_length: int) -> list[dict[str, Any]]:
    """Return MiB a sequence in a cache of ``batch``, by tree, policy and dtype: states with their stand-ins, and all."""
    found = []
    for widths in (*WIDTHS[:1], (2, 1, 1), (2, 2, 1), *WIDTHS[1:]):
        nodes = nodes_of_widths(widths)
        for policy in POLICIES:
            for state_dtype in ("bfloat16", "float32"):
                buffers = cache_buffers(
                    model,
                    batch=1,
                    nodes=nodes,
                    max_length=max_length,
                    policy=policy,
                    state_dtype=state_dtype,
                    flush_every=default_flush_every(nodes, batch * model.linear.value_heads),
                )
                found.append(
                    {
                        "widths": list(widths),
                        "nodes": nodes,
                        "policy": policy,
                        "state_dtype": state_dtype,
                        "state_mib": state_bytes(buffers) / 2**20,
                        "all_mib": bytes_of(buffers) / 2**20,
                    }
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    shape = model_shape(options.model)

    print(f"{shape.name} | torch {torch.__version__} | shapes alone, no device")
    for widths in WIDTHS[::2]:
        print_report(one_model(shape, batch=options.batch, widths=widths, max_length=options.max_length))
    is_equal = True
    blocks: dict[str, list[int]] = {policy: [] for policy in POLICIES}
    for model in MODELS.values():
        for widths in WIDTHS:
            nodes = nodes_of_widths(widths)
            for policy in POLICIES:
                cache = allocated_cache(model, options.batch, options.max_length, nodes, policy)
                counted = state_bytes(
                    cache_buffers(model, batch=options.batch, nodes=nodes, max_length=options.max_length, policy=policy)
                )
                states = allocated_states(cache)
                is_equal &= counted == allocated_state_bytes(cache) and states == state_blocks(policy, nodes)
                if model is shape and widths in (WIDTHS[0], WIDTHS[-1]):
                    blocks[policy].append(int(states))
    node = [
        bytes_of(cache_buffers(shape, batch=1, nodes=40, max_length=64, policy=policy), part=part) / count / 2**20
        for policy, part, count in (("store_all", "states of draft nodes", 39), ("reconstruct", "pseudo-values", 40))
    ]
    print(
        f"A draft node costs {node[0]:.2f} MiB as a state under store_all, {node[1]:.2f} MiB as pseudo-values under the others."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"model": shape.name, "max_length": options.max_length, "rows": rows(shape, options.batch, options.max_length)}
    (options.out / "memory.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps({"blocks": blocks, "bytes_equal_allocated": is_equal}))


if __name__ == "__main__":
    main()
