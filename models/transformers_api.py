"""What differs between versions of transformers, each told by the feature itself and not by the version."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

# Newer versions read states through methods of the cache and call the model's argument ``cache``.
CACHE_KEYWORD = "cache" if hasattr(Cache, "get_recurrent_state") else "past_key_values"
# A model of recurrent layers alone called it otherwise.
STATE_CACHE_KEYWORD = "cache" if CACHE_KEYWORD == "cache" else "cache_params"


def cache_keyword(model: PreTrainedModel) -> str:
    """Return the name of the argument by which ``model`` takes its cache.

    Raises:
        TypeError: if its forward takes none.
    """
    arguments = inspect.signature(model.forward).parameters
    for name in (CACHE_KEYWORD, "past_key_values", "cache_params"):
        if name in arguments:
            return name
    raise TypeError(f"{type(model).__name__}.forward takes no cache: pass a causal language model of transformers")


def last_logits_only(model: PreTrainedModel) -> dict[str, int]:
    """Return the argument that makes ``model`` compute logits at the last position alone, if it has one."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def uncompiled(model: torch.nn.Module) -> PreTrainedModel:
    """Return the module that ``torch.compile`` wrapped, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)  # type: ignore
