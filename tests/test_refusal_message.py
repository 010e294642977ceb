"""A refusal read as a new user reads it: a module outside this project, the message alone, the line it names, the mended line."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers

import treewy_inductor as treewy
from treewy_inductor.backend import treewy as backend
from treewy_inductor.layer_shapes import LinearShape

SOURCE = """
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width=32, heads=2, k=8, v=8):
        super().__init__()
        self.sizes = (heads * k, heads * k, heads * v)
        self.heads, self.channels = heads, sum(self.sizes)
        self.qkv = nn.Linear(width, self.channels, bias=False)
        self.gates = nn.Linear(width, 2 * heads)
        self.conv = nn.Conv1d(self.channels, self.channels, 4, groups=self.channels, padding=3)
        self.out = nn.Linear(heads * v, width, bias=False)

    def forward(self, x, cache):
        tokens = x.shape[1]
        columns = cache.update_conv_state(self.qkv(x).transpose(1, 2))
        mixed = nn.functional.silu(self.conv(columns)[:, :, : columns.shape[-1]])[:, :, -tokens:].transpose(1, 2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in mixed.split(self.sizes, -1))
        k = nn.functional.normalize(k, dim=-1)
        a, b = self.gates(x).sigmoid().chunk(2, -1)
        S = cache.recurrent_states[0]
        outputs = []
        for t in range(tokens):
            S = a[:, t, :, None, None] * S
            guess = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], b[:, t, :, None] * (v[:, t] - guess))
            S = 10 * torch.tanh(S / 10)
            outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        cache.update_recurrent_state(S)
        return self.out(torch.stack(outputs, 1).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))

    def forward(self, tokens, cache):
        x = self.embed(tokens)
        for mixer, layer in zip(self.mixers, cache.layers):
            x = x + mixer(x, layer)
        return x
"""
WRONG = "            S = 10 * torch.tanh(S / 10)\n"
SHAPE = LinearShape(key_heads=2, value_heads=2, key_dim=8, value_dim=8, conv_channels=48, conv_kernel=4)


def written(folder: Path, name: str, source: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dynamo looks a function's module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def prepared(module: ModuleType) -> tuple[torch.nn.Module, torch.Tensor, treewy.TreeCache]:
    cache = treewy.TreeCache(transformers.PreTrainedConfig(), 1, 64, 7, layer_shapes=[SHAPE, SHAPE])
    cache.set_tree(treewy.DraftTree.from_widths((2, 2)))
    return module.Model().eval(), torch.arange(7)[None], cache


@torch.no_grad()
def test_the_message_leads_to_the_line_and_without_the_line_the_model_is_proven(tmp_path: Path) -> None:
    model, tokens, cache = prepared(written(tmp_path, "mixer_with_a_squashed_state", SOURCE))
    options = {"treewy.codegen": False}
    with pytest.raises(Exception, match="could not be proven") as raised:
        torch.compile(model, backend=backend, fullgraph=True, options=options)(tokens, cache)
    message = str(raised.value)
    places = re.findall(r"^  (\S+\.py):(\d+): recurrence of (.+)\n +(\S.*)$", message, re.MULTILINE)
    # Both layers are the same class and are refused alike: one place to look at, not two.
    ((file, line, layers, code),) = places
    assert layers == "layer 0 (mixers.0), layer 1 (mixers.1)"
    assert Path(file).read_text().splitlines()[int(line) - 1] + "\n" == WRONG and code == WRONG.strip()
    assert "The rule is linear in the state, and this tanh of it is not" in message
    # What it took for the roles is told by lines of the user's, too.
    for role, text in (("key", "k = nn.functional.normalize"), ("beta", "a, b = self.gates")):
        role_line = re.search(rf"{role} \w+ of line (\d+)", message)
        assert role_line is not None, message
        assert text in Path(file).read_text().splitlines()[int(role_line[1]) - 1]

    mended = prepared(written(tmp_path, "mixer_mended", SOURCE.replace(WRONG, "")))
    explanation = treewy.explain(mended[0], *mended[1:])
    assert len(explanation.recurrences) == 2 and not explanation.refusals


def test_a_report_names_equal_layers_once(tmp_path: Path) -> None:
    model, tokens, cache = prepared(written(tmp_path, "mixer_to_explain", SOURCE))
    explanation = treewy.explain(model, tokens, cache)
    for report in (explanation.text(), explanation.html()):
        assert report.count("layer 0 (mixers.0), layer 1 (mixers.1)") == 1
        # The page has the line once more for each node of the graph that stands below.
        assert report.split("Between its states")[0].count("S = 10 * torch.tanh(S / 10)") == 1
    assert [refusal.layer for refusal in explanation.refusals] == [0, 1]
    # The page has the graph between the states, with the refused node in it; the dictionary has not.
    for refusal in explanation.refusals:
        roles = {node.role: node for node in refusal.graph if node.role}
        assert roles.keys() == {"state", "refused", "final_state"} and roles["refused"].name == refusal.node
        assert roles["state"].inputs == () and roles["refused"].inputs
    assert explanation.html().count("Between its states") == 1
    assert all("graph" not in refusal for refusal in explanation.to_dict()["refusals"])
