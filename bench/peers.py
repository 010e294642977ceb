"""How other projects verify the same tree: full states a node, or each path as a sequence of its own.

    snapshots   every node's state is written: our own kernel of `store_all`, SGLang's, and vLLM's, which takes chains alone
    paths       nothing is kept: fla-core's fused recurrent rule over every path from the root to a leaf, each with its own
                copy of the state, made beforehand and not timed

Each is checked against float64, outputs and states, before it is timed; one that is wrong has errors and no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.graph_timing import time_calls
from bench.kernel_cases import Shape, arguments, copies, relative_error
from bench.peer_modules import SGLANG, VLLM, find_fla_rule, find_rule
from treewy_inductor import reference_store_all
from treewy_inductor.lowerings.launch import EAGER
from treewy_inductor.lowerings.tree_gated_delta_snapshots import launch_tree_gated_delta_snapshots
from treewy_inductor.tree import DraftTree

# Of outputs, stored in bfloat16, and of states, by sums in float32.
OUTPUT_BOUND, STATE_BOUND = 3e-3, 1e-5
OUR_OWN = "store_all"


@dataclass
class Peer:
    """One kernel on one case.

    Attributes:
        kind: "snapshots" or "paths".
        call: runs it and returns its output in its own layout.
        outputs: that output as ``[B, N, HV, V]``.
        states: ``[B, N, HV, K, V]`` that it fills, None if it keeps no states.
    """

    name: str
    kind: str
    call: Callable[[], Tensor]
    outputs: Callable[[Tensor], Tensor]
    states: Tensor | None


def raw_gates(log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``a, b`` with ``log_decay = -softplus(a)`` and ``beta = sigmoid(b)``: what serving engines' kernels read."""
    return torch.log(torch.expm1(-log_decay.float())), torch.logit(beta.float())


def is_chain(parents: list[int]) -> bool:
    return parents == [*range(-1, len(parents) - 1)]


def plan_our_snapshots(case: tuple, parents: list[int]) -> Peer:
    query, key, value, log_decay, beta, state = case[:6]
    B, N = log_decay.shape[:2]
    links = torch.tensor(parents, dtype=torch.int32, device=key.device).expand(B, -1).contiguous()
    # One block more than nodes holds the committed state, so that a run finds it again.
    blocks = state.new_empty(B, N + 1, state.shape[1], *state.transpose(2, 3).shape[2:]).transpose(3, 4)
    blocks[:, N] = state
    accepted = torch.full((B,), N, dtype=torch.int32, device=key.device)
    given = query, key, value, log_decay, beta, links, accepted, blocks, case[10], case[11], case[12]
    return Peer(
        OUR_OWN, "snapshots", lambda: launch_tree_gated_delta_snapshots(EAGER, *given).handle, lambda o: o, blocks[:, :N]
    )


def plan_sglang(case: tuple, parents: list[int]) -> Peer | None:
    """As SGLang's ``target_verify`` calls it: all rows in one sequence of sequences, states in a pool of slots."""
    rule = find_rule(SGLANG)
    if rule is None:
        return None
    query, key, value, log_decay, beta, state = case[:6]
    B, N, HV = log_decay.shape
    K, V = state.shape[2:]
    device = key.device
    a, b = raw_gates(log_decay, beta)
    rows = torch.arange(B, dtype=torch.int32, device=device)
    snapshots = state.new_empty(B, N, HV, V, K)
    links = torch.tensor([max(p, 0) for p in parents], dtype=torch.int32, device=device).expand(B, -1).contiguous()
    given: dict[str, Any] = {
        "A_log": torch.zeros(HV, device=device),
        "dt_bias": torch.zeros(HV, device=device),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        **{name: x.flatten(0, 1)[None] for name, x in (("q", query), ("k", key), ("v", value))},
        **{name: x.flatten(0, 1) for name, x in (("a", a), ("b", b))},
        "initial_state_source": state.transpose(2, 3),
        "initial_state_indices": rows,
        "cu_seqlens": torch.arange(0, B * N + 1, N, dtype=torch.int32, device=device),
        "scale": case[10],
        "use_qk_l2norm_in_kernel": True,
        "disable_state_update": True,
        "intermediate_states_buffer": snapshots,
        "intermediate_state_indices": rows,
        "cache_steps": N,
        # A chain needs no parents and keeps its state in registers.
        "retrieve_parent_token": None if is_chain(parents) else links,
    }
    return Peer("SGLang", "snapshots", lambda: rule(**given), lambda o: o.view(B, N, HV, V), snapshots.transpose(3, 4))


def plan_vllm(case: tuple, parents: list[int]) -> Peer | None:
    """As vLLM's speculative decoding calls it: the states of a row in blocks that a table names. It has no trees."""
    rule = find_rule(VLLM) if is_chain(parents) else None
    if rule is None:
        return None
    query, key, value, log_decay, beta, state = case[:6]
    B, N, HV = log_decay.shape
    K, V = state.shape[2:]
    device = key.device
    a, b = raw_gates(log_decay, beta)
    # Block 0 means none. The last block of a row holds the committed state, so that a run finds it again.
    table = 1 + torch.arange(B * (N + 1), dtype=torch.int32, device=device).view(B, N + 1)
    blocks = state.new_empty(1 + B * (N + 1), HV, V, K)
    blocks[table[:, N].long()] = state.transpose(2, 3)
    given: dict[str, Any] = {
        "A_log": torch.zeros(HV, device=device),
        "dt_bias": torch.zeros(HV, device=device),
        **{name: x.flatten(0, 1)[None].contiguous() for name, x in (("q", query), ("k", key), ("v", value))},
        **{name: x.flatten(0, 1) for name, x in (("a", a), ("b", b))},
        "scale": case[10],
        "initial_state": blocks,
        "inplace_final_state": True,
        "cu_seqlens": torch.arange(0, B * N + 1, N, dtype=torch.int32, device=device),
        "ssm_state_indices": table,
        "num_accepted_tokens": torch.full((B,), N + 1, dtype=torch.int32, device=device),
        "use_qk_l2norm_in_kernel": True,
    }
    states = blocks[1:].view(B, N + 1, HV, V, K)[:, :N].transpose(3, 4)
    return Peer("vLLM", "snapshots", lambda: rule(**given)[0], lambda o: o.view(B, N, HV, V), states)


