"""From a checkpoint's own tensor names to canonical ones, and which tensors are left out on purpose.

The rewritings are those that transformers 5.17 applies when it saves the four architectures
(``conversion_mapping.py``) and those of the hub's own checkpoints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sidestream.config.model import Architecture, IndexerKind, ModelConfig

_VISION = re.compile(r"(model\.)?(visual|vision_tower|vision_model)\.")
_NESTED_TEXT = re.compile(r"(model\.language_model|language_model\.model)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT_PROJECTION = re.compile(r"(\.experts\.\d+)\.(w1|w2|w3)\.")
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SCALE_SUFFIX = "_scale_inv"
"""An fp8 tensor's scales are stored under its own name with this suffix."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A tensor that this engine leaves out, and why."""

    reason: str


def canonical_name(raw: str, config: ModelConfig) -> str | Skipped:
    """The canonical name of a checkpoint's tensor, or the reason to leave it out.

    A name that fits no rule is canonical as it stands, so it is reported as unexpected if no layer asks for it.
    """
    if _VISION.match(raw):
        return Skipped("vision weights: the text path takes no images")
    name = _NESTED_TEXT.sub("model.", raw, count=1) if _NESTED_TEXT.match(raw) else raw
    if name.startswith("language_model.lm_head."):
        name = name.removeprefix("language_model.")
    if config.architecture is Architecture.KIMI_LINEAR:
        name = name.replace(".block_sparse_moe.", ".mlp.", 1)
        name = _EXPERT_PROJECTION.sub(lambda m: f"{m[1]}.{_EXPERT_NAMES[m[2]]}.", name, count=1)
    if name.endswith("rotary_emb.inv_freq"):
        return Skipped("rotary frequencies: computed from the config")
    layer = _LAYER.match(name)
    if layer is None:
        return name
    index = int(layer[1])
    if index >= config.num_layers:
        return Skipped(f"layer {index} is past the model's {config.num_layers}: multi-token prediction is not used")
    if ".shared_head." in name:
        return Skipped("head of a multi-token-prediction layer: not used")
    if ".self_attn.indexer." in name and config.layers[index].indexer is IndexerKind.SHARED:
        return Skipped(f"layer {index} reuses the selection of the layer before it and runs no indexer")
    return name
