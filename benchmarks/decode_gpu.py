"""Inter-token latency of the whole engine on a GPU, for a model of real shapes with dummy weights.

Requests run through the engine core as in service: planned, launched one step ahead, sampled, read, committed. Their
prompts are not computed: caches hold random numbers, which cost what real ones do. A time is that between two calls of
``EngineCore.step``, of 100 steps in each of several repeats. Floors are those of ``floor.py``; vLLM's figures for
slice A were measured on the same kind of GPU.

    PYTHONPATH=. python benchmarks/decode_gpu.py --json benchmarks/results/decode-h200-DATE.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.floor import decode_floor
from sidestream import __version__
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.core.request import Request
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.core import EngineCore
from sidestream.engine.runner import StepOutput

SLICE_A = Path(__file__).parent / "configs" / "glm5-next-slice-a.json"
CASES = {(1, 2048): 2.61, (1, 32768): 2.77, (8, 8192): 4.86, (32, 8192): 7.01, (64, 8192): 8.03}
"""(batch, context) -> milliseconds that vLLM 0.33.0 takes for slice A."""
STEPS = 100


def engine(folder: Path, config: Path, mode: str) -> BuiltEngine:
    shutil.copy(config, folder / "config.json")
    return build_engine(
        folder,
        EngineConfig(
            device="cuda",
            cudagraph_mode=mode,
            load_format="dummy",
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=34816,
            num_blocks=64 * 132 + 600,
            memory_limit="100GiB",
        ),
    )


class Decoding:
    """``batch`` sequences that have ``context`` tokens behind them."""

    def __init__(self, built: BuiltEngine, batch: int, context: int, *, temperature: float) -> None:
        self.core = EngineCore(built)
        runner, hidden = built.runner, built.config.model.hidden_size
        for i in range(batch):
            self.core.add(
                Request(
                    request_id=str(i),
                    prompt_token_ids=tuple((7 * i + j) % 30000 + 5 for j in range(context)),
                    params=SamplingParams(temperature=temperature),
                    seed=i,
                    max_tokens=1000,
                    stop_token_ids=frozenset(),
                    mask_token_ids=(),
                )
            )
        real = runner.forward

        def prefill(chunks: list[Chunk], ids: list[int], **unknown: object) -> StepOutput:
            if all(chunk.is_decode for chunk in chunks):
                return real(chunks, ids, **unknown)  # type: ignore[arg-type]
            runner.streams.begin_step()
            return StepOutput(torch.zeros(-(-len(ids) // 8) * 8, hidden, dtype=torch.bfloat16, device="cuda"))

        runner.forward = prefill  # type: ignore[assignment, method-assign]
        decoding = 0
        while decoding < batch:
            decoding = sum(output.token_id is not None for output in self.core.step())
        runner.forward = real  # type: ignore[method-assign]

    def times(self, steps: int) -> list[float]:
        """Milliseconds of each of some steps."""
        for _ in range(5):
            self.core.step()
        taken = []
        last = time.perf_counter()
        for _ in range(steps):
            self.core.step()
            now = time.perf_counter()
            taken.append(1e3 * (now - last))
            last = now
        return taken

    def close(self) -> None:
        for i in range(64):
            self.core.abort(str(i))
        while self.core.has_work():
            self.core.step()


def fill(built: BuiltEngine) -> None:
    """Caches as a long service would leave them: finite and all different."""
    for tensor in built.pools.tensors():
        if tensor.is_floating_point() and tensor.itemsize > 1:
            for part in torch.split(tensor.flatten(), 1 << 28):
                part.normal_(0.0, 0.5)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=SLICE_A)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--mode", default="full")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="write a table of GPU kernels of a few steps at batch 1 and 64")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": args.commit,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "versions": {"sidestream": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "mode": args.mode,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        built = engine(Path(folder), args.config, args.mode)
        results["start_s"] = time.perf_counter() - started
        print(f"weights and graphs in {results['start_s']:.1f} s")
    fill(built)
    for (batch, context), peer in CASES.items():
        floor = decode_floor(built.config.model, batch=batch, context=context).ms()
        decoding = Decoding(built, batch, context, temperature=0.0)
        repeats = [decoding.times(STEPS) for _ in range(args.repeats)]
        medians = [statistics.median(times) for times in repeats]
        p90 = statistics.median(sorted(times)[int(0.9 * STEPS)] for times in repeats)
        if args.profile and batch in (1, 64) and context < 10000:
            profile(decoding, args.profile.with_suffix(f".{batch}.txt"))
        decoding.close()
        latency = statistics.median(medians)
        results["rows"].append(
            {
                "batch": batch,
                "context": context,
                "ms": latency,
                "p90_ms": p90,
                "medians": medians,
                "floor_ms": floor,
                "vllm_ms": peer if args.config == SLICE_A else None,
                "to_floor": latency / floor,
            }
        )
        print(
            f"  batch {batch:3} context {context:6}: {latency:6.2f} ms (p90 {p90:6.2f}), {latency / floor:4.2f} x the "
            f"floor of {floor:.2f} ms{f'; vLLM {peer} ms' if args.config == SLICE_A else ''}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")


def profile(decoding: Decoding, path: Path) -> None:
    """Kernels of ten steps, by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(10):
            decoding.core.step()
        torch.cuda.synchronize()
    path.write_text(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=60))


if __name__ == "__main__":
    main()
