"""Lower treewy::tree_gated_delta to two kernels: the tree's operators a head, then the state streamed once.

A layout that the kernels cannot address is copied into one that they can, never refused. A decay of its own for each channel
(log_decay [B, N, HV, K]) and float64 states are computed by the reference's own operations.
"""

from __future__ import annotations

from typing import Any

import torch

from treewy_inductor.lowerings.configurations import OperatorsTile, VerifyTile, operators_tile, verify_tile
from treewy_inductor.lowerings.launch import Launch, Launcher, Strided, block, precisions, strides
from treewy_inductor.lowerings.tree_gated_delta_kernel import tree_gated_delta_kernel
from treewy_inductor.lowerings.tree_operators_kernel import tree_operators_kernel


def launch_tree_gated_delta(
    launcher: Launcher,
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    beta: Any,
    state: Any,
    ancestors: Any,
    order: Any,
    internal: Any,
    height: Any,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
    *,
    trunk: tuple[Any, Any, Any, Any, Any] | None = None,
    verify: VerifyTile | None = None,
    operators: OperatorsTile | None = None,
) -> tuple[Strided, Strided, Strided, Strided]:
    """Run both kernels and return output, pseudo-values, path decays and key scales, as :mod:`treewy_inductor.ops` says.

    Args:
        trunk: keys, scales, values, decays and length of the trunk that the tree hangs from: :mod:`treewy_inductor.ops_replay`.
        verify, operators: tiles to use in place of those of the table, for measuring.
    """
    q, k, v = (launcher.strided(x, contiguous=[3]) for x in (query, key, value))
    S = launcher.strided(state, contiguous=[2, 3])
    log_a, b = launcher.strided(log_decay), launcher.strided(beta)
    trees = [launcher.strided(x) for x in (ancestors, order, internal, height)]
    B, N, HK, K = k.shape
    HV, V = v.shape[2:]
    block_n = block(N, 16)
    precision, solve_precision = precisions([q, k])
    trunks = [launcher.strided(x) for x in trunk] if trunk is not None else [q] * 5
    slots = trunks[0].shape[1] if trunk is not None else 0
    verify = verify or verify_tile(block_n, K, V, precision == "bf16x3")
    operators = operators or operators_tile(block_n, K, B * HK)

    work = launcher.empty((B, HV, block_n // 16, 2, 16, block_n), torch.float32, like=k)
    factors = launcher.empty((B, HV, 4, block_n), torch.float32, like=k)
    g = launcher.empty((B, N, HV), torch.float32, like=k)
    k_scale = launcher.empty((B, N, HK), torch.float32, like=k)
    o = launcher.empty((B, N, HV, V), out_dtype, like=k)
    u = launcher.empty((B, N, HV, V), torch.float32, like=k)
    launcher.launch(
        Launch(
            tree_operators_kernel,
            B * HK * operators.lanes,
            dict(zip(("query", "key", "log_decay", "beta"), (q, k, log_a, b), strict=True))
            | dict(zip(("ancestors", "order", "internal", "height"), trees, strict=True))
            | {"operators": work, "factors": factors, "path_decay": g, "key_scale": k_scale},
            strides("query", q, "bnh")
            | strides("key", k, "bnh")
            | strides("log_decay", log_a, "bnh")
            | strides("beta", b, "bnh")
            | {
                "N": N,
                "SCALE": scale,
                "NORM_EPS": norm_eps,
                "HK": HK,
                "GROUPS": HV // HK,
                "K": K,
                "W": trees[0].shape[2],
                "LANES": operators.lanes,
                "BLOCK_N": block_n,
                "BLOCK_K": operators.block_k,
                "COLUMNS": operators.columns,
                "PRECISION": precision,
                "SOLVE_PRECISION": solve_precision,
            },
            operators.warps,
        )
    )
    launcher.launch(
        Launch(
            tree_gated_delta_kernel,
            B * HV * -(-V // verify.block_v),
            {"query": q, "key": k, "value": v, "state": S, "order": trees[1], "internal": trees[2]}
            | {f"trunk_{name}": x for name, x in zip(("keys", "scale", "values", "decay", "length"), trunks, strict=True)}
            | {"operators": work, "factors": factors, "output": o, "pseudo_values": u},
            strides("query", q, "bnh")
            | strides("key", k, "bnh")
            | strides("value", v, "bnh")
            | strides("state", S, "bhkv")
            | {
                "N": N,
                "HK": HK,
                "GROUPS": HV // HK,
                "K": K,
                "V": V,
                "T": slots,
                "BLOCK_T": block(slots, 16),
                "BLOCK_N": block_n,
                "BLOCK_V": verify.block_v,
                "BLOCK_K": verify.block_k,
                "STAGES": verify.stages,
                "PRECISION": precision,
                "SOLVE_PRECISION": "bf16x3" if precision == "bf16x3" else solve_precision,
            },
            verify.warps,
            verify.stages,
        )
    )
    return o, u, g, k_scale
