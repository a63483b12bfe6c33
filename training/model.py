"""A trainable `glm5_next` text model whose indexer learns, with the hub's tensor names on export.

Formulas follow the published architecture (Kimi Delta Attention, k-pooled DeepSeek Sparse Attention over NoPE MLA
latents, manifold-constrained hyper-connections, sigmoid-routed experts); tests compare it with the transformers model.
B rows, T tokens, N = B T, Q queries, P pools, H streams, D hidden, h heads, L latent.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import ops
from training.selection import Fault, Selection, blind_mask, corrupt, corrupt_by_code, select, visible_pools
from training.spec import Spec

Mode = Literal["dense", "sparse"]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


class HyperConnection(nn.Module):
    """Weights that collapse the streams before a block and spread its output after it."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        h = spec.streams
        self.fn = nn.Parameter(torch.randn((2 + h) * h, h * spec.hidden) * 0.02)
        base = torch.randn((2 + h) * h) * 0.1
        base[2 * h :] += 2.0 * torch.eye(h).flatten()
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [N, H, D] -> collapsed [N, D], post [N, H], comb [N, H, H]."""
        spec, h = self.spec, self.spec.streams
        flat = F.rms_norm(streams.flatten(1), (h * spec.hidden,), None, spec.eps)
        scale = torch.cat([self.scale[i].expand(n) for i, n in enumerate((h, h, h * h))])
        logits = F.linear(flat, self.fn.to(flat.dtype)).float() * scale + self.base
        pre = torch.sigmoid(logits[:, :h]) + spec.hc_eps
        post = 2 * torch.sigmoid(logits[:, h : 2 * h])
        comb = torch.softmax(logits[:, 2 * h :].view(-1, h, h), dim=-1) + spec.hc_eps
        return ops.collapse(streams, pre), post, ops.sinkhorn(comb, spec.sinkhorn_iters, spec.hc_eps)


class Feedforward(nn.Module):
    """A dense SwiGLU, or routed experts (all computed, weighted by the router) beside a shared one."""

    router_bias: Tensor
    load: Tensor

    def __init__(self, spec: Spec, sparse: bool) -> None:
        super().__init__()
        self.spec, self.sparse = spec, sparse
        width = spec.moe_intermediate if sparse else spec.intermediate
        self.gate_up = linear(spec.hidden, 2 * width)
        self.down = linear(width, spec.hidden, 0.5)
        if sparse:
            self.router = linear(spec.hidden, spec.experts)
            self.register_buffer("router_bias", torch.zeros(spec.experts))
            self.register_buffer("load", torch.zeros(spec.experts), persistent=False)
            self.expert_gate_up = nn.Parameter(torch.randn(spec.experts, 2 * width, spec.hidden) * spec.hidden**-0.5)
            self.expert_down = nn.Parameter(torch.randn(spec.experts, spec.hidden, width) * 0.5 * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] -> [N, D]."""
        spec, n = self.spec, x.shape[0]
        ones = torch.ones(n, 1, device=x.device)
        gate_up = self.gate_up(x).unsqueeze(1)
        out: Tensor = self.down(ops.swiglu(gate_up, ones, spec.limit).squeeze(1))
        if not self.sparse:
            return out
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.router.weight))
        chosen = (scores + self.router_bias).topk(spec.top_experts, dim=-1).indices
        weight = scores.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * spec.routed_scale
        dense = torch.zeros_like(scores).scatter(1, chosen, weight)
        if self.training:
            self.load = (dense.detach() > 0).float().mean(0)
        hidden = F.linear(x, self.expert_gate_up.flatten(0, 1)).view(n, spec.experts, -1)
        hidden = ops.swiglu(hidden, dense, spec.limit).flatten(1)
        return out + F.linear(hidden, self.expert_down.transpose(0, 1).flatten(1))


