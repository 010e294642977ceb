"""Build a causal language model from its configuration alone: what its graph looks like does not need the weights."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def build_model(path: str, *, with_weights: bool = False) -> PreTrainedModel:
    """Return the model of a checkpoint's folder or name in evaluation mode, with random weights unless they are asked for.

    Raises:
        OSError: if there is no such checkpoint.
        ValueError: if transformers does not know its architecture.
    """
    if with_weights:
        return AutoModelForCausalLM.from_pretrained(path).eval()
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()
