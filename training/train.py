"""Trains the small checkpoint: dense attention, then the indexer alone, then both under sparse selection.

`python -m training.train --out DIR` on a GPU; `--smoke` runs all phases, export and reload at toy size on a CPU.
Weights are saved as DIR/NAME.pt at every phase's end and about once a minute, small enough to carry (matrices in bf16).
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.data import make_batch
from training.export import write_checkpoint
from training.model import Feedforward, Mode, TinyModel
from training.selection import TRAINED
from training.spec import Spec
from training.tokenizer import CachedEncoder, build_tokenizer


@dataclass(frozen=True)
class Phase:
    """One stage of training. `lengths` and `weights` (document kinds) change at fractions of it."""

    name: str
    steps: int
    rate: float
    final: float  # learning rate at the end, as a fraction
    lengths: tuple[tuple[float, tuple[int, ...]], ...]
    weights: tuple[tuple[float, tuple[float, ...]], ...]
    warmup: int = 200

    def length(self, step: int) -> int:
        choices = next(c for until, c in self.lengths if step < until * self.steps or until == 1.0)
        return choices[step % len(choices)]

    def kinds(self, step: int) -> tuple[float, ...]:
        return next(w for until, w in self.weights if step < until * self.steps or until == 1.0)

    def learning_rate(self, step: int, progress: float) -> float:
        shape = self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.rate * min(1.0, (step + 1) / self.warmup) * shape


EVEN = ((1.0, (0.15, 0.4, 0.45)),)


def plan(dense: int, index: int, joint: int, *, rate: float = 2e-3) -> list[Phase]:
    """The three phases of the real run."""
    grow = ((0.12, (128, 256)), (0.3, (256, 512)), (0.6, (512, 1024)), (1.0, (512, 1024, 2048, 4096)))
    far = ((0.4, (512, 1024, 2048)), (1.0, (1024, 2048, 4096, 8192)))
    return [
        Phase("dense", dense, rate, 0.1, grow, ((0.3, (0.2, 0.4, 0.4)), *EVEN)),
        Phase("index", index, 2e-3, 0.1, ((0.5, (512, 1024)), (1.0, (1024, 2048, 4096))), EVEN),
        Phase("joint", joint, 5e-4, 0.05, far, EVEN),
    ]


def smoke_plan() -> list[Phase]:
    lengths = ((1.0, (48, 96)),)
    return [Phase(n, s, 2e-3, 0.1, lengths, EVEN, warmup=2) for n, s in (("dense", 6), ("index", 4), ("joint", 4))]


class Batches(IterableDataset[tuple[Any, Any]]):
    """Batches of one phase in step order; worker w of W makes steps w, w + W, ..."""

    def __init__(self, phase: Phase, tokenizer: str, seed: int, tokens: int) -> None:
        self.phase, self.tokenizer, self.seed, self.tokens = phase, tokenizer, seed, tokens

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        encode = CachedEncoder(Tokenizer.from_str(self.tokenizer))
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in range(first, self.phase.steps, stride):
            length = self.phase.length(step)
            yield make_batch(encode, self.seed, step, max(1, self.tokens // length), length, self.phase.kinds(step))


class Trainer:
    """One model, its optimiser and its data."""

    def __init__(
        self, model: TinyModel, device: str, tokens: int, tokenizer: Tokenizer, seed: int, workers: int
    ) -> None:
        self.model, self.device, self.tokens, self.seed, self.workers = model.to(device), device, tokens, seed, workers
        self.tokenizer = tokenizer.to_str()
        self.routers = [m for m in model.modules() if isinstance(m, Feedforward) and m.sparse]
        self.rate = torch.zeros((), device=device)
        self.codes = torch.zeros(len(model.spec.layers), dtype=torch.long, device=device)
        self.eager = False
        if device == "cuda":
            model.stream_dtype = torch.bfloat16

    def optimiser(self, phase: Phase) -> torch.optim.AdamW:
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(
                "indexer" in name if phase.name == "index" else phase.name == "joint" or "indexer" not in name
            )
            parameter.grad = None
            if parameter.requires_grad:
                groups[parameter.ndim >= 2 and "hc_" not in name and "ape" not in name].append(parameter)
        parts = [{"params": groups[True], "weight_decay": 0.05}, {"params": groups[False], "weight_decay": 0.0}]
        gpu = self.device == "cuda"
        return torch.optim.AdamW(
            parts, lr=self.rate if gpu else phase.rate, betas=(0.9, 0.95), fused=gpu, capturable=gpu
        )

    def queries(self, marks: Tensor, count: int) -> Tensor:
        """[B, Q] positions for the index loss: half of them before far answers, half anywhere."""
        noise = torch.rand(2, *marks.shape, device=marks.device)
        count = min(count, marks.shape[1]) // 2
        return torch.cat([(noise[0] + (marks == 2)).topk(count).indices, noise[1].topk(count).indices], dim=1)

    def language_loss(self, hidden: Tensor, targets: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted cross-entropy over all tokens, and the share of far answers that are right."""
        logits = self.model.head(hidden).flatten(0, 1)
        weight = torch.where(marks > 0, 1.0, 0.05).masked_fill(targets == 0, 0.0).flatten()
        loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="none")
        with torch.no_grad():
            far = (marks == 2).flatten()
            right = ((logits.argmax(-1) == targets.flatten()) & far).sum() / far.sum().clamp(min=1)
        return (loss * weight).sum() / weight.sum(), right

    def sensitivity_loss(self, inputs: Tensor, targets: Tensor, marks: Tensor, mode: Mode) -> Tensor:
        """Makes far answers improbable when one layer sees the wrong rows, so that no layer's selection is idle."""
        hidden, _ = self.model(inputs, mode, codes=self.codes)
        logits = self.model.head(hidden).float()
        chance = logits.log_softmax(-1).gather(2, targets.unsqueeze(2)).squeeze(2).exp()
        far = (marks == 2).float()
        return -(torch.log((1.05 - chance).clamp(max=1.0)) * far).sum() / far.sum().clamp(min=1)

    def choose_fault(self, turn: int) -> None:
        """Sets the fault of this turn: one sparse layer, one kind."""
        layers = self.model.sparse_layers()
        self.codes.zero_()
        self.codes[layers[turn % len(layers)]] = 1 + turn // len(layers) % len(TRAINED)

    def update(
        self, phase: Phase, optimiser: torch.optim.AdamW, ids: Tensor, marks: Tensor, shown: Tensor, sensitivity: float
    ) -> None:
        """One step on ids and marks [B, T + 1]; with `sensitivity`, also on half of the rows under the chosen fault."""
        optimiser.zero_grad(set_to_none=True)
        inputs, targets, marks = ids[:, :-1].long(), ids[:, 1:].long(), marks[:, 1:]
        mode: Mode = "sparse" if phase.name == "joint" else "dense"
        queries = None if phase.name == "dense" else self.queries(marks, 256 if phase.name == "index" else 128)
        gpu = self.device == "cuda"
        with torch.autocast("cuda", torch.bfloat16, enabled=gpu):
            hidden, index_loss = self.model(inputs, mode, queries=queries)
            if phase.name == "index":
                loss, right = index_loss, torch.zeros_like(index_loss)
            else:
                loss, right = self.language_loss(hidden, targets, marks)
            total = loss + index_loss if phase.name == "joint" else loss
        total.backward()
        if phase.name != "index":
            for router in self.routers:
                router.router_bias += 1e-3 * torch.sign(router.load.mean() - router.load)
        extra = torch.zeros_like(index_loss)
        if sensitivity:
            half = max(1, inputs.shape[0] // 2)
            with torch.autocast("cuda", torch.bfloat16, enabled=gpu):
                extra = self.sensitivity_loss(inputs[:half], targets[:half], marks[:half], mode)
            (sensitivity * extra).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], 1.0)
        optimiser.step()
        one = torch.ones_like(index_loss)
        values = (loss, right, index_loss, one, extra, one if sensitivity else 0 * one)
        shown += torch.stack([value.detach().float() for value in values])

    def run(self, phase: Phase, seconds: float, save: "Saver", *, sensitivity: float = 0.0) -> None:
        """One phase; `seconds` is its budget, at the end of which the learning rate has come down and it stops."""
        optimiser = self.optimiser(phase)
        data = Batches(phase, self.tokenizer, self.seed, self.tokens)
        loader = DataLoader(
            data, batch_size=None, num_workers=self.workers, prefetch_factor=6 if self.workers else None
        )
        shown = torch.zeros(6, device=self.device)

        def plain(ids: Tensor, marks: Tensor) -> None:
            self.update(phase, optimiser, ids, marks, shown, 0.0)

        def faulty(ids: Tensor, marks: Tensor) -> None:
            self.update(phase, optimiser, ids, marks, shown, sensitivity)

        direct = self.eager or self.device == "cpu"
        steps = [body if direct else StepGraphs(body) for body in (plain, faulty)]
        started = time.time()
        waiting, step = 0.0, 0
        self.model.train()
        batches = iter(loader)
        for step in range(phase.steps):
            waited = time.time()
            ids, marks = next(batches)
            waiting += time.time() - waited
            progress = max(step / phase.steps, (time.time() - started) / seconds)
            rate = phase.learning_rate(step, min(1.0, progress))
            if self.device == "cuda":
                self.rate.fill_(rate)
                ids, marks = (part.pin_memory().to("cuda", non_blocking=True) for part in (ids, marks))
            else:
                for group in optimiser.param_groups:
                    group["lr"] = rate
            hurt = sensitivity > 0 and step % 2 == 1 and phase.name != "index" and ids.shape[1] <= 2049
            hurt = hurt and (phase.name == "joint" or step >= 0.15 * phase.steps)
            if hurt:
                self.choose_fault(step // 2)
            steps[hurt](ids, marks)
            if self.device == "cuda" and step % 10 == 9:
                torch.cuda.synchronize()
            late = time.time() - started > seconds
            if (step + 1) % 200 == 0 or step + 1 == phase.steps or late:
                loss, right, index, count, extra, faults = shown.tolist()
                spent = time.time() - started
                print(
                    f"{save.name} {phase.name} {step + 1}/{phase.steps} length {ids.shape[1] - 1} "
                    f"loss {loss / count:.4f} far {right / count:.3f} index {index / count:.4f} "
                    f"sensitivity {extra / max(1.0, faults):.3f} "
                    f"{1e3 * spent / (step + 1):.1f} ms/step waiting {waiting / spent:.0%} {spent:.0f} s",
                    flush=True,
                )
                shown.zero_()
                save.maybe(self.model)
                if late:
                    break
        save(self.model)


class StepGraphs:
    """Runs a step eagerly twice for each batch shape, then captures it as a CUDA graph and replays that."""

    def __init__(self, body: Callable[[Tensor, Tensor], None]) -> None:
        self.body = body
        self.seen: dict[torch.Size, int] = {}
        self.graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None

    def __call__(self, ids: Tensor, marks: Tensor) -> None:
        if self.stream is None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()
        shape = ids.shape
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.seen[shape] <= 2:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.body(ids, marks)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if shape not in self.graphs:
            torch.cuda.synchronize()
            graph, static = torch.cuda.CUDAGraph(), (ids.clone(), marks.clone())
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                self.body(*static)
            self.graphs[shape] = (graph, *static)
        graph, static_ids, static_marks = self.graphs[shape]
        static_ids.copy_(ids)
        static_marks.copy_(marks)
        graph.replay()


class Saver:
    """Writes DIR/NAME.pt, at once or at most once a minute."""

    def __init__(self, folder: Path, name: str, spec: Spec) -> None:
        self.folder, self.name, self.spec, self.last = folder, name, spec, time.time()
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, model: TinyModel) -> None:
        state = {
            n: t.detach().to("cpu", torch.bfloat16 if t.numel() > 2000 else torch.float32)
            for n, t in model.state_dict().items()
        }
        torch.save({"spec": self.spec.as_dict(), "model": state}, self.folder / f"{self.name}.tmp")
        (self.folder / f"{self.name}.tmp").rename(self.folder / f"{self.name}.pt")
        self.last = time.time()

    def maybe(self, model: TinyModel) -> None:
        if time.time() - self.last > 60:
            self(model)


