"""Runs every prompt through every cell of the matrix, compares the cells, and finds where a difference begins."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from sidestream.config.model import AttentionKind, IndexerKind, ModelConfig
from sidestream.engine.backends import open_backend
from sidestream.engine.build import BuiltEngine, build_engine, in_graph_mode
from sidestream.engine.verify.compare import Generated, compare
from sidestream.engine.verify.engines import CellRun, Progress, Variant, Workload, observed, variants_of
from sidestream.engine.verify.layer_digests import first_apart, first_other_bits
from sidestream.engine.verify.prompts import make_prompts
from sidestream.engine.verify.report import (
    SCHEDULES,
    Batching,
    Cell,
    Difference,
    Place,
    Prefill,
    Report,
    Rule,
    Schedule,
)
from sidestream.engine.verify.settings import VerifySettings
from sidestream.errors import CheckpointError, ConfigError
from sidestream.streams import StreamBackend

DEVICES = {
    "cuda": "CUDA",
    "sim": "the simulated device, which runs a GPU's graphs and streams on this CPU",
    "cpu": "this CPU, where there are no graphs",
}
FIRST = SCHEDULES[0]


def verify(model_path: str | os.PathLike[str], settings: VerifySettings, progress: Progress) -> Report:
    """Prove, or disprove, that a checkpoint gives the same tokens in every mode on this machine.

    Raises:
        ConfigError, CheckpointError, CapacityError: the engine cannot be built as asked. What goes wrong in a mode
            that was built is part of the report.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise CheckpointError(f"model {str(folder)!r} is not a folder; give the folder of a hub checkpoint")
    return Verification(folder, settings, progress).report()