class KDA(nn.Module):
    """Gated delta rule over short convolutions."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.kda_heads * spec.kda_dim
        self.qkv = linear(spec.hidden, 3 * width)
        self.conv = nn.Parameter(torch.randn(3 * width, spec.conv_width) * 0.5)
        self.f_a, self.f_b = linear(spec.hidden, spec.kda_dim), linear(spec.kda_dim, width)
        self.g_a, self.g_b = linear(spec.hidden, spec.kda_dim), linear(spec.kda_dim, width)
        self.b = linear(spec.hidden, spec.kda_heads)
        step = torch.empty(width).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.a_log = nn.Parameter(torch.zeros(spec.kda_heads))
        self.o_norm = RMSNorm(spec.kda_dim, spec.eps)
        self.o = linear(width, spec.hidden, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        spec = self.spec
        heads = (*x.shape[:2], spec.kda_heads, spec.kda_dim)
        q, k, v = ops.short_conv(self.qkv(x), self.conv).chunk(3, dim=-1)
        out = ops.kda(
            q.reshape(heads), k.reshape(heads), v.reshape(heads), self.f_b(self.f_a(x)).view(heads), self.b(x),
            self.a_log, self.dt_bias, spec.lower_bound,
        )  # fmt: skip
        out = self.o_norm(out) * torch.sigmoid(self.g_b(self.g_a(x)).view(heads))
        result: Tensor = self.o(out.flatten(2).to(x.dtype))
        return result


class Indexer(nn.Module):
    """Scores the complete pools of `kpool` tokens for each query; always in fp32."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.wq_b = linear(spec.q_latent, spec.index_heads * spec.index_dim)
        self.wk = linear(spec.hidden, spec.index_dim)
        self.k_norm = nn.LayerNorm(spec.index_dim, eps=1e-6)
        self.weights_proj = linear(spec.hidden, spec.index_heads)
        self.ape = nn.Parameter(torch.randn(spec.kpool, spec.index_dim) * 0.1)
        self.gate = nn.Parameter(torch.randn(spec.index_dim, spec.hidden) * spec.hidden**-0.5)

    def pool_keys(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, P, index_dim], a gated mean of each complete pool's keys."""
        spec = self.spec
        pools = x.shape[1] // spec.kpool
        x = x[:, : pools * spec.kpool].float()
        shape = (x.shape[0], pools, spec.kpool, spec.index_dim)
        keys, gates = self.k_norm(self.wk(x)).view(shape), F.linear(x, self.gate).view(shape)
        pooled: Tensor = ((gates + self.ape).softmax(2) * keys).sum(2)
        return pooled

    def scores(self, x: Tensor, q_resid: Tensor, keys: Tensor) -> Tensor:
        """Queries x [B, Q, D] and q_resid [B, Q, q_latent] against keys [B, P, index_dim] -> [B, Q, P]."""
        spec = self.spec
        q = self.wq_b(q_resid.float()).view(*x.shape[:2], spec.index_heads, spec.index_dim)
        weights = self.weights_proj(x.float()) * spec.index_heads**-0.5
        keys_t = keys.transpose(1, 2) * spec.index_dim**-0.5
        if torch.is_grad_enabled():
            return torch.einsum(
                "bqhp,bqh->bqp", F.relu(q.transpose(1, 2).matmul(keys_t.unsqueeze(1))).transpose(1, 2), weights
            )
        total: Tensor = q.new_zeros(*x.shape[:2], keys.shape[1])
        for head in range(spec.index_heads):
            total += F.relu(q[:, :, head] @ keys_t) * weights[:, :, head, None]
        return total


class IndexLoss:
    """KL from a leader's pool scores to the pooled attention of its group at some queries."""

    def __init__(self, scores: Tensor, visible: Tensor) -> None:
        self.log_p = scores.masked_fill(~visible, float("-inf")).log_softmax(-1)  # [B, Q, P]
        self.visible = visible
        self.target = torch.zeros_like(self.log_p)

    def value(self) -> Tensor:
        target = self.target / (self.target.sum(-1, keepdim=True) + 1e-9)
        gap = (target.clamp(min=1e-9).log() - self.log_p).masked_fill(~self.visible, 0.0)
        return (target * gap).sum(-1).mean()


@dataclass
class Pass:
    """What one forward pass carries from layer to layer."""

    mode: Mode
    faults: dict[int, Fault]
    queries: Tensor | None  # [B, Q] positions at which the index loss is taken
    codes: Tensor | None = None  # [layers] fault numbers of the sensitivity loss
    selection: Selection | None = None
    losses: list[IndexLoss] | None = None


