"""On a GPU: encoding, mask and acceptance agree with the CPU, never wait, and replay from one CUDA graph for every tree."""

from __future__ import annotations

import pytest
import torch

from tests.trees import batch_of, random_parents
from treewy_inductor.acceptance import greedy_accept
from treewy_inductor.encoding import TreeEncoding, attention_mask

pytestmark = pytest.mark.gpu
VOCAB, MAX_LENGTH = 3, 300


@pytest.mark.parametrize("nodes", [1, 5, 64, 65, 256])
def test_compiled_code_on_the_device_agrees_with_the_cpu(nodes: int) -> None:
    rows = 3
    encoding = TreeEncoding(rows, nodes, device="cuda")
    assert encoding.compiled
    mask = torch.zeros(rows, 1, nodes, MAX_LENGTH, dtype=torch.bool, device="cuda")
    lengths = torch.tensor([0, 7, 44])
    for seed in range(4):
        parents = batch_of(*(random_parents(nodes, 10 * seed + row, inert=0.1 * row) for row in range(rows)))
        logits, tokens = torch.randn(rows, nodes, VOCAB), torch.randint(VOCAB, (rows, nodes))
        on_cpu = TreeEncoding(rows, nodes).fill(parents)
        encoding.fill(parents.cuda()).fill_mask(mask, lengths.cuda())
        for name, tensor in encoding.tensors().items():
            assert torch.equal(tensor.cpu(), on_cpu.tensors()[name]), name
        assert torch.equal(mask.cpu(), attention_mask(lengths, on_cpu.ancestors, MAX_LENGTH))
        accepted = greedy_accept(logits.cuda(), tokens.cuda(), encoding)
        for a, b in zip(accepted, greedy_accept(logits, tokens, on_cpu), strict=True):
            assert torch.equal(a.cpu(), b)


def test_one_graph_replays_every_tree_and_never_waits() -> None:
    rows, nodes = 2, 70
    encoding = TreeEncoding(rows, nodes, device="cuda")
    mask = torch.zeros(rows, 1, nodes, MAX_LENGTH, dtype=torch.bool, device="cuda")
    parents = torch.full((rows, nodes), -2, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([5, 100], device="cuda")
    logits = torch.randn(rows, nodes, VOCAB, device="cuda")
    tokens = torch.randint(VOCAB, (rows, nodes), device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        encoding.fill(parents).fill_mask(mask, lengths)
        return greedy_accept(logits, tokens, encoding)

    step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accepted = step()
    for seed in range(5):
        trees = batch_of(random_parents(nodes, seed, inert=0.1), random_parents(nodes, seed + 50))
        parents.copy_(trees)
        graph.replay()
        on_cpu = TreeEncoding(rows, nodes).fill(trees)
        for name, tensor in encoding.tensors().items():
            assert torch.equal(tensor.cpu(), on_cpu.tensors()[name]), name
        assert torch.equal(mask.cpu(), attention_mask(lengths.cpu(), on_cpu.ancestors, MAX_LENGTH))
        for a, b in zip(accepted, greedy_accept(logits.cpu(), tokens.cpu(), on_cpu), strict=True):
            assert torch.equal(a.cpu(), b)
