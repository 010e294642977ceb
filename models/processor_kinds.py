"""Which of transformers' logits processors look at what, so that tree nodes can be scored with few calls.

A processor that is not listed is taken to look at everything: it is called with a whole batch for each row, which is slow and
always right. Processors with a state that advances once per call cannot serve a tree, where nodes are visited out of turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.generation import logits_process

from treewy_inductor.target_scores import Reads

_READ_SCORES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
# Tensor work of fixed shapes that never waits for the device, so that a CUDA graph can hold it.
_RUN_ON_DEVICE = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
_READ_ROW = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
)
_HAVE_STATE = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
)


def _classes(names: Sequence[str]) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


def what_they_read(processors: Sequence[Any]) -> Reads:
    """Return the most that any of ``processors`` looks at.

    Raises:
        NotImplementedError: if one of them has a state of its own.
    """
    kinds = set()
    for processor in processors:
        if isinstance(processor, _classes(_HAVE_STATE)):
            raise NotImplementedError(
                f"{type(processor).__name__} advances a state with every call, but the nodes of a draft tree are visited out "
                "of turn: generate without it, or with the model's own generate"
            )
        # Exact classes: a subclass may look at more than its parent.
        is_scores, is_row = (type(processor) in _classes(names) for names in (_READ_SCORES, _READ_ROW))
        # Newer versions leave each row's own padding out of the repetition penalty.
        is_row = is_row and not isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)
        kinds.add(Reads.SCORES if is_scores else Reads.ROW if is_row else Reads.BATCH)
    return Reads.BATCH if Reads.BATCH in kinds else Reads.ROW if Reads.ROW in kinds else Reads.SCORES


def run_on_device(processors: Sequence[Any]) -> bool:
    """Return whether a CUDA graph can hold all of ``processors``."""
    return all(type(processor) in _classes(_RUN_ON_DEVICE) for processor in processors)
