"""Other projects' kernels in bench.kernels: what is handed to them, and what is said where they are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench import peer_modules
from bench.kernel_cases import Shape, arguments, relative_error
from bench.peers import (
    OUR_OWN,
    PLANS,
    STATE_BOUND,
    Peer,
    best_snapshots,
    errors_of,
    float64_snapshots,
    plan_our_snapshots,
    raw_gates,
)
from tests.interpreted_checks import outcomes_of
from treewy_inductor import reference

CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 1, 1, 2, 2]
# The interpreter cuts bfloat16 off where a GPU rounds.
SHAPE = Shape(HK=2, groups=2, K=32, V=32, dtype=torch.float32)


def test_gates_are_those_that_engines_compute_from_raw_numbers() -> None:
    log_decay, beta = -2 * torch.rand(99), torch.rand(99)
    a, b = raw_gates(log_decay, beta)
    torch.testing.assert_close(-torch.nn.functional.softplus(a), log_decay)
    torch.testing.assert_close(b.sigmoid(), beta)


def test_gates_at_their_limits() -> None:
    a, b = raw_gates(torch.zeros(2), torch.tensor([0.0, 1.0]))
    assert torch.nn.functional.softplus(a).tolist() == [0.0, 0.0]
    assert b.sigmoid().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_exact_outputs_are_the_references(parents: list[int]) -> None:
    case = arguments(parents, 3, SHAPE, device="cpu")
    output, states = float64_snapshots(case, parents, slice(1, 3))
    wide = [x[1:3].double() if x.is_floating_point() else x[1:3] for x in case[:10]]
    expected, u, g, scale = reference.tree_gated_delta(*wide, *case[10:12], torch.float64)
    assert relative_error(output, expected) < 1e-12
    # The state of the last node is what committing its path leaves.
    path = torch.tensor([[0, 1, 2, 3] if parents == CHAIN else [0, 2, 6]])
    stacked = [x[None] for x in (wide[5].clone(), wide[1], scale, u, g)]
    reference.commit_state(*stacked, path.expand(2, -1).int())
    assert relative_error(states[:, -1], stacked[0][0]) < 1e-12


def check_plans() -> None:
    """Those that are there: our own always, others with TREEWY_PEERS."""
    for parents in (CHAIN, TREE):
        case = arguments(parents, 3, SHAPE, device="cpu")
        for peer in filter(None, (plan(case, parents) for plan in PLANS)):
            # Again: a run leaves the committed state as it was.
            for rows in (2, 8):
                output, states = errors_of(peer, case, parents, rows)
                assert output < 1e-5 and states < 1e-5, f"{peer.name}: output {output:.1e}, states {states:.1e}"


def check_wrong_states_are_seen() -> None:
    case = arguments(TREE, 3, SHAPE, device="cpu")
    peer = plan_our_snapshots(case, TREE)
    states = peer.states
    assert states is not None

    def call() -> torch.Tensor:
        output = peer.call()
        states[2, 5] += 1
        return output

    assert errors_of(Peer("", "snapshots", call, peer.outputs, states), case, TREE)[1] > STATE_BOUND


CHECKS = (check_plans, check_wrong_states_are_seen)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(__name__)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_in_the_interpreter(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == ""


def test_the_best_is_the_fastest_right_one_that_keeps_states() -> None:
    rows = {
        OUR_OWN: {"kind": "snapshots", "right": True, "us": 3.0},
        "quick": {"kind": "snapshots", "right": True, "us": 2.0},
        "wrong": {"kind": "snapshots", "right": False},
        "paths": {"kind": "paths", "right": True, "us": 1.0},
    }
    assert best_snapshots(rows) == "quick"
    assert best_snapshots({"wrong": rows["wrong"]}) is None


def test_a_file_is_imported_without_its_engine(tmp_path: Path) -> None:
    file = tmp_path / "of_an_engine.py"
    file.write_text("from sglang.srt.utils import is_hip\nfrom vllm.triton_utils import tl\nanswer = is_hip()\n")
    before = set(sys.modules)
    module = peer_modules.load_alone(file)
    assert module.answer is False and module.tl.__name__ == "triton.language"
    assert set(sys.modules) - before == {"peer_of_an_engine"}
    del sys.modules["peer_of_an_engine"]


def test_without_a_folder_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREEWY_PEERS", raising=False)
    assert peer_modules.find_rule(peer_modules.SGLANG) is None


def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREEWY_PEERS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no folder"):
        peer_modules.peers_folder()
