"""The checkpoint that ships: it answers, it equals transformers, and a wrong selection shows as a wrong answer."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import Glm5NextForConditionalGeneration

from sidestream import LLM, SamplingParams
from sidestream.attention.latent import PagedLatentAttention
from sidestream.core.batch import Chunk
from sidestream.engine.llm import bundled_model
from tests.engine.harness import Harness, decoded, oracle_logprobs
from tests.engine.selection_faults import faulty_selection
from tests.tolerances import PARITY_LOGPROB, SCORE_TIE
from training.data import Item, Kind, heldout_item
from training.selection import Fault

SEED = 77
FAULTS: tuple[Fault, ...] = ("random", "newest", "off_by_one", "late", "swapped_pages")
ITEMS = 8
CONTEXT = 512
"""Eight times the bundled model's index_topk."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu", dtype="float32", max_model_len=4096, max_num_seqs=16)


def items(llm: LLM, kind: Kind, length: int, count: int, *, chat: bool = False) -> list[Item]:
    def encode(text: str) -> list[int]:
        return list(llm.tokenizer(text, add_special_tokens=False).input_ids)  # type: ignore[misc]

    return [heldout_item(encode, SEED, i, kind, length, chat=chat) for i in range(count)]


@pytest.mark.parametrize(
    ("kind", "length", "chat"),
    [
        ("arithmetic", 0, False),
        ("arithmetic", 0, True),
        ("retrieval", 512, False),
        ("retrieval", 2048, True),
        ("chain", 512, False),
    ],
)
def test_it_answers_held_out_questions(llm: LLM, kind: Kind, length: int, chat: bool) -> None:
    asked = items(llm, kind, length, 12, chat=chat)
    outputs = llm.generate([item.prompt for item in asked], SamplingParams(temperature=0, max_tokens=200))
    right = [
        output.outputs[0].text.strip() == item.answer_text.strip() for output, item in zip(outputs, asked, strict=True)
    ]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    assert sum(right) >= 11, f"{sum(right)} of {len(right)}"


def test_chat_messages_go_through_the_template(llm: LLM) -> None:
    item = items(llm, "retrieval", 512, 1, chat=True)[0]
    user = item.prompt.removeprefix("<|user|>\n").removesuffix("<|assistant|>")
    conversation = [{"role": "user", "content": user}]
    greedy = SamplingParams(temperature=0, max_tokens=40)
    for output in [*llm.chat(conversation, greedy), *llm.chat([conversation, conversation], greedy)]:
        assert output.prompt == item.prompt
        assert output.outputs[0].text.strip() == item.answer_text.strip()


def oracle_scores(indexer: torch.nn.Module, hidden: torch.Tensor, q_resid: torch.Tensor) -> torch.Tensor:
    """[T, P] scores of a transformers indexer for every complete pool of one sequence, visible or not."""
    tokens = hidden.shape[1]
    q = indexer.wq_b(q_resid).view(1, tokens, indexer.n_heads, indexer.head_dim)
    gate = torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate)
    packed = torch.cat([indexer.k_norm(indexer.wk(hidden)), gate, torch.ones(1, tokens, 1)], dim=-1)
    keys = indexer.get_pooled_states(packed)[0]
    scores = torch.relu(torch.einsum("bthd,bpd->bthp", q, keys) * indexer.softmax_scale)
    weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5
    return torch.einsum("bthp,bth->btp", scores, weights)[0]


