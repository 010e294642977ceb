"""Generate text by verifying draft trees: ``treewy.generate``.

    treewy.generate(model, input_ids, max_new_tokens=100, draft_tree_widths=(3, 3, 3))
    model.generate(input_ids, max_new_tokens=100, custom_generate=treewy.generate, draft_tree_widths=(3, 3, 3))

Both run the same code and return what ``model.generate`` alone would: the same tokens when greedy, tokens of the same
distribution when sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from treewy_inductor.generation_arguments import drafter_named, named_by_transformers, padded_prompts, shape_of_trees
from treewy_inductor.generation_statistics import GenerationStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | Sequence[Sequence[int]],
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    drafter: Any = "prompt_lookup",
    draft_tree_widths: Sequence[int] | None = None,
    draft_node_budget: int | None = None,
    seed: int | Sequence[int] | None = None,
    row_max_new_tokens: Sequence[int] | None = None,
    statistics: GenerationStatistics | None = None,
    on_tokens: Callable[[int, list[int], int], None] | None = None,
    show_progress: bool = False,
    compile_options: dict[str, Any] | None = None,
    cuda_graph: bool | None = None,
    **options: Any,
) -> Any:
    """Generate from ``input_ids``, several tokens a step, and return what ``model.generate`` returns.

    Args:
        model: a causal language model of transformers whose layers a TreeCache knows.
        input_ids: ``[B, length]`` int64 with an ``attention_mask`` where there is padding, on either side; or a list of
            prompts of different lengths, which are padded on the left.
        logits_processor, stopping_criteria, generation_config: as in ``model.generate``.
        drafter: ``"prompt_lookup"``; ``"mtp"``, the model's own multi-token-prediction layer; a smaller model with the same
            tokens; a callable from the tokens so far to a DraftTree; or an object of the protocol in
            :mod:`treewy_inductor.drafting`. Called directly, this function also takes transformers' own names:
            ``assistant_model``, ``use_mtp``, and ``prompt_lookup_num_tokens``, which means a chain of so many drafts.
        draft_tree_widths: children of a node per level, (3, 3, 3) if no budget is given.
        draft_node_budget: nodes of a tree, its root included, spent where the drafter's probabilities are highest.
        seed: for sampling: one number, to which the row is added, or one a row. A seed gives the same text again, whatever
            the batch around it. By default it comes from torch's generator.
        row_max_new_tokens: the most new tokens of each row, within ``max_new_tokens``.
        statistics: filled with what happened.
        on_tokens: called with a row, its new tokens, and how many of them were accepted drafts; the others were decided by
            the model alone.
        show_progress: whether to show a progress bar on standard error.
        compile_options: ``mode`` or ``options`` of ``torch.compile``.
        cuda_graph: whether steps are replayed as CUDA graphs; by default on a CUDA device, unless ``compile_options`` make
            graphs themselves or generate no code. What logits processors, scores or stopping criteria want from the host is
            done after replaying the verification alone.
        **options: everything else that ``model.generate`` takes, such as ``max_new_tokens``, ``do_sample``, ``streamer``;
            ``cache``, a TreeCache that may hold the beginning of each prompt.

    Raises:
        ValueError: an empty prompt, an unknown option, a tree that does not fit, a drafted token outside the vocabulary, or NaN
            scores. A cache that was given is still usable.
    """
    own = {
        "drafter": drafter,
        "draft_tree_widths": draft_tree_widths,
        "draft_node_budget": draft_node_budget,
        "seed": seed,
        "row_max_new_tokens": row_max_new_tokens,
        "statistics": statistics,
        "on_tokens": on_tokens,
        "show_progress": show_progress,
        "compile_options": compile_options,
        "cuda_graph": cuda_graph,
    }
    from treewy_inductor.models.generate_call import argument_of_generate, with_stop_strings

    # transformers puts these tensors into the configuration that it hands to its loops, and into no other.
    if not hasattr(generation_config, "_eos_token_tensor"):
        module = getattr(model, "_orig_mod", model)
        if not hasattr(module, "generate"):
            raise ValueError(f"model is a {type(module).__name__}: give a causal language model of transformers")
        own |= named_by_transformers(options, draft_tree_widths, draft_node_budget)
        _name_cache_for(module, options)
        ids, mask = padded_prompts(module, input_ids, options.pop("attention_mask", None))
        return module.generate(
            ids,
            attention_mask=mask,
            logits_processor=logits_processor,
            stopping_criteria=with_stop_strings(stopping_criteria, options),
            generation_config=generation_config,
            custom_generate=generate,
            **{name: value for name, value in own.items() if value is not None},
            **options,
        )

    from treewy_inductor.models.generation import TreeOptions, run_prepared

    widths, budget, max_nodes = shape_of_trees(draft_tree_widths, draft_node_budget, options)
    statistics = statistics if statistics is not None else GenerationStatistics()
    progress = None
    assert isinstance(input_ids, Tensor)
    if show_progress:
        from treewy_inductor.generation_progress import GenerationProgress

        room = generation_config.max_length - input_ids.shape[1]
        progress = GenerationProgress(room * len(input_ids), on_tokens)
    try:
        return run_prepared(
            model,
            input_ids,
            logits_processor or [],
            stopping_criteria or [],
            generation_config,
            argument_of_generate("streamer"),
            TreeOptions(
                drafter=drafter_named(drafter, model),
                widths=widths,
                node_budget=budget,
                max_nodes=max_nodes,
                seed=seed,
                room=row_max_new_tokens,
                statistics=statistics,
                compile_options=compile_options,
                on_tokens=on_tokens if progress is None else progress,
                cuda_graph=cuda_graph,
            ),
            options,
        )
    finally:
        if progress is not None:
            progress.stop()


def _name_cache_for(module: PreTrainedModel, options: dict[str, Any]) -> None:
    """Let a cache in ``options`` have the name that this version of transformers gives it."""
    from treewy_inductor.models.transformers_api import cache_keyword

    for name in ("cache", "past_key_values"):
        if options.get(name) is not None:
            options[cache_keyword(module)] = options.pop(name)
