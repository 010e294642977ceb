"""Find kernels of other projects where their wheels are unpacked, and import one file of each without its engine.

    pip download --no-deps fla-core==0.6.0 einops sglang==0.5.23 vllm==0.33.0
    for wheel in *.whl; do unzip -qo $wheel '*.py' -d peers; done
    TREEWY_PEERS=peers python -m bench.kernels

What a kernel's file imports of its engine are questions about the machine, which are answered here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

SGLANG = "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
VLLM = "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"


def peers_folder() -> Path | None:
    """Return where wheels are unpacked, none if TREEWY_PEERS does not say.

    Raises:
        ValueError: it says a folder that is not there.
    """
    named = os.environ.get("TREEWY_PEERS", "")
    if named and not Path(named).is_dir():
        raise ValueError(f"TREEWY_PEERS is {named!r}, which is no folder: unpack the wheels there or unset it")
    return Path(named) if named else None


def capability() -> tuple[int, int]:
    """Return the compute capability of the NVIDIA GPU, (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def engine_answers() -> dict[str, dict[str, Any]]:
    """Return what the engines' own modules would answer on this machine, by module and name."""
    major, minor = capability()
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: major >= 9},
        "sglang.srt.utils": {
            "get_device_sm": lambda: 10 * major + minor,
            "is_cuda": lambda: major > 0,
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False,
            "is_sm90_supported": lambda: major == 9,
        },
        "vllm.triton_utils": {"tl": tl, "triton": triton},
    }


@contextmanager
def standing_in(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Let modules that are not there be imported with the ``answers``, and be gone again afterwards."""
    added = []
    for name, attributes in answers.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            if part not in sys.modules:
                module = ModuleType(part)
                module.__path__ = []
                sys.modules[part] = module
                added.append(part)
        vars(sys.modules[name]).update(attributes)
    try:
        yield
    finally:
        for part in added:
            del sys.modules[part]


def load_alone(file: Path) -> ModuleType:
    """Return the module in ``file``, imported without the packages around it."""
    name = "peer_" + file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton looks up a kernel's module by name when it compiles.
    sys.modules[name] = module
    with standing_in(engine_answers()):
        spec.loader.exec_module(module)
    return module


def find_rule(file: str) -> Any:
    """Return ``fused_sigmoid_gating_delta_rule_update`` of ``file`` under TREEWY_PEERS, none if it is not there."""
    folder = peers_folder()
    if folder is None or not (folder / file).exists():
        return None
    return load_alone(folder / file).fused_sigmoid_gating_delta_rule_update


def import_unpacked(name: str) -> None:
    """Import the package ``name`` from where wheels are unpacked, if it is there and was not imported from elsewhere."""
    folder = peers_folder()
    package = folder / name / "__init__.py" if folder is not None else None
    if package is None or not package.exists() or name in sys.modules:
        return
    # Not by sys.path: what else is unpacked there would then pass for installed.
    spec = importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(package.parent)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def find_fla_rule() -> Any:
    """Return fla-core's ``fused_recurrent_gated_delta_rule``, unpacked or installed; none if it is neither."""
    for name in ("einops", "fla"):
        import_unpacked(name)
    if "fla" not in sys.modules and importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
