"""An unmodified Qwen3.5: a compiled tree's logits and what is committed, against the plain model over each path."""

from __future__ import annotations

import pytest
import torch

from bench.path_oracle import path_logits, relative_error
from tests.tiny_models import VOCABULARY, in_dtype, tiny_model
from tests.trees import BRANCHES, CHAIN, FOREST, INERT_BETWEEN, STAR, batch_of, random_parents
from tests.verified_model import LENGTHS, TOLERANCE, VerifiedModel
from treewy_inductor import DraftTree, TreeCache
from treewy_inductor.backend import treewy
from treewy_inductor.errors import MisusedTreeCache
from treewy_inductor.models.transformers_api import CACHE_KEYWORD

NODES = 13


@pytest.fixture(scope="module")
def shared() -> VerifiedModel:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return VerifiedModel(tiny_model(initializer_range=0.05), NODES)


@pytest.fixture
def verified(shared: VerifiedModel) -> VerifiedModel:
    shared.start()
    return shared


def random_tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (len(LENGTHS), NODES))


@pytest.mark.parametrize(
    "trees",
    [
        pytest.param((CHAIN, STAR, BRANCHES), id="chain-star-branches"),
        pytest.param((FOREST, INERT_BETWEEN, [-1]), id="forest-inert-root"),
        pytest.param((list(range(-1, 12)), [-1, *[0] * 12], [-1, *[-2] * 12]), id="deep-flat-empty"),
    ],
)
def test_every_node_equals_its_path_run_alone(verified: VerifiedModel, trees: tuple[list[int], ...]) -> None:
    parents, tokens = batch_of(*trees), random_tokens()
    found = verified.verify(parents, tokens)
    assert verified.errors(found, parents, tokens).max() < TOLERANCE