def plan_fla(case: tuple, parents: list[int]) -> Peer | None:
    """Every path to a leaf as a sequence; paths of one length, as :meth:`DraftTree.from_widths` makes them."""
    rule = find_fla_rule()
    if rule is None:
        return None
    tree = DraftTree.from_parents(parents)
    paths = [tree.path_to(leaf) for leaf in range(len(tree)) if leaf not in parents]
    device = case[0].device
    B, P = case[0].shape[0], len(paths)
    nodes = torch.tensor(paths, device=device)
    found = {node: (p, t) for p, path in enumerate(paths) for t, node in enumerate(path)}
    path_of, place_of = (torch.tensor([found[node][i] for node in range(len(tree))], device=device) for i in (0, 1))
    q, k, v, g, beta = (x[:, nodes].flatten(0, 1).contiguous() for x in case[:5])
    state = case[5].transpose(2, 3)
    states = state[:, None].expand(B, P, *state.shape[1:]).flatten(0, 1).contiguous()

    def call() -> Tensor:
        output: Tensor = rule(
            *(q, k, v),
            g=g,
            beta=beta,
            scale=case[10],
            initial_state=states,
            use_qk_l2norm_in_kernel=True,
            state_v_first=True,
        )[0]
        return output

    return Peer("fla-core", "paths", call, lambda o: o.unflatten(0, (B, P))[:, path_of, place_of], None)


PLANS = (plan_our_snapshots, plan_sglang, plan_vllm, plan_fla)


def errors_of(peer: Peer, case: tuple, parents: list[int], rows: int = 8) -> tuple[float, float]:
    """Return the relative errors of outputs and of states (0 if there are none), the worst of each ``rows`` batch rows."""
    if peer.states is not None:
        peer.states.fill_(torch.nan)
    outputs = peer.outputs(peer.call())
    worst = [0.0, 0.0]
    for start in range(0, outputs.shape[0], rows):
        part = slice(start, start + rows)
        exact_output, exact_states = float64_snapshots(case, parents, part)
        found = [relative_error(outputs[part], exact_output)]
        found += [relative_error(peer.states[part], exact_states)] if peer.states is not None else [0.0]
        # A NaN stays: no comparison with it holds.
        worst = [b if not b <= a else a for a, b in zip(worst, found, strict=True)]
    return worst[0], worst[1]


def float64_snapshots(case: tuple, parents: list[int], part: slice) -> tuple[Tensor, Tensor]:
    """Return outputs ``[b, N, HV, V]`` and states ``[b, N, HV, K, V]`` of some rows by the literal recurrence in float64."""
    wide = [x[part].double() for x in case[:5]]
    state = case[5][part].double()
    b, N = wide[3].shape[:2]
    links = torch.tensor(parents, dtype=torch.int32, device=state.device).expand(b, -1)
    states = state[:, None].repeat(1, N, 1, 1, 1)
    accepted = torch.zeros(b, dtype=torch.int32, device=state.device)
    output = reference_store_all.tree_gated_delta_snapshots(*wide, links, accepted, states, case[10], case[11], torch.float64)
    return output, states


def measure_peers(parents: list[int], batch: int, shape: Shape) -> dict[str, Any]:
    """Return for each peer whose states fit the memory its kind, errors, and microseconds if it is right."""
    leaves = sum(node not in parents for node in range(len(parents)))
    found: dict[str, Any] = {}
    for plan in PLANS:
        states = 1 + (leaves if plan is plan_fla else len(parents))
        count = copies(batch, shape, states)
        if count * batch * states * shape.state_bytes > 0.6 * torch.cuda.mem_get_info()[0]:
            continue
        cases = [arguments(parents, batch, shape, seed) for seed in range(count)]
        peers = [peer for case in cases if (peer := plan(case, parents)) is not None]
        if not peers:
            continue
        errors = errors_of(peers[0], cases[0], parents)
        row: dict[str, Any] = {"kind": peers[0].kind, "o_err": errors[0], "state_err": errors[1]}
        row["right"] = errors[0] <= OUTPUT_BOUND and errors[1] <= STATE_BOUND
        if row["right"]:
            row["us"] = time_calls([peer.call for peer in peers], replays=5).median
        found[peers[0].name] = row
        del peers, cases
        torch.cuda.empty_cache()
    return found


def best_snapshots(peers: dict[str, Any]) -> str | None:
    """Return the name of the fastest right one that writes a state a node."""
    right = [name for name, row in peers.items() if row["kind"] == "snapshots" and row["right"]]
    return min(right, key=lambda name: peers[name]["us"], default=None)
