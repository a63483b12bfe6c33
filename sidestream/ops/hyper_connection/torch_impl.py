"""Hyper-connections in few calls: twelve sublayers run these in every step of a tiny model, so calls are the cost.

The Sinkhorn iteration works on [S * S, T], so that it runs along tokens, with a last row of ones: one product with a
constant matrix gives every entry its row's (or column's) sum plus ``eps``, and one division normalises. Few tokens use
numpy, whose calls cost a third of torch's; many use torch, which has threads. The two differ by rounding only.

The sublayer's input norm is part of the collapse, for the RMS norm of x is the layer norm of [x, -x], whose mean is
zero and whose variance is x's mean square: the product that collapses gives -x for next to nothing, and the layer norm
is one call where an RMS norm takes five.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from sidestream.ops.constants import constant
from sidestream.ops.moe.expert_sum import ExpertSum, settled
from sidestream.ops.norm.torch_impl import inverse_rms, rms_norm

NUMPY_MAX_TOKENS = 128
"""Above it (on a CPU) torch's Sinkhorn loop is faster than numpy's."""


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the residual streams into a sublayer's normalised input, and say how its output will be spread.

    Formula: ``Glm5NextTextHyperConnection`` (manifold-constrained hyper-connections, Xie et al. 2026, section 2.2),
    then the RMS norm that follows it; everything before the norm is fp32 whatever the streams are. The model's three
    scales are expected in the rows of ``fn`` already (``layers/residual.py`` multiplies them in when loading).

    Args:
        streams: [T, S, H], contiguous.
        fn: [(2 + S) * S, S * H] fp32, rows for pre [S], post [S], comb [S * S], times the scale of their part.
        base: [(2 + S) * S] fp32.
        norm_weight: [2, H], the weight of the sublayer's input norm, then anything finite (the place of -x).
        norm_eps: of that norm, and of the RMS norm over all streams of a token.
        eps: added to pre, to comb and to every Sinkhorn sum; > 0.
        iters: Sinkhorn iterations, >= 1; columns are normalised last.
    Returns:
        (input [T, H] in ``streams.dtype``; post [T, S, 1] fp32, half of the formula's; mix [T, S, S] fp32: what stream
        i adds to new stream j is at [j, i]). The first two may be strided.
    """
    T, S, H = streams.shape
    wide = streams.float()
    flat = wide.view(T, S * H)
    logits = torch.addcmul(base, F.linear(flat, fn), inverse_rms(flat, norm_eps))
    gates = torch.sigmoid(logits)
    # Over all rows, of which the last S * S count: cheaper than a copy of those.
    comb = torch.softmax(logits.view(T, 2 + S, S), dim=2)[:, 2:]
    small = comb.device.type == "cpu" and T <= NUMPY_MAX_TOKENS
    mix = _sinkhorn_numpy(comb, eps, iters) if small else _sinkhorn_torch(comb, eps, iters)
    signs = _signs(comb, eps)
    pre = torch.addcmul(signs[1], gates[:, :S].unsqueeze(1), signs[0])
    collapsed = torch.bmm(pre, wide)  # x and -x
    post = gates[:, S : 2 * S].unsqueeze(2)
    if streams.dtype is torch.float32:
        return torch.layer_norm(collapsed, norm_weight.shape, norm_weight, None, norm_eps)[:, 0], post, mix
    return rms_norm(collapsed[:, 0].to(streams.dtype), norm_weight[0], norm_eps), post, mix


def hyper_connection_post(
    streams: torch.Tensor, output: torch.Tensor | ExpertSum, post: torch.Tensor, *, mix: torch.Tensor
) -> torch.Tensor:
    """New streams: ``out[j] = 2 * post[j] * output + sum over i of mix[j, i] * streams[i]``.

    Formula: the residual update of ``Glm5NextTextDecoderLayer``.

    Args:
        streams: [T, S, H], the residual from before the sublayer.
        output: [T, H] of the sublayer, or what it is yet to be summed from, rounded to ``streams.dtype`` then too.
        post: [T, S, 1] and
        mix: [T, S, S] fp32, from ``hyper_connection_pre``; both are rounded to ``streams.dtype`` first, as there.
    Returns:
        [T, S, H] in ``streams.dtype``, new memory.
    """
    if streams.dtype is not torch.float32:
        mix, post = mix.to(streams.dtype), post.to(streams.dtype)
    return torch.bmm(mix, streams).addcmul_(post, settled(output).unsqueeze(1), value=2)


