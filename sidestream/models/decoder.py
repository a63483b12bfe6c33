"""The decoder that all supported architectures share: embedding, layers of mixer and MLP, final norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from sidestream.config.model import AttentionKind, MlpKind, ModelConfig
from sidestream.core.forward_context import get_forward_context
from sidestream.layers.embedding import Embedding, Head
from sidestream.layers.kda import KimiDeltaAttention
from sidestream.layers.loader import LayerLoader
from sidestream.layers.mla import LatentAttention
from sidestream.layers.mlp import DenseMlp, MoeMlp
from sidestream.layers.residual import PendingSum, ResidualState, Sublayer, at_rows, settled
from sidestream.layers.rope import Rope, Rotation
from sidestream.ops.norm import add_rms_norm, rms_norm


class Residual(Protocol):
    """Joins a sub-layer's output to the residual state."""

    def __call__(self, state: ResidualState, sublayer: Sublayer, /) -> ResidualState: ...


MakeResidual = Callable[[LayerLoader, ModelConfig, str, str], Residual]
"""(loader at the layer, config, name of the input norm, site "attn" or "ffn")."""


class DecoderLayer:
    def __init__(self, loader: LayerLoader, config: ModelConfig, layer: int, *, make_residual: MakeResidual) -> None:
        kind = config.layers[layer]
        attention = loader.at("self_attn")
        self.mixer: KimiDeltaAttention | LatentAttention = (
            KimiDeltaAttention(attention, config, layer)
            if kind.attention is AttentionKind.KDA
            else LatentAttention(attention, config, layer)
        )
        mlp = loader.at("mlp")
        self.mlp: MoeMlp | DenseMlp = (
            MoeMlp(mlp, config) if kind.mlp is MlpKind.SPARSE else DenseMlp(mlp, config, config.intermediate_size)
        )
        self.attention_residual = make_residual(loader, config, "input_layernorm", "attn")
        self.mlp_residual = make_residual(loader, config, "post_attention_layernorm", "ffn")

    def __call__(
        self, state: ResidualState, rotation: Rotation | None, asked: torch.Tensor | None = None
    ) -> ResidualState:
        """Residual state in and out: [Tp, hidden], or [Tp, S, hidden] with hyper-connections.

        Args:
            asked: [N] int64 rows that somebody reads behind this layer; out come these alone.
        """
        state = self.attention_residual(state, lambda x: self._mix(x, rotation, asked))
        return self.mlp_residual(state if asked is None else at_rows(state, asked), self.mlp)

    def _mix(self, x: torch.Tensor, rotation: Rotation | None, asked: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self.mixer, KimiDeltaAttention):
            return self.mixer(x, asked)
        return self.mixer(x, rotation, asked)


class DecoderModel:
    """A causal language model, complete once constructed.

    Args:
        loader: at the root of the canonical names.
        max_positions: longest sequence the engine will serve.
        make_residual: the architecture's residual.
    """

    def __init__(
        self, loader: LayerLoader, config: ModelConfig, max_positions: int, *, make_residual: MakeResidual
    ) -> None:
        self.config = config
        trunk = loader.at("model")
        self.embedding = Embedding(trunk, config)
        layers = trunk.at("layers")
        self.layers = [
            DecoderLayer(layers.at(str(i)), config, i, make_residual=make_residual) for i in range(config.num_layers)
        ]
        self.norm = trunk.tensor("norm.weight", (config.hidden_size,))
        self.head = Head(loader, config, self.embedding)
        self.rope = Rope(config.mla, max_positions, loader.device) if config.mla.rope is not None else None

    def enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[Tp] int64 -> residual state of the embeddings."""
        return self.embedding(token_ids)

    def leave(self, state: ResidualState) -> torch.Tensor:
        """Residual state -> [Tp, hidden], normalised."""
        if isinstance(state, PendingSum):
            return add_rms_norm(state.x, state.output, self.norm, self.config.rms_norm_eps)[1]
        return rms_norm(settled(state), self.norm, self.config.rms_norm_eps)

    def forward(self) -> torch.Tensor:
        """Run the step of the current forward context; returns normalised hidden states [Tp, hidden], or [N, hidden] of
        the rows that the context asks for."""
        context = get_forward_context()
        inputs = context.inputs
        rotation = self.rope(inputs.positions[: inputs.segment_rows]) if self.rope is not None else None
        state: ResidualState = self.enter(inputs.token_ids)
        for index, layer in enumerate(self.layers):
            state = layer(state, rotation, context.asked if index == len(self.layers) - 1 else None)
            if context.observer is not None:
                context.observer.see(index, settled(state))
        return self.leave(state)

    def logits(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [S, hidden] -> [S, vocab] fp32: ``out`` if given, contiguous, else new memory."""
        return self.head(hidden, out=out)
