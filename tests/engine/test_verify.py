"""``engine.verify``: a sound engine passes, and every kind of seeded fault is found and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.cache import hisparse
from sidestream.config.model import ModelConfig
from sidestream.core.batch import Chunk
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.forward_context import get_forward_context
from sidestream.engine.build import BuiltEngine, build_engine, in_graph_mode
from sidestream.engine.llm import bundled_model
from sidestream.engine.runner import ModelRunner, StepOutput
from sidestream.engine.tokenizer import load_tokenizer
from sidestream.engine.verify import engines, verification
from sidestream.engine.verify.compare import Generated, compare
from sidestream.engine.verify.engines import FULL, NONE, PIECEWISE, PLAIN_CPU, VARIANTS, Variant, Workload
from sidestream.engine.verify.layer_digests import LayerDigest, LayerDigests, first_apart, first_other_bits
from sidestream.engine.verify.prompts import NOMINAL_TOPK, make_prompts
from sidestream.engine.verify.report import SCHEDULES, Batching, Prefill, Report, Rule, Schedule
from sidestream.engine.verify.settings import VerifySettings
from sidestream.engine.verify.verification import verify
from sidestream.errors import CheckpointError, ConfigError
from sidestream.layers.kda import KimiDeltaAttention
from sidestream.layers.mla import LatentAttention
from sidestream.layers.residual import ResidualState, settled
from sidestream.models.decoder import DecoderLayer
from sidestream.streams.handoff import Handoff
from tests.tiny_models import build_oracle, next_layers, save_checkpoint, tiny_config

ALONE = SCHEDULES[0]
AGAIN = Variant("AGAIN", "auto", on_host=False, rule=Rule.BITWISE)
"""On a CPU the same engine a second time: what differs in it is a seeded fault."""


class Silent:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.cells: list[tuple[str, int]] = []
        self.notes: list[str] = []
        self.tokens = 0

    def begin(self, label: str, tokens: int) -> None:
        self.cells.append((label, tokens))

    def advance(self, tokens: int) -> None:
        self.tokens += tokens

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A KDA layer, a leader and its follower; index_topk 8."""
    oracle = build_oracle("glm5_next", 3, **next_layers("KDS"))
    return save_checkpoint(oracle, tmp_path_factory.mktemp("tiny"))


def settings(device: str, **changes: Any) -> VerifySettings:
    return replace(VerifySettings(device=device, tokens=4, prompts=2, max_num_seqs=2), **changes)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """On a CPU the same engine runs twice, compared to the bit; the list holds the runners of the second."""
    runners: list[ModelRunner] = []

    def noting(built: BuiltEngine, mode: str, **kw: Any) -> BuiltEngine:
        made = in_graph_mode(built, mode, **kw)
        if mode == AGAIN.cudagraph_mode:
            runners.append(made.runner)
        return made

    for module in (verification, engines):
        monkeypatch.setattr(module, "in_graph_mode", noting)
    monkeypatch.setitem(VARIANTS, "cpu", (NONE, AGAIN))
    return runners


def cells_of(report: Report, engine: str) -> list[bool]:
    return [cell.passed for cell in report.cells if cell.engine == engine]


# A sound engine


@pytest.fixture(scope="module")
def clean(folder: Path) -> tuple[Report, Silent]:
    progress = Silent()
    return verify(folder, settings("sim", tokens=3), progress), progress


def test_a_sound_engine_gives_the_same_tokens_in_every_mode(clean: tuple[Report, Silent]) -> None:
    report, _ = clean
    assert report.passed, report.problems()
    assert report.problems() == []
    assert {(cell.engine, cell.schedule, cell.rule) for cell in report.cells} == {
        (variant.name, schedule, rule)
        for schedule in SCHEDULES
        for variant, rule in (
            (NONE, Rule.REFERENCE if schedule == ALONE else Rule.BOUND),
            (PIECEWISE, Rule.BITWISE),
            (FULL, Rule.BITWISE),
            (PLAIN_CPU, Rule.BOUND),
        )
    }
    assert [cell.generated for cell in report.cells] == [2 * 3] * 16
    assert all(cell.compared == 6 for cell in report.cells if cell.rule is not Rule.REFERENCE)
    assert report.hazards == {"NONE": (), "PIECEWISE": (), "FULL": ()}