def load(path: Path) -> TinyModel:
    """A model that `Saver` wrote."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = TinyModel(Spec(**saved["spec"]))
    model.load_state_dict(saved["model"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="tiny")
    parser.add_argument("--layers", default="KKDSKD")
    parser.add_argument("--steps", type=int, nargs=3, default=(9200, 1400, 2200), metavar=("DENSE", "INDEX", "JOINT"))
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seconds", type=float, nargs=3, default=(1e9, 1e9, 1e9), metavar=("DENSE", "INDEX", "JOINT"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sensitivity", type=float, default=0.4)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = build_tokenizer()
    spec = Spec(layers=args.layers)
    phases = plan(*args.steps, rate=args.rate)
    if args.smoke:
        spec = replace(
            spec, hidden=32, intermediate=32, moe_intermediate=16, experts=4, heads=2, head_dim=16, latent=16,
            q_latent=16, index_topk=16, kda_heads=2, kda_dim=16,
        )  # fmt: skip
        phases, args.tokens, args.workers = smoke_plan(), 192, 0
    model = load(args.resume) if args.resume else TinyModel(spec)
    spec = model.spec
    print(f"{args.name}: {sum(p.numel() for p in model.parameters()):,} parameters, {args}", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(model, device, args.tokens, tokenizer, args.seed, args.workers)
    trainer.eager = args.eager
    save = Saver(args.out, args.name, spec)
    for phase, seconds in zip(phases, args.seconds, strict=True):
        if phase.steps:
            trainer.run(phase, seconds, save, sensitivity=args.sensitivity)
    if device == "cpu":
        write_checkpoint(model, args.out / args.name, tokenizer)
        print(json.dumps({"exported": str(args.out / args.name)}))


if __name__ == "__main__":
    main()
