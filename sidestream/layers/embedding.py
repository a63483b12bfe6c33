"""Token embedding and language-model head, both split over the vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sidestream.config.model import ModelConfig
from sidestream.layers.loader import LayerLoader
from sidestream.ops.embedding import embed
from sidestream.ops.linear import logits


class Embedding:
    """[vocab, hidden] table; a rank holds a range of rows and gives zeros for the others' tokens."""

    def __init__(self, loader: LayerLoader, config: ModelConfig) -> None:
        self.group = loader.group
        self.rows = loader.group.local("vocab_size", config.vocab_size)
        self.weight = loader.tensor("embed_tokens.weight", (self.rows, config.hidden_size), shard=loader.shard(0))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [T] int64 -> [T, hidden]."""
        if self.group.size == 1:
            return embed(token_ids, self.weight, copies=1).squeeze(1)
        local = token_ids - self.group.rank * self.rows
        mine = (local >= 0) & (local < self.rows)
        embedded = F.embedding(local.clamp(0, self.rows - 1), self.weight)
        return self.group.all_reduce(embedded.masked_fill(~mine[:, None], 0.0))

    def streams(self, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """token_ids [T] int64 -> [T, count, hidden], contiguous: each embedding ``count`` times."""
        if self.group.size == 1:
            return embed(token_ids, self.weight, copies=count)
        return self(token_ids).unsqueeze(1).expand(-1, count, -1).contiguous()


class Head:
    """Logits in fp32. A tied head shares the embedding's memory."""

    def __init__(self, loader: LayerLoader, config: ModelConfig, embedding: Embedding) -> None:
        self.group = loader.group
        rows = loader.group.local("vocab_size", config.vocab_size)
        if config.tie_word_embeddings:
            self.weight = embedding.weight
        else:
            self.weight = loader.tensor("lm_head.weight", (rows, config.hidden_size), shard=loader.shard(0))

    def __call__(self, hidden: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [S, hidden] -> logits [S, vocab] fp32: ``out`` if given, contiguous, else new memory."""
        if out is None or self.group.size > 1:
            local = torch.empty(hidden.shape[0], self.weight.shape[0], dtype=torch.float32, device=hidden.device)
        else:
            local = out
        logits(hidden, self.weight, out=local)
        whole = self.group.all_gather(local)
        return whole if out is None or out is local else out.copy_(whole)
