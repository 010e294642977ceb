"""The wheel holds every file of the package's folders, under one name each, and the entry points."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"treewy_inductor": "treewy_inductor"} | {
    f"treewy_inductor/{name}": name for name in ("passes", "lowerings", "models")
}
LINKS = ("passes", "lowerings", "models")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, without caches and without following the links to other folders."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from files_below(path)
        else:
            yield path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("setuptools", minversion="77")
    target = tmp_path_factory.mktemp("wheel")
    # Built from a copy, since setuptools leaves build folders beside the sources.
    source = tmp_path_factory.mktemp("source")
    names = ("pyproject.toml", "README.md", "LICENSE", "treewy_inductor", *LINKS)
    run(["cp", "-R", *(str(ROOT / name) for name in names), str(source)], check=True)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    result = run([sys.executable, "-c", build, str(target)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_wheel_holds_all_files_and_no_others(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in files_below(ROOT / folder)
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_names_the_backend_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    def text_of(ending: str) -> str:
        return wheel.read(next(name for name in wheel.namelist() if name.endswith(ending))).decode()

    entries = text_of("entry_points.txt")
    assert "[torch_dynamo_backends]\ntreewy = treewy_inductor.backend:treewy" in entries
    assert "treewy = treewy_inductor.cli:app" in entries
    assert "License-Expression: Apache-2.0" in text_of("METADATA")
    assert "Apache License" in text_of("LICENSE")


def test_every_folder_with_python_files_is_listed() -> None:
    folders = {
        package + ("" if path.parent == ROOT / folder else "/" + path.parent.relative_to(ROOT / folder).as_posix())
        for package, folder in FOLDERS.items()
        for path in files_below(ROOT / folder)
        if path.suffix == ".py"
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(name.replace("/", ".") for name in folders)


def test_links_in_the_package_lead_to_the_folders() -> None:
    for name in LINKS:
        link = ROOT / "treewy_inductor" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
