"""What is a break and what stays in a segment, asserted on captured engines; and what layers are told about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.attention.latent import PagedLatentAttention
from sidestream.core.cudagraph_mode import CUDAGraphMode
from sidestream.core.forward_context import in_piecewise_cudagraph
from sidestream.streams import Capture
from sidestream.streams.backend import Graph
from sidestream.streams.simulated import SimulatedBackend
from tests.engine.harness import Part, random_sequences
from tests.engine.sim.harness import MODELS, VOCAB, SimHarness, decodes, make_model

SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_capture_tokens": 4}

DECODE_BREAKS = {
    "glm5_next": ["KDA of layer 0", "attention of layer 1", "attention of layer 2"],
    "glm_moe_dsa": ["attention of layer 0", "attention of layer 1", "attention of layer 2"],
    "deepseek_v32": ["attention of layer 0", "attention of layer 1"],
    "kimi_linear": ["KDA of layer 0", "attention of layer 1", "KDA of layer 2"],
}
LEADERS = {"glm5_next": [1], "glm_moe_dsa": [0, 2], "deepseek_v32": [0, 1], "kimi_linear": []}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        make_model(name, folder)
    return made


def mixed_breaks(name: str) -> list[str]:
    """The decode's breaks with each leader's indexer before its attention."""
    breaks = []
    for label in DECODE_BREAKS[name]:
        layer = int(label.rsplit(" ", 1)[1])
        if layer in LEADERS[name] and label.startswith("attention"):
            breaks.append(f"indexer of layer {layer}")
        breaks.append(label)
    return breaks


@pytest.mark.parametrize("name", sorted(MODELS))
def test_piecewise_breaks_are_kda_and_attention_and_in_mixed_batches_the_indexer(
    name: str, folders: dict[str, Path]
) -> None:
    harness = SimHarness(folders[name], "piecewise", **SMALL)
    for tokens in (1, 2):
        pieces = harness.pieces(tokens, uniform=True)
        assert list(pieces.breaks) == DECODE_BREAKS[name]
        assert len(pieces.segments) == len(pieces.breaks) + 1
        # The indexer publishes in the segment that ends with its layer's attention, and nothing else is published.
        for segment, behind in zip(pieces.segments, [*pieces.breaks, "the end"], strict=True):
            leads = [layer for layer in LEADERS[name] if behind == f"attention of layer {layer}"]
            assert segment.published == tuple(f"logical_topk_ready of layer {layer}" for layer in leads)
            assert segment.awaited == ()
    for tokens in (1, 2, 4):
        pieces = harness.pieces(tokens, uniform=False)
        assert list(pieces.breaks) == mixed_breaks(name)
        assert [segment.published for segment in pieces.segments] == [()] * (len(pieces.breaks) + 1)
    assert {plan.mode for plan in harness.graphs.runner.captured} == {CUDAGraphMode.PIECEWISE}
    assert len(harness.graphs.runner.captured) == 5


@pytest.mark.parametrize("name", sorted(MODELS))
def test_full_is_one_graph_that_publishes_and_waits_inside(name: str, folders: dict[str, Path]) -> None:
    harness = SimHarness(folders[name], "full", **SMALL)
    for tokens in (1, 2):
        graph = harness.full_graph(tokens)
        assert isinstance(graph, Capture)
        kinds = ("logical_topk_ready", "physical_topk_ready")
        assert graph.published == tuple(f"{kind} of layer {layer}" for layer in LEADERS[name] for kind in kinds)
        assert graph.awaited == ()
    assert len(harness.graphs.runner.captured) == 2
    assert {plan.mode for plan in harness.graphs.runner.captured} == {CUDAGraphMode.FULL}


def test_breaks_of_all_shapes_share_static_buffers(folders: dict[str, Path]) -> None:
    """Named by kind, not by layer and not by shape, so they are no more for sixty layers than for one of each."""
    names = set(SimHarness(folders["glm5_next"], "piecewise", **SMALL).graphs.runner.buffers.names)
    kinds = {name.split(",")[0] for name in names}
    assert kinds == {"KDA", "indexer", "attention", "hidden", "logits"}
    assert not any(character.isdigit() for name in names for character in name.split(",")[0])


# What layers are told


class Witness:
    """Notes where the engine asks, and the answer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bool]] = []
        witness, real_publish, real_attend = (
            self,
            PagedLatentAttention.set_logical_topk_ready,
            PagedLatentAttention.attend,
        )

        def publish(attention: PagedLatentAttention, layer: int) -> None:
            witness.note("indexer")
            real_publish(attention, layer)

        def attend(attention: PagedLatentAttention, layer: int, *tensors: torch.Tensor, **keys: Any) -> torch.Tensor:
            witness.note("attention")
            return real_attend(attention, layer, *tensors, **keys)

        patch.setattr(PagedLatentAttention, "set_logical_topk_ready", publish)
        patch.setattr(PagedLatentAttention, "attend", attend)

        class Backend(SimulatedBackend):
            def replay(self, graph: Graph) -> None:
                witness.note("graph")
                super().replay(graph)

        self.backend = Backend()

    def note(self, place: str) -> None:
        self.seen.append((place, in_piecewise_cudagraph()))

    def take(self) -> list[tuple[str, bool]]:
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize(
    ("setting", "in_decode", "in_mixed"),
    [("piecewise", True, True), ("full", False, False), ("full_and_piecewise", False, True), ("none", False, False)],
)
def test_in_piecewise_cudagraph_is_true_in_segments_and_breaks_and_nowhere_else(
    setting: str, in_decode: bool, in_mixed: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the indexer (in a segment or in a break), of attention (in a break), and at each launch of a graph."""
    witness = Witness(monkeypatch)
    harness = SimHarness(folders["deepseek_v32"], setting, backend=witness.backend, **SMALL)
    at_capture = witness.take()
    answers = {in_decode} if setting in ("piecewise", "full") else {in_decode, in_mixed}
    assert {answer for _, answer in at_capture} == (answers if setting != "none" else set())
    told: dict[str, Sequence[tuple[str, bool]]] = {}

    def schedule() -> Any:
        yield [Part(0, 8)]
        told["too large to be captured"] = witness.take()
        yield [*decodes(0), Part(1, 3)]
        told["mixed"] = witness.take()
        yield decodes(0, 1)
        told["decode"] = witness.take()

    harness.run(random_sequences((10, 4), vocab=VOCAB, seed=1), schedule())
    layers, graphs = 2, {True: [("graph", True)], False: []}
    eager = [("indexer", False), ("attention", False)] * layers
    assert told["too large to be captured"] == eager
    if in_mixed:  # each indexer and each attention is a break between two segments
        pieces = [*graphs[True], ("indexer", True), *graphs[True], ("attention", True)] * layers + graphs[True]
        assert told["mixed"] == pieces
    else:
        assert told["mixed"] == eager
    if in_decode:  # the indexer is in the graph, so no Python of its runs
        assert told["decode"] == [*graphs[True], ("attention", True)] * layers + graphs[True]
    else:
        assert told["decode"] == (eager if setting == "none" else [("graph", False)])
    assert in_piecewise_cudagraph() is False
