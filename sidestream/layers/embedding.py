"""Token embedding and language-model head, both split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader


class Embedding:
    """[vocab, hidden] table."""

    def __init__(self, loader: LayerLoader, config: ModelConfig) -> None:
        rows = loader.group.local("vocab_size", config.vocab_size)
        assert loader.group.size == 1, "a vocabulary split over ranks needs a transport"
        self.weight = loader.tensor("embed_tokens.weight", (rows, config.hidden_size), shard=loader.shard(0))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        return F.embedding(token_ids, self.weight)


class Head:
    """Logits in fp32. A tied head shares the embedding's memory."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, embedding: Embedding) -> None:
        rows = loader.group.local("vocab_size", config.vocab_size)
        if config.tie_word_embeddings:
            self.weight = embedding.weight
        else:
            self.weight = loader.tensor("lm_head.weight", (rows, config.hidden_size), shard=loader.shard(0))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> logits [S, vocab] fp32."""
        return F.linear(hidden, self.weight).float()