def test_log_probabilities_and_selected_sets_equal_transformers(llm: LLM) -> None:
    """What stays invisible in answers (a lost tail, half the pools) shows here, row by row.

    A trained model has rows where two pools score the same to fp32 rounding. There, and only there, the selections may
    differ; the oracle then goes on with the engine's, so that every row's log-probabilities can be compared.
    """
    transformers.utils.logging.set_verbosity_error()
    folder = bundled_model()
    oracle = Glm5NextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ours: dict[int, list[torch.Tensor]] = {2: [], 5: []}
    ready = PagedLatentAttention.set_logical_topk_ready

    def record(self: PagedLatentAttention, layer: int) -> None:
        ours[layer].append(self.logical_topk_indices(layer).clone())
        ready(self, layer)

    item = items(llm, "chain", 640, 1)[0]
    ids = list(llm.tokenizer(item.prompt + item.answer_text, add_special_tokens=False).input_ids)  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedLatentAttention, "set_logical_topk_ready", record)
        harness = Harness(folder, block_size=64, num_blocks=32, max_model_len=2048)
        got = harness.run([ids], decoded([len(ids)], len(ids) - 40))[0]

    ties: dict[int, int] = {}

    def compare(
        layer: int, module: torch.nn.Module, kwargs: dict[str, torch.Tensor], out: torch.Tensor
    ) -> torch.Tensor:
        mine = torch.cat(ours[layer])
        theirs, same = out[0].sort(-1).values, mine.sort(-1).values
        differing = (theirs != same).any(-1).nonzero()[:, 0].tolist()
        scores = oracle_scores(module, kwargs["hidden_states"], kwargs["q_resid"])
        for row in differing:
            lost, won = (set(a[row].tolist()) - set(b[row].tolist()) for a, b in ((theirs, same), (same, theirs)))
            assert len(lost) == len(won) == 4, f"layer {layer} row {row}: {lost} became {won}"
            gap = scores[row, min(lost) // 4] - scores[row, min(won) // 4]
            assert 0 <= float(gap) < SCORE_TIE, f"layer {layer} row {row}: {lost} became {won}, behind by {gap}"
        ties[layer] = len(differing)
        return mine[None]

    for number in ours:
        oracle.model.language_model.layers[number].self_attn.indexer.register_forward_hook(
            lambda module, _args, kwargs, out, number=number: compare(number, module, kwargs, out), with_kwargs=True
        )
    expected = oracle_logprobs(oracle, ids)
    assert float((got - expected).abs().max()) < PARITY_LOGPROB
    assert sum(ties.values()) <= len(ids) // 100, ties
    tail = (torch.arange(len(ids)) + 1) % 4
    wanted = torch.minimum(torch.arange(len(ids)) + 1, 64 + tail)
    for pieces in ours.values():
        assert ((torch.cat(pieces) >= 0).sum(-1) == wanted).all()


@pytest.fixture(scope="module")
def questions(llm: LLM) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Prompt and answer ids: facts whose value is a code, facts whose value is a word, and link chains."""
    end = llm.built.config.model.eos_token_ids[0]

    def encode(text: str) -> list[int]:
        return list(llm.tokenizer(text, add_special_tokens=False).input_ids)  # type: ignore[misc]

    asked = {
        "codes": items(llm, "retrieval", CONTEXT, ITEMS),
        "words": [item for item in items(llm, "retrieval", CONTEXT, 40) if not item.answer_text[1].isdigit()][:ITEMS],
        "chains": items(llm, "chain", CONTEXT, ITEMS),
    }
    return {
        kind: [(encode(item.prompt), [*encode(item.answer_text), end]) for item in chosen]
        for kind, chosen in asked.items()
    }


def accuracy(llm: LLM, asked: list[tuple[list[int], list[int]]]) -> float:
    """Share of answers whose every token is the model's first choice, given the ones before it."""
    right = 0
    for prompt, answer in asked:
        tokens = [*prompt, *answer]
        blocks = tuple(range(1, 2 + len(tokens) // llm.built.config.block_size))
        hidden = llm.built.runner.forward([Chunk("q", 0, len(tokens), blocks, 1, False, False)], tokens)
        rows = range(len(prompt) - 1, len(tokens) - 1)
        right += llm.built.runner.logits(hidden, rows).argmax(-1).tolist() == answer
    return right / len(asked)


@pytest.mark.parametrize("fault", [None, *FAULTS])
@pytest.mark.parametrize("layer", [2, 3, 5])
def test_a_wrong_selection_in_one_layer_shows_as_wrong_answers(
    llm: LLM, questions: dict[str, list[tuple[list[int], list[int]]]], layer: int, fault: Fault | None
) -> None:
    indexer = llm.built.config.model.indexer
    assert indexer is not None
    with faulty_selection(layer, fault, kpool=indexer.kpool, topk=indexer.topk) if fault else nullcontext():
        found = {kind: accuracy(llm, asked) for kind, asked in questions.items()}
    if fault is None:
        assert min(found.values()) >= 0.85
    else:
        assert min(found.values()) < 0.3, found


def test_layers_of_the_faults_are_the_sparse_layers(llm: LLM) -> None:
    kinds = [layer.attention.value for layer in llm.built.config.model.layers]
    assert [i for i, kind in enumerate(kinds) if kind == "sparse_mla"] == [2, 3, 5]
