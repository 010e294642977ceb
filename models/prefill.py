"""Put prompts into a TreeCache by the model's ordinary forward, and take its states over exactly.

Padding never goes through the model, since it would leak into a recurrent state: rows that hold equally many tokens and get
equally many new ones run together, each group with transformers' own cache, seeded with what those rows hold.

    R rows to be filled   P longest prompt   B rows of the cache
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from treewy_inductor.models.cache_layers import TreeLinearLayer
from treewy_inductor.models.families import shapes_of_layers
from treewy_inductor.models.transformers_api import cache_keyword, last_logits_only, uncompiled

if TYPE_CHECKING:
    from treewy_inductor.models.tree_cache import TreeCache


@torch.no_grad()
def prefill(
    cache: TreeCache,
    model: torch.nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    chunk_size: int | None = None,
    rows: Sequence[int] | None = None,
    return_hidden_states: bool = False,
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """Append each prompt to its row; the row then holds what the model's own cache would after the same tokens.

    Args:
        model: eager or compiled; the module inside runs, uncompiled.
        input_ids: ``[R, P]`` int64.
        attention_mask: ``[R, P]``, nonzero at a prompt's tokens; padding may stand anywhere. By default there is none.
        chunk_size: most tokens in one forward, to bound its memory.
        rows: which rows of the cache the prompts are for, by default all of them.
        return_hidden_states: whether to return every prompt token's last hidden state too.

    Returns:
        The logits ``[R, vocabulary]`` after each prompt's last token; and, if asked for, one ``[tokens, hidden]`` a row.

    Raises:
        ValueError: if the rows do not match, a prompt is empty or too long for its row, or device or dtype are not the
            cache's. The cache stays as it was, also if the model raises.
    """
    module = uncompiled(model)
    check_same_layers(cache, module)
    chosen = cache.row_index(rows).tolist()
    prompts = _prompts(cache, module, input_ids, attention_mask, chosen)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1 or None")
    lengths = cache.lengths.tolist()
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (row, prompt) in enumerate(zip(chosen, prompts, strict=True)):
        if lengths[row] + len(prompt) > cache.max_length:
            raise ValueError(
                f"row {row} holds {lengths[row]} of {cache.max_length} tokens, and its prompt of {len(prompt)} does not fit: "
                "shorten it or construct the cache with a larger max_length"
            )
        groups[lengths[row], len(prompt)].append(i)

    logits: dict[int, Tensor] = {}
    hidden: dict[int, Tensor] = {}
    finished = []
    for (length, count), members in groups.items():
        index = torch.tensor([chosen[i] for i in members], device=cache.device)
        ordinary = _ordinary_cache(cache, index, length)
        tokens = torch.stack([prompts[i] for i in members])
        last, states = _run(module, ordinary, tokens, length, chunk_size or count, return_hidden_states)
        logits.update(zip(members, last, strict=True))
        hidden.update(zip(members, states, strict=True))
        _take_keys_values(cache, ordinary, index, length, count)
        finished.append((index, length + count, _recurrent_states(cache, ordinary)))
    # Only now, so that a forward that raises leaves every row's tokens as they were.
    for index, length, kept in finished:
        cache.states.settle(index)
        for slot, (state, history) in enumerate(kept):
            cache.state[slot, index] = state.to(cache.state.dtype)
            cache.history[slot, index] = history
        cache.lengths[index] = length
    cache.bound_lengths()
    last_logits = torch.stack([logits[i] for i in range(len(chosen))])
    return (last_logits, [hidden[i] for i in range(len(chosen))]) if return_hidden_states else last_logits


def check_same_layers(cache: TreeCache, module: PreTrainedModel) -> None:
    """Raise ValueError unless the layers of ``module`` keep what ``cache`` was constructed for."""
    text, ours = (config.get_text_config(decoder=True) for config in (module.config, cache.config))
    if text is ours:
        return
    try:
        shapes = shapes_of_layers(text)
    except NotImplementedError:
        # The cache was told by hand what the layers of this model keep.
        return
    if shapes != cache.shapes:
        differ = next((i for i, (a, b) in enumerate(zip(shapes, cache.shapes, strict=False)) if a != b), None)
        what = f"{len(shapes)} layers, the TreeCache {len(cache.shapes)}"
        if differ is not None:
            what = f"{shapes[differ]} in layer {differ}, the TreeCache {cache.shapes[differ]}"
        raise ValueError(f"the model has {what}: construct the cache with model.config")


def _prompts(
    cache: TreeCache, module: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, chosen: list[int]
) -> list[Tensor]:
    if input_ids.dim() != 2 or input_ids.shape[0] != len(chosen):
        raise ValueError(f"input_ids is {list(input_ids.shape)}, expected {len(chosen)} rows of tokens")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)} for input_ids of {list(input_ids.shape)}: give one entry a token"
        )
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"rows is {chosen}, expected each row once")
    parameter = next(module.parameters())
    named = {"input_ids": input_ids, "the model": parameter, "attention_mask": attention_mask}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != cache.device:
            raise ValueError(f"{name} is on {tensor.device}, the TreeCache on {cache.device}: move one to the other")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids is {input_ids.dtype}, expected numbers of tokens in int64")
    if parameter.dtype != cache.dtype:
        raise ValueError(f"the model is {parameter.dtype}, the TreeCache {cache.dtype}: construct it with dtype=model.dtype")
    prompts = list(input_ids.long())
    if attention_mask is not None:
        prompts = [ids[mask != 0] for ids, mask in zip(input_ids, attention_mask, strict=True)]
    for row, prompt in zip(chosen, prompts, strict=True):
        if len(prompt) == 0:
            raise ValueError(f"the prompt of row {row} holds no token: leave the row out with rows=")
    return prompts


def _ordinary_cache(cache: TreeCache, index: Tensor, length: int) -> DynamicCache:
    """Return transformers' own cache, holding the ``length`` tokens that each row of ``index`` has committed."""
    ordinary = DynamicCache(config=cache.config)
    if length == 0:
        return ordinary
    cache.states.settle(index)
    for layer, ours in zip(ordinary.layers, cache.layers, strict=True):
        if isinstance(ours, TreeLinearLayer):
            state = ours.states.state[index]
            state = state.transpose(2, 3) if ours.shape.state_is_value_major else state
            history = ours.history[index]
            layer.lazy_initialization(conv_states=history, recurrent_states=state.contiguous())
            layer.conv_states[0].copy_(history)
            layer.recurrent_states[0].copy_(state)
            layer.has_previous_state[0] = True
        else:
            layer.update(ours.keys[index, :, :length], ours.values[index, :, :length])
    return ordinary


