"""What a user gives to ``treewy.generate``, checked and in one form; whatever is wrong is said in one sentence.

prompts        a tensor and its mask, or lists of tokens, padded on the left
tree shapes    widths or a node budget, and the nodes of a verification
drafter        by name, as a model, as a callable or as an object
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treewy_inductor.drafters import PromptLookup
from treewy_inductor.drafting import Drafter, as_drafter
from treewy_inductor.tree import MAX_NODES, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EMPTY = "give at least one token, such as the beginning-of-text token"


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: if it is none, with the argument's ``name``.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}, expected a whole number") from None


def named_by_transformers(options: dict[str, Any], widths: Any, budget: Any) -> dict[str, Any]:
    """Take transformers' names for drafters out of ``options``; return them under ours."""
    model = options.pop("assistant_model", None)
    chain = options.pop("prompt_lookup_num_tokens", None)
    named = {
        "assistant_model": model,
        "prompt_lookup_num_tokens": None if chain is None else "prompt_lookup",
        "use_mtp": "mtp" if options.pop("use_mtp", None) else None,
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}: give one of them")
    own: dict[str, Any] = {} if not given else {"drafter": next(iter(given.values()))}
    if chain is not None and widths is None and budget is None:
        own["draft_tree_widths"] = (1,) * whole_number("prompt_lookup_num_tokens", chain)
    return own


def padded_prompts(
    model: PreTrainedModel, input_ids: Tensor | Sequence[Sequence[int]], mask: Tensor | Sequence[Sequence[int]] | None
) -> tuple[Tensor, Tensor | None]:
    """Return prompts as ``[B, length]`` int64, lists padded on the left, with the mask that says where.

    Raises:
        ValueError: if there is no prompt, one is empty or holds what is no token, or the mask is of another shape.
    """
    if isinstance(input_ids, Tensor):
        return checked_prompts(input_ids, mask)
    if isinstance(input_ids, str) or not isinstance(input_ids, Sequence):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}: give a tensor [rows, length] or a list of token lists")
    prompts = [_listed(row, prompt) for row, prompt in enumerate(input_ids)]
    if not prompts:
        raise ValueError("input_ids holds no prompt: give at least one, a list of tokens")
    if mask is not None:
        prompts = _without_padding(prompts, mask)
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"the prompt of row {row} is empty: {_EMPTY}")
    pad = model.generation_config.pad_token_id
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), 0 if pad is None else int(pad), dtype=torch.int64)
    kept = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        kept[row, longest - len(prompt) :] = 1
    return ids.to(model.device), kept.to(model.device)


def checked_prompts(input_ids: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
    """Return both as they are.

    Raises:
        ValueError: if there is no row, rows are empty or hold what is no token, or the mask is of another shape.
    """
    if input_ids.dim() != 2 or len(input_ids) == 0:
        raise ValueError(f"input_ids is {list(input_ids.shape)}, expected [rows, length] with at least one row")
    if input_ids.shape[1] == 0:
        raise ValueError(f"the prompt is empty in each of {len(input_ids)} rows: {_EMPTY}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids is {input_ids.dtype}, expected whole numbers, the tokens: such as torch.int64")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        found = list(mask.shape) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask is {found}, input_ids {list(input_ids.shape)}: give one entry a token")
    return input_ids, mask


def _listed(row: int, prompt: Any) -> list[int]:
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        raise ValueError(f"the prompt of row {row} is {prompt!r}, expected a list of tokens: encode texts with the tokenizer")
    return [whole_number(f"token {place} of the prompt of row {row}", token) for place, token in enumerate(prompt)]


def _without_padding(prompts: list[list[int]], mask: Any) -> list[list[int]]:
    masks = mask.tolist() if isinstance(mask, Tensor) else [list(kept) for kept in mask]
    if list(map(len, masks)) != list(map(len, prompts)):
        raise ValueError(f"attention_mask has rows of {list(map(len, masks))} entries for prompts of {list(map(len, prompts))}")
    return [
        [token for token, is_kept in zip(prompt, kept, strict=True) if is_kept]
        for prompt, kept in zip(prompts, masks, strict=True)
    ]


def shape_of_trees(
    widths: Sequence[int] | None, budget: int | None, options: dict[str, Any]
) -> tuple[tuple[int, ...] | None, int | None, int]:
    """Return widths or budget, and the nodes of a verification: those of a given cache, or as few as the trees need."""
    if widths is not None and budget is not None:
        raise ValueError(f"draft_tree_widths {widths!r} and draft_node_budget {budget!r}: give one of them")
    if budget is not None:
        budget = whole_number("draft_node_budget", budget)
        if not 2 <= budget <= MAX_NODES:
            raise ValueError(f"draft_node_budget is {budget}, expected 2 to {MAX_NODES}, the root included")
        chosen, nodes = None, budget
    else:
        if widths is not None and (isinstance(widths, str) or not isinstance(widths, Sequence)):
            raise ValueError(f"draft_tree_widths is {widths!r}: give the children of a node for each level, such as (3, 3, 3)")
        given = (3, 3, 3) if widths is None else widths
        chosen = tuple(whole_number(f"draft_tree_widths[{level}]", width) for level, width in enumerate(given))
        nodes = max(2, len(DraftTree.from_widths(chosen)))
    cache = next((options[name] for name in ("cache", "past_key_values") if hasattr(options.get(name), "max_nodes")), None)
    if cache is not None and nodes > cache.max_nodes:
        raise ValueError(
            f"{'draft_tree_widths ' + str(chosen) if chosen else 'draft_node_budget'} makes trees of {nodes} nodes, the "
            f"TreeCache verifies {cache.max_nodes}: draft fewer, or construct it with max_nodes={nodes}"
        )
    return chosen, budget, nodes


def drafter_named(drafter: Any, model: PreTrainedModel) -> Drafter:
    """Return the drafter that ``drafter`` names, is, or can be made into."""
    if isinstance(drafter, str):
        if drafter == "prompt_lookup":
            return PromptLookup()
        if drafter == "mtp":
            from treewy_inductor.models.mtp_drafter import MtpDrafter

            return MtpDrafter.of(model)
        raise ValueError(f"drafter is {drafter!r}, expected 'prompt_lookup', 'mtp', a model, a callable or a drafter object")
    if isinstance(drafter, torch.nn.Module):
        from treewy_inductor.models.assistant_drafter import AssistantDrafter

        return AssistantDrafter(drafter)
    return as_drafter(drafter)