def test_modes_really_ran(clean: tuple[Report, Silent]) -> None:
    report, _ = clean
    none, piecewise, full = (report.steps(name) for name in ("NONE", "PIECEWISE", "FULL"))
    assert set(none) == {"none"}
    assert none.total() == piecewise.total() == full.total() > 4 * 3
    alone = report.cell("PIECEWISE", ALONE)
    assert alone.steps == {"piecewise": 6}
    assert report.cell("FULL", ALONE).steps == {"none": 2, "full": 4}
    assert sum(report.cell("FULL", ALONE).fallbacks.values()) == 2
    chunked = report.cell("PIECEWISE", Schedule(Prefill.CHUNKED, Batching.ALONE))
    assert sum(chunked.steps.values()) > 6


def test_progress_tells_every_cell_and_token_and_an_estimate(clean: tuple[Report, Silent]) -> None:
    _, progress = clean
    assert [tokens for _, tokens in progress.cells] == [6] * 16
    assert progress.cells[0][0] == "1 of 16: NONE, one shot, alone"
    assert progress.cells[-1][0].startswith("16 of 16: ")
    assert progress.tokens == 16 * 6
    assert len(progress.notes) == 1
    assert "more" in progress.notes[0]


# What a cell runs


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> tuple[BuiltEngine, Workload]:
    model, asked = ModelConfig.from_hf(folder), settings("cpu", prompts=3)
    prompts = make_prompts(folder, model, count=3, tokens=4, seed=1)
    config = asked.engine(model, prompts, device="cpu")
    return build_engine(folder, config), Workload(prompts, 4, asked.chunk(max(map(len, prompts))))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_schedule_decides_what_shares_a_step(
    on_cpu: tuple[BuiltEngine, Workload], schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, workload = on_cpu
    forward, steps = ModelRunner.forward, []

    def noting(self: ModelRunner, chunks: Sequence[Chunk], token_ids: Sequence[int], **unknown: Any) -> StepOutput:
        steps.append(list(chunks))
        return forward(self, chunks, token_ids, **unknown)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    run = workload.run(built, schedule)
    assert max(map(len, steps)) == (1 if schedule.batching is Batching.ALONE else 2)
    prefills = [chunk for step in steps for chunk in step if not chunk.is_decode]
    if schedule.prefill is Prefill.ONE_SHOT:
        assert sorted(chunk.length for chunk in prefills) == sorted(map(len, workload.prompts))
    else:
        assert max(sum(chunk.length for chunk in step) for step in steps) == workload.chunk
        assert len(prefills) > len(workload.prompts)
    for made in run.generated:
        assert made is not None
        assert len(made.token_ids) == len(made.logprobs) == len(made.margins) == 4
        assert all(logprob < 0 <= margin for logprob, margin in zip(made.logprobs, made.margins, strict=True))


def test_a_rerun_stops_at_the_step_and_leaves_out_other_prompts(on_cpu: tuple[BuiltEngine, Workload]) -> None:
    built, workload = on_cpu
    whole = workload.run(built, ALONE).generated[1]
    run = workload.run(built, ALONE, only=[1], until=(1, 2))
    assert (run.generated[0], run.generated[2]) == (None, None)
    assert whole is not None
    assert run.generated[1] == Generated(whole.token_ids[:2], whole.logprobs[:2], whole.margins[:2])


# Seeded faults


def attends_in_layer_1(layer: DecoderLayer) -> bool:
    return isinstance(layer.mixer, LatentAttention) and layer.mixer.layer == 1


def test_a_fault_in_a_graph_mode_is_named_by_step_and_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower reads other rows in a break of PIECEWISE; a leader's output changes inside the graph of FULL."""
    attend, decode = PagedLatentAttention.attend, DecoderLayer.__call__
    long = settings("sim").prompts - 1
    prompt = make_prompts(folder, ModelConfig.from_hf(folder), count=2, tokens=4, seed=0)[long]

    def wrong_rows(self: PagedLatentAttention, layer: int, *args: Any, **kw: Any) -> torch.Tensor:
        out = attend(self, layer, *args, **kw)
        context = get_forward_context()
        if layer == 2 and context.mode is CUDAGraphMode.PIECEWISE and context.inputs.context_lens is not None:
            here = context.inputs.context_lens[:1].tolist()
            return out * 1.5 if here == [len(prompt) + 2] else out
        return out

    def wrong_graph(self: DecoderLayer, state: ResidualState, *rest: Any) -> ResidualState:
        out = decode(self, state, *rest)
        if get_forward_context().mode is CUDAGraphMode.FULL and attends_in_layer_1(self):
            return settled(out) * 1.25
        return out

    monkeypatch.setattr(PagedLatentAttention, "attend", wrong_rows)
    monkeypatch.setattr(DecoderLayer, "__call__", wrong_graph)
    monkeypatch.setitem(VARIANTS, "sim", (NONE, PIECEWISE, FULL))
    monkeypatch.setattr(verification, "SCHEDULES", (ALONE,))
    report = verify(folder, settings("sim"), Silent())
    assert not report.passed
    assert all(cells_of(report, "NONE"))
    broken = report.cell("PIECEWISE", ALONE)
    assert broken.differing == 1
    assert broken.difference is not None
    assert (broken.difference.prompt, broken.difference.step) == (long, 2)
    assert broken.difference.place is not None
    assert (broken.difference.place.step, broken.difference.place.layer) == (2, 2)
    assert "layer 2 (sparse mla, follower)" in broken.difference.place.text
    assert "at step 2" in broken.difference.place.text
    full = report.cell("FULL", ALONE)
    assert full.differing == 2
    assert full.difference is not None
    assert (full.difference.prompt, full.difference.step) == (0, 1)
    assert full.difference.place is not None
    assert (full.difference.place.step, full.difference.place.layer) == (1, 1)
    assert not any(report.hazards.values())


def test_log_probabilities_alone_are_enough_to_fail(
    folder: Path, again: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = ModelRunner.logits

    def a_little_more(self: ModelRunner, *args: Any) -> torch.Tensor:
        return logits(self, *args) * (1 + 2**-20 if self in again else 1)

    monkeypatch.setattr(ModelRunner, "logits", a_little_more)
    progress = Silent()
    report = verify(folder, settings("cpu"), progress)
    assert sum("running it again" in note for note in progress.notes) == 1
    first = report.cell("AGAIN", ALONE).difference
    assert first is not None
    assert first.tokens[0] == first.tokens[1]
    assert 0 < abs(first.logprobs[0] - first.logprobs[1]) < 1e-4
    assert "log-probability of token" in str(first)
    assert first.place is not None
    assert first.place.layer is None
    assert "behind the last one" in first.place.text
    assert all(cells_of(report, "NONE"))
    assert not any(cells_of(report, "AGAIN"))
    assert not report.passed


def test_a_difference_that_does_not_come_again_is_called_so(
    folder: Path, again: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = ModelRunner.logits

    def only_at_first(self: ModelRunner, *args: Any) -> torch.Tensor:
        return logits(self, *args) * (2 if again[:1] == [self] else 1)

    monkeypatch.setattr(ModelRunner, "logits", only_at_first)
    found = verify(folder, settings("cpu"), Silent()).cell("AGAIN", ALONE).difference
    assert found is not None
    assert found.place is not None
    assert (found.place.step, found.place.layer) == (None, None)
    assert "not seen again" in found.place.text


def test_a_fault_of_chunked_prefill_is_named_by_prompt_token_and_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = DecoderLayer.__call__

    def forgets(self: DecoderLayer, state: ResidualState, *rest: Any) -> ResidualState:
        out, inputs = decode(self, state, *rest), get_forward_context().inputs
        later_chunk = inputs.num_decode == 0 and inputs.segments[0].start_position > 0
        return settled(out) * 1.5 if later_chunk and attends_in_layer_1(self) else out

    monkeypatch.setattr(DecoderLayer, "__call__", forgets)
    report = verify(folder, settings("cpu"), Silent())
    assert report.cell("NONE", Schedule(Prefill.ONE_SHOT, Batching.BATCHED)).passed
    broken = report.cell("NONE", Schedule(Prefill.CHUNKED, Batching.ALONE))
    assert broken.difference is not None
    assert broken.against == "NONE, one shot, alone"
    place = broken.difference.place
    assert place is not None
    length = report.prompt_lengths[broken.difference.prompt]
    assert place.layer == 1
    assert place.step == report.chunk - (length - 1)
    assert f"in the prefill, at prompt token {report.chunk}" in place.text
    assert not report.passed


def test_a_fault_of_batches_is_named_by_a_rerun_of_the_batch(
    folder: Path, again: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, decode, shared = ModelRunner.forward, DecoderLayer.__call__, [False]

    def noting(self: ModelRunner, chunks: Sequence[Chunk], token_ids: Sequence[int], **unknown: Any) -> StepOutput:
        shared[0] = self in again and len(chunks) > 1 and chunks[-1].is_decode
        return forward(self, chunks, token_ids, **unknown)

    def wrong(self: DecoderLayer, state: ResidualState, *rest: Any) -> ResidualState:
        out = decode(self, state, *rest)
        return settled(out) * 1.5 if shared[0] and isinstance(self.mixer, KimiDeltaAttention) else out

    monkeypatch.setattr(ModelRunner, "forward", noting)
    monkeypatch.setattr(DecoderLayer, "__call__", wrong)
    report = verify(folder, settings("cpu"), Silent())
    assert report.cell("AGAIN", ALONE).passed
    found = report.cell("AGAIN", Schedule(Prefill.ONE_SHOT, Batching.BATCHED)).difference
    assert found is not None
    assert found.place is not None
    assert (found.place.step, found.place.layer) == (1, 0)
    assert "layer 0 (kda) is the first that differs, at step 1" in found.place.text


def test_a_hazard_alone_is_enough_to_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Handoff.wait

    def careless(self: Handoff) -> None:
        if not self.name.startswith("physical_topk_ready"):
            wait(self)

    monkeypatch.setattr(Handoff, "wait", careless)
    monkeypatch.setitem(VARIANTS, "sim", (NONE,))
    monkeypatch.setattr(verification, "SCHEDULES", (ALONE,))
    report = verify(folder, settings("sim", tokens=2), Silent())
    assert all(cell.passed for cell in report.cells)
    assert report.hazards["NONE"]
    assert not report.passed
    assert report.problems()[0].startswith("NONE: hazard: ")


def test_what_a_mode_raises_is_reported_and_the_others_go_on(
    folder: Path, again: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.forward

    def breaks(self: ModelRunner, chunks: list[Chunk], token_ids: list[int], **unknown: Any) -> StepOutput:
        if self in again:
            error = RuntimeError("no such event\nand more")
            error.add_note("in break 'KDA of layer 0'")
            raise error
        return forward(self, chunks, token_ids, **unknown)

    monkeypatch.setattr(ModelRunner, "forward", breaks)
    report = verify(folder, settings("cpu"), Silent())
    assert all(cells_of(report, "NONE"))
    assert [cell.error for cell in report.cells if cell.engine == "AGAIN"] == [
        "RuntimeError: no such event; in break 'KDA of layer 0'"
    ] * 4
    assert not report.passed
    assert len(report.problems()) == 4


def test_nothing_is_equal_to_a_reference_that_failed(
    folder: Path, again: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.forward

    def breaks(self: ModelRunner, *args: Any, **unknown: Any) -> StepOutput:
        assert self in again, "the reference is broken"
        return forward(self, *args, **unknown)

    monkeypatch.setattr(ModelRunner, "forward", breaks)
    report = verify(folder, settings("cpu"), Silent())
    assert not any(cell.passed for cell in report.cells)
    assert report.cell("AGAIN", ALONE).error == "nothing to compare with: NONE, one shot, alone failed"


# Comparing


def made(tokens: list[int], logprobs: list[float], margins: list[float]) -> list[Generated]:
    return [Generated(tokens, logprobs, margins)]


WIDE = [1.0, 1.0, 1.0]


def test_to_the_bit_no_margin_excuses() -> None:
    a = made([1, 2, 3], [-0.5, -0.25, -1.0], [1.0, 0.0, 1.0])
    assert compare(a, a, Rule.BITWISE, bound=1.0).differences == ()
    other_token = compare(a, made([1, 5, 3], [-0.5, -0.25, -1.0], WIDE), Rule.BITWISE, bound=1.0)
    assert [(d.prompt, d.step, d.tokens) for d in other_token.differences] == [(0, 1, (2, 5))]
    other_bit = compare(a, made([1, 2, 3], [-0.5, -0.25, -1.0 - 2**-52], WIDE), Rule.BITWISE, bound=1.0)
    assert [(d.step, d.tokens) for d in other_bit.differences] == [(2, (3, 3))]
    assert other_bit.compared == 2


@pytest.mark.parametrize("whose", [0, 1])
def test_a_narrow_margin_excuses_another_token_and_ends_the_prompt(whose: int) -> None:
    margins = [[1.0, 0.05, 1.0], WIDE]
    a = made([1, 2, 3], [-0.5, -0.7, -1.0], margins[whose])
    b = made([1, 5, 9], [-0.5, -0.7, -9.0], margins[1 - whose])
    found = compare(a, b, Rule.BOUND, bound=0.1)
    assert (found.compared, found.narrow, found.differences) == (1, 1, ())
    assert compare(a, b, Rule.BOUND, bound=0.01).differences[0].step == 1


def test_a_narrow_margin_excuses_no_log_probability_and_no_later_token() -> None:
    a = made([1, 2, 3], [-0.5, -0.7, -1.0], [1.0, 0.05, 1.0])
    far = compare(a, made([1, 2, 3], [-0.5, -0.9, -1.0], WIDE), Rule.BOUND, bound=0.1)
    assert [(d.step, d.tokens) for d in far.differences] == [(1, (2, 2))]
    later = compare(a, made([1, 2, 4], [-0.5, -0.75, -1.0], WIDE), Rule.BOUND, bound=0.1)
    assert [(d.step, d.tokens) for d in later.differences] == [(2, (3, 4))]
    assert later.spread == pytest.approx(0.05)


def test_log_probabilities_that_are_no_numbers_differ() -> None:
    a, b = made([1], [float("nan")], [1.0]), made([1], [-0.5], [1.0])
    for rule in (Rule.BITWISE, Rule.BOUND):
        assert len(compare(a, b, rule, bound=1.0).differences) == 1
        assert len(compare(a, a, rule, bound=1.0).differences) == 1


# Layer digests


def model_of(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_hf(tiny_config("glm5_next", **next_layers("KDS"), **overrides).to_dict())


def digested(state: torch.Tensor) -> LayerDigests:
    digests = LayerDigests(model_of(), max_rows=8, device=torch.device("cpu"))
    for layer in range(3):
        digests.see(layer, state if layer < 2 else state * 2)
    digests.end_step([Chunk("a", 4, 2, (), 1, is_decode=False, samples=False), Chunk("b", 0, 1, (), 2, False, True)])
    return digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_other_bit_is_other_bits(dtype: torch.dtype) -> None:
    state = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    left = digested(state).seen
    assert set(left) == {("a", 4), ("a", 5), ("b", 0)}
    assert first_other_bits(left, digested(state.clone()).seen, "a") is None
    flipped = state.clone()
    flipped.view(torch.int32 if dtype is torch.float32 else torch.int16)[1, 2, 3] ^= 1
    right = digested(flipped).seen
    assert first_other_bits(left, right, "a") == (5, 0)
    assert first_other_bits(left, right, "b") is None
    assert first_apart(left, right, "a", bound=0.05) is None
    swapped = state.clone()
    swapped[1, 0, :2] = state[1, 0, :2].flip(0)
    assert first_other_bits(left, digested(swapped).seen, "a") == (5, 0)
    flipped[1] *= 2
    assert first_apart(left, digested(flipped).seen, "a", bound=0.05) == (5, 0)


def test_positions_come_before_layers() -> None:
    def digest(*bits: int) -> LayerDigest:
        return LayerDigest(bits, tuple(map(float, bits)), (1.0,) * len(bits))

    left = {("a", 3): digest(1, 1, 1), ("a", 4): digest(1, 1, 1), ("a", 9): digest(0, 0, 0)}
    right = {("a", 4): digest(7, 1, 1), ("a", 3): digest(1, 1, 7), ("a", 8): digest(5, 5, 5)}
    assert first_other_bits(left, right, "a") == (3, 2)
    assert first_apart(left, right, "a", bound=0.5) == (3, 2)
    assert first_apart(left, right, "a", bound=7.0) is None


def test_a_distance_is_measured_by_the_size_of_the_row() -> None:
    def digest(projection: float) -> LayerDigest:
        return LayerDigest((0,), (projection,), (100.0,))

    left = {("a", 0): digest(0.0)}
    assert first_apart(left, {("a", 0): digest(40.0)}, "a", bound=0.5) is None
    assert first_apart(left, {("a", 0): digest(60.0)}, "a", bound=0.5) == (0, 0)
    assert first_apart(left, {("a", 0): digest(float("nan"))}, "a", bound=0.5) == (0, 0)


# Prompts and settings


@pytest.mark.parametrize("count", [16, 5])
def test_half_of_the_prompts_are_longer_than_the_selection(count: int) -> None:
    model = model_of(index_topk=24)
    prompts = make_prompts(Path("elsewhere"), model, count=count, tokens=4, seed=1)
    long = [len(prompt) > 24 for prompt in prompts]
    assert (len(long), sum(long)) == (count, count // 2)
    assert all(2 <= len(prompt) <= 40 for prompt in prompts)
    used = {token for prompt in prompts for token in prompt}
    assert used <= set(range(3, 144)), "ids 0, 1 and 2 have a meaning of their own"
    assert prompts == make_prompts(Path("elsewhere"), model, count=count, tokens=4, seed=1)
    assert prompts != make_prompts(Path("elsewhere"), model, count=count, tokens=4, seed=2)


def test_the_bundled_checkpoint_gets_its_own_prompts() -> None:
    model, tokenizer = ModelConfig.from_hf(bundled_model()), load_tokenizer(bundled_model())
    assert tokenizer is not None
    prompts = make_prompts(bundled_model(), model, count=16, tokens=64, seed=0)
    assert sum(len(prompt) > 64 for prompt in prompts) == 8
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert all(text.endswith("\nAnswer:"[-len(text) :]) for text in texts)
    assert len({prompt[-8:] for prompt in prompts if len(prompt) > 8}) > 4


def test_a_model_without_selection_gets_two_lengths_too() -> None:
    model = ModelConfig.from_hf(tiny_config("kimi_linear").to_dict())
    lengths = [len(prompt) for prompt in make_prompts(Path("elsewhere"), model, count=8, tokens=4, seed=0)]
    assert sum(length > NOMINAL_TOPK for length in lengths) == 4


def test_prompts_that_the_model_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings 2048; lower --tokens"):
        make_prompts(Path("elsewhere"), model_of(), count=2, tokens=2040, seed=0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokens", 0, "tokens is 0, at least 1"),
        ("prompts", 1, "prompts is 1, at least 2"),
        ("max_num_seqs", 1, "max_num_seqs is 1, at least 2"),
        ("seed", -1, "seed is -1, at least 0"),
        ("margin", 0.0, "margin is 0.0, it must be a finite number"),
        ("margin", float("nan"), "margin is nan"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(VerifySettings(), **{name: value})  # type: ignore[arg-type]


def test_the_margin_follows_the_dtype_unless_it_is_given() -> None:
    assert VerifySettings().bound("float32") < VerifySettings().bound("bfloat16")
    assert VerifySettings(margin=0.25).bound("float32") == 0.25


def test_the_engine_is_asked_for_what_the_prompts_need() -> None:
    asked = VerifySettings(device="sim", dtype="bfloat16", load_format="dummy", tokens=5, max_num_seqs=3, seed=9)
    config = asked.engine(model_of(), [[1] * 4, [1] * 30], device="sim")
    assert (config.device, config.dtype, config.load_format, config.seed) == ("sim", "bfloat16", "dummy", 9)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (3, 90, 35)
    assert config.max_capture_tokens == 32, "the captured size that holds the longest prompt"
    assert config.graph_debug


def test_chunks_are_odd_and_several() -> None:
    for longest in (9, 24, 96, 3072):
        chunk = VerifySettings().chunk(longest)
        assert chunk % 2 == 1
        assert chunk >= 4
        assert longest > 2 * chunk or longest == 9


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify(tmp_path / "nothing", settings("cpu"), Silent())


# With a host pool


def test_every_mode_runs_with_a_host_pool_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the schedule that all are compared with, and under that which has chunks and batches."""
    schedules = (ALONE, Schedule(Prefill.CHUNKED, Batching.BATCHED))
    assert set(schedules) < set(SCHEDULES)
    monkeypatch.setattr(verification, "SCHEDULES", schedules)
    report = verify(folder, settings("sim", tokens=3, hisparse=True), Silent())
    assert report.passed, report.problems()
    names = ["NONE", "PIECEWISE", "FULL", "plain CPU", "NONE, HiSparse", "PIECEWISE, HiSparse", "FULL, HiSparse"]
    assert list(report.engines) == names
    hosted = [cell for cell in report.cells if "HiSparse" in cell.engine]
    assert len(hosted) == 3 * len(schedules)
    assert all(cell.rule is Rule.BITWISE and cell.compared == cell.generated == 6 for cell in hosted)
    assert report.hazards == {name: () for name in names if name != "plain CPU"}


def test_a_row_lost_on_its_way_from_the_host_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot copy of one row a step is of its neighbour."""
    real = hisparse.copy_rows

    def slipped(pool: torch.Tensor, host: torch.Tensor, *, source: torch.Tensor, **named: Any) -> None:
        source = source.clone()
        source[:, 0] ^= 1
        real(pool, host, source=source, **named)

    monkeypatch.setattr(hisparse, "copy_rows", slipped)
    report = verify(folder, settings("cpu", hisparse=True), Silent())
    assert not report.passed
    assert all(cells_of(report, "NONE"))
    assert not all(cells_of(report, "NONE, HiSparse"))
    place = next(cell.difference.place for cell in report.cells if cell.difference is not None)
    assert place is not None
    assert place.layer == 1, place
