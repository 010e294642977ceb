"""The decoding loop of ``model.generate(..., custom_generate=treewy.generate)``: from transformers' arguments and back.

transformers has validated the options, built the logits processors and stopping criteria, and calls this in place of its own
loop. The result is what its loop would return.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treewy_inductor.decoding import Decoded, DecodingPlan, decode
from treewy_inductor.drafting import Drafter
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.model_verifier import ModelVerifier, borrowed_cache
from treewy_inductor.models.processor_kinds import run_on_device, what_they_read
from treewy_inductor.models.transformers_api import uncompiled
from treewy_inductor.models.tree_cache import TreeCache

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# What transformers passes along and this loop derives by itself, or needs not.
_DERIVED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "token_type_ids", "cache_position"}


@dataclass
class TreeOptions:
    """What treewy.generate takes beyond transformers' own options; see there."""

    drafter: Drafter
    widths: tuple[int, ...] | None
    node_budget: int | None
    max_nodes: int
    seed: int | Sequence[int] | None
    room: Sequence[int] | None
    statistics: GenerationStatistics
    compile_options: dict[str, Any] | None
    on_tokens: Callable[[int, list[int], int], None] | None
    cuda_graph: bool | None


def argument_of_generate(name: str) -> Any:
    """Return the argument ``name`` of the ``model.generate`` call that is running, or None.

    transformers keeps ``streamer`` from callables in ``custom_generate`` (they get only arguments that its own loop does not
    have), so it has to be read where it is: in the frame of ``generate``, which calls the callable directly.
    """
    frame = sys._getframe(1)
    while frame is not None and "custom_generate" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


