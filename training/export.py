"""Between the trainable model and a hub folder.

`to_hub` / `from_hub` map state dicts; `write_checkpoint` lets transformers itself write config and weights, beside the
tokenizer.
`python -m training.export WEIGHTS.pt FOLDER` exports what train.py saved.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.model import TinyModel
from training.spec import Spec
from training.tokenizer import build_tokenizer, save_tokenizer

ROOT = "model.language_model."
MEDIA_ID = 5  # the one reserved token behind all image and video ids
ATTENTION = {
    "q_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_layernorm.weight",
    "q_b.weight": "q_b_proj.weight",
    "kv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "kv_b.weight": "kv_b_proj.weight",
    "o.weight": "o_proj.weight",
    "o_norm.weight": "o_norm.weight",
    "f_a.weight": "f_a_proj.weight",
    "f_b.weight": "f_b_proj.weight",
    "g_a.weight": "g_a_proj.weight",
    "g_b.weight": "g_b_proj.weight",
    "b.weight": "b_proj.weight",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "indexer.wq_b.weight": "indexer.wq_b.weight",
    "indexer.wk.weight": "indexer.wk.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight",
    "indexer.k_norm.bias": "indexer.k_norm.bias",
    "indexer.weights_proj.weight": "indexer.weights_proj.weight",
    "indexer.ape": "indexer.index_kpool_compress_ape",
    "indexer.gate": "indexer.index_kpool_compress_gate",
}
LAYER = {
    "norm_attention.weight": "input_layernorm.weight",
    "norm_feedforward.weight": "post_attention_layernorm.weight",
    **{f"hc_attention.{n}": f"hc_attn_{n}" for n in ("fn", "base", "scale")},
    **{f"hc_feedforward.{n}": f"hc_ffn_{n}" for n in ("fn", "base", "scale")},
    "feedforward.router.weight": "mlp.gate.weight",
    "feedforward.router_bias": "mlp.gate.e_score_correction_bias",
    **{f"attention.{ours}": f"self_attn.{hub}" for ours, hub in ATTENTION.items()},
}
TOP = {
    "embed.weight": ROOT + "embed_tokens.weight",
    "norm.weight": ROOT + "norm.weight",
    "head.weight": "lm_head.weight",
}


def _parts(ours: str, tensor: Tensor, hub: str, sparse: bool) -> dict[str, Tensor]:
    """Tensors that the hub keeps in pieces: convolutions, q/k/v, gate/up, experts."""
    qkv = {"attention.qkv.weight": "{}_proj.weight", "attention.conv": "{}_conv1d.weight"}
    if ours in qkv:
        pieces = (tensor.unsqueeze(1) if ours == "attention.conv" else tensor).chunk(3)
        return {f"{hub}self_attn." + qkv[ours].format(n): t for n, t in zip("qkv", pieces, strict=True)}
    dense = "mlp.shared_experts." if sparse else "mlp."
    if ours == "feedforward.gate_up.weight":
        gate, up = tensor.chunk(2)
        return {f"{hub}{dense}gate_proj.weight": gate, f"{hub}{dense}up_proj.weight": up}
    if ours == "feedforward.down.weight":
        return {f"{hub}{dense}down_proj.weight": tensor}
    out: dict[str, Tensor] = {}
    for e, expert in enumerate(tensor):
        if ours == "feedforward.expert_gate_up":
            gate, up = expert.chunk(2)
            out |= {f"{hub}mlp.experts.{e}.gate_proj.weight": gate, f"{hub}mlp.experts.{e}.up_proj.weight": up}
        elif ours == "feedforward.expert_down":
            out[f"{hub}mlp.experts.{e}.down_proj.weight"] = expert
        else:
            raise AssertionError(f"no hub name for {ours}")
    return out


def to_hub(model: TinyModel) -> dict[str, Tensor]:
    """State dict under hub names, fp32 on the CPU."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensor = value.detach().float().cpu()
        if name in TOP:
            out[TOP[name]] = tensor
            continue
        _, index, ours = name.split(".", 2)
        hub = f"{ROOT}layers.{index}."
        if ours in LAYER:
            out[hub + LAYER[ours]] = tensor
        else:
            out |= _parts(ours, tensor, hub, sparse=int(index) > 0)
    return {name: tensor.contiguous() for name, tensor in out.items()}


def from_hub(folder: Path) -> TinyModel:
    """The trainable model with the weights of an exported folder, fp32."""

    text = json.loads((folder / "config.json").read_text())["text_config"]
    kinds = zip(text["layer_types"], text["indexer_types"], strict=True)
    letters = "".join("K" if a == "linear_attention" else "S" if b == "shared" else "D" for a, b in kinds)
    spec = Spec(
        layers=letters,
        vocab_size=text["vocab_size"],
        hidden=text["hidden_size"],
        intermediate=text["intermediate_size"],
        moe_intermediate=text["moe_intermediate_size"],
        experts=text["n_routed_experts"],
        top_experts=text["num_experts_per_tok"],
        heads=text["num_attention_heads"],
        head_dim=text["v_head_dim"],
        latent=text["kv_lora_rank"],
        q_latent=text["q_lora_rank"],
        index_heads=text["index_n_heads"],
        index_dim=text["index_head_dim"],
        index_topk=text["index_topk"],
        kpool=text["index_kpool"],
        kda_heads=text["linear_num_heads"],
        kda_dim=text["linear_head_dim"],
        streams=text["hc_mult"],
    )
    model = TinyModel(spec)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name in TOP:
                value.copy_(stored[TOP[name]])
                continue
            _, index, ours = name.split(".", 2)
            hub = f"{ROOT}layers.{index}."
            if ours in LAYER:
                value.copy_(stored[hub + LAYER[ours]])
                continue
            names = list(_parts(ours, value, hub, sparse=int(index) > 0))
            flat = torch.cat([stored[n].float() for n in names])
            value.copy_(flat.reshape(value.shape))
    return model


def hub_config(spec: Spec) -> Any:
    """The transformers config, with the smallest vision tower that transformers accepts."""
    from transformers import Glm5NextConfig

    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": spec.hidden,
        "projection_intermediate_size": 16, "image_size": 28,
    }  # fmt: skip
    text = spec.text_config() | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    media = {f"{m}_{e}token_id": MEDIA_ID for m in ("image", "video") for e in ("", "start_", "end_")}
    return Glm5NextConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **media)


def write_checkpoint(
    model: TinyModel, folder: Path, tokenizer: Tokenizer | None, *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes config, generation config and weights (through transformers), and the tokenizer's files."""
    from transformers import GenerationConfig, Glm5NextForConditionalGeneration

    config = hub_config(model.spec)
    with tempfile.TemporaryDirectory() as scratch:
        save_file(to_hub(model), Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        config.architectures = ["Glm5NextForConditionalGeneration"]
        config.save_pretrained(scratch)
        torch.manual_seed(0)  # the vision tower is new and unused, and should be the same in every export
        hub = Glm5NextForConditionalGeneration.from_pretrained(scratch, dtype=dtype)
    hub.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=False, max_new_tokens=64)
    folder.mkdir(parents=True, exist_ok=True)
    hub.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


if __name__ == "__main__":
    saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    trained = TinyModel(Spec(**saved["spec"]))
    trained.load_state_dict(saved["model"])
    write_checkpoint(trained, Path(sys.argv[2]), build_tokenizer())