def test_a_chain_equals_one_token_at_a_time(verified: VerifiedModel) -> None:
    tokens = random_tokens()
    found = verified.verify(torch.arange(-1, NODES - 1).repeat(3, 1), tokens)
    stepwise = TreeCache(verified.model.config, 3, 160, NODES)
    for row, prompt in enumerate(verified.tokens):
        stepwise.prefill(verified.model, prompt[None], rows=[row])
    for t in range(NODES):
        expected = stepwise.prefill(verified.model, tokens[:, t : t + 1])
        torch.testing.assert_close(found[:, t], expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def test_steps_after_commits_and_the_committed_rows_equal_recomputing(verified: VerifiedModel) -> None:
    for step in range(5):
        parents = torch.tensor([random_parents(NODES, 3 * step + row, inert=0.1) for row in range(3)])
        tokens = random_tokens()
        found = verified.verify(parents, tokens)
        assert verified.errors(found, parents, tokens).max() < TOLERANCE
        real = [(row != -2).nonzero()[:, 0].tolist() for row in parents]
        # The last real node, some node, and in turn the root alone or nothing at all.
        verified.commit(parents, tokens, [real[0][-1], real[1][step % len(real[1])], 0 if step % 2 else None])
        verified.assert_rows_equal_recomputing()


def test_nothing_is_compiled_again(verified: VerifiedModel) -> None:
    before = verified.compiled
    verified.verify(batch_of(CHAIN, STAR, BRANCHES), random_tokens())
    compiled = verified.compiled
    assert compiled - before <= 1
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    verified.commit(batch_of(CHAIN, STAR, BRANCHES), random_tokens(), [6, 3, 8])
    verified.verify(batch_of(FOREST, INERT_BETWEEN, CHAIN), random_tokens())
    verified.cache.reset([1])
    verified.cache.prefill(verified.model, torch.randint(0, VOCABULARY, (1, 40)), rows=[1])
    verified.cache.set_tree([DraftTree(STAR), None, DraftTree([-1])])
    verified.verify(batch_of(STAR, [-2], [-1]), random_tokens())
    # Another cache object of the same shapes, too.
    verified.start()
    verified.verify(batch_of(CHAIN, STAR, BRANCHES), random_tokens())
    assert verified.compiled == compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
def test_rejected_nodes_change_no_bit_of_the_others(filler: float) -> None:
    model = tiny_model(initializer_range=0.05)
    poison = VOCABULARY - 1
    torch._dynamo.reset()
    clean = VerifiedModel(model, NODES)
    tokens = torch.randint(0, poison, (3, NODES))
    parents = batch_of(BRANCHES, INERT_BETWEEN, STAR)
    # Each poisoned node is a leaf, so that no other may differ.
    leaves = ((0, 5), (0, 8), (1, 6), (2, 1), (2, 6))
    committed = [torch.randint(0, poison, (length,)) for length in LENGTHS]
    results = []
    for is_poisoned in (False, True):
        clean.start()
        clean.cache.reset()
        for row, prompt in enumerate(committed):
            clean.cache.prefill(model, prompt[None], rows=[row])
        given = tokens.clone()
        with torch.no_grad():
            if is_poisoned:
                model.model.embed_tokens.weight[poison] = filler
                for row, node in leaves:
                    given[row, node] = poison
                # Inert nodes as well: inputs() leaves what the caller put there.
                given[1, 1] = given[1, 4] = poison
                given[:, 9:] = poison
            logits = clean.verify(parents, given)
        path = clean.commit(parents, given, [6, 3, 5])
        after = clean.verify(batch_of(CHAIN, CHAIN, CHAIN), tokens)
        results.append((logits, path, clean.cache.snapshot(), after))
    (logits, path, snapshot, after), (poisoned, same_path, theirs, then) = results
    assert torch.equal(path, same_path)
    survivors = torch.zeros(3, NODES, dtype=torch.bool)
    survivors[:, :9] = parents != -2
    for row, node in leaves:
        survivors[row, node] = False
    assert torch.equal(logits[survivors], poisoned[survivors])
    for name in ("lengths", "state", "history", "keys", "values"):
        assert torch.equal(getattr(snapshot, name), getattr(theirs, name)), name
    assert torch.equal(after[:, :7], then[:, :7])


def test_bfloat16_is_no_farther_from_float32_than_plain_eager() -> None:
    torch._dynamo.reset()
    model = in_dtype(tiny_model(initializer_range=0.05), torch.bfloat16)
    verified = VerifiedModel(model, NODES)
    exact = in_dtype(model, torch.float32)
    tree, plain = [], []
    for step in range(3):
        parents = torch.tensor([random_parents(NODES, 3 * step + row, inert=0.1) for row in range(3)])
        tokens = random_tokens()
        found = verified.verify(parents, tokens)
        verified.model = exact
        tree.append(verified.errors(found, parents, tokens))
        for row, committed in enumerate(verified.tokens):
            eager, wanted = (path_logits(each, committed, tokens[row], parents[row]) for each in (model, exact))
            plain.append(relative_error(eager, wanted)[parents[row] != -2])
        verified.model = model
        verified.commit(parents, tokens, [0, 0, 0])
    ours, theirs = (torch.cat(errors).square().mean().sqrt() for errors in (tree, plain))
    assert ours <= 1.1 * theirs, f"{ours} against eager's {theirs}"


@pytest.mark.parametrize("policy", ["replay", "fused", "store_all"])
def test_other_commit_policies_verify_and_commit_the_same(policy: str) -> None:
    torch._dynamo.reset()
    options = {"mamba_state_commit": policy} | ({"flush_every": 6} if policy == "replay" else {})
    verified = VerifiedModel(tiny_model(initializer_range=0.05), NODES, **options)
    for step in range(4):
        parents = torch.tensor([random_parents(NODES, 3 * step + row) for row in range(3)])
        tokens = random_tokens()
        found = verified.verify(parents, tokens)
        assert verified.errors(found, parents, tokens).max() < TOLERANCE
        verified.commit(parents, tokens, [NODES - 1, step, 0])
    verified.assert_rows_equal_recomputing()
    forked = verified.cache.fork([1, 1, 0])
    verified.tokens = [verified.tokens[row] for row in (1, 1, 0)]
    verified.cache = forked
    verified.assert_rows_equal_recomputing()


@torch.no_grad()
def test_wrong_forwards_are_refused_and_leave_the_cache_as_it_was(verified: VerifiedModel) -> None:
    cache, tokens = verified.cache, random_tokens()
    before = cache.snapshot()
    cache.has_tree = False
    with pytest.raises(MisusedTreeCache, match=r"before any tree was set: call TreeCache\.set_tree"):
        verified.step(input_ids=tokens, position_ids=tokens, use_cache=True, **{CACHE_KEYWORD: cache})
    cache.set_tree(DraftTree(CHAIN))
    good = cache.inputs(tokens)
    for count in (1, 5):
        short = {name: value[:, :count] for name, value in good.items() if name in ("input_ids", "position_ids")}
        mask = good["attention_mask"][:, :, :count]
        with pytest.raises(MisusedTreeCache, match=f"a forward of {count} tokens on a TreeCache of 13 nodes"):
            verified.step(**good | short | {"attention_mask": mask})
    for missing in ("attention_mask", "position_ids"):
        with pytest.raises(MisusedTreeCache, match=r"call model\(\*\*cache\.inputs\(tokens\)\)$") as error:
            verified.step(**{name: value for name, value in good.items() if name != missing})
        # One sentence at the end of a short traceback, and no lines of Dynamo's around it.
        assert "\n" not in str(error.value) and len(error.traceback) < 15
    wrong = TreeCache(verified.model.config, 3, 160, NODES, dtype=torch.bfloat16)
    wrong.set_tree(DraftTree(CHAIN))
    with pytest.raises(MisusedTreeCache, match=r"is torch\.float32 on cpu, the TreeCache holds torch\.bfloat16"):
        verified.step(**wrong.inputs(tokens))
    after = cache.snapshot()
    for name in ("lengths", "state", "history", "keys", "values"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_caches_of_other_sizes_are_compiled_for_their_sizes(attention: str) -> None:
    model = tiny_model(attn_implementation=attention)
    torch._dynamo.reset()
    # As the README has it: without dynamic=False, Dynamo takes a size that changed for one that varies.
    step = torch.compile(model, backend=treewy, fullgraph=True, options={"treewy.codegen": False})
    for rows, length, nodes in ((1, 32, 3), (2, 32, 3), (2, 40, 5)):
        cache = TreeCache(model.config, rows, length, nodes)
        prompt, tokens = (torch.randint(0, VOCABULARY, (rows, count)) for count in (6, 3))
        cache.prefill(model, prompt)
        cache.set_tree(DraftTree.from_parents([-1, 0, 0]))
        found = step(**cache.inputs(tokens)).logits[:, 2]
        alone = model(torch.cat([prompt, tokens[:, [0, 2]]], 1)).logits[:, -1]
        assert float((found - alone).norm() / alone.norm()) < TOLERANCE


@torch.no_grad()
def test_stock_inductor_refuses_a_tree(verified: VerifiedModel) -> None:
    verified.cache.set_tree(DraftTree(CHAIN))
    step = torch.compile(verified.model, backend="aot_eager", fullgraph=True, dynamic=False)
    with pytest.raises(RuntimeError, match=r"reached run time: a TreeCache only works"):
        step(**verified.cache.inputs(random_tokens()))
