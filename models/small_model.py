"""The small trained model that the package ships: a Qwen3.5 text model with a multi-token-prediction layer.

It needs no network and no other download. How it was trained and what it is good for: treewy_inductor/small_model/README.md.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def small_model_folder() -> Path:
    """Return the checkpoint's folder, which ``from_pretrained`` of transformers reads too."""
    return Path(str(resources.files("treewy_inductor"))) / "small_model"


def load_small_model(
    dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in evaluation mode, and its tokenizer.

    A text starts with the end-of-text token, ``tokenizer.eos_token_id``: so did the training text's documents.

    Args:
        dtype: the weights are stored in bfloat16, so every wider dtype holds them exactly.
        device: where the model goes.
    """
    folder = small_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval(), tokenizer
