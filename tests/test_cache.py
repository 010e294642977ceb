"""TreeCache without a compiled model: construction, inputs, commit, rows moved about, files, and every refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from bench.path_oracle import path_to
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model
from tests.trees import BRANCHES, CHAIN, INERT_BETWEEN, batch_of
from treewy_inductor import DraftTree, TreeCache, reference
from treewy_inductor.cache_snapshot import CacheSnapshot
from treewy_inductor.layer_shapes import LinearShape, SoftmaxShape

COMMITTED = ("lengths", "state", "history", "keys", "values")
NODES = 9


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def new_cache(model: PreTrainedModel, rows: int = 3, max_length: int = 64, **options: Any) -> TreeCache:
    return TreeCache(model.config, rows, max_length, NODES, **options)


def filled_cache(model: PreTrainedModel, lengths: tuple[int, ...] = (12, 5, 20), max_length: int = 64) -> TreeCache:
    cache = new_cache(model, len(lengths), max_length)
    for row, length in enumerate(lengths):
        cache.prefill(model, torch.randint(0, VOCABULARY, (1, length)), rows=[row])
    return cache


def assert_same_rows(found: TreeCache, found_row: int, expected: TreeCache, expected_row: int) -> None:
    length = int(expected.lengths[expected_row])
    assert int(found.lengths[found_row]) == length
    for name in ("state", "history"):
        assert torch.equal(getattr(found, name)[:, found_row], getattr(expected, name)[:, expected_row]), name
    for name in ("keys", "values"):
        ours, theirs = getattr(found, name)[:, found_row], getattr(expected, name)[:, expected_row]
        assert torch.equal(ours[:, :, :length], theirs[:, :, :length]), name


def assert_unchanged(cache: TreeCache, before: dict[str, Tensor]) -> None:
    for name, tensor in before.items():
        assert torch.equal(getattr(cache, name), tensor), name


def copies(cache: TreeCache) -> dict[str, Tensor]:
    return {name: getattr(cache, name).clone() for name in COMMITTED}


def fill_nodes(cache: TreeCache) -> None:
    """Put random numbers where a verification would leave its nodes' keys, pseudo-values, decays and so on."""
    states = cache.states
    for tensor in (cache.conv_inputs, states.node_keys, states.pseudo_values):
        tensor.normal_()
    states.key_scale.uniform_(0.5, 1)
    states.path_decay.uniform_(-2, 0)
    for row, length in enumerate(cache.lengths.tolist()):
        for tensor in (cache.keys, cache.values):
            tensor[:, row, :, length : length + NODES].normal_()


def test_shapes_and_layout(model: PreTrainedModel) -> None:
    cache = new_cache(model)
    assert cache.state.shape == (3, 3, 4, 8, 16) and cache.state.stride(3) == 1
    assert cache.conv_inputs.shape == (3, 3, 96, NODES) and cache.conv_inputs.stride(2) == 1
    assert cache.keys.shape == cache.values.shape == (1, 3, 2, 64, 16)
    assert cache.state.dtype == cache.states.pseudo_values.dtype == cache.states.path_decay.dtype == torch.float32
    for slot, layer in enumerate(cache.layers[:3]):
        assert layer.states.state.data_ptr() == cache.state[slot].data_ptr()
        assert layer.history.data_ptr() == cache.history[slot].data_ptr()
    half = new_cache(model, dtype=torch.bfloat16)
    assert half.keys.dtype == half.states.node_keys.dtype == half.history.dtype == torch.bfloat16
    assert half.state.dtype == half.states.key_scale.dtype == torch.float32


def test_no_buffer_holds_a_state_a_node(model: PreTrainedModel) -> None:
    small, large = new_cache(model), TreeCache(model.config, 3, 64, 4 * NODES)
    assert small.state.shape == large.state.shape
    for name in ("node_keys", "pseudo_values", "path_decay", "key_scale"):
        few, many = getattr(small.states, name), getattr(large.states, name)
        assert many.numel() == 4 * few.numel()
        assert few[0, 0].numel() < NODES * small.state[0, 0].numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_fit_every_family(family: str) -> None:
    model = tiny_model(family)
    cache = new_cache(model, 1)
    cache.prefill(model, torch.randint(0, VOCABULARY, (1, 6)))
    assert cache.lengths.tolist() == [6]
    assert all(cache.state[slot].abs().sum() > 0 for slot in range(cache.linear_layers))


