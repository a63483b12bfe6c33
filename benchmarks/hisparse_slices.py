"""Engines for ``hisparse_gpu.py``: over one set of weights, with and without a host pool, started with two graphs."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.chosen_experts import ChosenExperts, different
from benchmarks.replayed_selections import ReplayedSelections
from sidestream.cache.hosted_rows import HostedRows
from sidestream.cache.pools import CachePools
from sidestream.config.engine import EngineConfig
from sidestream.engine import build
from sidestream.engine.bench.latency import WARM_STEPS, Decoding, fill_caches
from sidestream.engine.build import BuiltEngine, build_engine, start_runner
from sidestream.engine.hosting import hosted_sizes
from sidestream.engine.scratch_steps import scratch_chunk
from sidestream.graphs import dispatch

CONFIGS = Path(__file__).parent / "configs"
BLOCK = 64
SAMPLES = 8
"""Steps whose experts are counted before others are timed, and as many behind them."""
SLICES = {
    "A": ("glm5-next-slice-a.json", "auto"),
    "B": ("deepseek-v32-slice-b.json", "fp8_ds_mla"),
    "C": ("glm-moe-dsa-slice-c.json", "auto"),
}
"""Config and row format of each."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 48,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "vocab_size": 128,
}
"""Of a slice's config, for a CPU: the same layers, all of them narrow."""


class Slice:
    """Engines over one set of weights: made when a case first needs them, each with sequences that decode.

    Args:
        args: of the script.
        cases: that the sequences of one engine may have to last for.
    """

    def __init__(self, letter: str, args: argparse.Namespace, *, cases: int) -> None:
        self.args, self.letter = args, letter
        name, self.rows = SLICES[letter]
        config = json.loads((CONFIGS / name).read_text())
        if args.config == "tiny":
            config |= {key: value for key, value in TINY.items() if key in config}
        self.room = 3 * args.batch + cases * (3 * (args.warm + 2 * WARM_STEPS) + 2 * args.steps + 4 * SAMPLES + 20)
        self.blocks = args.batch * -(-(args.context + self.room) // BLOCK)
        user = EngineConfig(
            device=args.device,
            cudagraph_mode="full" if args.device == "cuda" else "auto",
            dtype="bfloat16" if args.device == "cuda" else "float32",
            kv_cache_dtype=args.kv_cache_dtype or self.rows,
            load_format="dummy",
            max_num_seqs=args.batch,
            max_num_batched_tokens=args.batched_tokens,
            max_model_len=args.context + self.room,
            num_blocks=self.blocks,
            block_size=BLOCK,
            enable_prefix_caching=False,
            prefill_pacing=False,
            max_capture_tokens=1,
            memory_limit=args.memory_limit,
        )
        kpool = int(config.get("index_kpool", 1))
        self.replayed = ReplayedSelections(args.context - BLOCK, kpool=kpool, device=args.device)
        self.experts = ChosenExperts(args.batch)
        started = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder, small_start(args.batch):
                (Path(folder) / "config.json").write_text(json.dumps(config))
                self.base = build_engine(folder, user)
        except BaseException:
            self._leave_layers()
            raise
        self.startup_s = time.perf_counter() - started
        fill_caches(self.base)
        self._running: dict[str, tuple[BuiltEngine, Decoding]] = {}

    def running(self, engine: str) -> tuple[BuiltEngine, Decoding]:
        """ "resident", "capped", "free" or "pressed", and its sequences. One of them has pools of its own at a time."""
        if engine not in self._running:
            self.stop()
            built = self.base if engine in ("resident", "capped") else self._hosted(engine)
            batch = self.args.batch // 4 if engine == "capped" else self.args.batch
            self.select(built, 0.9)
            decoding = Decoding(
                built, batch, self.args.context, room=self.room, temperature=1.0
            )  # greedy ones go round
            self._running[engine] = built, decoding
        return self._running[engine]

    def select(self, built: BuiltEngine, overlap: float | None) -> None:
        """What the engine's steps select from now on."""
        with built.runner.on_device():
            self.replayed.use(overlap)

    def chosen(self, built: BuiltEngine, decoding: Decoding) -> torch.Tensor:
        """[2, layers]: different experts that all tokens of a step choose, and those of a quarter of ``args.batch``.
        Means of some steps."""
        quarter, counts = self.args.batch // 4, []
        with built.runner.on_device():
            for _ in range(SAMPLES):
                layers = self.experts.of_step(decoding.core.step)
                counts.append([[different(ids[:rows]) for ids in layers] for rows in (None, quarter)])
        return torch.tensor(counts, dtype=torch.float32).mean(dim=0)

    def stop(self) -> None:
        """End all sequences, and free the memory of an engine that has a host pool."""
        for built, decoding in self._running.values():
            decoding.close()
            built.runner.settle()
            if built.pools.hosted is not None:
                built.pools.hosted.host.close()
        self._running.clear()
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.stop()
        self._leave_layers()
        del self.base
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def _leave_layers(self) -> None:
        self.replayed.close()
        self.experts.close()

    def _hosted(self, engine: str) -> BuiltEngine:
        """The same weights over pools of a device that holds a quarter of the blocks, or all; with a host pool."""
        base, groups = self.base, self.base.pools.groups
        places = self.blocks // 4 if engine == "pressed" else self.blocks
        host_blocks = self.blocks - places + BLOCK
        config = replace(
            base.config,
            host_memory=host_blocks * groups.kv.bytes_per_block,
            hot_factor=self.args.hot_factor,
            watermark=self.args.watermark,
            staged_tokens=self.args.batch * base.max_model_len,  # all prompts at once, as beside it
        )
        sizes = hosted_sizes(config, groups)
        assert sizes is not None
        backend = base.runner.streams.backend
        if base.memory is not None:
            base.memory.lift()
        rows = HostedRows(groups, sizes, places + 1, device=backend.device)
        blocks = places + 1 + sizes.host_blocks
        pools = CachePools(groups, blocks, base.num_slots, device=backend.device, hosted=rows)
        with capture_sizes(self.args.batch):
            runner = start_runner(
                base.model,
                config,
                pools,
                backend=backend,
                max_model_len=base.max_model_len,
                weight_bytes=base.weight_bytes,
            )
        built = replace(base, config=config, runner=runner, pools=pools, num_blocks=blocks)
        fill_caches(built)
        return built


def small_start(batch: int) -> AbstractContextManager[None]:
    """Compile and capture nothing but decodes of the two batches that are measured."""
    decode = (scratch_chunk(BLOCK, 2 * BLOCK, 1, decode=True),) * batch
    return patched(
        (build, "compile_steps", lambda config, **named: iter(())),
        (build, "largest_steps", lambda config, **named: (decode,)),
        (dispatch, "capture_sizes", sizes_of(batch)),
    )


def capture_sizes(batch: int) -> AbstractContextManager[None]:
    return patched((dispatch, "capture_sizes", sizes_of(batch)))


def sizes_of(batch: int) -> Callable[[int], tuple[int, ...]]:
    return lambda limit: (*(size for size in (batch // 4,) if 0 < size < limit), limit)


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes exchanged while a block runs."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield
