"""What a call of ``model.generate`` means for the decoding loop: prompts, room, end tokens, criteria, seeds, a given cache.

transformers has validated its own options and built processors and criteria by then; what is read or refused here is what
its loop would have done with them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from treewy_inductor.generation_arguments import checked_prompts, whole_number
from treewy_inductor.models.tree_cache import TreeCache

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# What transformers passes along and this loop derives by itself, or needs not.
_DERIVED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "token_type_ids", "cache_position"}
_SEEDS = 2**63


def argument_of_generate(name: str) -> Any:
    """Return the argument ``name`` of the ``model.generate`` call that is running, or None.

    transformers keeps ``streamer`` from callables in ``custom_generate`` (they get only arguments that its own loop does not
    have), so it has to be read where it is: in the frame of ``generate``, which calls the callable directly.
    """
    frame = sys._getframe(1)
    while frame is not None and "custom_generate" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


def with_stop_strings(criteria: Sequence[Any] | None, options: dict[str, Any]) -> Sequence[Any] | None:
    """Return ``criteria`` with one for ``stop_strings``, taken out of ``options`` together with the tokenizer it needs.

    transformers drops the tokenizer of a call whose loop is a callable, and then asks for it.
    """
    strings, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
    if strings is None:
        return criteria
    if tokenizer is None:
        raise ValueError(f"stop_strings is {strings!r}: pass the tokenizer too, as tokenizer=")
    return StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])


def refuse_unsupported(config: Any, streamer: Any, rows: int, model_arguments: dict[str, Any]) -> None:
    """Raise ValueError, with the option's name, for what the loop cannot do."""
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams is {config.num_beams}: treewy.generate decodes one path a row, use num_beams=1")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError("output_attentions and output_hidden_states: treewy.generate returns neither, leave them False")
    if streamer is not None and rows > 1:
        raise ValueError(f"streamer with {rows} rows: a streamer prints one row, generate one at a time")
    extra = {name for name, value in model_arguments.items() if value is not None} - _DERIVED - set(_CACHE_NAMES)
    if extra:
        raise ValueError(f"treewy.generate passes tokens alone to the model, not {', '.join(sorted(extra))}: leave them out")


def given_cache(model_arguments: dict[str, Any]) -> TreeCache | None:
    """Return the TreeCache that the call was given, or None.

    Raises:
        ValueError: if the user gave another cache, which this loop can neither read nor fill.
    """
    found = next((model_arguments[name] for name in _CACHE_NAMES if isinstance(model_arguments.get(name), TreeCache)), None)
    # transformers makes an ordinary cache for every call: only what stands in the call itself was given.
    by_user = argument_of_generate("kwargs") or {}
    for name in _CACHE_NAMES:
        if found is None and by_user.get(name) is not None:
            raise ValueError(f"{name} is a {type(by_user[name]).__name__}: give treewy.generate a TreeCache, or no cache")
    return found


def prompts_of(input_ids: Tensor, mask: Tensor | None, vocabulary: int) -> list[list[int]]:
    """Return each row's tokens without padding.

    Raises:
        ValueError: as :func:`checked_prompts`, and if a row is empty or holds a token that is not below ``vocabulary``.
    """
    input_ids, mask = checked_prompts(input_ids, mask)
    prompts = input_ids.tolist()
    if mask is not None:
        prompts = [ids[keep != 0].tolist() for ids, keep in zip(input_ids, mask, strict=True)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"the prompt of row {row} is empty, all of it is masked as padding: give it at least one token")
        for place, token in enumerate(prompt):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"token {place} of the prompt of row {row} is {token}, outside the vocabulary of {vocabulary}: use the "
                    "tokenizer of this model"
                )
    return prompts


@dataclass
class Ends:
    """What ends a row.

    Attributes:
        max_length: tokens of a row, padding included.
        eos: tokens that end it.
        stops: ``(row, tokens) -> bool``, what remains of the criteria, or None.
    """

    max_length: int
    eos: list[int]
    stops: Callable[[int, list[int]], bool] | None

    @classmethod
    def of(cls, criteria: Sequence[Any], config: Any, device: torch.device) -> Ends:
        """Read them from the merged criteria, where a user's own criterion stands in the place of transformers'."""
        lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        ends = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
        rest = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        longest = whole_number("max_length", min(lengths, default=config.max_length))
        return cls(longest, sorted({token for tokens in ends for token in tokens}), _asked(rest, device))


def _asked(criteria: Sequence[Any], device: torch.device) -> Callable[[int, list[int]], bool] | None:
    if not criteria:
        return None

    def stops(row: int, tokens: list[int]) -> bool:
        ids = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(one(ids, None)).any()) for one in criteria)

    return stops


def room_of(most: int, rows: int, per_row: Sequence[int] | None) -> list[int]:
    """Return how many tokens each row may get: ``most``, or its own number if that is smaller."""
    if per_row is None:
        return [most] * rows
    if isinstance(per_row, str) or not isinstance(per_row, Sequence):
        raise ValueError(f"row_max_new_tokens is {per_row!r}: give a list with one number a row, or use max_new_tokens")
    if len(per_row) != rows:
        raise ValueError(f"row_max_new_tokens has {len(per_row)} entries for {rows} rows: give one a row")
    own = [whole_number(f"row_max_new_tokens[{row}]", count) for row, count in enumerate(per_row)]
    for row, count in enumerate(own):
        if count < 0:
            raise ValueError(f"row_max_new_tokens[{row}] is {count}, expected at least 0")
    return [min(most, count) for count in own]


def seeds_of(seed: Any, rows: int) -> list[int]:
    """Return one seed a row: those given, or one number to which the row is added."""
    if seed is None:
        # From torch's generator, so that torch.manual_seed and transformers.set_seed decide the text.
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if len(seed) != rows:
            raise ValueError(f"seed has {len(seed)} entries for {rows} rows: give one a row, or one number for all")
        return [_seed(f"seed[{row}]", own) for row, own in enumerate(seed)]
    first = _seed("seed", seed)
    # Wraps around, as the sum of 64 bits would.
    return [(first + row + _SEEDS) % (2 * _SEEDS) - _SEEDS for row in range(rows)]


def _seed(name: str, value: Any) -> int:
    seed = whole_number(name, value)
    if not -_SEEDS <= seed < _SEEDS:
        raise ValueError(f"{name} is {seed}, expected a number of 64 bits: from -2 ** 63 to 2 ** 63 - 1")
    return seed
