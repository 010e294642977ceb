"""The text of Python's standard library, cleaned and split by module: what the small model learns and is judged on.

Every Python installation carries this text, under the licence of the Python Software Foundation. A *unit* is a top-level
module or package together with its tests (``json/``, ``test/test_json/``), so that a held-out module's tests are never
trained on. The part of a unit follows from its name alone: every machine and every Python version splits alike.
Installations without the ``test`` folder have less training text; the held-out documents never come from there.
"""

from __future__ import annotations

import ast
import dataclasses
import sysconfig
import zlib
from pathlib import Path

# Generated tables, duplicates of other modules, grammars, and data that only looks like Python.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
}
_SKIPPED_TEST_FOLDERS = ("data", "test_lib2to3", "encoded_modules", "tokenizedata", "cjkencodings", "decimaltestdata")
_LONGEST_LINE = 160
_SHORTEST_DOCUMENT = 200
_REPEATED_BLOCK = 300


@dataclasses.dataclass(frozen=True)
class LibraryText:
    """Documents by part. ``held_out`` is never trained on nor used to choose anything; ``validation`` chooses a checkpoint."""

    train: list[str]
    validation: list[str]
    held_out: list[str]


def read_library(folder: Path | None = None) -> LibraryText:
    """Read and split the standard library at ``folder``, by default the running interpreter's.

    Args:
        folder: holds ``json/``, ``pathlib.py`` and so on; with ``test/`` or without.

    Raises:
        ValueError: if the folder holds too little text to split.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts: dict[str, list[str]] = {"train": [], "validation": [], "held_out": []}
    seen_blocks: set[int] = set()
    for path in _source_files(folder):
        relative = path.relative_to(folder)
        part, is_test = part_of(relative), not {"test", "tests"}.isdisjoint(relative.parts)
        if is_test and part != "train":
            continue
        document = _without_repeated_blocks(_clean(path), seen_blocks)
        if len(document) >= _SHORTEST_DOCUMENT and not _is_a_table(document):
            parts[part].append(document)
    text = LibraryText(**parts)
    if not (text.train and text.validation and text.held_out):
        counts = {name: len(documents) for name, documents in parts.items()}
        raise ValueError(f"{folder} gave documents {counts}: every part needs one; pass a standard library's folder")
    return text


def part_of(relative: Path) -> str:
    """Return ``train``, ``validation`` or ``held_out`` for a file, given by its path inside the library.

    ``pathlib.py``, ``pathlib/_local.py``, ``_pathlib.py`` and ``test/test_pathlib.py`` are one unit.
    """
    names = relative.parts
    if names[0] == "test" and len(names) > 1:
        names = tuple(name for name in names[1:] if name != "__init__.py") or names
    unit = names[0].removesuffix(".py").removeprefix("test_").strip("_").lower()
    bucket = zlib.crc32(unit.encode()) % 24
    return {0: "held_out", 1: "validation"}.get(bucket, "train")


def _source_files(folder: Path) -> list[Path]:
    """Sorted by path, modules before tests, so that a block which repeats is kept where it is not a test."""

    def is_wanted(path: Path) -> bool:
        folders = path.relative_to(folder).parts[:-1]
        if any(name in _SKIPPED_FOLDERS or name.startswith("config-") for name in folders):
            return False
        return not (folders[:1] == ("test",) and any(part in name for name in folders for part in _SKIPPED_TEST_FOLDERS))

    files = [path for path in folder.rglob("*.py") if is_wanted(path)]
    return sorted(files, key=lambda path: (path.relative_to(folder).parts[0] == "test", path.relative_to(folder).as_posix()))


def _clean(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # A few tests are written in another encoding on purpose.
        return ""
    if path.name == "topics.py" and path.parent.name == "pydoc_data":
        text = "\n\n".join(_dictionary_values(text))
    lines = (line.rstrip() for line in text.replace("\t", "    ").splitlines())
    return "\n".join(line for line in lines if len(line) <= _LONGEST_LINE).strip() + "\n"


def _dictionary_values(source: str) -> list[str]:
    """The strings of ``topics = {name: text}``: the language reference as prose rather than as an escaped literal."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return [str(text) for text in ast.literal_eval(statement.value).values()]
    return []


def _without_repeated_blocks(document: str, seen: set[int]) -> str:
    """Drop long paragraphs that an earlier document had: licences, copied helpers, generated boilerplate."""
    kept = []
    for block in document.split("\n\n"):
        key = zlib.crc32(block.encode()) << 32 | len(block)
        if len(block) < _REPEATED_BLOCK or key not in seen:
            kept.append(block)
        seen.add(key)
    return "\n\n".join(kept)


def _is_a_table(document: str) -> bool:
    characters = [character for character in document if not character.isspace()]
    letters = sum(character.isascii() and (character.isalpha() or character == "_") for character in characters)
    return letters < 0.55 * len(characters)
