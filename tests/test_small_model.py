"""The shipped model: loads without a network, writes text like its training text, and its prediction layer predicts it."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import conversion_mapping

from bench.prediction_depths import DEPTHS, distillation_losses, unrolled
from treewy_inductor.models.multi_token_prediction import MultiTokenPrediction
from treewy_inductor.models.small_model import load_small_model, small_model_folder

MODEL, TOKENIZER = load_small_model()
# No line of the standard library, but in its manner.
TEXT = '''import os
import sys


class Folder:
    """A folder of files.

    The argument *path* is the name of the folder.
    """

    def __init__(self, path, mode=None):
        self.path = path
        self.mode = mode

    def __repr__(self):
        return "<%s %r>" % (self.__class__.__name__, self.path)

    def names(self):
        """Return a list of the names of all files."""
        return [name for name in os.listdir(self.path) if not name.startswith(".")]
'''


def encoded(text: str) -> Tensor:
    return torch.tensor([[TOKENIZER.eos_token_id, *TOKENIZER(text, add_special_tokens=False)["input_ids"]]])


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in small_model_folder().iterdir()) <= 12_000_000


def test_model_is_what_transformers_builds_for_the_checkpoint() -> None:
    assert type(MODEL).__name__ == "Qwen3_5ForCausalLM"
    assert type(MODEL).__module__.startswith("transformers.")
    assert MODEL.dtype == torch.float32
    assert MODEL.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    with safe_open(small_model_folder() / "model.safetensors", framework="pt") as file:
        stored = {name for name in file.keys() if not name.startswith("mtp.")}  # noqa: SIM118, the opened file is no dict
    assert stored == set(MODEL.state_dict()) - {"lm_head.weight"}


def test_text_goes_through_the_tokenizer_and_back() -> None:
    text = TEXT + "\tümläut 数 \U0001f333\r\n"
    assert TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"]) == text
    assert len(TOKENIZER) == MODEL.config.vocab_size


@torch.no_grad()
def test_new_text_in_the_manner_of_the_training_text_is_likely() -> None:
    ids = encoded(TEXT)
    loss = F.cross_entropy(MODEL(ids).logits[0, :-1], ids[0, 1:]).item()
    # Chance is log 2048 = 7.6 nats a token, single tokens by frequency about 6; held-out library text 2.1.
    assert loss < 2.5
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert F.cross_entropy(MODEL(shuffled).logits[0, :-1], shuffled[0, 1:]).item() > math.log(2048) - 1


def test_it_writes_python() -> None:
    prompt = "import os\nimport sys\n\n\ndef main("
    ids = encoded(prompt)
    output = MODEL.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    written = TOKENIZER.decode(output[0, 1:])
    assert written.startswith(prompt)
    head, _, body = written[len(prompt) :].partition("):\n")
    assert head.replace(",", "").replace(" ", "").replace("=", "").replace("*", "").isidentifier() or head == ""
    assert body.startswith("    ")


@torch.no_grad()
def test_prediction_layer_agrees_with_the_model_at_every_depth() -> None:
    prediction = MultiTokenPrediction.of(MODEL)
    ids = encoded(TEXT)
    hidden = MODEL.model(input_ids=ids, use_cache=False).last_hidden_state
    drafted = unrolled(prediction, ids, hidden)
    _, agreements = distillation_losses(MODEL.lm_head(hidden), drafted)
    assert len(agreements) == DEPTHS
    assert min(agreements) > 0.5


@torch.no_grad()
@pytest.mark.skipif(
    "pre_fc_norm_embedding" not in inspect.getsource(conversion_mapping),
    reason="this transformers reads no prediction layer of this layout",
)
def test_transformers_reads_the_same_prediction_layer() -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    theirs = MtpModel.from_pretrained(MODEL)
    ours = MultiTokenPrediction.of(MODEL)
    ids = encoded(TEXT)
    hidden = MODEL.model(input_ids=ids, use_cache=False).last_hidden_state
    anchors = ids.shape[1] - DEPTHS
    positions = torch.arange(1, anchors + 1)[None]
    cache = MtpCache(config=MODEL.config.get_mtp_config())
    state = theirs.forward_layer(0, hidden[:, :anchors], positions, cache, input_ids=ids[:, 1 : anchors + 1])
    torch.testing.assert_close(ours.logits(state), unrolled(ours, ids, hidden)[0], rtol=1e-4, atol=1e-4)


def test_training_record_has_the_held_out_losses() -> None:
    report = json.loads((small_model_folder() / "training.json").read_text())["report"]
    assert report["model_loss"] < report["trigram_loss"]
    assert report["seconds"] < 15 * 60
    assert report["parameters"] == sum(p.numel() for p in MODEL.parameters()) + sum(
        p.numel() for p in MultiTokenPrediction(MODEL).parameters()
    )
