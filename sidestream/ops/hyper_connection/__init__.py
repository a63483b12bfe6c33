"""Hyper-connections: several residual streams, collapsed into a sublayer's input and mixed around its output."""

from __future__ import annotations

from typing import Any

import torch

from sidestream.ops.hyper_connection import torch_impl
from sidestream.ops.moe.expert_sum import ExpertSum
from sidestream.ops.operator import operator

__all__ = ["hyper_connection_post", "hyper_connection_post_pre", "hyper_connection_pre"]

hyper_connection_pre = operator(
    "hyper_connection.hyper_connection_pre", reads=("streams", "fn", "base", "norm_weight")
)(torch_impl.hyper_connection_pre)
hyper_connection_post = operator("hyper_connection.hyper_connection_post", reads=("streams", "output", "post", "mix"))(
    torch_impl.hyper_connection_post
)
hyper_connection_post_pre = operator(
    "hyper_connection.hyper_connection_post_pre",
    reads=("streams", "output", "post", "fn", "base", "mix", "norm_weight"),
)(torch_impl.hyper_connection_post_pre)


@hyper_connection_pre.register("cuda")
def _pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    function = torch_impl.hyper_connection_pre
    if streams.is_cuda:
        from sidestream.ops.hyper_connection import triton_pre

        if triton_pre.takes(streams, fn, base, norm_weight):
            function = triton_pre.hyper_connection_pre
    return function(streams, fn, base, norm_weight=norm_weight, norm_eps=norm_eps, eps=eps, iters=iters)


@hyper_connection_post.register("cuda")
def _post(
    streams: torch.Tensor, output: torch.Tensor | ExpertSum, post: torch.Tensor, *, mix: torch.Tensor
) -> torch.Tensor:
    function = torch_impl.hyper_connection_post
    if streams.is_cuda:
        from sidestream.ops.hyper_connection import triton_post

        if triton_post.takes(streams, output):
            function = triton_post.hyper_connection_post
    return function(streams, output, post, mix=mix)


@hyper_connection_post_pre.register("cuda")
def _post_pre(
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
    settings: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps, "eps": eps, "iters": iters}
    if streams.is_cuda:
        from sidestream.ops.hyper_connection import triton_post_pre

        if triton_post_pre.takes(streams, output, fn, base, norm_weight):
            return triton_post_pre.hyper_connection_post_pre(streams, output, post, fn, base, mix=mix, **settings)
    new = _post(streams, output, post, mix=mix)
    return (new, *_pre(new, fn, base, **settings))
