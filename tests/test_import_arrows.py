"""Who may import whom: the layers of the package, read from the source with ``ast``.

tree, reference*, ops*     torch alone: they exist before capture and on any machine
passes                     ops and tree; never lowerings, models, transformers or Triton
lowerings                  ops and the kernels; never passes, models or transformers
lowerings/*_kernel         triton and other kernels alone
models                     alone may import transformers
compat                     alone touches torch._inductor and its neighbours
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"treewy_inductor": "treewy_inductor"} | {
    name: f"treewy_inductor.{name}" for name in ("passes", "lowerings", "models")
}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    is_at_load: bool
    """Runs when the file is loaded: outside of functions and of ``if TYPE_CHECKING``."""
    is_for_types: bool


def package_files() -> dict[str, Path]:
    """Return the package's files by module name; the links inside the package are not followed."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


FILES = package_files()


def imports_of(path: Path) -> list[Import]:
    """Return every import of a file, ``from a import b`` as ``a.b`` where that is a module of the package."""

    def visit(node: ast.AST, is_at_load: bool, is_for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, is_at_load, is_for_types)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(full if full in FILES else child.module or "", child.lineno, is_at_load, is_for_types)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, False, True)
            else:
                is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from visit(child, is_at_load and not is_function, is_for_types)

    return list(visit(ast.parse(path.read_text()), True, False))


IMPORTS = {module: imports_of(path) for module, path in FILES.items()}


def offences(modules: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Return what modules matching the pattern import although it lies below a forbidden name and no allowed pattern."""
    return [
        f"{FILES[module].relative_to(ROOT)}:{found.line} imports {found.module}"
        for module in FILES
        if fnmatch(module, modules)
        for found in IMPORTS[module]
        if not found.is_for_types
        if any(found.module == name or found.module.startswith(name + ".") for name in forbidden)
        and not any(fnmatch(found.module, pattern) for pattern in allowed)
    ]


def test_every_folder_was_read() -> None:
    assert {module.split(".")[1] for module in FILES if module.count(".") == 2} == {"passes", "lowerings", "models"}
    assert "treewy_inductor.ops" in FILES


def test_an_offence_is_seen() -> None:
    assert offences("treewy_inductor.ops", ("torch",))
    assert not offences("treewy_inductor.ops", ("torch",), allowed=("torch*",))


def test_nothing_imports_tests_or_bench() -> None:
    assert offences("treewy_inductor*", ("tests", "bench")) == []


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    assert offences("*", ("passes", "lowerings", "models")) == []


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        ("treewy_inductor.tree", ("treewy_inductor.tree_drawing",)),
        ("treewy_inductor.reference*", ("treewy_inductor.tree", "treewy_inductor.reference*")),
        ("treewy_inductor.ops*", ("treewy_inductor", "treewy_inductor.reference*", "treewy_inductor.ops*")),
    ],
)
def test_ops_and_reference_know_nothing_above_them(modules: str, allowed: tuple[str, ...]) -> None:
    assert offences(modules, ("treewy_inductor", "triton", "transformers"), allowed) == []


def test_passes_and_lowerings_meet_only_at_the_ops() -> None:
    above = ("treewy_inductor.models", "treewy_inductor.backend", "transformers")
    assert offences("treewy_inductor.passes*", ("treewy_inductor.lowerings", "triton", *above)) == []
    assert offences("treewy_inductor.lowerings*", ("treewy_inductor.passes", *above)) == []


def test_kernels_import_triton_and_kernels_alone() -> None:
    for module, path in FILES.items():
        if not fnmatch(module, "treewy_inductor.lowerings.*_kernel"):
            continue
        for found in IMPORTS[module]:
            is_allowed = found.module.split(".")[0] in ("triton", "__future__") or fnmatch(found.module, "*_kernel")
            assert is_allowed, f"{path.name}:{found.line} imports {found.module}"


def test_models_alone_import_transformers() -> None:
    others = [module for module in FILES if not module.startswith("treewy_inductor.models")]
    assert [offence for module in others for offence in offences(module, ("transformers",))] == []


def test_compat_alone_imports_torch_private_modules() -> None:
    private = ("torch._inductor", "torch._functorch", "torch._guards", "torch._subclasses", "torch._higher_order_ops")
    others = [module for module in FILES if module != "treewy_inductor.compat"]
    assert [offence for module in others for offence in offences(module, private)] == []


def test_files_load_each_other_without_cycles() -> None:
    graph = nx.DiGraph(
        (module, found.module)
        for module in FILES
        for found in IMPORTS[module]
        if found.is_at_load and found.module in FILES and found.module not in FOLDERS.values()
    )
    assert list(nx.simple_cycles(graph)) == []


def test_importing_the_package_is_cheap() -> None:
    script = (
        "import sys, treewy_inductor, treewy_inductor.ops;"
        "print([m for m in ('transformers', 'triton', 'networkx.drawing', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_what_they_say() -> None:
    import treewy_inductor as treewy

    for name in treewy.__all__:
        assert getattr(treewy, name).__name__ == name
        assert f"treewy_inductor.{name}" not in FILES, f"module {name} would shadow the public name"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        treewy.nothing  # noqa: B018
