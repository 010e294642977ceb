"""``treewy doctor``: what is installed, whether this torch has what the package reaches into, and what to do if not.

Each check is run, not looked up in a table of versions: the private parts of torch are found by reading compat.py and
imported one by one, and the last check compiles a small recurrence on a draft tree and compares its numbers.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from treewy_inductor import compat, ops, reference
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.tree import DraftTree

GOOD, LESS, WRONG = "good", "less", "wrong"
PACKAGES = {
    "torch": "",
    "triton": "needed on a GPU: pip install triton",
    "transformers": "needed for TreeCache and treewy generate: pip install 'treewy-inductor[hf]'",
}


@dataclass(frozen=True)
class Check:
    """One finding: ``good``, ``less`` (something is not available, the rest works) or ``wrong`` (the backend will not work).

    Attributes:
        name: what was looked at.
        detail: what was found.
        remedy: what to do; empty where nothing has to be done.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""


def examine() -> list[Check]:
    """Run every check on this machine, in a few seconds, and return what was found."""
    return [*_packages(), _entry_point(), *_private_apis(), *_devices(), _compiler(), _cache_protocol(), _proof()]


def report(checks: list[Check], *, color: bool = False) -> str:
    """Return the checks as a table that ends with the verdict; the private parts of torch that are there make one line."""
    import io

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    styles = {GOOD: "green", LESS: "yellow", WRONG: "bold red"}
    console = Console(file=io.StringIO(), width=100, force_terminal=color, color_system="standard" if color else None)
    table = Table(box=None, show_header=False, pad_edge=False)
    private = [check for check in checks if check.name.startswith("torch._")]
    shown = [check for check in checks if check not in private or check.status != GOOD]
    there = sum(check.status == GOOD for check in private)
    shown.append(Check("private torch", GOOD if there == len(private) else WRONG, f"{there} of {len(private)} parts are there"))
    for check in shown:
        mark = f"[{styles[check.status]}]{check.status}[/]"
        table.add_row(mark, escape(check.name), escape(check.detail + (f"\n→ {check.remedy}" if check.remedy else "")))
    console.print(table)
    console.print(verdict(checks), style=styles[worst(checks)], highlight=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


def worst(checks: list[Check]) -> str:
    """Return the worst status among the checks."""
    return max((check.status for check in checks), key=(GOOD, LESS, WRONG).index)


def verdict(checks: list[Check]) -> str:
    """Return one sentence: what works here."""
    wrong = [check.name for check in checks if check.status == WRONG]
    if wrong:
        return f"The backend will not work here: {', '.join(wrong)}."
    less = [check.name for check in checks if check.status == LESS]
    return f"The backend works; without {', '.join(less)}." if less else "Everything works."


def to_dict(checks: list[Check]) -> dict[str, object]:
    """Return the checks and the verdict as values that JSON takes."""
    return {"status": worst(checks), "verdict": verdict(checks), "checks": [asdict(check) for check in checks]}


def _packages() -> Iterator[Check]:
    yield Check("python", GOOD, platform.python_version())
    for package, remedy in PACKAGES.items():
        try:
            yield Check(package, GOOD, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Check(package, LESS, "not installed", remedy)


def _entry_point() -> Check:
    name = "backend by name"
    if "treewy" in torch._dynamo.list_backends(exclude_tags=()):
        return Check(name, GOOD, 'torch.compile(model, backend="treewy")')
    detail = "torch does not find the entry point: the package is on the path but not installed"
    return Check(name, LESS, detail, "pip install it, or pass treewy_inductor.backend.treewy itself as the backend")


def _private_apis() -> Iterator[Check]:
    """Import each private name that a function of compat.py imports."""
    tree = ast.parse(inspect.getsource(compat))
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch._"):
                continue
            for alias in node.names:
                yield _private_api(str(node.module), alias.name, function)


def _private_api(module: str, name: str, function: ast.FunctionDef) -> Check:
    full, purpose = f"{module}.{name}", (ast.get_docstring(function) or "").split("\n")[0]
    try:
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(full)
    except ImportError as error:
        remedy = f"this torch needs another way in compat.{function.name} ({purpose}): report it with the version of torch"
        return Check(full, WRONG, str(error), remedy)
    return Check(full, GOOD, purpose)


def _devices() -> Iterator[Check]:
    if not torch.cuda.is_available():
        yield Check(
            "GPU", LESS, "none that torch sees: the ops run as plain PyTorch", "install torch for CUDA where there is a GPU"
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = properties.major, properties.minor
        detail = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        if capability < (8, 0):
            yield Check(f"GPU {index}", LESS, detail, "kernels are written for sm_80 and later: use the CPU or another GPU")
        else:
            yield Check(f"GPU {index}", GOOD, detail)


def _compiler() -> Check:
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found:
        return Check("C++ compiler", GOOD, found)
    remedy = 'install g++, or compile with options={"treewy.codegen": False} where only correctness is asked'
    return Check("C++ compiler", LESS, "none: Inductor cannot generate code for the CPU", remedy)


def _cache_protocol() -> Check:
    try:
        importlib.import_module("transformers")
    except ImportError:
        return Check("TreeCache", LESS, "transformers is not installed", PACKAGES["transformers"])
    try:
        from treewy_inductor.models.families import FAMILIES
        from treewy_inductor.models.tree_cache import TreeCache
    except ImportError as error:
        return Check("TreeCache", WRONG, str(error), "this transformers is not supported: 5.17 and 5.24 are tested")
    known = ", ".join(model_type for family in FAMILIES for model_type in family.MODEL_TYPES)
    return Check(TreeCache.__name__, GOOD, f"for {known}")


def _proof() -> Check:
    """Compile a loop of the gated delta rule on a draft tree and compare it with the literal rule."""
    from treewy_inductor.backend import treewy

    tree = DraftTree.from_widths((2, 2))
    encoding, nodes = TreeEncoding.of(tree), len(tree)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, nodes, 2, size, generator=generator) for size in (4, 4, 6))
    log_decay, beta = -torch.rand(1, nodes, 2, generator=generator), torch.rand(1, nodes, 2, generator=generator)
    state = torch.randn(1, 2, 4, 6, generator=generator)
    buffers = [torch.zeros(1, nodes, 2, 6), torch.zeros(1, nodes, 2, 4), torch.zeros(1, nodes, 2), torch.zeros(1, nodes, 2)]

    def loop(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, buffers: list[Tensor]) -> Tensor:
        S = ops.state_in(state, encoding.ancestors, encoding.order, encoding.internal, encoding.height, 0, 0)
        outputs = []
        for t in range(nodes):
            S = S * log_decay[:, t, :, None, None].exp()
            u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outputs.append((S * q[:, t, :, :, None]).sum(-2))
        for buffer, new in zip(buffers, ops.state_out(S, *buffers, 0, 0), strict=True):
            buffer.copy_(new)
        return torch.stack(outputs, 1)

    try:
        with torch.no_grad():
            step = torch.compile(loop, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False})
            output = step(q, k, v, log_decay, beta, buffers)
    except Exception as error:
        # Whatever goes wrong in torch is this check's finding.
        return Check(
            "a tree, compiled",
            WRONG,
            f"{type(error).__name__}: {error}".split("\n")[0],
            "report this with the output of treewy doctor",
        )
    expected, _ = reference.literal_gated_delta(q, k, v, log_decay, beta, state, encoding.parents, 1.0, -1.0)
    error_found = float((output - expected).norm() / expected.norm())
    if error_found < 1e-5:
        return Check("a tree, compiled", GOOD, f"{nodes} nodes, relative error {error_found:.0e}")
    return Check("a tree, compiled", WRONG, f"relative error {error_found:.0e}", "report this with the output of treewy doctor")
