"""Triton kernels of the training run: Sinkhorn, hyper-connection mixing and clamped SwiGLU, each with its gradient.

N tokens, H = 4 streams, D hidden, E experts, F inner width. Streams are bf16 or fp32, mixing weights fp32, sums fp32.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable


@triton.jit
def _sinkhorn_fwd(x_ptr, y_ptr, s_ptr, N, eps, ITERS: tl.constexpr, B: tl.constexpr):
    n = tl.program_id(0) * B + tl.arange(0, B)
    i, j, ok = tl.arange(0, 4), tl.arange(0, 4), n < N
    at = n[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
    x = tl.load(x_ptr + at, mask=ok[:, None, None], other=1.0)
    s_at = n[:, None] * 4 + i[None, :]
    s = tl.sum(x, axis=1) + eps
    tl.store(s_ptr + s_at, s, mask=ok[:, None])
    x = x / s[:, None, :]
    for it in range(1, ITERS):
        s = tl.sum(x, axis=2) + eps
        tl.store(s_ptr + (2 * it - 1) * N * 4 + s_at, s, mask=ok[:, None])
        x = x / s[:, :, None]
        s = tl.sum(x, axis=1) + eps
        tl.store(s_ptr + 2 * it * N * 4 + s_at, s, mask=ok[:, None])
        x = x / s[:, None, :]
    tl.store(y_ptr + at, x, mask=ok[:, None, None])


@triton.jit
def _sinkhorn_bwd(y_ptr, dy_ptr, s_ptr, dx_ptr, N, ITERS: tl.constexpr, B: tl.constexpr):
    n = tl.program_id(0) * B + tl.arange(0, B)
    i, j, ok = tl.arange(0, 4), tl.arange(0, 4), n < N
    at = n[:, None, None] * 16 + i[None, :, None] * 4 + j[None, None, :]
    y = tl.load(y_ptr + at, mask=ok[:, None, None], other=0.0)
    d = tl.load(dy_ptr + at, mask=ok[:, None, None], other=0.0)
    s_at = n[:, None] * 4 + i[None, :]
    for back in range(1, ITERS):
        it = ITERS - back
        s = tl.load(s_ptr + 2 * it * N * 4 + s_at, mask=ok[:, None], other=1.0)
        d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
        y = y * s[:, None, :]
        s = tl.load(s_ptr + (2 * it - 1) * N * 4 + s_at, mask=ok[:, None], other=1.0)
        d = (d - tl.sum(d * y, axis=2)[:, :, None]) / s[:, :, None]
        y = y * s[:, :, None]
    s = tl.load(s_ptr + s_at, mask=ok[:, None], other=1.0)
    d = (d - tl.sum(d * y, axis=1)[:, None, :]) / s[:, None, :]
    tl.store(dx_ptr + at, d, mask=ok[:, None, None])


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, iters, eps):
        x = x.contiguous()
        n = x.shape[0]
        y, s = torch.empty_like(x), x.new_empty(2 * iters - 1, n, 4)
        _sinkhorn_fwd[(triton.cdiv(n, 64),)](x, y, s, n, eps, ITERS=iters, B=64)
        ctx.save_for_backward(y, s)
        ctx.iters = iters
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, s = ctx.saved_tensors
        n = y.shape[0]
        dx = torch.empty_like(y)
        _sinkhorn_bwd[(triton.cdiv(n, 64),)](y, dy.contiguous(), s, dx, n, ITERS=ctx.iters, B=64)
        return dx, None, None


@triton.jit
def _collapse_fwd(s_ptr, p_ptr, o_ptr, D: tl.constexpr, BD: tl.constexpr):
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    ok = d < D
    out = tl.zeros([BD], tl.float32)
    for h in tl.static_range(4):
        s = tl.load(s_ptr + n * 4 * D + h * D + d, mask=ok, other=0.0).to(tl.float32)
        out += s * tl.load(p_ptr + n * 4 + h)
    tl.store(o_ptr + n * D + d, out, mask=ok)


@triton.jit
def _collapse_bwd(s_ptr, p_ptr, do_ptr, ds_ptr, dp_ptr, D: tl.constexpr, BD: tl.constexpr):
    n, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, 4), tl.arange(0, BD)
    ok = d < D
    at = n * 4 * D + h[:, None] * D + d[None, :]
    s = tl.load(s_ptr + at, mask=ok[None, :], other=0.0).to(tl.float32)
    p = tl.load(p_ptr + n * 4 + h)
    g = tl.load(do_ptr + n * D + d, mask=ok, other=0.0).to(tl.float32)
    tl.store(ds_ptr + at, p[:, None] * g[None, :], mask=ok[None, :])
    tl.store(dp_ptr + n * 4 + h, tl.sum(s * g[None, :], axis=1))


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams, pre):
        streams, pre = streams.contiguous(), pre.contiguous()
        n, _, d = streams.shape
        out = streams.new_empty(n, d)
        _collapse_fwd[(n,)](streams, pre, out, D=d, BD=triton.next_power_of_2(d), num_warps=2)
        ctx.save_for_backward(streams, pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        streams, pre = ctx.saved_tensors
        n, _, d = streams.shape
        ds, dp = torch.empty_like(streams), torch.empty_like(pre)
        _collapse_bwd[(n,)](streams, pre, grad.contiguous(), ds, dp, D=d, BD=triton.next_power_of_2(d), num_warps=2)
        return ds, dp


@triton.jit
def _expand_fwd(x_ptr, s_ptr, p_ptr, c_ptr, o_ptr, D: tl.constexpr, BD: tl.constexpr):
    n, d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    ok = d < D
    at = s_ptr + n * 4 * D + d
    x = tl.load(x_ptr + n * D + d, mask=ok, other=0.0).to(tl.float32)
    s0 = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    s1 = tl.load(at + D, mask=ok, other=0.0).to(tl.float32)
    s2 = tl.load(at + 2 * D, mask=ok, other=0.0).to(tl.float32)
    s3 = tl.load(at + 3 * D, mask=ok, other=0.0).to(tl.float32)
    c = c_ptr + n * 16
    for j in tl.static_range(4):
        out = tl.load(p_ptr + n * 4 + j) * x + tl.load(c + j) * s0 + tl.load(c + 4 + j) * s1
        out += tl.load(c + 8 + j) * s2 + tl.load(c + 12 + j) * s3
        tl.store(o_ptr + n * 4 * D + j * D + d, out, mask=ok)


@triton.jit
def _expand_bwd(x_ptr, s_ptr, p_ptr, c_ptr, do_ptr, dx_ptr, ds_ptr, dp_ptr, dc_ptr, D: tl.constexpr, BD: tl.constexpr):
    n, h, d = tl.program_id(0).to(tl.int64), tl.arange(0, 4), tl.arange(0, BD)
    ok = d < D
    at = n * 4 * D + h[:, None] * D + d[None, :]
    s = tl.load(s_ptr + at, mask=ok[None, :], other=0.0).to(tl.float32)
    x = tl.load(x_ptr + n * D + d, mask=ok, other=0.0).to(tl.float32)
    dx = tl.zeros([BD], tl.float32)
    ds = tl.zeros([4, BD], tl.float32)
    for j in tl.static_range(4):
        g = tl.load(do_ptr + n * 4 * D + j * D + d, mask=ok, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + n * 16 + h * 4 + j)
        dx += tl.load(p_ptr + n * 4 + j) * g
        ds += c[:, None] * g[None, :]
        tl.store(dp_ptr + n * 4 + j, tl.sum(g * x, axis=0))
        tl.store(dc_ptr + n * 16 + h * 4 + j, tl.sum(s * g[None, :], axis=1))
    tl.store(dx_ptr + n * D + d, dx, mask=ok)
    tl.store(ds_ptr + at, ds, mask=ok[None, :])


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, streams, post, comb):
        x, streams, post, comb = x.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous()
        n, _, d = streams.shape
        out = torch.empty_like(streams)
        _expand_fwd[(n,)](x, streams, post, comb, out, D=d, BD=triton.next_power_of_2(d), num_warps=2)
        ctx.save_for_backward(x, streams, post, comb)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, streams, post, comb = ctx.saved_tensors
        n, _, d = streams.shape
        dx, ds, dp, dc = (torch.empty_like(t) for t in (x, streams, post, comb))
        bd = triton.next_power_of_2(d)
        _expand_bwd[(n,)](x, streams, post, comb, grad.contiguous(), dx, ds, dp, dc, D=d, BD=bd, num_warps=2)
        return dx, ds, dp, dc


@triton.jit
def _swiglu_fwd(gu_ptr, w_ptr, o_ptr, R, limit, F: tl.constexpr, BF: tl.constexpr, B: tl.constexpr):
    r, f = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.arange(0, BF)
    ok = (r < R)[:, None] & (f < F)[None, :]
    g = tl.load(gu_ptr + r[:, None] * 2 * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    u = tl.load(gu_ptr + r[:, None] * 2 * F + F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + r, mask=r < R, other=0.0)
    g = tl.minimum(g, limit)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    tl.store(o_ptr + r[:, None] * F + f[None, :], g * tl.sigmoid(g) * u * w[:, None], mask=ok)


@triton.jit
def _swiglu_bwd(gu_ptr, w_ptr, do_ptr, dgu_ptr, dw_ptr, R, limit, F: tl.constexpr, BF: tl.constexpr, B: tl.constexpr):
    r, f = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B), tl.arange(0, BF)
    ok = (r < R)[:, None] & (f < F)[None, :]
    g0 = tl.load(gu_ptr + r[:, None] * 2 * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    u0 = tl.load(gu_ptr + r[:, None] * 2 * F + F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    d = tl.load(do_ptr + r[:, None] * F + f[None, :], mask=ok, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + r, mask=r < R, other=0.0)
    g = tl.minimum(g0, limit)
    u = tl.minimum(tl.maximum(u0, -limit), limit)
    sig = tl.sigmoid(g)
    act = g * sig
    tl.store(dw_ptr + r, tl.sum(d * act * u, axis=1), mask=r < R)
    d = d * w[:, None]
    dg = tl.where(g0 < limit, d * u * sig * (1 + g * (1 - sig)), 0.0)
    du = tl.where((u0 < limit) & (u0 > -limit), d * act, 0.0)
    tl.store(dgu_ptr + r[:, None] * 2 * F + f[None, :], dg, mask=ok)
    tl.store(dgu_ptr + r[:, None] * 2 * F + F + f[None, :], du, mask=ok)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weight, limit):
        gate_up, weight = gate_up.contiguous(), weight.contiguous()
        rows, width = weight.numel(), gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        bf = triton.next_power_of_2(width)
        _swiglu_fwd[(triton.cdiv(rows, 8),)](gate_up, weight, out, rows, limit, F=width, BF=bf, B=8)
        ctx.save_for_backward(gate_up, weight)
        ctx.limit = limit
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate_up, weight = ctx.saved_tensors
        rows, width = weight.numel(), gate_up.shape[-1] // 2
        dgu, dw = torch.empty_like(gate_up), torch.empty_like(weight)
        bf = triton.next_power_of_2(width)
        _swiglu_bwd[(triton.cdiv(rows, 8),)](
            gate_up, weight, grad.contiguous(), dgu, dw, rows, ctx.limit, F=width, BF=bf, B=8
        )
        return dgu, dw, None


def sinkhorn(x: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """x, result [N, 4, 4] fp32."""
    return _Sinkhorn.apply(x, iters, eps)


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """streams [N, 4, D], pre [N, 4] -> [N, D]."""
    return _Collapse.apply(streams, pre)


def expand(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """x [N, D], streams [N, 4, D], post [N, 4], comb [N, 4, 4] -> new streams [N, 4, D]."""
    return _Expand.apply(x, streams, post, comb)


def swiglu(gate_up: torch.Tensor, weight: torch.Tensor, limit: float) -> torch.Tensor:
    """gate_up [N, E, 2F], weight [N, E] fp32 -> weighted activations [N, E, F]."""
    return _SwiGLU.apply(gate_up, weight, limit)
