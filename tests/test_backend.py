"""The backend: what it leaves alone, what it passes on, what it caches, and what it says when it cannot go on."""

from __future__ import annotations

import contextlib
import gc
import textwrap
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code

from tests.recurrence_loops import LoopOverTokens
from tests.recurrence_near_misses import NEAR_MISSES
from tests.recurrences import WIDTH, TreeSlot
from tests.two_processes import words_of_two_processes
from treewy_inductor import backend, ops, records
from treewy_inductor.backend import TreePass, treewy
from treewy_inductor.encoding import TreeEncoding
from treewy_inductor.errors import UnprovenRecurrence
from treewy_inductor.tree import DraftTree

TREE = DraftTree.from_parents([-1, 0, 0, 1, 2])
OP_BY_OP = {"treewy.codegen": False}


class Seen(CustomGraphPass):  # type: ignore[misc]
    """A user's own pass, which counts its calls and the markers it met."""

    def __init__(self, known: Any = "seen") -> None:
        self.markers: list[int] = []
        self.known = known

    def __call__(self, graph: fx.Graph) -> None:
        self.markers.append(sum(node.target in ops.MARKERS for node in graph.nodes))

    def uuid(self) -> Any:
        return self.known


def _layer_and_slot(kind: type = LoopOverTokens) -> tuple[Any, TreeSlot]:
    layer = kind()
    state = torch.randn(1, layer.value_heads, layer.key_dim, layer.value_dim)
    return layer, TreeSlot(layer, state, TreeEncoding.of(TREE))


def _run(layer: Any, slot: TreeSlot, **options: Any) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(layer, backend=treewy, fullgraph=True, dynamic=False, **options)
        return step(torch.ones(1, len(TREE), WIDTH), slot)  # type: ignore[no-any-return]


@contextmanager
def _raises_unproven() -> Iterator[list[UnprovenRecurrence]]:
    found: list[UnprovenRecurrence] = []
    with pytest.raises(Exception) as raised:
        yield found
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, UnprovenRecurrence):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert error is not None, raised.value
    found.append(error)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.silu(x @ weight).cumsum(1)


