"""Let Dynamo trace through flash-linear-attention, which transformers calls wherever it is installed.

fla's entry points are closed to Dynamo, so a model that calls them cannot be captured whole. While tracing they are replaced by
the same rule in plain PyTorch, which the passes prove and rewrite like any other. Eager calls, such as a prompt's, still run
fla's kernels. A traced graph with an ordinary cache runs the plain rule as well.

    B batch   N tokens   HK key heads   HV value heads   K key dim   V value dim
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

RULES = {"fla.ops.gated_delta_rule": "chunk_gated_delta_rule", "fla.ops.kda": "chunk_kda"}


@functools.cache
def trace_through_fla() -> bool:
    """Replace fla's rules while Dynamo traces, once a process; return whether there were any."""
    if importlib.util.find_spec("fla") is None:
        return False
    replaced = 0
    for module, name in RULES.items():
        try:
            rule = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            # transformers does not call what it cannot import either, but its own rule.
            log.info("%s.%s of flash-linear-attention is not used: %s", module, name, error)
            continue
        torch._dynamo.substitute_in_graph(rule, skip_signature_check=True)(plain_rule)
        replaced += 1
    return replaced > 0


def plain_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule over all tokens at once, by one triangular solve.

    Args:
        q, k: ``[B, N, HK, K]``.
        v: ``[B, N, HV, V]``.
        g: ``[B, N, HV]`` or ``[B, N, HV, K]``, log decays.
        beta: ``[B, N, HV]``.
        initial_state: ``[B, HV, K, V]``, zero by default.
        others: fla's further options, all of which must be off.

    Returns:
        Outputs ``[B, N, HV, V]`` in the dtype of v, and the final state in float32 if it is asked for.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}={value!r} of fla's rule cannot be verified on a tree: call the model without it")
    dtype, groups = v.dtype, v.shape[2] // q.shape[2]
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (q, k))
    S = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if initial_state is None else initial_state.float()

    later = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=k.device).triu(1)
    if g.dim() == 3:
        g = g.cumsum(2)
        D = (g[..., :, None] - g[..., None, :]).masked_fill(later, -torch.inf).exp()
        KK, QK, g = D * (k @ k.mT), D * (q @ k.mT), g[..., None]
    else:
        g = g.cumsum(2)
        D = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
        KK, QK = ((D * x[..., :, None, :] * k[..., None, :, :]).sum(-1) for x in (k, q))
    R = beta[..., None] * (v - (k * g.exp()) @ S)
    u = torch.linalg.solve_triangular(beta[..., None] * KK, R, upper=False, unitriangular=True)
    o = (q * g.exp()) @ S + QK @ u
    last = g[:, :, -1:]
    end = last.transpose(-1, -2).exp() * S + (k * (last - g).exp()).mT @ u
    return o.transpose(1, 2).to(dtype), end if output_final_state else None
