"""This engine beside its peers in one run: transformers on a cut of slice A, and torch's own operators.

    PYTHONPATH=. python benchmarks/peers_gpu.py --json benchmarks/results/peers-h200-DATE.json

Both engines run the same first layers of the same config (``--layers``) with random weights, one after the other, on
contexts of random tokens; transformers decodes with its own cache, a prompt computed before. It uses fla-core's kernels
for linear attention if they are installed, which the result says. The file is written after each part; a part that
fails is named in it, and the others run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import Glm5NextTextConfig, Glm5NextTextModel

from sidestream.config.engine import EngineConfig
from sidestream.engine.bench.run import LatencySettings, measure, open_engine
from sidestream.ops.kv_rows import kv_row_layout
from sidestream.ops.linear import linear
from sidestream.ops.norm import rms_norm
from sidestream.ops.sparse_mla import sparse_mla
from sidestream.ops.topk import topk_ascending

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


def cut_config(path: Path, layers: int) -> dict[str, Any]:
    """The config of the model's first layers.

    Raises:
        ValueError: it is no text config of ``glm5_next``, or has fewer layers.
    """
    config: dict[str, Any] = json.loads(path.read_text())
    config = config.get("text_config", config)
    if config.get("model_type") != "glm5_next_text":
        raise ValueError(f"{path}: model_type is {config.get('model_type')!r}, only 'glm5_next_text' has a peer here")
    if not 0 < layers <= config["num_hidden_layers"]:
        raise ValueError(f"--layers is {layers}, {path} has 1 to {config['num_hidden_layers']}")
    return config | {"num_hidden_layers": layers} | {key: config[key][:layers] for key in PER_LAYER if key in config}


def seconds_of(run: Callable[[], object], device: str, *, rounds: int) -> list[float]:
    """Of each of some rounds, the device idle at both ends."""
    taken = []
    for _ in range(rounds):
        settle(device)
        began = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - began)
    return taken


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Peer:
    """transformers' model with a head, weights drawn from a normal distribution.

    Args:
        config: of the cut.
    """

    def __init__(self, config: dict[str, Any], device: str, dtype: torch.dtype) -> None:
        fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        self.device = device
        with torch.device(device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                self.model = Glm5NextTextModel(Glm5NextTextConfig(**fields)).eval()
                self.head = torch.empty(config["vocab_size"], config["hidden_size"])
            finally:
                torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in (*self.model.parameters(), self.head):
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02)
        self.vocab = config["vocab_size"]

    def prompt(self, batch: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch * 1000 + tokens)
        return torch.randint(self.vocab, (batch, tokens), generator=generator).to(self.device)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """The next tokens [B, 1], greedy, and the cache."""
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits = F.linear(out.last_hidden_state[:, -1], self.head)
        return logits.argmax(dim=-1, keepdim=True), out.past_key_values

    def decode_ms(self, batch: int, context: int, *, steps: int) -> dict[str, Any]:
        """Milliseconds of a step, each from an idle device to its token on the host."""
        ids, cache = self.step(self.prompt(batch, context), None)
        times = []
        for i in range(steps + 3):
            began = time.perf_counter()
            ids, cache = self.step(ids, cache)
            ids.tolist()
            if i >= 3:
                times.append(1e3 * (time.perf_counter() - began))
        return {
            "batch": batch,
            "context": context,
            "ms": statistics.median(times),
            "p90": sorted(times)[len(times) * 9 // 10],
        }

    def prefill(self, tokens: int, *, rounds: int) -> dict[str, Any]:
        prompt = self.prompt(1, tokens)
        taken = seconds_of(lambda: self.step(prompt, None), self.device, rounds=rounds + 1)[1:]
        return {"tokens": tokens, "tokens_per_s": tokens / statistics.median(taken)}


def ours(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """This engine on the cut: as ``decode_gpu.py`` measures."""
    settings = LatencySettings(
        cases=tuple((batch, args.context) for batch in args.batch),
        prefills=tuple(args.prefill),
        steps=args.steps,
        repeats=args.repeats,
    )
    user = EngineConfig(
        device=args.device,
        dtype=args.dtype,
        cudagraph_mode="full" if args.device == "cuda" else "none",
        max_num_batched_tokens=min(8192, max(args.prefill)),
        memory_limit=args.memory_limit,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.json"
        path.write_text(json.dumps(config))
        built = open_engine(path, user, settings)
    report = measure(built, settings, model="cut", command=sys.argv, on_row=lambda row: print(row, flush=True))
    found = report.as_json()
    return {key: found[key] for key in ("startup_s", "decode", "prefill")}


def theirs(config: dict[str, Any], args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """transformers on the cut."""
    peer = Peer(config, args.device, getattr(torch, args.dtype))
    found: dict[str, Any] = {"fla": find_spec("fla") is not None, "decode": [], "prefill": [], "failed": []}
    runs: list[tuple[str, str, Callable[[], dict[str, Any]]]] = []
    for batch in args.batch:
        run = lambda batch=batch: peer.decode_ms(batch, args.context, steps=args.peer_steps)  # noqa: E731
        runs.append(("decode", f"batch {batch}", run))
    for tokens in args.prefill:
        runs.append(("prefill", f"{tokens} tokens", lambda tokens=tokens: peer.prefill(tokens, rounds=args.repeats)))
    for kind, name, run in runs:
        try:
            found[kind].append(run())
            print(f"transformers: {found[kind][-1]}", flush=True)
        except RuntimeError as error:  # out of memory, for one
            found["failed"].append(f"{kind} of {name}: {str(error)[:300]}")
            print(f"transformers: {found['failed'][-1]}", flush=True)
        keep(found)
    return found


def operators(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One operator of ours against what torch has for it, microseconds a call in a row of calls."""
    device, dtype, rows = args.device, getattr(torch, args.dtype), []
    small = args.device == "cpu"
    hidden, heads, latent, width, pool_rows = (64, 4, 32, 16, 256) if small else (4096, 64, 512, 2048, 1 << 20)
    layout = kv_row_layout("auto", latent_dim=latent, rope_dim=0, model_dtype=dtype)
    pool = torch.randn(pool_rows, latent, device=device).to(dtype)
    weight = (torch.randn(4 * hidden, hidden, device=device) * 0.02).to(dtype)
    scale = torch.ones(hidden, device=device, dtype=dtype)
    for tokens in (1, 8, 64):
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        q = torch.randn(tokens, heads, latent, device=device).to(dtype)
        chosen = torch.randint(pool_rows, (tokens, width), device=device)
        counts = torch.full((tokens,), width, dtype=torch.int32, device=device)
        scores = torch.randn(tokens, 16 * width, device=device)
        valid = torch.full((tokens,), scores.shape[1], dtype=torch.int64, device=device)

        def attend() -> object:
            return sparse_mla(q, pool, chosen, counts=counts, scale=latent**-0.5, layout=layout, with_lse=False)  # noqa: B023

        def attend_torch() -> object:
            kv = pool.index_select(0, chosen.view(-1)).view(tokens, 1, width, latent)  # noqa: B023
            kv = kv.expand(-1, heads, -1, -1)
            return F.scaled_dot_product_attention(q.unsqueeze(2), kv, kv)  # noqa: B023

        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "sparse attention": (attend, attend_torch),
            "linear": (lambda x=x: linear(x, weight, None), lambda x=x: F.linear(x, weight)),
            "rms norm": (lambda x=x: rms_norm(x, scale, 1e-5), lambda x=x: F.rms_norm(x, (hidden,), scale, 1e-5)),
            "top-k": (
                lambda scores=scores, valid=valid: topk_ascending(scores, valid, width),
                lambda scores=scores: torch.topk(scores, width, dim=1),
            ),
        }
        for name, sides in pairs.items():
            row: dict[str, Any] = {"name": name, "tokens": tokens}
            for side, run in zip(("us", "torch_us"), sides, strict=True):
                try:
                    row[side] = round(call_us(run, device), 2)
                except RuntimeError as error:  # out of memory, for one
                    row[f"{side}_failed"] = str(error)[:300]
            rows.append(row)
            print(row, flush=True)
    return rows


