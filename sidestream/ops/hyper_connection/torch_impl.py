"""Hyper-connections in few calls: twelve sublayers run these in every step of a tiny model, so calls are the cost.

The Sinkhorn iteration works on [S * S, T], so that it runs along tokens, with a last row of ones: one product with a
constant matrix gives every entry its row's (or column's) sum plus ``eps``, and one division normalises. Few tokens use
numpy, whose calls cost a third of torch's; many use torch, which has threads. The two differ by rounding only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from sidestream.ops.norm.torch_impl import inverse_rms

NUMPY_MAX_TOKENS = 128
"""Above it (on a CPU) torch's Sinkhorn loop is faster than numpy's."""


def hyper_connection_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the residual streams into a sublayer's input, and say how its output will be spread.

    Formula: ``Glm5NextTextHyperConnection`` (manifold-constrained hyper-connections, Xie et al. 2026, section 2.2);
    everything but ``collapsed`` is fp32 whatever the streams are.

    Args:
        streams: [T, S, H], contiguous.
        fn: [(2 + S) * S, S * H] fp32, rows for pre [S], post [S], comb [S * S].
        base: [(2 + S) * S] fp32.
        scale: [3] fp32, of pre, post and comb.
        norm_eps: of the RMS norm over all streams of a token.
        eps: added to pre, to comb and to every Sinkhorn sum; > 0.
        iters: Sinkhorn iterations, >= 1; columns are normalised last.
    Returns:
        (collapsed [T, H] in ``streams.dtype``, post [T, S] fp32, comb [T, S, S] fp32), all contiguous.
    """
    T, S, H = streams.shape
    wide = streams.float()
    flat = wide.view(T, S * H)
    mix = torch.mm(fn, flat.t()).mul_(inverse_rms(flat, norm_eps).t())
    parts = _parts(S, scale.device)
    logits = torch.addcmul(base.unsqueeze(1), mix, scale.index_select(0, parts).unsqueeze(1))
    gates = torch.sigmoid(logits[: 2 * S])
    comb = torch.softmax(logits[2 * S :].view(S, S, T), dim=1).view(S * S, T)
    if comb.device.type == "cpu" and T <= NUMPY_MAX_TOKENS:
        pre, post, comb = _finish_numpy(gates, comb, S, eps, iters)
    else:
        pre, post, comb = _finish_torch(gates, comb, S, eps, iters)
    collapsed = torch.bmm(pre, wide).view(T, H)
    return collapsed.to(streams.dtype), post, comb


def hyper_connection_post(
    streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, *, comb: torch.Tensor
) -> torch.Tensor:
    """New streams: ``out[j] = post[j] * output + sum over i of comb[i, j] * streams[i]``.

    Formula: the residual update of ``Glm5NextTextDecoderLayer``.

    Args:
        streams: [T, S, H], the residual from before the sublayer.
        output: [T, H] of the sublayer.
        post: [T, S] and
        comb: [T, S, S] fp32, from ``hyper_connection_pre``; both are rounded to ``streams.dtype`` first, as there.
    Returns:
        [T, S, H] in ``streams.dtype``, new memory.
    """
    mixed = torch.bmm(comb.to(streams.dtype).transpose(1, 2), streams)
    return mixed.addcmul_(post.to(streams.dtype).unsqueeze(2), output.unsqueeze(1))


def _finish_numpy(
    gates: torch.Tensor, comb: torch.Tensor, S: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From sigmoids [2S, T] and softmax [S * S, T] to pre [T, 1, S], post [T, S], comb [T, S, S]."""
    T = comb.shape[1]
    columns, rows = _sums_numpy(S, eps)
    entries = np.empty((S * S + 1, T), dtype=np.float32)
    entries[-1] = 1.0
    matrix = entries[:-1]
    sums = np.empty_like(matrix)
    dot, divide = np.dot, np.divide
    np.add(comb.numpy(), eps, matrix)
    dot(columns, entries, sums)
    divide(matrix, sums, matrix)
    for _ in range(iters - 1):
        dot(rows, entries, sums)
        divide(matrix, sums, matrix)
        dot(columns, entries, sums)
        divide(matrix, sums, matrix)
    gate = torch.empty(2, T, S)  # torch's own memory: its alignment, which GEMM results can depend on
    mixed = torch.empty(T, S, S)
    gate_out, sigmoids = gate.numpy(), gates.numpy()
    np.add(sigmoids[:S].T, eps, gate_out[0])
    np.multiply(sigmoids[S:].T, 2.0, gate_out[1])
    mixed.numpy().reshape(T, S * S)[:] = matrix.T
    pre, post = gate.unbind(0)
    return pre.unsqueeze(1), post, mixed


def _finish_torch(
    gates: torch.Tensor, comb: torch.Tensor, S: int, eps: float, iters: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``_finish_numpy``; a sum is computed once a row or column, and divides by broadcasting."""
    T = comb.shape[1]
    columns, rows = _sums_torch(S, eps, comb.device)
    entries = torch.empty(S * S + 1, T, dtype=torch.float32, device=comb.device)
    entries[-1] = 1.0
    torch.add(comb, eps, out=entries[:-1])
    matrix = entries[:-1].view(S, S, T)
    sums = torch.empty(S, T, dtype=torch.float32, device=comb.device)
    of_columns, of_rows = sums.unsqueeze(0), sums.unsqueeze(1)
    torch.mm(columns, entries, out=sums)
    matrix.div_(of_columns)
    for _ in range(iters - 1):
        torch.mm(rows, entries, out=sums)
        matrix.div_(of_rows)
        torch.mm(columns, entries, out=sums)
        matrix.div_(of_columns)
    pre = gates[:S].t().add(eps).contiguous().unsqueeze(1)
    post = gates[S:].t().mul(2).contiguous()
    return pre, post, matrix.permute(2, 0, 1).contiguous()


@lru_cache(maxsize=8)
def _sums_numpy(S: int, eps: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[S * S, S * S + 1] constants that give entry (i, j) the sum of its column, or row, plus ``eps``."""
    same_column = np.tile(np.eye(S, dtype=np.float32), (S, S))
    same_row = np.kron(np.eye(S, dtype=np.float32), np.ones((S, S), dtype=np.float32))
    last = np.full((S * S, 1), eps, dtype=np.float32)
    return np.hstack([same_column, last]), np.hstack([same_row, last])


@lru_cache(maxsize=8)
def _sums_torch(S: int, eps: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, S * S + 1] constants: one row for each column sum, or row sum."""
    columns, rows = _sums_numpy(S, eps)
    with torch.inference_mode(False):
        return torch.from_numpy(columns[:S].copy()).to(device), torch.from_numpy(rows[::S].copy()).to(device)


@lru_cache(maxsize=8)
def _parts(S: int, device: torch.device) -> torch.Tensor:
    """[(2 + S) * S] int64: which of the three scales a row of ``fn`` belongs to."""
    with torch.inference_mode(False):
        return torch.tensor([0] * S + [1] * S + [2] * S * S, device=device)
