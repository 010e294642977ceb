"""Are wrong recurrences caught? ``python -m bench.mutants`` changes one place of transformers' rules at a time.

Each mutant is a copy of the source with one line changed; it computes something else than the original, which is checked
first. A change that only renames what a role is made of (beta squared everywhere, say) would be another correct gated delta
rule, so every change here is inside: it makes two uses of the same role differ.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bench.machine import machine_line
from bench.marked_rule import MarkedRule
from treewy_inductor import records
from treewy_inductor.tree import DraftTree

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
# Two chunks of 64, the second padded.
NODES = {CHUNK: 70, RECURRENT: 7}


@dataclass(frozen=True)
class Mutant:
    """``old`` in the source of ``rule`` becomes ``new``."""

    name: str
    rule: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "sign of g between tokens",
        CHUNK,
        "cum_decay.unsqueeze(4) - cum_decay.unsqueeze(3)",
        "cum_decay.unsqueeze(3) - cum_decay.unsqueeze(4)",
    ),
    Mutant(
        "sign of g over the chunk", CHUNK, "chunk_decay = cum_decay[..., -1].exp()", "chunk_decay = (-cum_decay[..., -1]).exp()"
    ),
    Mutant("beta squared on keys", CHUNK, "k_beta = key * beta.unsqueeze(-1)", "k_beta = key * beta.unsqueeze(-1) ** 2"),
    Mutant("beta squared on values", CHUNK, "v_beta = value * beta.unsqueeze(-1)", "v_beta = value * beta.unsqueeze(-1) ** 2"),
    Mutant("no beta on values", CHUNK, "v_beta = value * beta.unsqueeze(-1)", "v_beta = value"),
    Mutant(
        "q and k swapped between tokens",
        CHUNK,
        "intra_chunk_attn = (query @ key.transpose(-1, -2))",
        "intra_chunk_attn = (key @ query.transpose(-1, -2))",
    ),
    Mutant(
        "q in place of k in the system",
        CHUNK,
        "ut_system = (k_beta @ key.transpose(-1, -2))",
        "ut_system = (k_beta @ query.transpose(-1, -2))",
    ),
    Mutant(
        "no decay before the prediction",
        CHUNK,
        "decayed_k_beta = k_beta * cum_decay.exp().unsqueeze(-1)",
        "decayed_k_beta = k_beta",
    ),
    Mutant("no decay before the output", CHUNK, "query = query * cum_decay.exp().unsqueeze(-1)", "query = query"),
    Mutant("no decay after the write", CHUNK, "key = key * (cum_decay[..., -1:] - cum_decay).exp().unsqueeze(-1)", "key = key"),
    Mutant("no decay of the state", CHUNK, "last_recurrent_state * chunk_decay[:, :, i]", "last_recurrent_state"),
    Mutant("decays summed one token late", CHUNK, "cum_decay = decay.cumsum(dim=3)", "cum_decay = decay.cumsum(dim=3) - decay"),
    Mutant("a token sees the next one", CHUNK, ".triu(1)", ".triu(2)"),
    Mutant("a token does not see itself", CHUNK, ".triu(1)", ".triu(0)"),
    Mutant(
        "sign of the correction", CHUNK, "v_new = new_values[:, :, i] - k_cumdecay", "v_new = new_values[:, :, i] + k_cumdecay"
    ),
    Mutant(
        "correction of the first chunk for all",
        CHUNK,
        "k_cumdecay[:, :, i] @ last_recurrent_state",
        "k_cumdecay[:, :, 0] @ last_recurrent_state",
    ),
    Mutant(
        "prediction from one state back",
        RECURRENT,
        "kv_mem = (last_recurrent_state *",
        "kv_mem = (last_recurrent_state / decay_t *",
    ),
    Mutant(
        "output one token back",
        RECURRENT,
        "core_attn_out[:, :, i] = (last_recurrent_state *",
        "core_attn_out[:, :, i] = ((last_recurrent_state - k_t.unsqueeze(-1) * delta.unsqueeze(-2)) *",
    ),
    Mutant(
        "key of the token before",
        RECURRENT,
        "kv_mem = (last_recurrent_state * k_t.unsqueeze(-1))",
        "kv_mem = (last_recurrent_state * key[:, :, max(i - 1, 0)].unsqueeze(-1))",
    ),
    Mutant("beta left out of the write", RECURRENT, "delta = (v_t - kv_mem) * beta_t", "delta = v_t - kv_mem * beta_t"),
)


def rule_of(mutant: Mutant | None, rule: str, folder: Path) -> tuple[Any, Path]:
    """Write a module with one rule of transformers, mutated or not, and return the rule and its file."""
    found = importlib.util.find_spec("transformers.models.qwen3_5.modeling_qwen3_5")
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    wanted = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    # The segment of a function leaves its decorators out.
    texts = {name: ast.get_source_segment(source, wanted[name]) or "" for name in ("l2norm", rule)}
    if mutant is not None:
        if texts[rule].count(mutant.old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: {mutant.old!r} stands {texts[rule].count(mutant.old)} times in {rule}")
        texts[rule] = texts[rule].replace(mutant.old, mutant.new)
    name = f"mutant_{MUTANTS.index(mutant) if mutant else rule}"
    file = folder / f"{name}.py"
    header = "import torch\nimport torch.nn.functional as F\n\ndef is_torchdynamo_exporting():\n    return False\n\n\n"
    file.write_text(header + "\n\n\n".join(texts.values()) + "\n")
    return getattr(_load(name, file), rule), file


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dynamo looks a function's module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def case_of(rule: str) -> MarkedRule:
    """Return small inputs for a rule, as many key heads as value heads."""
    return MarkedRule((DraftTree.from_parents([i - 1 for i in range(NODES[rule])]),), heads=(2, 2))


def outcome(mutant: Mutant, folder: Path) -> tuple[records.Refused | None, str]:
    """Compile a mutant; return its refusal if there is one that names a node and a line of the mutant, and what went wrong."""
    rule, file = rule_of(mutant, mutant.rule, folder)
    original, _ = rule_of(None, mutant.rule, folder)
    case = case_of(mutant.rule)
    x = case.operands
    args = {"q": x["q"], "k": x["k"], "v": x["v"]}
    ordinary = {"g": x["g"], "beta": x["beta"], "initial_state": x["state"], "output_final_state": True}
    results = [each(*args.values(), **ordinary, use_qk_l2norm_in_kernel=True) for each in (original, rule)]
    if all(torch.allclose(old, new, rtol=1e-4, atol=1e-5) for old, new in zip(*results, strict=True)):
        return None, "computes what the original computes"
    found: list[records.Record] = []
    try:
        with records.collect() as found:
            case.compiled(rule, use_qk_l2norm_in_kernel=True)
    except torch._dynamo.exc.BackendCompilerFailed:
        refused = next((record for record in found if isinstance(record, records.Refused)), None)
        if refused is None or not refused.node or not refused.source.startswith(str(file)):
            return None, f"refused, but not at a line of {file.name}: {refused}"
        return refused, ""
    return None, "was rewritten"


def main() -> None:
    print(machine_line("fp32"))
    refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rule in (CHUNK, RECURRENT):
            _, found = case_of(rule).compiled(rule_of(None, rule, folder)[0], use_qk_l2norm_in_kernel=True)
            proven = [record for record in found if isinstance(record, records.Proven)]
            print(f"{rule}: unchanged, proven to {proven[0].error:.0e}, the next reading off by {proven[0].runner_up:.0e}")
        for mutant in MUTANTS:
            refusal, wrong = outcome(mutant, folder)
            refused += refusal is not None
            where = f"{refusal.node}, line {refusal.source.rsplit(':', 1)[1]}" if refusal else f"NOT REFUSED: {wrong}"
            print(f"{mutant.name:40} {where}")
    print(f"{refused} of {len(MUTANTS)} mutants were refused, each at a node and a line of its own source.")
    print(json.dumps({"mutants": len(MUTANTS), "refused": refused}))


if __name__ == "__main__":
    main()
