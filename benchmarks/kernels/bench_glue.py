"""What stands between the large kernels of a step on a GPU: with the copies of torch's kernels, and without.

    PYTHONPATH=. python benchmarks/kernels/bench_glue.py OUT.json [--rows 8 64]

Shapes are those of GLM-5.3-Flash, the head that of slice A. Weights rotate through more copies than the L2 cache holds.
Floor: bytes that must be touched once over 4.28 TB/s. "copied" is what a step does with the switches off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.kernels.bench_moe import BYTES_PER_US, HIDDEN, Report, Shape, draw, error_of
from benchmarks.kernels.results import keep, out_file
from sidestream.ops.embedding import torch_impl as embed_torch
from sidestream.ops.embedding import triton_embed
from sidestream.ops.linear import reference, torch_impl, triton_linear
from sidestream.ops.linear.launches import launch_for
from sidestream.ops.norm import reference as norm_reference
from sidestream.ops.norm import rms_norm, triton_norms
from sidestream.ops.rope import reference as rope_reference
from sidestream.ops.rope import triton_rope

HEADS, DIM, LATENT, VOCAB, STREAMS = 64, 256, 512, 32768, 4
QUERY = HEADS * DIM + 32 * 128
ROWS = (1, 8, 32, 64, 8192)
ROTATED_BYTES = 300e6
EPS = 1e-5


def shape(name: str, rows: int, nbytes: float, sets: int) -> Shape:
    return Shape(f"{name} x {rows}", nbytes / BYTES_PER_US, sets, max(sets, 8) // sets * sets)


def copies_of(nbytes: float, rows: int) -> int:
    return 2 if rows > 64 else max(2, int(ROTATED_BYTES // nbytes) + 1)


def heads(report: Report, rows: int, *, values: bool) -> None:
    """The absorbed query, from a slice of a wider product; or values, from a contiguous result."""
    name = "values" if values else "absorbed query"
    sets = copies_of(2 * HEADS * DIM * LATENT, rows)
    inner, outer = (LATENT, DIM) if values else (DIM, LATENT)
    expand = [draw(HEADS, 2 * DIM, LATENT, spread=LATENT**-0.5) for _ in range(sets)]
    weights = [one[:, DIM:].transpose(1, 2) if values else one[:, :DIM] for one in expand]
    x = [
        (draw(rows, HEADS * LATENT) if values else draw(rows, QUERY)[:, : HEADS * DIM]).view(rows, HEADS, inner)
        for _ in range(sets)
    ]
    want = reference.by_head(x[0][:64], weights[0])
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "copied": lambda x, weight: torch_impl.by_head(x, weight).contiguous(),
        "in place": torch_impl.by_head_in_place,
    }
    moved = 2 * HEADS * (inner * outer + rows * (inner + outer))
    for way, function in ways.items():
        report.add(
            shape(name, rows, moved, sets),
            way,
            lambda i, function=function: function(x[i], weights[i]),  # type: ignore[misc]
            lambda function=function: error_of(function(x[0], weights[0])[:64], want),  # type: ignore[misc]
        )


def rotated_query(report: Report, rows: int) -> None:
    """Absorbed queries of DeepSeek-V3.2 with their rotated parts, and the keys' rotated part."""
    heads, nope, rope = 128, 128, 64
    sets = copies_of(2 * heads * nope * LATENT, rows)
    weights = [draw(heads, nope, LATENT, spread=nope**-0.5) for _ in range(sets)]
    x = [draw(rows, heads, nope + rope) for _ in range(2 if rows > 64 else sets)]
    keys, angle = draw(rows, LATENT + rope)[:, LATENT:], torch.rand(rows, rope, device="cuda") * 6
    cos, sin = angle.chunk(2, dim=1)
    turn = {"interleaved": True}

    def copied(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        absorbed = torch_impl.by_head_in_place(query[..., :nope], weight)
        turned = triton_rope.apply_rope(query[..., nope:], cos, sin, **turn)
        triton_rope.apply_rope(keys, cos, sin, **turn)
        return torch.cat([absorbed, turned], dim=-1)

    def in_place(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(rows, heads, LATENT + rope)
        torch_impl.write_by_head(query[..., :nope], weight, out=out[..., :LATENT])
        triton_rope.apply_rope_pair(query[..., nope:], keys, cos, sin, **turn, out=out[..., LATENT:])
        return out

    few = slice(0, 64)
    turned = rope_reference.apply_rope(x[0][few, :, nope:], cos[few], sin[few], **turn)
    want = torch.cat([reference.by_head(x[0][few, :, :nope], weights[0]), turned], dim=-1)
    moved = 2 * heads * (nope * LATENT + rows * (nope + LATENT + 2 * rope))
    for way, function in {"copied": copied, "in place": in_place}.items():
        report.add(
            shape("rotated query", rows, moved, sets),
            way,
            lambda i, function=function: function(x[i % len(x)], weights[i]),  # type: ignore[misc]
            lambda function=function: error_of(function(x[0], weights[0])[few], want),  # type: ignore[misc]
        )


def head(report: Report, rows: int) -> None:
    """Logits in the memory of results."""
    sets = copies_of(2 * VOCAB * HIDDEN, rows)
    weights = [draw(VOCAB, HIDDEN, spread=HIDDEN**-0.5) for _ in range(sets)]
    x = [draw(rows, HIDDEN) for _ in range(sets)]
    out = torch.empty(rows, VOCAB, device="cuda")
    want = reference.linear(x[0], weights[0], None)
    launch = launch_for(rows, VOCAB, HIDDEN)

    def narrow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if launch is None:
            return torch_impl.linear(x, weight, None)
        return triton_linear.linear(x, weight, None, launch=launch)

    def wide(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if launch is None:
            torch_impl.wide_logits(x, weight, out=out)
            return out
        return triton_linear.linear(x, weight, None, launch=launch, out=out)

    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "widened, then copied": lambda x, weight: out.copy_(narrow(x, weight).float()),
        "copied": lambda x, weight: out.copy_(narrow(x, weight)),
        "fp32 sums": wide,
    }
    for way, function in ways.items():
        report.add(
            shape("head", rows, 2 * VOCAB * HIDDEN, sets),
            way,
            lambda i, function=function: function(x[i], weights[i]),  # type: ignore[misc]
            lambda function=function: error_of(function(x[0], weights[0]), want),  # type: ignore[misc]
        )


def enter(report: Report, rows: int) -> None:
    table = draw(VOCAB, HIDDEN)
    ids = [torch.randint(VOCAB, (rows,), device="cuda") for _ in range(8)]
    want = embed_torch.embed(ids[0], table, copies=STREAMS)
    for way, module in {"copied": embed_torch, "one launch": triton_embed}.items():
        report.add(
            shape("embedding", rows, 2 * rows * HIDDEN * (1 + STREAMS), 8),
            way,
            lambda i, module=module: module.embed(ids[i], table, copies=STREAMS),  # type: ignore[misc]
            lambda module=module: error_of(module.embed(ids[0], table, copies=STREAMS), want),  # type: ignore[misc]
        )


def leave(report: Report, rows: int) -> None:
    streams, weight = [draw(rows, STREAMS, HIDDEN) for _ in range(8 if rows <= 64 else 2)], draw(HIDDEN)
    want = norm_reference.mean_rms_norm(streams[0], weight, EPS)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "mean, then norm": lambda x: rms_norm(x.mean(dim=1), weight, EPS),
        "one launch": lambda x: triton_norms.mean_rms_norm(x, weight, EPS),
    }
    for way, function in ways.items():
        report.add(
            shape("last norm", rows, 2 * rows * HIDDEN * (1 + STREAMS), len(streams)),
            way,
            lambda i, function=function: function(streams[i]),  # type: ignore[misc]
            lambda function=function: error_of(function(streams[0]), want),  # type: ignore[misc]
        )


def norms(report: Report, rows: int) -> None:
    """Of the low-rank query and of the latent, two parts of one product."""
    x, weights = [draw(rows, 2336) for _ in range(8 if rows <= 64 else 2)], (draw(1536), draw(512))
    want = norm_reference.rms_norm(x[0][:, :1536], weights[0], EPS)
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
        "two launches": lambda a, b: (rms_norm(a, weights[0], EPS), rms_norm(b, weights[1], EPS)),
        "one launch": lambda a, b: triton_norms.rms_norm_pair(a, b, *weights, eps=EPS),
    }
    for way, function in ways.items():
        report.add(
            shape("two norms", rows, 4 * rows * 2048, len(x)),
            way,
            lambda i, function=function: function(x[i][:, :1536], x[i][:, 1536:2048]),  # type: ignore[misc]
            lambda function=function: error_of(function(x[0][:, :1536], x[0][:, 1536:2048])[0], want),  # type: ignore[misc]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=out_file)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    options = parser.parse_args()
    torch.manual_seed(1)
    report, began = Report(out=options.out), time.monotonic()
    with torch.inference_mode():
        for rows in options.rows:
            heads(report, rows, values=False)
            heads(report, rows, values=True)
            rotated_query(report, rows)
            if rows <= 64:
                head(report, rows)
            enter(report, rows)
            leave(report, rows)
            norms(report, rows)
    report.show()
    seconds = round(time.monotonic() - began, 1)
    made = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": seconds, "rows": report.rows}
    keep(options.out, made)
    print(f"{made['device']}, {seconds} s")


if __name__ == "__main__":
    main()