def hyper_connection_post_pre(
    streams: torch.Tensor,
    output: torch.Tensor | ExpertSum,
    post: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    mix: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``hyper_connection_post`` behind one sublayer, then ``hyper_connection_pre`` of the next.

    Returns:
        (new streams [T, S, H]; then what ``hyper_connection_pre`` returns).
    """
    new = hyper_connection_post(streams, output, post, mix=mix)
    collapsed = hyper_connection_pre(new, fn, base, norm_weight=norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)
    return (new, *collapsed)


def _sinkhorn_numpy(comb: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """From softmax [T, S, S], indexed [i, j], to the mix [T, S, S], indexed [j, i]."""
    T, S, _ = comb.shape
    columns, rows = _sums_numpy(S, eps)
    entries = np.empty((S * S + 1, T), dtype=np.float32)
    entries[-1] = 1.0
    matrix = entries[:-1]
    sums = np.empty((S * S, T), dtype=np.float32)
    # Methods: the function np.dot spends a third of its time on looking for overrides.
    sum_columns, sum_rows, divide = columns.dot, rows.dot, np.divide
    matrix.reshape(S, S, T)[:] = comb.numpy().transpose(1, 2, 0)
    np.add(matrix, np.float32(eps), matrix)
    sum_columns(entries, sums)
    divide(matrix, sums, matrix)
    for _ in range(iters - 1):
        sum_rows(entries, sums)
        divide(matrix, sums, matrix)
        sum_columns(entries, sums)
        divide(matrix, sums, matrix)
    mix = torch.empty(T, S, S)  # torch's own memory: its alignment, which GEMM results can depend on
    mix.numpy().transpose(2, 1, 0)[:] = matrix.reshape(S, S, T)
    return mix


def _sinkhorn_torch(comb: torch.Tensor, eps: float, iters: int) -> torch.Tensor:
    """As ``_sinkhorn_numpy``; a sum is computed once a row or column, and divides by broadcasting."""
    T, S, _ = comb.shape
    columns, rows = _sums_torch(comb, S, eps)
    entries = torch.empty(S * S + 1, T, dtype=torch.float32, device=comb.device)
    entries[-1] = 1.0
    matrix = entries[:-1].view(S, S, T)
    torch.add(comb.permute(1, 2, 0), eps, out=matrix)
    sums = torch.empty(S, T, dtype=torch.float32, device=comb.device)
    of_columns, of_rows = sums.unsqueeze(0), sums.unsqueeze(1)
    torch.mm(columns, entries, out=sums)
    matrix.div_(of_columns)
    for _ in range(iters - 1):
        torch.mm(rows, entries, out=sums)
        matrix.div_(of_rows)
        torch.mm(columns, entries, out=sums)
        matrix.div_(of_columns)
    return matrix.permute(2, 1, 0).contiguous()


@constant
def _signs(device: torch.device, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 1] factors 1 and -1, and what is added to them: ``eps`` and ``-eps``."""
    signs = torch.ones(2, 1, device=device)
    signs[1].neg_()
    return signs, eps * signs


@lru_cache(maxsize=8)
def _sums_numpy(S: int, eps: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[S * S, S * S + 1] constants that give entry (i, j) the sum of its column, or row, plus ``eps``."""
    same_column = np.tile(np.eye(S, dtype=np.float32), (S, S))
    same_row = np.kron(np.eye(S, dtype=np.float32), np.ones((S, S), dtype=np.float32))
    last = np.full((S * S, 1), eps, dtype=np.float32)
    return np.hstack([same_column, last]), np.hstack([same_row, last])


@constant
def _sums_torch(device: torch.device, S: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, S * S + 1] constants that sum the entries (i, j) of each column j, or each row i, and add ``eps``."""
    columns, rows = torch.zeros(2, S, S * S + 1, device=device).unbind(0)
    for sums, summed in ((columns, 2), (rows, 1)):
        sums[:, -1].fill_(eps)
        sums[:, :-1].view(S, S, S).diagonal(dim1=0, dim2=summed).fill_(1.0)
    return columns, rows
