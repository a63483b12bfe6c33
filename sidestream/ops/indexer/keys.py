"""Index keys: one a token, or one a pool of tokens with the unfinished pool kept raw in a ring."""

from __future__ import annotations

import torch

from sidestream.core.ring import RingPlan
from sidestream.ops.norm.torch_impl import layer_norm
from sidestream.ops.rope.torch_impl import apply_rope


def rotate_leading(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, *, interleaved: bool
) -> torch.Tensor:
    """``apply_rope`` of the first dimensions of x [T, H, D] or [T, D], as many as there are angles for; the others as
    they are. ``cos`` and ``sin`` [T, at most D / 2] fp32, or None."""
    if cos is None or sin is None:
        return x
    width = 2 * cos.shape[-1]
    rotated = apply_rope(x[..., :width], cos, sin, interleaved=interleaved)
    return torch.cat([rotated, x[..., width:]], dim=-1)


def write_keys(keys_flat: torch.Tensor, rows: torch.Tensor, k: torch.Tensor) -> None:
    """Store keys.

    Args:
        keys_flat: [N, D], written at ``rows`` only.
        rows: [M] int64; a row named twice (scratch, by padding) keeps one of its keys.
        k: [M, D], converted to the pool's dtype.
    """
    if rows.shape[0]:
        keys_flat.index_copy_(0, rows, k.to(keys_flat.dtype))


def write_normed_keys(
    keys_flat: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """``write_keys`` of ``k`` after layer norm and a rotation of its first dimensions, each rounded to its dtype.

    Args:
        norm_weight, norm_bias: [D].
        cos, sin: [M, at most D / 2] fp32, None without rotation; ``interleaved`` as for ``rope.apply_rope``.
    """
    k = layer_norm(k, norm_weight, norm_bias, eps=norm_eps)
    write_keys(keys_flat, rows, rotate_leading(k, cos, sin, interleaved=interleaved))


def pool_keys(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    pools: torch.Tensor,
) -> torch.Tensor:
    """Keys of the pools that this step completes; then keeps the step's last tokens for the pools it does not.

    A pool's key is the sum of its tokens' keys, weighted for each channel by a softmax over its tokens of gate score
    plus ``ape`` (``get_pooled_states`` of the hub model ``glm5_next``), in fp32. Pools are counted from position 0,
    so a completed one never reaches before the start of its sequence, and what a slot held before is never read.

    Args:
        k, gate: [T, D] of the step's true tokens, any float dtype.
        ape: [kpool, D] bias of the place in the pool.
        tail: [rows, 2 * D] ring of raw (key, gate score); read at ``plan.carry_rows``, then written at
            ``plan.keep_rows``.
        plan: windows of ``kpool`` tokens.
        pools: [C] int64 token rows that are the last of a pool.
    Returns:
        [C, D] of k's dtype.
    """
    assert plan.window == ape.shape[0], f"windows of {plan.window} tokens for pools of {ape.shape[0]}"
    dim, kpool, complete = k.shape[1], ape.shape[0], pools.shape[0]
    step = torch.cat([k, gate], dim=1)
    if complete:
        carried = tail.index_select(0, plan.carry_rows).to(step.dtype)
        # No complete pool reaches row 0 of the plan's source, so any finite row stands in for it.
        source = torch.cat([step[:1], step, carried])
        members = plan.window_rows.index_select(0, pools).view(-1)
        windows = source.index_select(0, members).view(complete, kpool, 2 * dim).float()
        probabilities = torch.softmax(windows[:, :, dim:] + ape, dim=1)
        pooled = (probabilities * windows[:, :, :dim]).sum(dim=1).to(k.dtype)
    else:
        pooled = k.new_empty(0, dim)
    kept = step if plan.keep_tokens.shape[0] == step.shape[0] else step.index_select(0, plan.keep_tokens)
    tail.index_copy_(0, plan.keep_rows, kept.to(tail.dtype))
    return pooled


def write_pools(
    k: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    *,
    tail: torch.Tensor,
    plan: RingPlan,
    keys_flat: torch.Tensor,
    entries: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 0.0,
) -> None:
    """Norm, ``pool_keys`` and ``write_keys`` of a uniform decode: row r is the new token of a sequence of its own.

    Args:
        k, gate, ape: as for ``pool_keys``, ``k`` before its norm.
        norm_weight, norm_bias: [D]; None for keys that are normalised already.
        tail: as for ``pool_keys``; no two rows but padding ones share a slot.
        plan: of one token a sequence: ``carry_rows`` [R * (kpool - 1)], ``keep_rows`` [R].
        keys_flat: [N, D], written at ``entries`` only.
        entries: [R] int64 where each row's pool is stored; a scratch entry for rows that complete none, whose key
            means nothing.
    """
    rows = torch.arange(k.shape[0], device=k.device)
    if norm_weight is not None and norm_bias is not None:
        k = layer_norm(k, norm_weight, norm_bias, eps=norm_eps)
    write_keys(keys_flat, entries, pool_keys(k, gate, ape, tail=tail, plan=plan, pools=rows))
