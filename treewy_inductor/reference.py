"""Every op of the package in plain PyTorch: slow, obvious, and the specification of the kernels.

The letters are those of the math card (docs/math.md): ``S`` state, ``u`` pseudo-values, ``g`` path decay in log space,
``b`` beta, ``A`` ancestor-or-self. Nodes stand in the order the user gave them, parents before children.

    B batch   N nodes   HK key heads   HV value heads   K key dim   V value dim   C channels   W words of 64 nodes   L layers
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_ancestors(ancestors: Tensor) -> Tensor:
    """Return ``A[t, i]``, true where node i is node t or above it, from the bitset.

    Args:
        ancestors: ``[B, N, W]`` int64, bit ``i % 64`` of word ``i // 64`` of row t.

    Returns:
        ``[B, N, N]`` bool.
    """
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    words = ancestors[..., nodes // 64]
    return (words >> (nodes % 64)) & 1 != 0


def tree_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    ancestors: Tensor,
    order: Tensor,
    internal: Tensor,
    height: Tensor,
    scale: float,
    norm_eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve ``(I + G) U = R`` over a draft tree and read every node's output from it.

    Shapes and meaning are those of :mod:`treewy_inductor.ops`. ``order``, ``internal`` and ``height`` only help a kernel
    to leave leaves out of the solve, so they are not read here. Computes in float32, in float64 if the state is float64.

    What a node holds reaches its descendants and nobody else, not even as ``0 * NaN`` or ``0 * inf``: every sum over
    ancestors selects its terms before it multiplies.
    """
    work = torch.promote_types(state.dtype, torch.float32)
    N, groups = key.shape[1], value.shape[2] // key.shape[2]
    A = unpack_ancestors(ancestors)[:, None]  # [B, 1, N, N]
    node = A.diagonal(dim1=-2, dim2=-1)[..., None]  # [B, 1, N, 1], false at inert nodes
    q, k, v, log_a, b = (
        torch.where(node if x.dim() == 4 else node[..., 0], x.transpose(1, 2).to(work), 0)
        for x in (query, key, value, log_decay, beta)
    )
    k_scale = (k.square().sum(-1) + norm_eps).rsqrt() if norm_eps >= 0 else torch.ones_like(k[..., 0])
    q_scale = (q.square().sum(-1) + norm_eps).rsqrt() if norm_eps >= 0 else torch.ones_like(q[..., 0])
    q = (q * q_scale[..., None] * scale).repeat_interleave(groups, 1)
    k = (k * k_scale[..., None]).repeat_interleave(groups, 1)
    S = state.to(work)

    if log_decay.dim() == 3:
        g = torch.where(A, log_a[..., None, :], 0).sum(-1)  # [B, HV, N]
        D = (g[..., :, None] - g[..., None, :]).masked_fill(~A, -torch.inf).exp()
        KK, QK = D * (k @ k.mT), D * (q @ k.mT)
        into = g.exp()[..., None]
    else:
        g = torch.where(A[..., None], log_a[..., None, :, :], 0).sum(-2)  # [B, HV, N, K]
        D = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(~A[..., None], -torch.inf).exp()
        KK = (D * k[..., :, None, :] * k[..., None, :, :]).sum(-1)
        QK = (D * q[..., :, None, :] * k[..., None, :, :]).sum(-1)
        into = g.exp()
    G = torch.where(A, b[..., None] * KK, 0).tril(-1)
    QK = torch.where(A, QK, 0)
    R = b[..., None] * (v - (into * k) @ S)
    o = (into * q) @ S

    # Row t of (I + G) U = R needs rows above t only, since parents stand before children.
    u = torch.zeros_like(R)
    for t in range(N):
        above = torch.where(A[:, :, t, :t, None], u[:, :, :t], 0)
        u[:, :, t] = R[:, :, t] - (G[:, :, t, None, :t] @ above)[:, :, 0]
        o[:, :, t] += (QK[:, :, t, None, :t] @ above)[:, :, 0] + QK[:, :, t, t, None] * u[:, :, t]
    return (
        o.transpose(1, 2).to(out_dtype).contiguous(),
        u.transpose(1, 2).contiguous(),
        g.transpose(1, 2).contiguous(),
        torch.where(node[..., 0], k_scale, 0).transpose(1, 2).contiguous(),
    )