class SparseMLA(nn.Module):
    """Latent attention without positions, dense or over the rows that the group's indexer selects."""

    def __init__(self, spec: Spec, leader: bool) -> None:
        super().__init__()
        self.spec = spec
        self.q_a, self.q_norm = linear(spec.hidden, spec.q_latent), RMSNorm(spec.q_latent, spec.eps)
        self.q_b = linear(spec.q_latent, spec.heads * spec.head_dim)
        self.kv_a, self.kv_norm = linear(spec.hidden, spec.latent), RMSNorm(spec.latent, spec.eps)
        self.kv_b = linear(spec.latent, spec.heads * 2 * spec.head_dim)
        self.o = linear(spec.heads * spec.head_dim, spec.hidden, 0.5)
        self.indexer = Indexer(spec) if leader else None

    def forward(self, x: Tensor, layer: int, state: Pass) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        spec, (rows, length, _) = self.spec, x.shape
        q_resid = self.q_norm(self.q_a(x))
        q = self.q_b(q_resid).view(rows, length, spec.heads, spec.head_dim)
        latent = self.kv_norm(self.kv_a(x))
        if self.indexer is not None and length >= spec.kpool:
            with torch.autocast(x.device.type, enabled=False):
                self._lead(x.detach(), q_resid.detach(), state)
        if state.queries is not None and state.losses:
            with torch.no_grad():
                state.losses[-1].target += self._pooled_attention(q, latent, state.queries)
        if state.mode == "dense":
            k, v = self.kv_b(latent).view(rows, length, spec.heads, -1).transpose(1, 2).chunk(2, dim=-1)
            mask = None if state.codes is None else blind_mask(length, rows, state.codes[layer])
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, is_causal=mask is None).transpose(1, 2)
        else:
            selection = state.selection
            if selection is None:
                positions = torch.arange(length, device=x.device)
                selection = Selection(positions.new_full((rows, length, 1), -1), positions, spec.kpool)
            if layer in state.faults:
                selection = corrupt(selection, state.faults[layer], layer)
            if state.codes is not None:
                selection = corrupt_by_code(selection, state.codes[layer])
            out = self._attend(q, latent, selection.rows())
        result: Tensor = self.o(out.reshape(rows, length, -1))
        return result

    def _lead(self, x: Tensor, q_resid: Tensor, state: Pass) -> None:
        """Runs the indexer: the index loss at the given queries, the selection of all queries in sparse mode."""
        assert self.indexer is not None
        spec, length = self.spec, x.shape[1]
        keys = self.indexer.pool_keys(x)
        if state.queries is not None and state.losses is not None:
            rows = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
            scores = self.indexer.scores(x[rows, state.queries], q_resid[rows, state.queries], keys)
            state.losses.append(IndexLoss(scores, visible_pools(state.queries, keys.shape[1], spec.kpool)))
        if state.mode == "sparse":
            with torch.no_grad():
                positions = torch.arange(length, device=x.device)
                parts = []
                for part in torch.split(positions, 2048):
                    scores = self.indexer.scores(x[:, part], q_resid[:, part], keys)
                    parts.append(select(scores, part, spec.index_topk // spec.kpool, spec.kpool).pools)
                state.selection = Selection(torch.cat(parts, 1), positions, spec.kpool)

    def _attend(self, q: Tensor, latent: Tensor, rows: Tensor) -> Tensor:
        """q [B, T, h, d], latent [B, T, L], rows [B, T, R] -> [B, T, h, d], through absorbed keys and values."""
        spec, (batch, length, _) = self.spec, latent.shape
        up = self.kv_b.weight.view(spec.heads, 2, spec.head_dim, spec.latent)
        at = rows.clamp(min=0) + torch.arange(batch, device=rows.device).view(-1, 1, 1) * length
        picked = latent.float().reshape(-1, spec.latent).index_select(0, at.flatten()).to(q.dtype)
        picked = picked.view(batch * length, -1, spec.latent)
        query = torch.einsum("nhd,hdl->nhl", q.flatten(0, 1), up[:, 0].to(q.dtype))
        logits = (query @ picked.transpose(1, 2)).float() * spec.head_dim**-0.5
        weights = logits.masked_fill(rows.flatten(0, 1).unsqueeze(1) < 0, -1e30).softmax(-1)
        return torch.einsum("nhl,hdl->nhd", weights.to(q.dtype) @ picked, up[:, 1].to(q.dtype)).view(
            batch, length, spec.heads, -1
        )

    def _pooled_attention(self, q: Tensor, latent: Tensor, queries: Tensor) -> Tensor:
        """Dense attention of the queries, meaned over heads and summed over each complete pool: [B, Q, P]."""
        spec, (batch, length, _) = self.spec, latent.shape
        up = self.kv_b.weight.view(spec.heads, 2, spec.head_dim, spec.latent)[:, 0]
        rows = torch.arange(batch, device=q.device).unsqueeze(-1)
        query = torch.einsum("bqhd,hdl->bhql", q[rows, queries], up.to(q.dtype))
        logits = (query @ latent.unsqueeze(1).transpose(2, 3)).float() * spec.head_dim**-0.5
        future = torch.arange(length, device=q.device) > queries.unsqueeze(-1)
        weights = logits.masked_fill(future.unsqueeze(1), float("-inf")).softmax(-1).mean(1)
        pools = length // spec.kpool
        whole: Tensor = weights[..., : pools * spec.kpool].view(batch, queries.shape[1], pools, spec.kpool).sum(-1)
        return whole


class Layer(nn.Module):
    def __init__(self, spec: Spec, index: int) -> None:
        super().__init__()
        kind = spec.layers[index]
        self.index = index
        self.attention: KDA | SparseMLA = KDA(spec) if kind == "K" else SparseMLA(spec, leader=kind == "D")
        self.feedforward = Feedforward(spec, sparse=index > 0)
        self.norm_attention, self.norm_feedforward = RMSNorm(spec.hidden, spec.eps), RMSNorm(spec.hidden, spec.eps)
        self.hc_attention, self.hc_feedforward = HyperConnection(spec), HyperConnection(spec)

    def forward(self, streams: Tensor, shape: tuple[int, int], state: Pass) -> Tensor:
        """streams [N, H, D] of `shape` = (B, T) tokens."""
        x, post, comb = self.hc_attention(streams)
        x = self.norm_attention(x).view(*shape, -1)
        x = self.attention(x) if isinstance(self.attention, KDA) else self.attention(x, self.index, state)
        streams = ops.expand(x.flatten(0, 1), streams, post, comb)
        x, post, comb = self.hc_feedforward(streams)
        return ops.expand(self.feedforward(self.norm_feedforward(x)), streams, post, comb)


class TinyModel(nn.Module):
    """The whole text model."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab_size, spec.hidden)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(spec, i) for i in range(len(spec.layers)))
        self.norm = RMSNorm(spec.hidden, spec.eps)
        self.head = linear(spec.hidden, spec.vocab_size)
        self.stream_dtype = torch.float32

    def forward(
        self,
        tokens: Tensor,
        mode: Mode = "dense",
        *,
        faults: dict[int, Fault] | None = None,
        queries: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, T] -> (normed hidden states [B, T, D] for `head`, sum of index losses over leaders)."""
        state = Pass(mode, faults or {}, queries, codes, losses=[])
        streams = self.embed(tokens).flatten(0, 1).to(self.stream_dtype)
        streams = streams.unsqueeze(1).expand(-1, self.spec.streams, -1).contiguous()
        shape = (tokens.shape[0], tokens.shape[1])
        for layer in self.layers:
            streams = layer(streams, shape, state)
        loss = sum((part.value() for part in state.losses or []), torch.zeros((), device=tokens.device))
        return self.norm(streams.float().mean(1).to(streams.dtype)).view(*shape, -1), loss

    def logits(self, tokens: Tensor, mode: Mode = "sparse", faults: dict[int, Fault] | None = None) -> Tensor:
        """tokens [B, T] -> [B, T, vocab], fp32."""
        hidden: Tensor = self.head(self(tokens, mode, faults=faults)[0])
        return hidden.float()

    def sparse_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.spec.layers) if kind != "K"]
