"""Sampled tokens: how a step takes the tokens of the step before it without the host knowing them."""

from sidestream.ops.operator import operator
from sidestream.ops.sampled_tokens import torch_impl

__all__ = ["fill_sampled"]

fill_sampled = operator(
    "sampled_tokens.fill_sampled", reads=("token_ids", "sources", "sampled"), writes=("token_ids",)
)(torch_impl.fill_sampled)