def literal_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    parents: Tensor,
    scale: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Walk the tree node by node, one full state a node: ``S_t = a_t (I - b_t k_t k_t^T) S_p(t) + b_t k_t v_t^T``.

    The second reference: it shares nothing with :func:`tree_gated_delta` but the inputs.

    Args:
        parents: ``[B, N]`` int, -1 at a root, -2 at an inert node; the others as in :func:`tree_gated_delta`.

    Returns:
        Outputs ``[B, N, HV, V]`` and states ``[B, N, HV, K, V]`` of all nodes, zero at inert nodes, in the state's dtype.
    """
    (B, N), HV = parents.shape, value.shape[2]
    groups = HV // key.shape[2]
    S_of = state.new_zeros(B, N, *state.shape[1:])
    o = state.new_zeros(B, N, HV, value.shape[3])
    for row in range(B):
        for t in range(N):
            p = int(parents[row, t])
            if p == -2:
                continue
            for h in range(HV):
                q, k = (x[row, t, h // groups].to(state.dtype) for x in (query, key))
                if norm_eps >= 0:
                    q, k = (x / (x.square().sum() + norm_eps).sqrt() for x in (q, k))
                v, b = value[row, t, h].to(state.dtype), beta[row, t, h].to(state.dtype)
                a = log_decay[row, t, h].to(state.dtype).exp()
                S = (state[row, h] if p < 0 else S_of[row, p, h]) * (a[:, None] if a.dim() else a)
                S = S + b * torch.outer(k, v - S.mT @ k)
                S_of[row, t, h] = S
                o[row, t, h] = S.mT @ (q * scale)
    return o, S_of


def tree_causal_conv1d(inputs: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor) -> Tensor:
    """Convolve each node with its own ancestors: ``y[t] = bias + sum over j of weight[K-1-j] x[ancestor j of t]``.

    Above the root the committed ``history`` is read: window -1 is its last column. Shapes as in :mod:`treewy_inductor.ops`.
    """
    C, N, K = inputs.shape[1], inputs.shape[2], weight.shape[1]
    itself = torch.arange(N, device=window.device, dtype=window.dtype).expand(window.shape[0], N)
    taps = torch.cat([window.flip(-1), itself[..., None]], -1)  # [B, N, K], oldest first as in the weight
    is_node = (window[..., 0] > -(2**30)) if K > 1 else torch.ones_like(itself, dtype=torch.bool)
    work = torch.promote_types(inputs.dtype, torch.float32)
    columns = torch.cat([history, inputs], -1)
    index = (taps.long() + history.shape[2]).clamp(min=0)  # [B, N, K]
    seen = columns.gather(2, index.reshape(index.shape[0], 1, N * K).expand(-1, C, -1)).unflatten(2, (N, K))
    y = (seen.to(work) * weight.to(work)[:, None]).sum(-1)
    if bias is not None:
        y = y + bias.to(work)[:, None]
    return torch.where(is_node[:, None], y, 0).to(inputs.dtype).transpose(1, 2).contiguous().transpose(1, 2)


def commit_state(
    state: Tensor, keys: Tensor, key_scale: Tensor, pseudo_values: Tensor, path_decay: Tensor, path: Tensor
) -> None:
    """Overwrite each state with the accepted node's: ``S_a = exp(g_a) S_0 + sum over the path of exp(g_a - g_i) k_i u_i^T``."""
    work = torch.promote_types(state.dtype, torch.float32)
    on_path = path >= 0  # [B, P]
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    nodes = path.clamp(min=0).long()
    last = (on_path.sum(1) - 1).clamp(min=0)
    groups = pseudo_values.shape[3] // keys.shape[3]
    for S, k, r, u, g in zip(state, keys, key_scale, pseudo_values, path_decay, strict=True):
        k_i = (k[rows, nodes].to(work) * r[rows, nodes][..., None].to(work)).repeat_interleave(groups, 2)
        u_i, g_i = u[rows, nodes].to(work), g[rows, nodes].to(work)  # [B, P, HV, V], [B, P, HV(, K)]
        g_a = g_i[rows[:, 0], last]  # [B, HV(, K)]
        steps = on_path[..., None] if g_i.dim() == 3 else on_path[..., None, None]
        weight = torch.where(steps, (g_a[:, None] - g_i).exp(), 0)
        if g_i.dim() == 3:
            weight, into = weight[..., None], g_a.exp()[..., None, None]
        else:
            into = g_a.exp()[..., None]
        k_i = torch.where(on_path[..., None, None], k_i, 0)
        u_i = torch.where(on_path[..., None, None], u_i, 0)
        new = into * S.to(work) + torch.einsum("bphk,bphv->bhkv", weight * k_i, u_i)
        S.copy_(torch.where(on_path.any(1)[:, None, None, None], new, S.to(work)))


def commit_conv(history: Tensor, inputs: Tensor, path: Tensor) -> None:
    """Move each row's convolution history along the accepted path: the last K of ``history`` then ``inputs[path]``."""
    K = history.shape[3]
    count = (path >= 0).sum(1)
    columns = torch.arange(K, device=path.device)[None] + count[:, None]  # of history followed by the path
    node = path.gather(1, (columns - K).clamp(min=0)).clamp(min=0).long()
    is_new = (columns >= K)[None, :, None]  # [1, B, 1, K]
    wide = (history.shape[0], -1, history.shape[2], -1)
    old = history.gather(3, columns.clamp(max=K - 1)[None, :, None].expand(wide))
    new = inputs.gather(3, node[None, :, None].expand(wide))
    history.copy_(torch.where(is_new, new.to(history.dtype), old))


def commit_keys_values(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move the accepted nodes' keys and values from ``length + node`` to ``length + step``, step = 0, 1, ... of the path."""
    steps = torch.arange(path.shape[1], device=path.device)[None]
    # A step beyond the path moves onto itself, so that one gather and one scatter serve all rows.
    source = lengths[:, None] + torch.where(path >= 0, path, steps)
    target = lengths[:, None] + steps
    for rows in (keys, values):
        last = rows.shape[3] - 1
        shape = (rows.shape[0], -1, rows.shape[2], -1, rows.shape[4])
        source_rows = source.clamp(max=last)[None, :, None, :, None].expand(shape)
        target_rows = target.clamp(max=last)[None, :, None, :, None].expand(shape)
        moved = rows.gather(3, source_rows)
        rows.scatter_(3, target_rows, moved)


def store(buffer: Tensor, value: Tensor) -> None:
    """Overwrite ``buffer`` with ``value``."""
    buffer.copy_(value)
