"""The first line of every report: machine, versions, dtype, commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch


def machine_line(dtype: str) -> str:
    """Return ``H200 | torch 2.11.0 triton 3.6.0 transformers 5.17.0 | bf16 | 3f2a91c``."""
    versions = " ".join(f"{package} {_version(package)}" for package in ("torch", "triton", "transformers"))
    return f"{machine_name()} | {versions} | {dtype} | {measured_commit()}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def machine_name() -> str:
    """Return the name of the GPU, of the processor's kind where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"


def measured_commit() -> str:
    """Return which code is measured; TREEWY_COMMIT names it where there is no repository."""
    given = os.environ.get("TREEWY_COMMIT", "")
    if given or not shutil.which("git"):
        return given or "unknown"
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"
