"""One model under every commit policy: the same tokens, the same states, whatever is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_models import VOCABULARY, tiny_model
from tests.trees import random_parents
from treewy_inductor import DraftTree, TreeCache, generate, greedy_accept
from treewy_inductor.backend import treewy
from treewy_inductor.memory import POLICIES

ROWS, NODES = 2, 7


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def step(model: PreTrainedModel) -> Callable[..., Any]:
    return torch.compile(model, backend=treewy, fullgraph=True, dynamic=False, options={"treewy.codegen": False})


def new_cache(model: PreTrainedModel, policy: str, **options: Any) -> TreeCache:
    if policy == "replay":
        options.setdefault("flush_every", 5)
    return TreeCache(model.config, ROWS, 256, NODES, mamba_state_commit=policy, **options)


def drafts(number: int) -> list[DraftTree]:
    """Return a random tree a row: of all sizes, deep and flat."""
    sizes = torch.randint(1, NODES + 1, (ROWS,), generator=torch.Generator().manual_seed(number)).tolist()
    return [DraftTree(random_parents(size, 2 * number + row, roots=0.0)) for row, size in enumerate(sizes)]


@torch.no_grad()
def decode(
    model: PreTrainedModel, step: Callable[..., Any], cache: TreeCache, steps: int, oracle: list[list[int]] | None
) -> list[list[int]]:
    """Decode greedily for ``steps`` random trees; drafts are random tokens, or the right ones along each node's depth."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, VOCABULARY, (ROWS, 9), generator=generator)
    root = cache.prefill(model, prompt).argmax(-1)
    written: list[list[int]] = [[token] for token in root.tolist()]
    for number in range(steps):
        cache.set_tree(drafts(number))
        tokens = torch.randint(0, VOCABULARY, (ROWS, NODES), generator=generator)
        if oracle is not None:
            # Half of the nodes carry the token that greedy decoding gives at their depth, so that paths of all lengths are accepted.
            for row, right in enumerate(oracle):
                for node, depth in enumerate(cache.encoding.depth[row].tolist()):
                    place = len(written[row]) - 1 + depth
                    if depth > 0 and node % 3 and place < len(right):
                        tokens[row, node] = right[place]
        tokens[:, 0] = torch.tensor([tokens_so_far[-1] for tokens_so_far in written])
        logits = step(**cache.inputs(tokens)).logits
        path, bonus, _ = greedy_accept(logits, tokens, cache.encoding)
        cache.commit(path)
        for row, nodes in enumerate(path.tolist()):
            written[row] += [int(tokens[row, node]) for node in nodes[1:] if node >= 0] + [int(bonus[row])]
    return written


@torch.no_grad()
def plain_greedy(model: PreTrainedModel, length: int) -> list[list[int]]:
    prompt = torch.randint(0, VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(3))
    tokens = prompt
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokens[:, 9:].tolist()


def test_all_policies_accept_the_tokens_of_plain_greedy(model: PreTrainedModel, step: Callable[..., Any]) -> None:
    right = plain_greedy(model, 110)
    caches = {policy: new_cache(model, policy) for policy in POLICIES}
    written = {policy: decode(model, step, cache, 35, right) for policy, cache in caches.items()}
    for policy in POLICIES:
        for row, tokens in enumerate(written[policy]):
            assert len(tokens) > 45
            assert tokens == right[row][: len(tokens)], policy
    for cache in caches.values():
        cache.states.settle()
    for policy in POLICIES:
        assert torch.equal(caches[policy].lengths, caches["reconstruct"].lengths)
        torch.testing.assert_close(caches[policy].state, caches["reconstruct"].state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(caches[policy].history, caches["reconstruct"].history, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_rejected_and_padded_nodes_change_no_bit(model: PreTrainedModel, step: Callable[..., Any], policy: str) -> None:
    results = []
    for poison in (False, True):
        cache = new_cache(model, policy)
        cache.prefill(model, torch.arange(2 * 9).view(2, 9))
        for _ in range(2):
            cache.set_tree(DraftTree([-1, 0, 0, 1]))
            step(**cache.inputs(torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])))
            if poison:
                _poison(cache, [2, 3, 4, 5, 6])
            cache.commit(torch.tensor([[0, 1], [0, 1]], dtype=torch.int32))
        logits = step(**cache.inputs(torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]]))).logits[:, :4].clone()
        cache.commit(torch.tensor([[0, 1, 3], [0, 2, -1]], dtype=torch.int32))
        cache.states.settle()
        results.append((logits, cache.state.clone(), cache.history.clone()))
    for clean, spoilt in zip(*results, strict=True):
        assert torch.isfinite(spoilt).all()
        assert torch.equal(clean, spoilt)


def _poison(cache: TreeCache, nodes: list[int]) -> None:
    """Fill what these nodes left with NaN."""
    for name, tensor in cache.states.tensors().items():
        if name in ("snapshots", "node_keys", "key_scale", "pseudo_values", "path_decay"):
            tensor[:, :, nodes] = torch.nan
    cache.conv_inputs[..., nodes] = torch.nan