def test_inputs_describe_each_rows_own_tree(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    trees = [BRANCHES, CHAIN, INERT_BETWEEN]
    cache.set_tree(batch_of(*trees))
    tokens = torch.randint(1, VOCABULARY, (3, 8))
    inputs = cache.inputs(tokens)
    assert inputs["input_ids"].tolist() == torch.nn.functional.pad(tokens, (0, 1)).tolist()
    for row, (parents, length) in enumerate(zip(trees, (12, 5, 20), strict=True)):
        for t, parent in enumerate(parents):
            if parent == -2:
                continue
            path = path_to(parents, t)
            assert inputs["position_ids"][row, t] == length + len(path) - 1
            seen = inputs["attention_mask"][row, 0, t].nonzero()[:, 0].tolist()
            assert seen == [*range(length), *(length + node for node in path)]


def test_inputs_keep_their_addresses(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    cache.set_tree(DraftTree(CHAIN))
    first = cache.inputs(torch.zeros(3, 7, dtype=torch.int64))
    addresses = {name: value.data_ptr() for name, value in first.items() if isinstance(value, Tensor)}
    cache.set_tree([DraftTree(BRANCHES), None, DraftTree([-1])])
    second = cache.inputs(torch.ones(3, 9, dtype=torch.int64))
    assert {name: value.data_ptr() for name, value in second.items() if isinstance(value, Tensor)} == addresses
    assert second["input_ids"].tolist() == [[1] * 9] * 3


def test_eager_attention_gets_a_mask_to_add() -> None:
    model = tiny_model(attn_implementation="eager")
    cache = filled_cache(model)
    cache.set_tree(DraftTree(BRANCHES))
    mask = cache.inputs(torch.zeros(3, 9, dtype=torch.int64))["attention_mask"]
    assert mask.dtype == torch.float32
    assert torch.equal(mask == 0, cache.mask) and mask.min() == torch.finfo(torch.float32).min


def test_commit_moves_states_histories_keys_and_lengths(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    fill_nodes(cache)
    before = copies(cache)
    inputs = cache.conv_inputs.clone()
    cache.commit(torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32))
    assert cache.lengths.tolist() == [15, 6, 20]
    keys = before["keys"]
    assert torch.equal(cache.keys[:, 0, :, 12:15], keys[:, 0, :, [12, 14, 17]])
    assert torch.equal(cache.keys[:, 0, :, :12], keys[:, 0, :, :12])
    assert torch.equal(cache.values[:, 1, :, 5], before["values"][:, 1, :, 5])
    assert torch.equal(cache.history[:, 0, :, 1:], inputs[:, 0][..., [0, 2, 5]])
    assert torch.equal(cache.history[:, 0, :, 0], before["history"][:, 0, :, 3])
    for name in ("state", "history"):
        assert torch.equal(getattr(cache, name)[:, 2], before[name][:, 2]), name
        assert not torch.equal(getattr(cache, name)[:, 0], before[name][:, 0]), name
    expected = before["state"].clone()
    path = torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    states = cache.states
    reference.commit_state(expected, states.node_keys, states.key_scale, states.pseudo_values, states.path_decay, path)
    torch.testing.assert_close(cache.state, expected, rtol=0, atol=0)


def test_commit_does_not_read_rejected_nodes(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    fill_nodes(cache)
    path = torch.tensor([[0, 2, 5], [0, 1, -1], [0, -1, -1]], dtype=torch.int32)
    spoiled = cache.fork([0, 1, 2])
    leavings = ("node_keys", "key_scale", "pseudo_values", "path_decay")
    for name in leavings:
        getattr(spoiled.states, name).copy_(getattr(cache.states, name))
    spoiled.conv_inputs.copy_(cache.conv_inputs)
    for row, length in enumerate(cache.lengths.tolist()):
        rejected = [t for t in range(NODES) if t not in path[row].tolist()]
        spoiled.keys[:, row, :, length : length + NODES] = cache.keys[:, row, :, length : length + NODES]
        spoiled.values[:, row, :, length : length + NODES] = cache.values[:, row, :, length : length + NODES]
        for name in leavings:
            getattr(spoiled.states, name)[:, row, rejected] = torch.nan
        spoiled.conv_inputs[:, row][..., rejected] = torch.nan
        for tensor in (spoiled.keys, spoiled.values):
            tensor[:, row, :, [length + t for t in rejected]] = torch.nan
    cache.commit(path)
    spoiled.commit(path)
    for row in range(3):
        assert_same_rows(spoiled, row, cache, row)


def test_fork_copies_rows_and_goes_its_own_way(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    forked = cache.fork([2, 0, 2])
    for row, source in enumerate([2, 0, 2]):
        assert_same_rows(forked, row, cache, source)
    before = copies(cache)
    forked.prefill(model, torch.randint(0, VOCABULARY, (3, 4)))
    assert_unchanged(cache, before)
    assert forked.lengths.tolist() == [24, 16, 24]


def test_reorder_is_in_place(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    before = cache.fork([0, 1, 2])
    address = cache.state.data_ptr()
    cache.set_tree(DraftTree(CHAIN))
    cache.reorder_cache(torch.tensor([2, 2, 1]))
    for row, source in enumerate([2, 2, 1]):
        assert_same_rows(cache, row, before, source)
    assert cache.state.data_ptr() == address
    with pytest.raises(ValueError, match="no tree was set"):
        cache.inputs(torch.zeros(3, 7, dtype=torch.int64))


def test_snapshot_is_a_way_back(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    untouched, snapshot = cache.fork([0, 1, 2]), cache.snapshot()
    fill_nodes(cache)
    cache.commit(torch.tensor([[0, 1], [0, -1], [0, 3]], dtype=torch.int32))
    cache.prefill(model, torch.randint(0, VOCABULARY, (1, 30)), rows=[1])
    cache.restore(snapshot)
    for row in range(3):
        assert_same_rows(cache, row, untouched, row)
    assert snapshot.bytes == sum(getattr(snapshot, name).nbytes for name in COMMITTED)


def test_one_row_is_restored_into_another_slot(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    expected = cache.fork([0, 1, 2])
    cache.restore(cache.snapshot([1]), [2])
    for row, source in enumerate([0, 1, 1]):
        assert_same_rows(cache, row, expected, source)
    # The longer row that stood there has left nothing that a masked softmax could still multiply by zero.
    assert not cache.keys[:, 2, :, 5:].any() and not cache.values[:, 2, :, 5:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(model: PreTrainedModel, tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    cache = new_cache(model, dtype=dtype)
    cache.prefill(model, torch.randint(0, VOCABULARY, (3, 11)))
    cache.save(tmp_path / "rows.safetensors", [2, 0])
    loaded = new_cache(model, 4, 100, dtype=dtype)
    loaded.load(tmp_path / "rows.safetensors", [3, 1])
    assert_same_rows(loaded, 3, cache, 2)
    assert_same_rows(loaded, 1, cache, 0)
    assert loaded.lengths.tolist() == [0, 11, 0, 11]


def test_a_foreign_file_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"lengths": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="has format None, expected"):
        CacheSnapshot.load(tmp_path / "other.safetensors")


def test_room_is_counted_on_the_host_and_looked_up_near_the_limit(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled_cache(model, (10, 10), 64)
    looked: list[int] = []
    bound_lengths = cache.bound_lengths
    monkeypatch.setattr(cache, "bound_lengths", lambda: looked.append(1) or bound_lengths())
    cache.set_tree(DraftTree(CHAIN))
    tokens = torch.zeros(2, NODES, dtype=torch.int64)
    path = torch.full((2, NODES), -1, dtype=torch.int32)
    path[:, :2] = torch.tensor([0, 1])
    steps = 0
    while int(cache.lengths.max()) + NODES <= 64:
        cache.inputs(tokens)
        cache.commit(path)
        steps += 1
    before = copies(cache)
    with pytest.raises(ValueError, match="row 0 holds 56 of 64 tokens and has no room for 9 nodes"):
        cache.inputs(tokens)
    assert_unchanged(cache, before)
    # The bound grows by the width of a path each step: most steps never look at the device.
    assert steps == 23 and sum(looked) < steps / 2


def test_set_tree_refusals_keep_the_tree(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    cache.set_tree(DraftTree(BRANCHES))
    before = cache.encoding.parents.clone()
    refused: list[tuple[str, Any]] = [
        ("nodes is 9 for a tree of 10", DraftTree([-1, *range(9)])),
        ("2 trees for 3 rows", [DraftTree([-1]), None]),
        (r"parents is \[3, 10\], expected 3 rows of at most 9", torch.full((3, 10), -1)),
        (r"parents is \[2, 4\], expected 3 rows", torch.full((2, 4), -1)),
        (r"parents\[1\] is 1, expected a node before 1", torch.tensor([-1, 1])),
        (r"parents\[2\] is 1, expected a node before 2 that is not inert", torch.tensor([-1, -2, 1])),
        (r"parents\[0\] is -3", torch.tensor([-3])),
    ]
    for message, tree in refused:
        with pytest.raises(ValueError, match=message):
            cache.set_tree(tree)
    assert torch.equal(cache.encoding.parents, before)


def test_input_and_path_refusals(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    tokens = torch.zeros(3, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"no tree was set: call TreeCache\.set_tree"):
        cache.inputs(tokens)
    cache.set_tree(DraftTree(CHAIN))
    before = copies(cache)
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r"tokens is \[2, 7\], expected 3 rows of at most 9", lambda: cache.inputs(tokens[:2])),
        (r"tokens is \[3, 10\], expected 3 rows of at most 9", lambda: cache.inputs(tokens.new_zeros(3, 10))),
        ("tokens is torch.float32, expected numbers of tokens", lambda: cache.inputs(tokens.float())),
        (r"path is \[3, 10\], expected 3 rows", lambda: cache.commit(torch.full((3, 10), -1, dtype=torch.int32))),
        (r"path is \[2, 4\], expected 3 rows", lambda: cache.commit(torch.full((2, 4), -1, dtype=torch.int32))),
        ("path is torch.int64 on cpu, expected int32", lambda: cache.commit(torch.full((3, 4), -1))),
        ("path is torch.int32 on meta", lambda: cache.commit(torch.full((3, 4), -1, dtype=torch.int32, device="meta"))),
        ("row 3 is not one of the 3 rows", lambda: cache.reset([3])),
        ("row -1 is not one of the 3 rows", lambda: cache.snapshot([-1])),
        ("a snapshot of 2 rows for 3 rows", lambda: cache.restore(cache.snapshot([0, 1]))),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    other = tiny_model("olmo_hybrid")
    theirs = TreeCache(other.config, 3, 64, NODES)
    with pytest.raises(ValueError, match="state of the snapshot is"):
        theirs.restore(cache.snapshot())
    with pytest.raises(ValueError, match="a snapshot of 20 tokens in a cache of 16"):
        new_cache(model, 3, 16).restore(cache.snapshot())
    with pytest.raises(NotImplementedError, match="committed tokens are final"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match=r"use TreeCache\.fork"):
        cache.batch_repeat_interleave(2)
    assert_unchanged(cache, before)


def test_construction_refusals(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="max_nodes is 1, expected at least 2"):
        TreeCache(model.config, 1, 64, 1)
    with pytest.raises(ValueError, match="max_length is 8 with 9 nodes"):
        TreeCache(model.config, 1, 8, 9)
    with pytest.raises(ValueError, match="max_nodes is 257, expected 1 to 256"):
        TreeCache(model.config, 1, 1024, 257)


def test_layers_that_are_not_known_are_refused_by_name() -> None:
    mistral = transformers.MistralConfig(num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match="layer 0 in a model of type 'mistral' keeps what its configuration"):
        TreeCache(mistral, 1, 64, 8)
    config = tiny_model().config
    config.layer_types = ["linear_attention", "linear_attention", "sliding_attention", "full_attention"]
    with pytest.raises(NotImplementedError, match="layer 2 is of type 'sliding_attention', which qwen3_5_text does not"):
        TreeCache(config, 1, 64, 8)
    config.layer_types = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    config.number_of_conv_states = 3
    with pytest.raises(NotImplementedError, match="layer 1 of type 'linear_attention' keeps 3 convolution states"):
        TreeCache(config, 1, 64, 8)


def test_layer_shapes_stand_in_for_a_family() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2)
    linear = LinearShape(key_heads=1, value_heads=2, key_dim=4, value_dim=6, conv_channels=20, conv_kernel=3)
    softmax = SoftmaxShape(heads=2, key_dim=4, value_dim=4)
    cache = TreeCache(config, 2, 16, 4, layer_shapes=[linear, softmax])
    assert cache.state.shape == (1, 2, 2, 4, 6) and cache.keys.shape == (1, 2, 2, 16, 4)
    assert cache.encoding.window.shape == (2, 4, 2)
    wider = SoftmaxShape(heads=2, key_dim=8, value_dim=4)
    with pytest.raises(NotImplementedError, match="layers of one kind keep different shapes"):
        TreeCache(config, 2, 16, 4, layer_shapes=[linear, softmax, wider])


@torch.no_grad()
def test_an_eager_forward_raises_and_says_what_to_do(model: PreTrainedModel) -> None:
    cache = filled_cache(model)
    cache.set_tree(DraftTree(CHAIN))
    before = copies(cache)
    with pytest.raises(RuntimeError, match=r'torch\.compile\(model, backend="treewy", fullgraph=True\)'):
        model(**cache.inputs(torch.zeros(3, 7, dtype=torch.int64)))
    assert_unchanged(cache, before)
