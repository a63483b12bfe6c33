"""The model's operators in plain torch, and the choice between them and the GPU kernels.

B rows, T tokens, N = B T, H streams, D hidden, E experts, F inner width, A KDA heads, K head width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    """Alternate column and row normalisation of x [N, H, H], fp32, columns first and last."""
    if x.is_cuda:
        from training import kernels

        return kernels.sinkhorn(x, iters, eps)
    x = x / (x.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        x = x / (x.sum(2, keepdim=True) + eps)
        x = x / (x.sum(1, keepdim=True) + eps)
    return x


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Weighted sum over the streams: [N, H, D], [N, H] -> [N, D]."""
    if streams.is_cuda:
        from training import kernels

        return kernels.collapse(streams, pre)
    return (pre.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


def expand(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """A block's output x [N, D] back onto streams [N, H, D], which comb [N, H, H] mixes first (row = old stream)."""
    if streams.is_cuda:
        from training import kernels

        return kernels.expand(x.to(streams.dtype), streams, post, comb)
    return post.unsqueeze(-1) * x.unsqueeze(1) + comb.transpose(1, 2) @ streams


def swiglu(gate_up: Tensor, weight: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, clamped, times the expert's weight: [N, E, 2F], [N, E] -> [N, E, F]."""
    if gate_up.is_cuda:
        from training import kernels

        return kernels.swiglu(gate_up, weight, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight.unsqueeze(-1)


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: x [B, T, C], weight [C, W]."""
    width, length = weight.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    taps = weight.to(x.dtype)
    out = padded[:, :length] * taps[:, 0]
    for i in range(1, width):
        out = out + padded[:, i : i + length] * taps[:, i]
    return F.silu(out)


@cache
def _chunk_kda() -> Callable[..., Any]:
    """fla's chunked kernel with one launch configuration a kernel: autotuning them all takes minutes at every start."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def pinned(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        warps = (
            1
            if getattr(fn, "__name__", "")
            in ("chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_inter_solve_fused")
            else 4
        )

        def cost(config: Any) -> tuple[int, int, int]:
            blocks = sum(abs(v - 32) for v in config.kwargs.values() if isinstance(v, int))
            return abs(config.num_warps - warps), blocks, abs(config.num_stages - 2)

        start(self, fn, arg_names, sorted(configs, key=cost)[:1], *args, **kwargs)

    Autotuner.__init__ = pinned
    try:
        from fla.ops.kda import chunk_kda
    finally:
        Autotuner.__init__ = start
    return chunk_kda  # type: ignore[no-any-return]


def _l2norm(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> Tensor:
    """Kimi Delta Attention from an empty state. q, k, v, gate [B, T, A, K]; beta [B, T, A] logits; result [B, T, A, K].

    The log decay is lower_bound * sigmoid(exp(A_log) * (gate + dt_bias)). On a GPU it runs in fla's chunked kernel.
    """
    if q.is_cuda:
        out, _ = _chunk_kda()(
            q=q, k=k, v=v, g=gate.to(q.dtype), beta=beta.float().sigmoid(), A_log=a_log, dt_bias=dt_bias,
            lower_bound=lower_bound, safe_gate=True, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
            disable_recompute=True,
        )  # fmt: skip
        return torch.as_tensor(out)
    heads, width = q.shape[2:]
    decay = lower_bound * torch.sigmoid(a_log.exp().view(heads, 1) * (gate.float() + dt_bias.view(heads, width)))
    query, key, value = _l2norm(q.float()) * width**-0.5, _l2norm(k.float()), v.float()
    rate, keep = beta.float().sigmoid(), decay.exp()
    state = query.new_zeros(q.shape[0], heads, width, width)
    outputs = []
    for t in range(q.shape[1]):
        state = state * keep[:, t].unsqueeze(-1)
        delta = (value[:, t] - torch.einsum("bak,bakv->bav", key[:, t], state)) * rate[:, t].unsqueeze(-1)
        state = state + key[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("bak,bakv->bav", query[:, t], state))
    return torch.stack(outputs, 1).to(q.dtype)