@torch.no_grad()
def test_a_fork_and_a_snapshot_are_the_same_under_all_policies(model: PreTrainedModel, step: Callable[..., Any]) -> None:
    states = {}
    for policy in POLICIES:
        cache = new_cache(model, policy)
        decode(model, step, cache, 3, None)
        taken = cache.snapshot()
        fork = cache.fork([1, 1])
        assert fork.states.policy == policy and fork.states.flush_every == cache.states.flush_every
        assert torch.equal(fork.state[:, 0], taken.state[:, 1])
        states[policy] = taken.state
        cache.reset([0])
        cache.restore(taken)
        assert torch.equal(cache.state, taken.state)
    for policy in POLICIES:
        torch.testing.assert_close(states[policy], states["reconstruct"], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_after_drafts_continues_the_row(model: PreTrainedModel, step: Callable[..., Any], policy: str) -> None:
    cache = new_cache(model, policy)
    written = decode(model, step, cache, 4, None)
    more = torch.randint(0, VOCABULARY, (ROWS, 5))
    logits = cache.prefill(model, more)
    prompt = torch.randint(0, VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(3))
    for row, tokens in enumerate(written):
        # The last token written is the next root: it is not committed yet.
        whole = torch.cat([prompt[row], torch.tensor(tokens[:-1]), more[row]])[None]
        expected = model(whole, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)


def test_unknown_policies_and_needless_trunks_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(
        ValueError, match="mamba_state_commit is 'sometimes': choose one of 'reconstruct', 'replay', 'fused', 'store_all'"
    ):
        new_cache(model, "sometimes")
    for policy in ("store_all", "fused"):
        with pytest.raises(ValueError, match=f"flush_every is 8 under mamba_state_commit='{policy}'"):
            new_cache(model, policy, flush_every=8)
    with pytest.raises(ValueError, match="flush_every is 0, expected at least 1"):
        new_cache(model, "replay", flush_every=0)


@pytest.mark.parametrize(("states", "nodes", "expected"), [(256, 4, 16), (252, 4, 1), (256, 40, 1)])
def test_replay_defers_by_default_where_it_was_measured_to_pay(
    model: PreTrainedModel, states: int, nodes: int, expected: int
) -> None:
    rows, rest = divmod(states, model.config.linear_num_value_heads)
    assert rest == 0
    cache = TreeCache(model.config, rows, 64, nodes, mamba_state_commit="replay")
    assert cache.states.policy == "replay"
    assert cache.states.flush_every == expected
    assert ("trunk_keys" in cache.states.tensors()) == (expected > 1)


@torch.no_grad()
def test_replay_without_a_trunk_is_reconstruct_bit_for_bit(model: PreTrainedModel, step: Callable[..., Any]) -> None:
    caches = [new_cache(model, "reconstruct"), new_cache(model, "replay", flush_every=1)]
    written = [decode(model, step, cache, 4, None) for cache in caches]
    assert written[0] == written[1]
    assert torch.equal(caches[0].state, caches[1].state)


@torch.no_grad()
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_fused_is_reconstruct_bit_for_bit(model: PreTrainedModel, step: Callable[..., Any], state_dtype: torch.dtype) -> None:
    caches = [new_cache(model, policy, state_dtype=state_dtype) for policy in ("reconstruct", "fused")]
    written = [decode(model, step, cache, 4, None) for cache in caches]
    assert written[0] == written[1]
    assert caches[1].states.trunk_length.all(), "the last step's path has to wait for a verification"
    caches[1].states.settle()
    assert not caches[1].states.trunk_length.any()
    assert torch.equal(caches[0].state, caches[1].state)


@torch.no_grad()
def test_a_tree_verified_twice_follows_what_was_accepted_once(model: PreTrainedModel, step: Callable[..., Any]) -> None:
    cache = new_cache(model, "fused")
    decode(model, step, cache, 3, None)
    cache.set_tree(drafts(0))
    tokens = torch.randint(0, VOCABULARY, (ROWS, NODES), generator=torch.Generator().manual_seed(4))
    logits, states = [], []
    for _ in range(2):
        logits.append(step(**cache.inputs(tokens)).logits.clone())
        states.append(cache.state.clone())
        assert not cache.states.trunk_length.any()
    is_node = cache.encoding.depth >= 0
    assert torch.equal(logits[0][is_node], logits[1][is_node])
    assert torch.equal(*states)


@torch.no_grad()
def test_a_lost_state_is_nan_not_wrong(model: PreTrainedModel, step: Callable[..., Any]) -> None:
    cache = new_cache(model, "store_all")
    cache.prefill(model, torch.arange(2 * 9).view(2, 9))
    cache.set_tree(DraftTree([-1, 0]))
    step(**cache.inputs(torch.zeros(2, 2, dtype=torch.int64)))
    nothing: Tensor = torch.tensor([[0], [-1]], dtype=torch.int32)
    cache.commit(nothing)
    logits = step(**cache.inputs(torch.zeros(2, 2, dtype=torch.int64))).logits
    assert torch.isfinite(logits[0, :2]).all()
    assert logits[1, :2].isnan().all()


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_writes_the_same_text_into_a_cache_of_any_policy(model: PreTrainedModel, policy: str) -> None:
    prompts = torch.randint(0, VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(3))
    cache = new_cache(model, policy)
    compiled = {"options": {"treewy.codegen": False}}
    own = {"max_new_tokens": 20, "do_sample": False, "draft_tree_widths": (2, 2), "compile_options": compiled, "cache": cache}
    assert generate(model, prompts, **own)[:, 9:].tolist() == plain_greedy(model, 20)
