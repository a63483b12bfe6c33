"""What a layer keeps between steps, as plain tensors that the cache pools own."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of the pools for one layer; None where the layer keeps nothing of the kind.

    Attributes:
        kv: [num_blocks * block_size, row_elems] KV rows of an MLA layer; row = block * block_size + offset.
        index_keys: [num_blocks, block_size // kpool, D] keys of an index-producing layer.
        index_tail: [num_slots * ring, 2 * D] raw key and gate score of the last tokens (kpool > 1).
        conv: [num_slots * ring, 3 * H * D] inputs of the short convolution of a KDA layer.
        recurrent: [num_slots, versions, H, K, V] fp32; the state after t tokens is version ``t % versions``.
    """

    kv: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_tail: torch.Tensor | None = None
    conv: torch.Tensor | None = None
    recurrent: torch.Tensor | None = None