class BackendTest(unittest.TestCase):
    def test_found_by_name_once_installed_and_named_in_the_package(self) -> None:
        from pathlib import Path

        import tomllib

        project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
        self.assertEqual(project["entry-points"]["torch_dynamo_backends"]["treewy"], "treewy_inductor.backend:treewy")

    def test_graph_without_markers_compiles_to_the_code_of_stock_inductor(self) -> None:
        args = torch.randn(3, 5), torch.randn(5, 7)
        codes = []
        for name in ("inductor", treewy):
            torch._dynamo.reset()
            with torch.no_grad(), fresh_cache():
                _, (code,) = run_and_get_code(torch.compile(_plain, backend=name), *args)
            # The one thing that may differ is the counter in the cache key's comment.
            codes.append(code.split("async_compile", 1)[1])
        self.assertEqual(*codes)

    def test_training_graph_gives_the_gradients_of_stock_inductor(self) -> None:
        grads = []
        for name in ("inductor", treewy):
            torch._dynamo.reset()
            torch.manual_seed(0)
            weight = torch.randn(5, 7, requires_grad=True)
            torch.compile(_plain, backend=name)(torch.randn(3, 5), weight).square().sum().backward()
            grads.append(weight.grad)
        torch.testing.assert_close(*grads, rtol=0, atol=0)

    def test_a_tree_is_compiled_for_inference_where_gradients_are_recorded(self) -> None:
        class WithoutGradientsInPart(LoopOverTokens):
            def recur(self, q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
                # As rotary embeddings have it; behind it, gradients are recorded again.
                with torch.no_grad():
                    q = 2 * q
                return super().recur(q, *rest)

        layer, slot = _layer_and_slot(WithoutGradientsInPart)
        expected = _run(layer, slot)
        kept = slot.pseudo_values.clone()
        slot.pseudo_values.zero_()
        torch._dynamo.reset()
        found = torch.compile(layer, backend=treewy, fullgraph=True)(torch.ones(1, len(TREE), WIDTH), slot)
        self.assertFalse(found.requires_grad or slot.pseudo_values.requires_grad)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(slot.pseudo_values, kept, rtol=0, atol=0)

    def test_a_refusal_under_dynamic_shapes_asks_for_static_ones(self) -> None:
        layer, slot = _layer_and_slot(NEAR_MISSES[0])
        for dynamic in (True, False):
            torch._dynamo.reset()
            with _raises_unproven() as found, torch.no_grad():
                torch.compile(layer, backend=treewy, fullgraph=True, dynamic=dynamic)(torch.ones(1, len(TREE), WIDTH), slot)
            self.assertEqual("dynamic=False" in str(found[0]), dynamic)

    def test_refusal_names_layer_node_line_and_code(self) -> None:
        layer, slot = _layer_and_slot(NEAR_MISSES[0])
        with _raises_unproven() as found:
            _run(layer, slot, options=OP_BY_OP)
        (refusal,) = found[0].refusals
        for part in (refusal.node, refusal.source, refusal.code, "layer 0", "recurrence"):
            self.assertIn(part, str(found[0]))
        self.assertTrue(refusal.code)

    def test_inductor_and_eager_say_what_to_do(self) -> None:
        layer, slot = _layer_and_slot()
        hidden = torch.ones(1, len(TREE), WIDTH)
        torch._dynamo.reset()
        with torch.no_grad():
            for run in (layer, torch.compile(layer, backend="inductor", fullgraph=True)):
                with pytest.raises(RuntimeError, match=r'backend="treewy", fullgraph=True'):
                    run(hidden, slot)

    def test_modes_and_inductor_options_are_passed_on(self) -> None:
        _, inductor = backend.split_options("max-autotune", {"treewy.check": True, "epilogue-fusion": False})
        self.assertTrue(inductor["max_autotune"] and inductor["triton.cudagraphs"])
        self.assertEqual(inductor["epilogue_fusion"], False)
        for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"):
            torch._dynamo.reset()
            with torch.no_grad():
                compiled = torch.compile(lambda x: x + 1, backend=treewy, mode=mode)
                torch.testing.assert_close(compiled(torch.ones(3)), torch.full((3,), 2.0))

    def test_option_patches_reach_the_compile(self) -> None:
        seen = []

        class Look(Seen):
            def __call__(self, graph: fx.Graph) -> None:
                seen.append(config.max_autotune_gemm)

        torch._dynamo.reset()
        with torch.no_grad():
            options = {"max_autotune_gemm": True, "joint_custom_pre_pass": Look(None)}
            torch.compile(lambda x: x + 2, backend=treewy, options=options)(torch.ones(3))
        self.assertEqual(seen, [True])

    def test_unknown_options_are_named(self) -> None:
        for options, known in (({"treewy.speed": True}, "treewy.codegen"), ({"max_autotun": True}, "max_autotun")):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=known):
                torch.compile(lambda x: x + 3, backend=treewy, options=options)(torch.ones(3))

    def test_users_pass_runs_first_and_sees_the_markers(self) -> None:
        layer, slot = _layer_and_slot()
        seen = Seen()
        _run(layer, slot, options=OP_BY_OP | {"joint_custom_pre_pass": seen})
        self.assertEqual(seen.markers, [2])

    def test_configured_pass_is_chained_too(self) -> None:
        layer, slot = _layer_and_slot()
        seen = Seen()
        with config.patch(joint_custom_pre_pass=seen):
            _run(layer, slot, options=OP_BY_OP)
        self.assertEqual(seen.markers, [2])

    def test_key_depends_on_options_and_on_the_users_pass(self) -> None:
        def key(previous: Any = None, **own: bool) -> Any:
            return TreePass(backend.OWN_OPTIONS | own, previous).uuid()

        keys = [key(), key(check=True), key(Seen("a")), key(Seen("b"))]
        self.assertEqual(len(set(map(repr, keys))), 4)
        self.assertEqual(key(), key())
        self.assertIsNone(key(Seen(None)))
        self.assertIsNone(key(lambda graph: None))

    def test_key_covers_every_source_of_the_package(self) -> None:
        names = {path.name for path in backend._sources()}
        for name in ("ops.py", "certify.py", "tree_gated_delta_kernel.py", "cache_layers.py", "backend.py"):
            self.assertIn(name, names)

    def test_op_by_op_equals_generated_code(self) -> None:
        layer, slot = _layer_and_slot()
        torch.testing.assert_close(_run(layer, slot), _run(layer, slot, options=OP_BY_OP), rtol=1e-5, atol=1e-6)

    def test_collecting_bypasses_caches(self) -> None:
        layer, slot = _layer_and_slot()
        for _ in range(2):
            with records.collect() as found:
                _run(layer, slot, options=OP_BY_OP)
            self.assertEqual([type(record) for record in found], [records.Proven])

    def test_garbage_waits_while_a_tree_is_compiled_and_after_a_refusal_too_is_collected_again(self) -> None:
        collecting: list[bool] = []

        def note(graph: fx.Graph) -> None:
            collecting.append(gc.isenabled())

        for layer, slot in (_layer_and_slot(), _layer_and_slot(NEAR_MISSES[0])):
            with contextlib.suppress(Exception):
                _run(layer, slot, options=OP_BY_OP | {"joint_custom_pre_pass": note})
            self.assertTrue(gc.isenabled())
        torch._dynamo.reset()
        options = {"joint_custom_pre_pass": note, "force_disable_caches": True}
        with torch.no_grad():
            torch.compile(_plain, backend=treewy, options=options)(torch.randn(3, 5), torch.randn(5, 7))
        self.assertEqual(collecting, [False, False, True])

    def test_reset_is_there_for_dynamo(self) -> None:
        treewy.reset()


WARM = textwrap.dedent(
    """
    import torch
    from torch._dynamo.utils import counters
    from tests.test_backend import _layer_and_slot, _run
    import treewy_inductor.passes.recognize_gated_delta as recognition
    torch.manual_seed(0)
    proofs = []
    prove = recognition._prove
    recognition._prove = lambda *args: proofs.append(1) or prove(*args)
    out = _run(*_layer_and_slot())
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(len(proofs), int(hits > 0), float(out.double().sum()))
    """
)


def test_second_process_compiles_warm(tmp_path: Any) -> None:
    """Both caches on disk serve it, so nothing is proven again, and the result is the same."""
    (proofs, hits, total), (warm_proofs, warm_hits, warm_total) = words_of_two_processes(WARM, tmp_path)
    assert (proofs, hits) == ("1", "0")
    assert (warm_proofs, warm_hits) == ("0", "1")
    assert total == warm_total
