"""Compile what a host wrapper would launch to machine code of a GPU that is not here, and read its resources.

A :class:`Recorder` stands in for the launcher: tensors are descriptions on a "cuda" device, launches are collected.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.async_reads import unfenced_reads
from tests.machine_code import is_trap, unwritten_reads
from treewy_inductor.lowerings.launch import Launch, Strided

H200, B200 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32)
MI355X = GPUTarget("hip", "gfx950", 64)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def described(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Strided:
    """Return a description of a CUDA tensor that does not exist; contiguous unless ``stride`` says otherwise."""
    return Strided(None, tuple(shape), tuple(stride or torch.empty(shape, device="meta").stride()), dtype, "cuda")


class Recorder:
    """A launcher that only collects ``launches``."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def strided(self, tensor: Strided, contiguous: Sequence[int] = ()) -> Strided:
        return tensor

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Strided) -> Strided:
        return described(shape, dtype)

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)


@dataclass(frozen=True)
class Resources:
    """What ptxas and cuobjdump say of a compiled kernel; bytes but for ``registers``, and what may be wrong in it.

    Attributes:
        multiplied: types of the numbers that matrix instructions multiply; "kind::f16" is bfloat16 as well.
        tensor: columns of tensor memory, 0 where the chip has none.
        is_trap: nothing runs but a trap, which is what Triton makes of a kernel that does not fit.
        unwritten: instructions that read a uniform register that was not written on every way there.
        unfenced: products that read what copies wrote without a fence between.
    """

    target: str
    matrix_instructions: frozenset[str]
    multiplied: frozenset[str]
    registers: int
    stack: int
    local: int
    shared: int
    tensor: int
    is_trap: bool
    unwritten: tuple[str, ...]
    unfenced: tuple[str, ...]


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Return Triton's compiled kernel of ``launch`` for ``target``, specialised as an eager call would be."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in launch.tensors:
            signature[name] = POINTERS[launch.tensors[name].dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or launch.constants[name] == 1:
            signature[name], constants[name] = "constexpr", launch.constants[name]
        else:
            value = launch.constants[name]
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers is not None and target.backend == "cuda":
        options["maxnreg"] = launch.registers
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any) -> Resources:
    """Return the resources of a kernel compiled for an NVIDIA target."""
    ptx = compiled.asm["ptx"]
    cuobjdump = os.path.join(os.path.dirname(triton.backends.nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report, code = (
            subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", report)[1]) for word in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return Resources(
        re.search(r"\.target (\w+)", ptx)[1],  # type: ignore[index]
        frozenset(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx)),
        frozenset(re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*?\.(kind::\w+|tf32|bf16|f16)\b", ptx)),
        registers,
        stack,
        local,
        compiled.metadata.shared,
        getattr(compiled.metadata, "tmem_size", None) or 0,
        is_trap(code),
        tuple(unwritten_reads(code)),
        tuple(unfenced_reads(compiled.asm["ttgir"])),
    )
