"""An ordinary cache that can take tokens back, for transformers' own assisted generation on these models.

    with treewy.assisted(model) as arguments:
        model.generate(ids, prompt_lookup_num_tokens=4, **arguments)      # or assistant_model=, or use_mtp=

transformers verifies a chain of drafts and then crops the cache. A recurrent state cannot be cropped, so these layers keep
what they held before the last forward, and what their mixer was given in it; a crop puts the former back and runs the mixer
again on the tokens that stay. The model and its files are as they were.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from treewy_inductor.models.transformers_api import cache_keyword, uncompiled


class ReplayLinearLayer(LinearAttentionLayer):
    """A layer with recurrent states that remembers its last forward."""

    is_compileable = False
    is_croppable = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: list[tuple[bool, Tensor | None, Tensor | None]] = []
        self._mixer: torch.nn.Module | None = None
        self._hidden_states: Tensor | None = None
        self._arguments: dict[str, Any] = {}
        self.tokens = 0

    def remember(self, mixer: torch.nn.Module, hidden_states: Tensor, arguments: dict[str, Any]) -> None:
        """Keep the states as they are now, and what ``mixer`` is about to be run on."""
        self._mixer, self._hidden_states, self._arguments = mixer, hidden_states, arguments
        self.tokens += hidden_states.shape[1]
        self._before = []
        for slot in range(self.number_of_states):
            is_held = bool(self.has_previous_state[slot])
            states = [self.conv_states[slot], self.recurrent_states[slot]]
            kept = [state.clone() if is_held and isinstance(state, Tensor) else None for state in states]
            self._before.append((is_held, kept[0], kept[1]))

    def activate_past_recording(self) -> None:
        """Do nothing: the past is recorded by :meth:`remember`, and the convolution's history keeps its size."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last ``|tokens_to_remove|`` tokens of the last forward back."""
        removed = abs(int(tokens_to_remove))
        if removed == 0:
            return
        if self._mixer is None or self._hidden_states is None or removed > self._hidden_states.shape[1]:
            ran = 0 if self._hidden_states is None else self._hidden_states.shape[1]
            raise ValueError(f"crop of {removed} tokens: only the {ran} tokens of the last forward can be taken back")
        for slot, (is_held, conv, recurrent) in enumerate(self._before):
            self.has_previous_state[slot] = is_held
            for current, kept in ((self.conv_states[slot], conv), (self.recurrent_states[slot], recurrent)):
                if isinstance(current, Tensor):
                    current.copy_(kept) if kept is not None else current.zero_()
        kept_tokens = self._hidden_states[:, : self._hidden_states.shape[1] - removed]
        if kept_tokens.shape[1] > 0:
            arguments = {**self._arguments, "attention_mask": None}
            with torch.no_grad():
                # forward and not the call: the hook would remember this run.
                type(self._mixer).forward(self._mixer, kept_tokens, **arguments)
        self._hidden_states = kept_tokens
        self.tokens -= removed


class ReplayCache(DynamicCache):
    """transformers' dynamic cache of ``model`` with linear layers that can be cropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        model = uncompiled(model)
        super().__init__(config=model.config)
        for i, layer in enumerate(self.layers):
            if type(layer) is LinearAttentionLayer:
                self.layers[i] = ReplayLinearLayer()
        mixers = [one for one in model.modules() if hasattr(one, "layer_idx") and hasattr(one, "conv1d")]
        if len(mixers) != sum(isinstance(layer, ReplayLinearLayer) for layer in self.layers):
            raise NotImplementedError(
                f"{type(model).__name__} has {len(mixers)} mixers with a convolution for "
                f"{sum(isinstance(layer, ReplayLinearLayer) for layer in self.layers)} recurrent layers: use treewy.generate"
            )
        own = weakref.ref(self)

        def remember(mixer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = own()
            given = next((kwargs[name] for name in ("cache", "cache_params", "past_key_values") if name in kwargs), None)
            if cache is not None and given is cache:
                rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
                hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                cache.layers[mixer.layer_idx].remember(mixer, hidden_states, rest)  # type: ignore

        handles = [mixer.register_forward_pre_hook(remember, with_kwargs=True) for mixer in mixers]
        for handle in handles:
            weakref.finalize(self, handle.remove)

    @property
    def is_croppable(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens are held, also in a model without attention layers, which transformers' own does not."""
        if all(isinstance(layer, ReplayLinearLayer) for layer in self.layers):
            return self.layers[0].tokens
        return super().get_seq_length(layer_idx)


class _FreshCache(Mapping[str, ReplayCache]):
    """The cache argument of ``model``, a new and empty cache whenever it is read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._name = model, cache_keyword(model)
        if self._name == "cache_params":
            raise NotImplementedError(
                f"{type(model).__name__} takes its cache as cache_params, which assisted generation of this transformers does "
                "not hand on: use treewy.generate"
            )

    def __getitem__(self, name: str) -> ReplayCache:
        if name != self._name:
            raise KeyError(name)
        return ReplayCache(self._model)

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


@contextlib.contextmanager
def assisted(model: torch.nn.Module) -> Iterator[Mapping[str, Any]]:
    """Let transformers' own assisted generation run on ``model`` inside the block; give the arguments it needs.

        with treewy.assisted(model) as arguments:
            model.generate(ids, prompt_lookup_num_tokens=4, **arguments)

    transformers refuses models with recurrent states there, since their ordinary caches cannot be cropped, and older
    versions silently return other tokens with such a cache. Inside the block the refusal is lifted for this object alone.
    Every use of the arguments brings an empty cache, so each call in the block is a text of its own.

    Raises:
        NotImplementedError: if the model's recurrent layers are not known, or this transformers cannot hand a cache to it.
    """
    module: PreTrainedModel = uncompiled(model)
    had_own = "_is_stateful" in vars(module)
    before = module._is_stateful
    module._is_stateful = False  # type: ignore
    try:
        yield _FreshCache(module)
    finally:
        if had_own:
            module._is_stateful = before  # type: ignore
        else:
            del module._is_stateful