class Verification:
    """The engines and runs of one verification; weights are loaded once a device."""

    def __init__(self, folder: Path, settings: VerifySettings, progress: Progress) -> None:
        self._folder = folder
        self._settings = settings
        self._progress = progress
        self._model = model = ModelConfig.from_hf(folder)
        self._device = settings.chosen_device
        dense = model.layers_of(AttentionKind.DENSE_MLA)
        if settings.hisparse and (dense or model.indexer is None):
            raise ConfigError(
                f"hisparse: layers {dense} of this model read their whole context, so no row is ever cold"
            )
        prompts = make_prompts(folder, model, count=settings.prompts, tokens=settings.tokens, seed=settings.seed)
        self._workload = Workload(prompts, settings.tokens, settings.chunk(max(map(len, prompts))))
        self._base = self._build(self._device)
        self._host: BuiltEngine | None = None
        self._hosted: BuiltEngine | None = None
        self._bound = settings.bound(self._base.config.dtype)
        self._runs: dict[tuple[Variant, Schedule], CellRun] = {}
        self._hazards: dict[str, tuple[str, ...]] = {}

    @property
    def _variants(self) -> tuple[Variant, ...]:
        return variants_of(self._device, hisparse=self._settings.hisparse)

    def report(self) -> Report:
        """Run all, compare all, look for the layer where something differs."""
        for variant in self._variants:
            self._run(variant)
        cells = [self._compare(variant, schedule) for schedule in SCHEDULES for variant in self._variants]
        lengths = tuple(map(len, self._workload.prompts))
        topk = self._model.indexer.topk if self._model.indexer is not None else None
        return Report(
            model=str(self._folder),
            device=DEVICES[self._device],
            simulated=self._device == "sim",
            dtype=self._base.config.dtype,
            tokens=self._settings.tokens,
            margin=self._bound,
            seed=self._settings.seed,
            max_num_seqs=self._settings.max_num_seqs,
            chunk=self._workload.chunk,
            prompt_lengths=lengths,
            index_topk=topk,
            selecting=sum(length > topk for length in lengths) if topk is not None else 0,
            cells=tuple(self._located(cells)),
            hazards=self._hazards,
        )

    # Runs

    def _build(self, device: str) -> BuiltEngine:
        config = self._settings.engine(self._model, self._workload.prompts, device=device)
        return build_engine(self._folder, config, backend=_backend(device))

    def _engine(self, variant: Variant) -> BuiltEngine:
        if variant.on_host:
            if self._host is None:
                self._host = self._build("cpu")
            return self._host
        base = self._over_its_pools(variant)
        if variant.cudagraph_mode == base.config.cudagraph_mode:
            return base
        base.runner.streams.backend.synchronize()  # each mode has streams of its own, over the same pools
        return in_graph_mode(base, variant.cudagraph_mode)

    def _over_its_pools(self, variant: Variant) -> BuiltEngine:
        """The engine without graphs that a variant shares weights and pools with."""
        if not variant.hosted:
            return self._base
        if self._hosted is None:
            config = self._settings.hosted_engine(self._model, self._workload.prompts, device=self._device)
            self._hosted = build_engine(self._folder, config, backend=self._base.runner.streams.backend)
        return self._hosted

    def _run(self, variant: Variant) -> None:
        """All schedules; what a mode raises ends it, and is reported in its cells."""
        known = sum(map(len, self._hazards.values()))
        error: str | None = None
        engine: BuiltEngine | None = None
        for schedule in SCHEDULES:
            started = time.perf_counter()
            tokens = len(self._workload.prompts) * self._workload.tokens
            place = f"{len(self._runs) + 1} of {len(self._variants) * len(SCHEDULES)}"
            self._progress.begin(f"{place}: {variant.name}, {schedule}", tokens)
            if error is None:
                try:
                    engine = engine or self._engine(variant)
                    run = self._workload.run(engine, schedule, progress=self._progress)
                except Exception as failure:  # noqa: BLE001  a mode that breaks is a finding, not the end
                    error = _in_words(failure)
            self._runs[variant, schedule] = run if error is None else CellRun([], error=error)
            if len(self._runs) == 1 and error is None:
                self._estimate(time.perf_counter() - started)
        if not variant.on_host and self._device == "sim":
            found = _hazards(self._base.runner.streams.backend)
            self._hazards[variant.name] = found[known:]

    def _estimate(self, seconds: float) -> None:
        """Steps of the other cells at the price of the first cell's; a plain CPU beside the simulation is cheap."""
        variants = sum(not variant.on_host for variant in self._variants)
        steps = variants * sum(map(self._steps, SCHEDULES)) - self._steps(FIRST)
        left = seconds / self._steps(FIRST) * steps
        unit = f"{left / 60:.0f} minutes" if left >= 120 else f"{left:.0f} seconds"
        self._progress.note(f"the first cell took {seconds:.0f} seconds; about {unit} more")

    def _steps(self, schedule: Schedule) -> int:
        chunked = schedule.prefill is Prefill.CHUNKED
        prefills = [-(-len(p) // self._workload.chunk) if chunked else 1 for p in self._workload.prompts]
        if schedule.batching is Batching.ALONE:
            return sum(prefills) + len(prefills) * (self._workload.tokens - 1)
        return -(-len(prefills) // self._settings.max_num_seqs) * (self._workload.tokens - 1) + sum(prefills)

    # Comparisons

    def _pair(self, variant: Variant, schedule: Schedule) -> tuple[Variant, Schedule, Rule]:
        """What a cell is compared with, and how."""
        first = self._variants[0]
        if variant is not first:
            return first, schedule, variant.rule
        return first, FIRST, Rule.REFERENCE if schedule == FIRST else Rule.BOUND

    def _compare(self, variant: Variant, schedule: Schedule) -> Cell:
        other, other_schedule, rule = self._pair(variant, schedule)
        mine, reference = self._runs[variant, schedule], self._runs[other, other_schedule]
        cell = Cell(
            engine=variant.name,
            schedule=schedule,
            rule=rule,
            against="" if rule is Rule.REFERENCE else f"{other.name}, {other_schedule}",
            generated=sum(len(made.token_ids) for made in mine.generated if made is not None),
            steps=dict(mine.steps),
            fallbacks=dict(mine.fallbacks),
            error=mine.error,
        )
        if mine.error is not None or rule is Rule.REFERENCE:
            return cell
        if reference.error is not None:
            return replace(cell, error=f"nothing to compare with: {cell.against} failed")
        found = compare(_all(reference), _all(mine), rule, bound=self._bound)
        return replace(
            cell,
            compared=found.compared,
            narrow=found.narrow,
            spread=found.spread,
            differing=len(found.differences),
            difference=found.differences[0] if found.differences else None,
        )

    # Where a difference begins

    def _located(self, cells: list[Cell]) -> list[Cell]:
        """The cells, with the layer of the first difference of each variant."""
        done: set[str] = set()
        located = []
        for cell in cells:
            if cell.difference is not None and cell.engine not in done:
                done.add(cell.engine)
                self._progress.note(f"{cell.problem()}: running it again to find the layer")
                variant = next(v for v in self._variants if v.name == cell.engine)
                try:
                    place = self._locate(variant, cell.schedule, cell.difference)
                except Exception as failure:  # noqa: BLE001  the difference itself must be reported
                    place = Place(f"the rerun that would name the layer failed: {_in_words(failure)}")
                cell = replace(cell, difference=replace(cell.difference, place=place))
            located.append(cell)
        return located

    def _locate(self, variant: Variant, schedule: Schedule, difference: Difference) -> Place:
        """Run both cells again up to the step, recording what the layers put out."""
        other, other_schedule, rule = self._pair(variant, schedule)
        prompt, until = difference.prompt, (difference.prompt, difference.step + 1)
        seen, made = [], []
        for one, its_schedule in ((other, other_schedule), (variant, schedule)):
            base = self._engine(one) if one.on_host else self._over_its_pools(one)
            engine, digests = observed(base, one.cudagraph_mode)
            only = [prompt] if its_schedule.batching is Batching.ALONE else None
            run = self._workload.run(engine, its_schedule, only=only, until=until)
            seen.append(digests.seen)
            made.append(run.generated[prompt])
        if rule is Rule.BITWISE:
            first = first_other_bits(seen[0], seen[1], str(prompt))
        else:
            first = first_apart(seen[0], seen[1], str(prompt), bound=self._bound)
        if first is None:
            if made[0] == made[1] and rule is Rule.BITWISE:
                return Place("not seen again when layers were recorded: it depends on memory or on time")
            return Place("no layer differs: it arises behind the last one, in the final norm, the head or the sampler")
        position, layer = first
        step = position - (len(self._workload.prompts[prompt]) - 1)
        where = f"at step {step}" if step >= 0 else f"in the prefill, at prompt token {position}"
        differs = "differs" if rule is Rule.BITWISE else f"differs by more than {self._bound:g} of its size"
        return Place(f"layer {layer} ({self._kind(layer)}) is the first that {differs}, {where}", step, layer)

    def _kind(self, layer: int) -> str:
        config = self._model.layers[layer]
        role = {IndexerKind.FULL: ", leader", IndexerKind.SHARED: ", follower", IndexerKind.NONE: ""}[config.indexer]
        return f"{config.attention.value.replace('_', ' ')}{role}"


def _backend(device: str) -> StreamBackend | None:
    if device != "sim":
        return open_backend(device) if device in ("cpu", "cuda") else None
    from sidestream.streams.simulated import Order, SimulatedBackend

    # The order in which issued work runs does not matter to the hazard checker, and this one is the fastest.
    return SimulatedBackend(Order.INLINE)


def _hazards(backend: StreamBackend) -> tuple[str, ...]:
    from sidestream.streams.simulated import SimulatedBackend

    assert isinstance(backend, SimulatedBackend)
    return tuple(" ".join(str(hazard).split()) for hazard in backend.hazards())


def _all(run: CellRun) -> list[Generated]:
    return [made for made in run.generated if made is not None]


def _in_words(error: BaseException) -> str:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}{notes}"
