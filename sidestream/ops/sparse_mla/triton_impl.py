"""Sparse MLA with Triton kernels, decodes and prefills alike."""

from __future__ import annotations

import torch

from sidestream.ops.kv_rows.layout import KVRowLayout
from sidestream.ops.sparse_mla import torch_impl
from sidestream.ops.sparse_mla.triton_launch import Launch, choose_launch, run, supported

MAX_SPLITS = 33
"""Runs a token at most: more only make the merge longer at 2,048 rows."""


def sparse_mla(
    q: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    counts: torch.Tensor,
    scale: float,
    layout: KVRowLayout,
    with_lse: bool = True,
    scratch_bytes: int | None = None,
    out_rows: int | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``torch_impl.sparse_mla``, which also runs what the kernels do not support.

    ``counts`` is what loops run to. The number of runs a token is cut into follows from T, H and W, so the bits of a
    token may differ between padded row counts, but never with what other rows hold. Weights are rounded to bf16 before
    they meet the latents. ``scratch_bytes`` has no use here; ``launch`` overrides the sizes chosen.
    """
    tokens, heads, dim = q.shape
    assert counts.shape == (tokens,), f"counts of {tuple(counts.shape)} for {tokens} tokens"
    assert dim == layout.latent_dim + layout.rope_dim, (
        f"queries of {dim}, rows of {layout.latent_dim + layout.rope_dim}"
    )
    if not supported(q, pool, layout) or not rows.shape[1]:
        return torch_impl.sparse_mla(
            q,
            pool,
            rows,
            counts=counts,
            scale=scale,
            layout=layout,
            with_lse=with_lse,
            scratch_bytes=scratch_bytes,
            out_rows=out_rows,
        )
    sizes = launch or choose_launch(tokens, heads, rows.shape[1], layout, MAX_SPLITS)
    size = tokens if out_rows is None else out_rows
    out = torch.empty(size, heads, layout.latent_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    into = (out[:tokens], lse)
    run(q, pool, rows, lengths=counts, block_size=0, scale=scale, layout=layout, launch=sizes, into=into)
    if size > tokens:
        out[tokens:].zero_()
    return out, lse if with_lse else None
