"""Sidestream against transformers on this CPU: same process, same checkpoint, fp32, ratios of tokens per second.

    python benchmarks/cpu_vs_transformers.py [--model FOLDER] [--threads N] [--json FILE] [--quick]

Rounds of both engines alternate, each figure is a median. The peer gets its best way of serving: for the unequal
requests it may batch with left padding (the batch runs as long as its longest answer) or go one by one, whichever is
faster.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Glm5NextForConditionalGeneration

from sidestream import LLM, SamplingParams, __version__
from sidestream.config.engine import EngineConfig
from sidestream.core.batch import Chunk
from sidestream.engine.build import BuiltEngine, build_engine
from sidestream.engine.llm import bundled_model

CONTEXT = 512
PREFILL = 4096


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Decoder:
    """Sidestream decode steps of a batch whose sequences hold ``context`` tokens; each step is one more token."""

    def __init__(self, built: BuiltEngine, batch: int, context: int, vocab: int) -> None:
        self.built, self.vocab = built, vocab
        size = built.config.block_size
        need = -(-(context + 256) // size)
        self.blocks = [tuple(range(1 + i * need, 1 + (i + 1) * need)) for i in range(batch)]
        self.position = 0
        ids = random_ids(context, vocab)
        while self.position < context:
            length = min(1024, context - self.position)
            for i in range(batch):
                piece = ids[self.position : self.position + length]
                built.runner.forward([self.chunk(i, length, decode=False)], piece)
            self.position += length

    def chunk(self, i: int, length: int, *, decode: bool) -> Chunk:
        size = self.built.config.block_size
        used = self.blocks[i][: -(-(self.position + length) // size)]
        return Chunk(str(i), self.position, length, used, i + 1, decode, True)

    def step(self) -> None:
        batch = len(self.blocks)
        hidden = self.built.runner.forward(
            [self.chunk(i, 1, decode=True) for i in range(batch)], random_ids(batch, self.vocab)
        )
        self.built.runner.logits(hidden, range(batch)).argmax(-1).tolist()
        self.position += 1


class Peer:
    """transformers on the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.model = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.vocab = self.model.config.text_config.vocab_size

    @torch.inference_mode()
    def prefill(self, ids: Sequence[Sequence[int]]) -> Any:
        return self.model(input_ids=torch.tensor(ids), use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def step(self, cache: Any, batch: int) -> None:
        ids = torch.tensor([[token] for token in random_ids(batch, self.vocab)])
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        out.logits[:, -1].argmax(-1).tolist()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Left-padded batch, as long as the longest answer."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        longest = max(lengths)
        self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )


_RNG = random.Random(0)


def random_ids(count: int, vocab: int) -> list[int]:
    return [_RNG.randrange(8, vocab - 8) for _ in range(count)]


def compare_decode(built: BuiltEngine, peer: Peer, batch: int, rounds: int) -> dict[str, float]:
    ours = Decoder(built, batch, CONTEXT, peer.vocab)
    cache = peer.prefill([random_ids(CONTEXT, peer.vocab) for _ in range(batch)])
    mine, theirs = [], []
    for _ in range(3):
        ours.step()
        peer.step(cache, batch)
    for _ in range(rounds):
        mine.append(median_seconds(ours.step, 3))
        theirs.append(median_seconds(lambda: peer.step(cache, batch), 3))
    return report(batch / statistics.median(mine), batch / statistics.median(theirs))


