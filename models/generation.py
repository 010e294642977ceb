"""The decoding loop of ``model.generate(..., custom_generate=treewy.generate)``: from transformers' arguments and back.

transformers has validated the options, built the logits processors and stopping criteria, and calls this in place of its own
loop. The result is what its loop would return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from treewy_inductor.decoding import Decoded, DecodingPlan, decode
from treewy_inductor.drafting import Drafter
from treewy_inductor.generation_statistics import GenerationStatistics
from treewy_inductor.models.generate_call import Ends, given_cache, prompts_of, refuse_unsupported, room_of, seeds_of
from treewy_inductor.models.model_verifier import ModelVerifier, borrowed_cache
from treewy_inductor.models.processor_kinds import run_on_device, what_they_read
from treewy_inductor.models.transformers_api import uncompiled
from treewy_inductor.models.tree_cache import TreeCache


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
    refuse_unsupported(config, streamer, len(input_ids), model_arguments)
    given = given_cache(model_arguments)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = prompts_of(input_ids, model_arguments.get("attention_mask"), vocabulary)
    ends = Ends.of(criteria, config, input_ids.device)
    # Where there is no room left transformers' loop asks after its first token.
    room = room_of(max(1, ends.max_length - input_ids.shape[1]), len(prompts), options.room)
    plan = DecodingPlan(
        prompts=prompts,
        held=[0] * len(prompts),
        room=room,
        eos=ends.eos,
        widths=options.widths,
        node_budget=options.node_budget,
        seeds=seeds_of(options.seed, len(prompts)) if config.do_sample else None,
        processors=list(processors),
        reads=what_they_read(processors),
        processors_run_on_device=run_on_device(processors),
        prefixes=input_ids.tolist(),
        stops=ends.stops,
        on_tokens=_streaming(streamer, options.on_tokens),
        keeps_scores=bool(config.return_dict_in_generate and config.output_scores),
        keeps_logits=bool(config.return_dict_in_generate and config.output_logits),
    )
    wants_hidden = bool(getattr(options.drafter, "wants_hidden_states", False))
    longest = max(len(prompt) + more for prompt, more in zip(prompts, room, strict=True))
    lent = nullcontext(given) if given is not None else borrowed_cache(model, len(prompts), longest, options.max_nodes)
    with lent as cache:
        if given is not None:
            plan.held = _held(given, plan)
        verifier = ModelVerifier(model, cache, wants_hidden, options.compile_options, options.cuda_graph)
        decoded = decode(verifier, options.drafter, plan, options.statistics)
        if streamer is not None:
            streamer.end()
        return _result(decoded, input_ids, config, ends.eos, given, model.config.vocab_size)


def _streaming(streamer: Any, also: Callable[[int, list[int], int], None] | None) -> Callable[..., None] | None:
    if streamer is None:
        return also

    def on_tokens(row: int, tokens: list[int], accepted: int) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))
        if also is not None:
            also(row, tokens, accepted)

    return on_tokens


def _held(cache: TreeCache, plan: DecodingPlan) -> list[int]:
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
    return held


def _result(
    decoded: Decoded, input_ids: Tensor, config: Any, eos: list[int], cache: TreeCache | None, vocab_size: int
) -> Tensor | GenerateDecoderOnlyOutput:
    steps = max(map(len, decoded.tokens))
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