def run_prepared(
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: Any,
    streamer: Any,
    options: TreeOptions,
    model_arguments: dict[str, Any],
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate from arguments that ``model.generate`` has prepared.

    Raises:
        ValueError: for what the loop cannot do, with the option's name.
    """
    model = uncompiled(model)
    _refuse_unsupported(config, streamer, input_ids, model_arguments)
    mask = model_arguments.get("attention_mask")
    prompts = _prompts(input_ids, mask)
    _refuse_unknown_tokens(prompts, model.get_input_embeddings().weight.shape[0])
    given = next((model_arguments[name] for name in _CACHE_NAMES if isinstance(model_arguments.get(name), TreeCache)), None)
    room = _room(config, input_ids, options.room)
    stops = _stops([one for one in criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)], input_ids.device)
    plan = DecodingPlan(
        prompts=prompts,
        held=[0] * len(prompts),
        room=room,
        eos=_end_tokens(config),
        widths=options.widths,
        node_budget=options.node_budget,
        seeds=_seeds(options.seed, len(prompts)) if config.do_sample else None,
        processors=list(processors),
        reads=what_they_read(processors),
        processors_run_on_device=run_on_device(processors),
        prefixes=input_ids.tolist(),
        stops=stops,
        on_tokens=_streaming(streamer, options.on_tokens),
        keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
        keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
    )
    wants_hidden = bool(getattr(options.drafter, "wants_hidden_states", False))
    longest = max(len(prompt) + more for prompt, more in zip(prompts, room, strict=True))
    lent = nullcontext(given) if given is not None else borrowed_cache(model, len(prompts), longest, options.max_nodes)
    with lent as cache:
        if given is not None:
            plan.held = _held(given, plan, wants_hidden)
        verifier = ModelVerifier(model, cache, wants_hidden, options.compile_options, options.cuda_graph)
        decoded = decode(verifier, options.drafter, plan, options.statistics)
        if streamer is not None:
            streamer.end()
        return _result(decoded, input_ids, config, given, model.config.vocab_size)


def _refuse_unsupported(config: Any, streamer: Any, input_ids: Tensor, model_arguments: dict[str, Any]) -> None:
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams is {config.num_beams}: treewy.generate decodes one path a row, use num_beams=1")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError("output_attentions and output_hidden_states: treewy.generate returns neither, leave them False")
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"streamer with {len(input_ids)} rows: a streamer prints one row, generate one at a time")
    extra = {name for name, value in model_arguments.items() if value is not None} - _DERIVED - set(_CACHE_NAMES)
    if extra:
        raise ValueError(f"treewy.generate passes tokens alone to the model, not {', '.join(sorted(extra))}: leave them out")


def _prompts(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if input_ids.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token a row, such as the beginning-of-text token")
    if mask is None:
        return input_ids.tolist()
    prompts = [ids[keep != 0].tolist() for ids, keep in zip(input_ids, mask, strict=True)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"the prompt of row {row} is empty, all of it is masked as padding: give it at least one token")
    return prompts


def _refuse_unknown_tokens(prompts: list[list[int]], vocabulary: int) -> None:
    for row, prompt in enumerate(prompts):
        for place, token in enumerate(prompt):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"token {place} of the prompt of row {row} is {token}, outside the vocabulary of {vocabulary}: use the "
                    "tokenizer of this model"
                )


def _room(config: Any, input_ids: Tensor, per_row: Sequence[int] | None) -> list[int]:
    most = config.max_length - input_ids.shape[1]
    if per_row is None:
        return [most] * len(input_ids)
    if len(per_row) != len(input_ids):
        raise ValueError(f"row_max_new_tokens has {len(per_row)} entries for {len(input_ids)} rows: give one a row")
    return [min(most, int(own)) for own in per_row]


def _end_tokens(config: Any) -> list[int]:
    eos = config.eos_token_id
    return [] if eos is None else [int(token) for token in (eos if isinstance(eos, list | tuple) else [eos])]


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        # From torch's generator, so that torch.manual_seed and transformers.set_seed decide the text.
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, int):
        return [seed + row for row in range(rows)]
    if len(seed) != rows:
        raise ValueError(f"seed has {len(seed)} entries for {rows} rows: give one a row, or one number for all")
    return [int(own) for own in seed]


def _stops(criteria: Sequence[Any], device: torch.device) -> Callable[[int, list[int]], bool] | None:
    if not criteria:
        return None

    def stops(row: int, tokens: list[int]) -> bool:
        ids = torch.tensor([tokens], device=device)
        return any(bool(torch.as_tensor(one(ids, None)).any()) for one in criteria)

    return stops


def _streaming(streamer: Any, also: Callable[[int, list[int], int], None] | None) -> Callable[..., None] | None:
    if streamer is None:
        return also

    def on_tokens(row: int, tokens: list[int], accepted: int) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))
        if also is not None:
            also(row, tokens, accepted)

    return on_tokens


def _held(cache: TreeCache, plan: DecodingPlan, wants_hidden: bool) -> list[int]:
    """Return how many tokens each row of a given cache holds, after checking that it can take the rest."""
    if cache.rows != len(plan.prompts):
        raise ValueError(f"the TreeCache has {cache.rows} rows for {len(plan.prompts)} prompts: give one of as many rows")
    held = cache.bound_lengths()
    for row, (length, prompt, room) in enumerate(zip(held, plan.prompts, plan.room, strict=True)):
        if length >= len(prompt):
            raise ValueError(
                f"row {row} of the TreeCache holds {length} tokens, its prompt has {len(prompt)}: pass the whole text, which "
                "goes on beyond what the cache holds, or reset the cache"
            )
        if len(prompt) + room + cache.max_nodes - 1 > cache.max_length:
            raise ValueError(
                f"row {row} may grow to {len(prompt) + room} tokens and needs {cache.max_nodes} more for a tree, the TreeCache "
                f"holds {cache.max_length}: construct it with a larger max_length or generate less"
            )
    if wants_hidden and any(held):
        raise ValueError("the drafter reads hidden states, which a TreeCache that holds tokens does not have: reset it first")
    return held


def _result(
    decoded: Decoded, input_ids: Tensor, config: Any, cache: TreeCache | None, vocab_size: int
) -> Tensor | GenerateDecoderOnlyOutput:
    steps = max(map(len, decoded.tokens))
    eos = _end_tokens(config)
    pad = config.pad_token_id if config.pad_token_id is not None else eos[0] if eos else 0
    new = input_ids.new_full((len(input_ids), steps), pad)
    for row, tokens in enumerate(decoded.tokens):
        new[row, : len(tokens)] = torch.tensor(tokens, dtype=new.dtype)
    sequences = torch.cat([input_ids, new], 1)
    if not config.return_dict_in_generate:
        return sequences
    fields: dict[str, Any] = {"sequences": sequences}
    if config.output_scores:
        fields["scores"] = _by_step(decoded.scores, steps, vocab_size)
    if config.output_logits:
        fields["logits"] = _by_step(decoded.logits, steps, vocab_size)
    if cache is not None:
        known = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
        fields["cache" if "cache" in known else "past_key_values"] = cache
    return GenerateDecoderOnlyOutput(**fields)


def _by_step(per_row: list[list[Tensor]], steps: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Return ``[B, V]`` per step; zeros in rows that had finished."""
    like = next(iter(tensor for row in per_row for tensor in row), torch.zeros(vocab_size))
    nothing = torch.zeros_like(like)
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in per_row]) for step in range(steps))
