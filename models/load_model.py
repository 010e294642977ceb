"""Load a causal language model and its tokenizer for a command, from a local folder or a name on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging


def load_model(path: str | Path, device: str | None = None, dtype: str | None = None) -> tuple[PreTrainedModel, Any]:
    """Return the model in evaluation mode and its tokenizer.

    Args:
        device: where to put it; by default a GPU if there is one.
        dtype: by default float32 on the CPU and the checkpoint's own elsewhere.

    Raises:
        ValueError: if there is no such device here or no such dtype.
        OSError: if there is no such model.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, which is none of PyTorch's: write one such as 'cpu' or 'cuda'") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and PyTorch finds no such GPU here: use 'cpu'")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, which is none of PyTorch's: write one such as 'bfloat16' or 'float32'")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    return model.to(device).eval(), AutoTokenizer.from_pretrained(path)


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text``, after the token that begins a text where the tokenizer has one."""
    tokens = list(tokenizer(text).input_ids)
    begin = tokenizer.bos_token_id
    return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]
