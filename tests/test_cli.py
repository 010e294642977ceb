"""The commands, run as a user would, on a tiny checkpoint with a tokenizer of bytes."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.tiny_models import tiny_model
from treewy_inductor.cli import app
from treewy_inductor.command_options import SMALL_MODEL
from treewy_inductor.errors import UnprovenRecurrence
from treewy_inductor.models import load_model

LOAD = load_model.load_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def saved(folder: Path, model: PreTrainedModel) -> str:
    """Save ``model`` and a tokenizer of bytes; return the folder."""
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("checkpoint"), tiny_model(vocab_size=len(ALPHABET)))


@pytest.fixture
def loaded_once(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all commands one model object, so that they find its compiled steps."""
    monkeypatch.setattr(load_model, "load_model", _loaded_once)


@functools.cache
def _loaded_once(path: str, device: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    return LOAD(path, device, dtype)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_demo_checks_itself_and_prints_one_table(checkpoint: str) -> None:
    code, out, _ = run("demo", "--model", checkpoint, "--drafter", "prompt_lookup", "--new-tokens", "12", "--widths", "2,2")
    figures = json.loads(out.splitlines()[-1])
    assert figures["ok"]
    assert figures["equal_tokens"] == figures["tokens"] == 12
    assert figures["path_error"] < 1e-5
    assert figures["graphs"] == 1
    assert figures["proven"] == 3
    assert figures["copies_bytes"] == 7 * figures["state_bytes"] > 0
    assert out.count("Measured in this run") == 1
    assert "def read_lines(path" in out
    assert code == 0


def test_demo_fails_when_a_check_fails(checkpoint: str, loaded_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treewy_inductor.demonstration.largest_path_error", lambda *_: 1e-3)
    code, out, _ = run("demo", "--model", checkpoint, "--drafter", "prompt_lookup", "--new-tokens", "2", "--widths", "2,2")
    assert code == 1
    assert not json.loads(out.splitlines()[-1])["ok"]


@pytest.mark.parametrize("family", ["mamba2", "kimi_linear"])
def test_demo_of_another_family(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny_model(family, vocab_size=len(ALPHABET), num_hidden_layers=4))
    code, out, _ = run("demo", "--model", folder, "--drafter", "prompt_lookup", "--new-tokens", "4", "--widths", "2,2")
    assert json.loads(out.splitlines()[-1])["proven"] in (3, 4)
    assert code == 0


def test_generate_prints_text_or_json(checkpoint: str, loaded_once: None) -> None:
    common = ("generate", "--model", checkpoint, "--prompt", "abc abc ab", "--max-new-tokens", "6", "--widths", "2,2")
    code, out, errors = run(*common)
    assert code == 0
    # Without colours nothing says what they mean.
    assert out.startswith("abc abc ab")
    assert "6 tokens in" in errors
    assert "ms a step" in " ".join(errors.split())
    figures = json.loads(run(*common, "--json")[1])
    assert figures["tokens"] == 6
    assert figures["text"].strip() in out
    again = [json.loads(run(*common, "--json", "--temperature", "1.0", "--seed", seed)[1])["text"] for seed in "112"]
    assert again[0] == again[1] != again[2]


def test_generate_wants_exactly_one_prompt(checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    for given in ([], ["--prompt", "a", "--prompt-file", str(file)]):
        code, _, errors = run("generate", "--model", checkpoint, *given)
        assert code == 2
        assert "give a prompt" in errors
    code, _, errors = run("generate", "--model", checkpoint, "--prompt", "a", "--widths", "3,x")
    assert code == 2
    assert "'3,x' is no list of widths" in errors


def test_bench_tree_measures_every_shape_and_picks_one(checkpoint: str, loaded_once: None) -> None:
    code, out, _ = run("bench-tree", "--model", checkpoint, "--shapes", "1 2,2", "--new-tokens", "8", "--prompt", "ab ab")
    figures = json.loads(out.splitlines()[-1])
    assert code == 0
    assert [shape["widths"] for shape in figures["shapes"]] == [[], [1], [2, 2]]
    assert all(shape["equal"] and shape["step_ms"] > 0 for shape in figures["shapes"])
    assert figures["best"] in [[], [1], [2, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("generate", "--prompt", "a", "--widths", "9,9,9"), "more than 256 nodes"),
        (("generate", "--prompt", "a", "--widths", "0,2"), "widths[0] is 0"),
        (("generate", "--prompt", "a", "--dtype", "float3"), "dtype is 'float3'"),
        (("generate", "--prompt-file", "no/such/file"), "No such file"),
        (("generate", "--prompt", "a", "--draft-width", "3"), "No such option"),
        (("generate", "--prompt", "a", "--device", "gpu"), "device is 'gpu', which is none of PyTorch's"),
        (("generate", "--prompt", "a", "--drafter", "mtp"), "no weights under 'mtp.'"),
        (("generate", "--prompt", "a", "--node-budget", "1"), "draft_node_budget is 1, expected 2 to 256"),
        (("bench-tree", "--shapes", ""), "--shapes names no tree"),
        (("bench-tree", "--shapes", "2,2 9,9,9"), "more than 256 nodes"),
        (("demo", "--drafter", "ngram", "--model", "no/such/folder"), "no/such/folder"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, errors = run(*given, *(() if "--model" in given else ("--model", checkpoint)))
    assert code == 2
    # The frame around a message breaks its lines.
    assert message in " ".join(errors.replace("│", " ").split())
    assert "Traceback" not in out + errors


def test_what_is_wrong_with_a_model_or_a_file_is_said_without_a_traceback(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=len(ALPHABET))
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    broken = saved(tmp_path / "broken", model)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    foreign = saved(tmp_path / "foreign", LlamaForCausalLM(LlamaConfig(vocab_size=len(ALPHABET), **sizes)))
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff\xfe\x00")
    for given, message in (
        (("generate", "--prompt", "a", "--model", broken), "row 0 after 1 tokens are NaN"),
        (("generate", "--prompt", "a", "--model", foreign), "a model of type 'llama'"),
        (("demo", "--drafter", "prompt_lookup", "--model", foreign), "a model of type 'llama'"),
        (("bench-tree", "--model", foreign), "a model of type 'llama'"),
        (("generate", "--prompt-file", str(noise), "--model", broken), "is no text in UTF-8"),
    ):
        code, out, errors = run(*given)
        assert code == 2
        assert message in " ".join(errors.replace("│", " ").split())
        assert "Traceback" not in out + errors


def test_a_recurrence_that_is_not_proven_is_one_error(monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise UnprovenRecurrence([])

    monkeypatch.setattr("treewy_inductor.shape_comparison.generate", refuses)
    code, out, errors = run("bench-tree", "--model", checkpoint)
    assert code == 2
    assert "docs/refusals.md" in errors
    assert "Traceback" not in out + errors


def test_a_missing_small_model_is_said() -> None:
    if (SMALL_MODEL / "model.safetensors").exists():
        pytest.skip("this checkout has the small model")
    code, _, errors = run("demo")
    assert code == 2
    assert "pass --model" in errors


@pytest.mark.skipif(not (SMALL_MODEL / "model.safetensors").exists(), reason="this checkout has no small model")
def test_demo_runs_on_the_small_model() -> None:
    code, out, _ = run("demo", "--new-tokens", "24", "--drafter", "prompt_lookup")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["ok"]


def test_help_needs_neither_torch_nor_transformers() -> None:
    script = (
        "import sys; from treewy_inductor.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.splitlines()[-1] == "[]"
    for name in ("demo", "generate", "bench-tree"):
        assert name in result.stdout