@torch.inference_mode()
def call_us(run: Callable[[], object], device: str) -> float:
    """On a GPU within a graph, where launches cost neither side anything."""
    if device == "cuda":
        import triton

        return 1e3 * float(triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median"))
    run()
    return 1e6 * statistics.median(seconds_of(run, device, rounds=5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try the script")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prefill", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--peer-steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-limit", default="60GiB")
    parser.add_argument("--only", nargs="+", choices=("operators", "ours", "transformers"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    try:
        config = cut_config(args.config, args.layers)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    results: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "layers": args.layers, "versions": versions}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    parts: dict[str, Callable[[], Any]] = {
        "operators": lambda: operators(args),
        "ours": lambda: ours(config, args),
        "transformers": lambda: theirs(config, args, lambda found: keep("transformers", found)),
    }
    failed = False
    for name, run in parts.items():
        if args.only and name not in args.only:
            continue
        try:
            keep(name, run())
        except (RuntimeError, ValueError, TypeError) as error:
            traceback.print_exc()
            keep(name, {"failed": repr(error)[:1000]})
            failed = True
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    ratios(results)
    return int(failed)


def ratios(results: dict[str, Any]) -> None:
    """Prints how much longer transformers takes, where both were measured."""
    mine, peers = results.get("ours", {}), results.get("transformers", {})
    decode = {row["batch"]: row["median"] for row in mine.get("decode", [])}
    prefill = {row["tokens"]: row["tokens_per_s"] for row in mine.get("prefill", [])}
    for row in peers.get("decode", []):
        if row["batch"] in decode:
            print(f"batch {row['batch']}: transformers takes {row['ms'] / decode[row['batch']]:.1f} times as long")
    for row in peers.get("prefill", []):
        if row["tokens"] in prefill:
            times = prefill[row["tokens"]] / row["tokens_per_s"]
            print(f"prefill of {row['tokens']}: transformers takes {times:.1f} times as long")


if __name__ == "__main__":
    sys.exit(main())
