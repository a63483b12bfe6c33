"""Checks the GPU kernels against plain torch and measures the step time: `python -m training.probe`."""

import argparse
import time

import torch
from torch import Tensor

from training import ops
from training.data import make_batch
from training.model import TinyModel
from training.spec import Spec
from training.tokenizer import CachedEncoder, build_tokenizer


def compare(name: str, function: object, inputs: list[Tensor], *constants: object) -> None:
    """Relative error of output and gradients on the GPU against the same function on the CPU."""
    assert callable(function)
    cpu = [x.clone().requires_grad_() for x in inputs]
    gpu = [x.cuda().requires_grad_() for x in inputs]
    want, got = function(*cpu, *constants), function(*gpu, *constants)
    grad = torch.randn_like(want)
    want.backward(grad)
    got.backward(grad.cuda())
    pairs = [(want, got)] + [(a.grad, b.grad) for a, b in zip(cpu, gpu, strict=True)]
    print(name, [f"{float((a - b.cpu()).detach().norm() / a.detach().norm()):.1e}" for a, b in pairs], flush=True)


def check_kernels() -> None:
    n, d = 777, 192
    compare("sinkhorn", lambda x: ops.sinkhorn(x.softmax(-1), 20, 1e-6), [torch.randn(n, 4, 4) * 2])
    compare("collapse", ops.collapse, [torch.randn(n, 4, d), torch.rand(n, 4)])
    compare("expand", ops.expand, [torch.randn(n, d), torch.randn(n, 4, d), torch.rand(n, 4), torch.rand(n, 4, 4)])
    compare("swiglu", lambda a, b: ops.swiglu(a, b, 2.0), [torch.randn(n, 8, 256) * 2, torch.rand(n, 8)])
    shape = (2, 200, 4, 32)
    inputs = [torch.randn(shape) for _ in range(4)] + [
        torch.randn(2, 200, 4),
        torch.randn(4) * 0.3,
        torch.randn(128) - 3,
    ]
    compare("kda fp32", lambda q, k, v, g, b, a, d: ops.kda(q, k, v, g, b, a, d, -5.0), inputs)


def step_time(model: TinyModel, ids: Tensor, mode: str, queries: Tensor | None, steps: int) -> float:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.time()
        with torch.autocast("cuda", torch.bfloat16):
            hidden, index = model(ids[:, :-1], mode, queries=queries)
            loss = (
                torch.nn.functional.cross_entropy(model.head(hidden).flatten(0, 1).float(), ids[:, 1:].flatten())
                + index
            )
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        torch.cuda.synchronize()
        times.append(time.time() - started)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="KKDKKD")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    started = time.time()
    check_kernels()
    print(f"kernels checked after {time.time() - started:.0f} s", flush=True)
    encode = CachedEncoder(build_tokenizer())
    model = TinyModel(Spec(layers=args.layers)).cuda().train()
    model.stream_dtype = torch.bfloat16
    for length in (256, 1024, 8192):
        for tokens in (32768,):
            ids = torch.from_numpy(make_batch(encode, 0, 0, tokens // length, length)[0]).long().cuda()
            queries = torch.randint(length, (ids.shape[0], 256), device="cuda")
            row = []
            for mode, q in (("dense", None), ("dense", queries), ("sparse", queries)):
                row.append(
                    f"{mode}{'+index' if q is not None else ''} {1e3 * step_time(model, ids, mode, q, 8):.1f} ms"
                )
            print(
                f"length {length} tokens {tokens}: " + ", ".join(row) + f", {time.time() - started:.0f} s", flush=True
            )
    if args.profile:
        ids = torch.from_numpy(make_batch(encode, 0, 0, 32, 1024)[0]).long().cuda()
        for mode in ("dense", "sparse"):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            ) as prof:
                step_time(model, ids, mode, None, 2)
            print(
                prof.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60)[:6000],
                flush=True,
            )


if __name__ == "__main__":
    main()