def _run(
    module: PreTrainedModel, ordinary: DynamicCache, tokens: Tensor, length: int, chunk_size: int, with_hidden: bool
) -> tuple[Tensor, list[Tensor]]:
    """Run ``tokens`` ``[G, n]`` in chunks; return the last logits ``[G, vocabulary]`` and each row's hidden states."""
    hidden = []
    for chunk in tokens.split(chunk_size, dim=1):
        positions = torch.arange(length, length + chunk.shape[1], device=tokens.device).expand(len(tokens), -1)
        length += chunk.shape[1]
        output = module(
            input_ids=chunk,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=with_hidden,
            **{cache_keyword(module): ordinary},
            **last_logits_only(module),
        )
        hidden.append(output.hidden_states[-1] if with_hidden else chunk[..., :0])
    return output.logits[:, -1], list(torch.cat(hidden, 1))


def _take_keys_values(cache: TreeCache, ordinary: DynamicCache, index: Tensor, length: int, count: int) -> None:
    """Write the new tokens' keys and values behind the committed ones, where a draft would stand."""
    for layer, ours in zip(ordinary.layers, cache.layers, strict=True):
        if not isinstance(ours, TreeLinearLayer):
            ours.keys[index, :, length : length + count] = layer.keys[:, :, length:]
            ours.values[index, :, length : length + count] = layer.values[:, :, length:]


def _recurrent_states(cache: TreeCache, ordinary: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Return the state ``[G, HV, K, V]`` and the convolution's history ``[G, C, K]`` of each linear layer."""
    kept = []
    for layer, ours in zip(ordinary.layers, cache.layers, strict=True):
        if isinstance(ours, TreeLinearLayer):
            state = layer.recurrent_states[0]
            kept.append((state.transpose(2, 3) if ours.shape.state_is_value_major else state, layer.conv_states[0]))
    return kept
