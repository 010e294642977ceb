"""How long does the first compile take? ``python -m bench.compile_time`` on Qwen3.5-0.8B's shape, ours beside stock.

Ours compiles the verification of a tree of 40 nodes; stock ``torch.compile`` compiles the ordinary forward of the same 40
tokens. Each runs in a process of its own with both of Inductor's caches empty, once, since that is what cold means. Beside the
time on the clock stands the processor's, of the process and the C++ compilers it starts: what else the machine does changes
it less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine_line

NODES = 40
# Qwen3.5-0.8B without its vision tower; what a vocabulary adds is one product.
SHAPE: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
    },
}


def model_of(layers: int, vocabulary: int) -> Any:
    """Return the model in bfloat16 with random weights."""
    import transformers

    config = transformers.Qwen3_5TextConfig(**SHAPE | {"num_hidden_layers": layers, "vocab_size": vocabulary})
    torch.manual_seed(0)
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return transformers.Qwen3_5ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(was)


def seconds_of_ours(layers: int, vocabulary: int) -> dict[str, Any]:
    """Compile and run a verify forward; return its seconds, what was proven, and how far node 0 is from the plain model."""
    from treewy_inductor import DraftTree, TreeCache, records
    from treewy_inductor.passes import recognize_gated_delta

    model = model_of(layers, vocabulary)
    tree = DraftTree.from_widths((3, 3, 3))
    cache = TreeCache(model.config, batch_size=1, max_length=128, max_nodes=NODES, dtype=torch.bfloat16)
    prompt, tokens = torch.arange(3, 12)[None], torch.arange(20, 20 + NODES)[None]
    proofs: list[float] = []
    recognize = recognize_gated_delta._prove

    def timed(*args: Any) -> Any:
        found = recognize(*args)
        if not isinstance(found, records.Refused):
            proofs.append(found.record.seconds)
        return found

    recognize_gated_delta._prove = timed
    with torch.no_grad():
        cache.prefill(model, prompt)
        cache.set_tree(tree)
        inputs = cache.inputs(tokens)
        from treewy_inductor.backend import treewy

        started = _now()
        output = torch.compile(model, backend=treewy, fullgraph=True, dynamic=False)(**inputs)
        spent = _since(started)
        plain = model(input_ids=torch.cat([prompt, tokens[:, :1]], 1), use_cache=False).logits[0, -1].float()
    error = float((output.logits[0, 0].float() - plain).norm() / plain.norm())
    return spent | {"proofs": len(proofs), "proof_seconds": sum(proofs), "error": error}


def _now() -> tuple[float, float]:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(each.ru_utime + each.ru_stime for each in used)


def _since(started: tuple[float, float]) -> dict[str, Any]:
    seconds, cpu_seconds = (after - before for before, after in zip(started, _now(), strict=True))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def seconds_of_stock(layers: int, vocabulary: int) -> dict[str, Any]:
    """Compile and run the ordinary forward of as many tokens; return its seconds and its error to the eager model."""
    model = model_of(layers, vocabulary)
    tokens = torch.arange(20, 20 + NODES)[None]
    with torch.no_grad():
        started = _now()
        output = torch.compile(model, dynamic=False)(input_ids=tokens, use_cache=False)
        spent = _since(started)
        plain = model(input_ids=tokens, use_cache=False).logits.float()
    return spent | {"error": float((output.logits.float() - plain).norm() / plain.norm())}


def _alone(which: str, layers: int, vocabulary: int) -> dict[str, Any]:
    """Run one side in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "bench.compile_time", "--only", which]
        command += ["--layers", str(layers), "--vocabulary", str(vocabulary)]
        run = subprocess.run(
            command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}, capture_output=True, text=True, check=False
        )
    if run.returncode:
        raise RuntimeError(f"{which} failed with status {run.returncode}: {run.stderr[-2000:]}")
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--vocabulary", type=int, default=SHAPE["vocab_size"])
    parser.add_argument("--only", choices=("ours", "stock"), help="one side, in this process")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compile_time.json")
    options = parser.parse_args()
    if options.only:
        side = seconds_of_ours if options.only == "ours" else seconds_of_stock
        print(json.dumps(side(options.layers, options.vocabulary)))
        return
    machine = machine_line("bf16")
    print(machine)
    sides = {which: _alone(which, options.layers, options.vocabulary) for which in ("stock", "ours")}
    print(f"{'':8}{'seconds':>9}{'processor s':>13}{'error':>10}")
    for which, side in sides.items():
        # Random weights in bf16: two sound compiles of this model differ by a few parts in a hundred.
        wrong = side["error"] >= 0.1
        shown = f"{'wrong':>9}{'wrong':>13}" if wrong else f"{side['seconds']:9.1f}{side['cpu_seconds']:13.1f}"
        print(f"{which:8}{shown}{side['error']:10.1e}")
    ratio, cpu_ratio = (sides["ours"][unit] / sides["stock"][unit] for unit in ("seconds", "cpu_seconds"))
    print(
        f"The first compile of a {NODES}-node tree takes {ratio:.2f} of stock's for {NODES} tokens, {cpu_ratio:.2f} of its "
        f"processor time; {sides['ours']['proofs']} proof took {sides['ours']['proof_seconds']:.1f} s of it."
    )
    result: dict[str, Any] = {"machine": machine, "date": time.strftime("%Y-%m-%d")}
    result |= {"layers": options.layers, "vocabulary": options.vocabulary, "nodes": NODES}
    for which, side in sides.items():
        result |= {f"{which}_s": side["seconds"], f"{which}_cpu_s": side["cpu_seconds"], f"{which}_error": side["error"]}
    result |= {"ratio": ratio, "cpu_ratio": cpu_ratio}
    result |= {"proofs": sides["ours"]["proofs"], "proof_s": sides["ours"]["proof_seconds"]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