def compare_prefill(built: BuiltEngine, peer: Peer, rounds: int) -> dict[str, float]:
    ids = random_ids(PREFILL, peer.vocab)
    size = built.config.block_size
    blocks = tuple(range(1, 1 + PREFILL // size))

    def ours() -> None:
        hidden = None
        for start in range(0, PREFILL, 1024):
            chunk = Chunk("p", start, 1024, blocks[: (start + 1024) // size], 1, False, True)
            hidden = built.runner.forward([chunk], ids[start : start + 1024])
        assert hidden is not None
        built.runner.logits(hidden, [1023]).argmax(-1).tolist()

    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(median_seconds(ours, 1))
        theirs.append(median_seconds(lambda: peer.prefill([ids]), 1))
    return report(PREFILL / statistics.median(mine), PREFILL / statistics.median(theirs))


def compare_requests(folder: Path, peer: Peer, count: int, rounds: int) -> dict[str, float]:
    rng = random.Random(1)
    prompts = [random_ids(rng.randrange(16, 384), peer.vocab) for _ in range(count)]
    lengths = [rng.randrange(8, 96) for _ in range(count)]
    llm = LLM(folder, device="cpu", dtype="float32", max_num_seqs=count, max_model_len=1024)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    mine, batched, alone = [], [], []
    for _ in range(rounds):
        mine.append(median_seconds(lambda: llm.generate(prompts, params), 1))
        batched.append(median_seconds(lambda: peer.generate(prompts, lengths), 1))

        def one_by_one() -> None:
            for prompt, length in zip(prompts, lengths, strict=True):
                peer.generate([prompt], [length])

        alone.append(median_seconds(one_by_one, 1))
    tokens = sum(lengths)
    best = min(statistics.median(batched), statistics.median(alone))
    return report(tokens / statistics.median(mine), tokens / best) | {
        "peer_batched_s": statistics.median(batched),
        "peer_one_by_one_s": statistics.median(alone),
    }


def with_index_topk(folder: Path, topk: int, into: Path) -> Path:
    """The checkpoint with another ``index_topk``, on which no weight depends: files linked, config rewritten."""
    into.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (into / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["index_topk"] = topk
    (into / "config.json").write_text(json.dumps(config))
    return into


def context_curve(folder: Path, contexts: Sequence[int], topks: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Milliseconds of a decode step at batch 1 by context and ``index_topk``."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for topk in topks:
            variant = with_index_topk(folder, topk, Path(scratch) / str(topk))
            built = build_engine(variant, EngineConfig(device="cpu", dtype="float32", max_num_seqs=1))
            for context in contexts:
                decoder = Decoder(built, 1, context, built.config.model.vocab_size)
                for _ in range(3):
                    decoder.step()
                rows.append({"index_topk": topk, "context": context, "ms": 1e3 * median_seconds(decoder.step, rounds)})
                print(f"  index_topk {topk:5}  context {context:6}  {rows[-1]['ms']:7.2f} ms a step", flush=True)
    return rows


def report(mine: float, theirs: float) -> dict[str, float]:
    return {"sidestream_tok_s": mine, "transformers_tok_s": theirs, "ratio": mine / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=bundled_model())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no curve beyond 8k")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    rounds = 5 if args.quick else 15
    built = build_engine(args.model, EngineConfig(device="cpu", dtype="float32", max_num_seqs=8))
    peer = Peer(args.model)
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "sidestream": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "threads": args.threads,
        },
    }
    bars = {"decode_batch_1": 2.0, "decode_batch_8": 2.5, "requests_32": 4.0, "prefill_4k": 3.0}
    results["decode_batch_1"] = compare_decode(built, peer, 1, rounds)
    results["decode_batch_8"] = compare_decode(built, peer, 8, rounds)
    results["prefill_4k"] = compare_prefill(built, peer, 3)
    results["requests_32"] = compare_requests(args.model, peer, 32, 1 if args.quick else 3)
    print(f"{'':16} {'sidestream':>12} {'transformers':>12}   ratio  (bar)   tokens/s")
    for name, bar in bars.items():
        row = results[name]
        print(
            f"{name:16} {row['sidestream_tok_s']:12.1f} {row['transformers_tok_s']:12.1f} "
            f"{row['ratio']:7.2f}  ({bar:.1f})"
        )
    contexts = [1024, 4096, 8192] if args.quick else [1024, 2048, 4096, 8192, 16384, 32000]
    results["curve"] = context_curve(args.model, contexts, [64, 256, 1024], rounds)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
