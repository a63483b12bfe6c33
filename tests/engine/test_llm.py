"""``LLM`` end to end on tiny checkpoints: greedy tokens, preemption, log-probabilities, stops, n, seeds, text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from sidestream import LLM, RequestError, SamplingParams
from sidestream.core.request import FinishReason
from tests.engine.harness import oracle_logprobs, random_sequences
from tests.engine.llm_fixtures import check_greedy, make_checkpoint
from tests.tolerances import PARITY_LOGPROB

VARIANTS = ("next", "next_share", "dsa", "deepseek", "kimi")


Checkpoint = tuple[Path, torch.nn.Module]


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(request.param, folder)


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    make_checkpoint("kimi", folder, tokenizer=True)
    return folder


def greedy(max_tokens: int, **kw: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kw)  # type: ignore[arg-type]


def test_preempted_and_batched_answers_are_the_oracle_s(checkpoint: Checkpoint) -> None:
    """Pools too small for all: sequences lose their memory and are recomputed; log-probabilities hold to 1e-4."""
    folder, oracle = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=14, max_num_seqs=5, max_num_batched_tokens=12, max_model_len=96)
    llm.built.pools.poison()
    prompts = random_sequences((30, 1, 45, 9, 17, 26, 2), vocab=136, seed=2)
    outputs = llm.generate(prompts, greedy(25, logprobs=2, prompt_logprobs=1))
    assert llm.core.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        assert made.finish_reason is FinishReason.LENGTH
        assert len(made.token_ids) == 25
        check_greedy(oracle, prompt, made.token_ids)
        tokens = [*prompt, *made.token_ids]
        expected = oracle_logprobs(oracle, tokens)
        assert output.prompt_logprobs is not None
        assert made.logprobs is not None
        rows = [*output.prompt_logprobs, *made.logprobs]
        assert rows[0] is None
        assert len(rows) == len(tokens)
        for position in range(1, len(tokens)):
            row = rows[position]
            assert row is not None
            assert tokens[position] in row
            for token, entry in row.items():
                assert abs(entry.logprob - float(expected[position - 1, token])) < PARITY_LOGPROB
            assert row[max(row, key=lambda token: row[token].logprob)].rank == 1
    llm.core.scheduler.check_integrity()


def test_pools_return_to_their_start(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=40, max_num_seqs=4, max_model_len=96)
    scheduler = llm.core.scheduler
    before = scheduler.num_free_blocks, scheduler.num_free_slots
    stream = llm.stream(random_sequences((20, 30, 9), vocab=136, seed=1), greedy(20))
    for _ in range(12):
        next(stream)
    assert (scheduler.num_free_blocks, scheduler.num_free_slots) != before
    stream.close()
    assert (scheduler.num_free_blocks, scheduler.num_free_slots) == before
    assert not llm.core.has_work()
    scheduler.check_integrity()


def test_a_reused_slot_shows_nothing_of_its_last_owner(checkpoint: Checkpoint) -> None:
    """Fault 2 of docs/faults.md: in one seat, a one-token prompt after a long one equals the same on a fresh engine."""
    folder, oracle = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=96)
    llm.generate(random_sequences((60,), vocab=136, seed=9), greedy(10))
    for prompt in ([17], random_sequences((17,), vocab=136, seed=4)[0], [5, 6]):
        made = llm.generate(prompt, greedy(12))[0].outputs[0].token_ids
        fresh = LLM(folder, block_size=8, num_blocks=16, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=96)
        assert fresh.generate(prompt, greedy(12))[0].outputs[0].token_ids == made
        check_greedy(oracle, prompt, made)


def test_same_schedule_same_bits(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    prompts = random_sequences((20, 33), vocab=136, seed=3)
    runs = []
    for _ in range(2):
        llm = LLM(folder, block_size=8, num_blocks=40, max_num_seqs=4, max_model_len=96)
        outputs = llm.generate(prompts, greedy(15, logprobs=3))
        runs.append([output.outputs[0].logprobs for output in outputs])
    assert runs[0] == runs[1]


def test_n_completions_with_seeds_do_not_depend_on_the_batch(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=80, max_num_seqs=8, max_model_len=96)
    prompt = random_sequences((20,), vocab=136, seed=3)[0]
    params = SamplingParams(n=3, seed=7, temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True)
    together = llm.generate([prompt, [4, 5, 6], prompt], [params, SamplingParams(max_tokens=9), params])
    texts = [[c.token_ids for c in together[i].outputs] for i in (0, 2)]
    assert texts[0] == texts[1]
    assert len({tuple(ids) for ids in texts[0]}) > 1
    for index in range(3):
        alone = SamplingParams(seed=7 + index, temperature=0.9, top_p=0.9, max_tokens=12, ignore_eos=True)
        assert llm.generate(prompt, alone)[0].outputs[0].token_ids == texts[0][index]


def test_stop_token_ids_and_min_tokens(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=40, max_model_len=96)
    prompt = random_sequences((20,), vocab=136, seed=3)[0]
    free = llm.generate(prompt, greedy(20))[0].outputs[0].token_ids
    stop = free[6]
    made = llm.generate(prompt, greedy(20, stop_token_ids=[stop]))[0].outputs[0]
    assert made.token_ids == free[: free.index(stop) + 1]
    assert (made.finish_reason, made.stop_reason) == (FinishReason.STOP, stop)
    late = llm.generate(prompt, greedy(20, stop_token_ids=[stop], min_tokens=10))[0].outputs[0]
    assert len(late.token_ids) >= 10
    assert stop not in late.token_ids[:10]


def test_max_tokens_is_clamped_to_the_room(checkpoint: Checkpoint) -> None:
    folder, _ = checkpoint
    llm = LLM(folder, block_size=8, num_blocks=40, max_model_len=32)
    made = llm.generate([5] * 30, greedy(10**12))[0].outputs[0]
    assert (len(made.token_ids), made.finish_reason) == (2, FinishReason.LENGTH)
    everything = llm.generate([5] * 20, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(everything.outputs[0].token_ids) == 12


def test_text_stop_strings_and_streaming(with_text: Path) -> None:
    llm = LLM(with_text, block_size=8, num_blocks=40, max_model_len=128)
    free = llm.generate("hello world", greedy(40))[0]
    text = free.outputs[0].text
    assert free.prompt == "hello world"
    assert text == llm.tokenizer.decode(free.outputs[0].token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
    pieces = [delta.text for delta in llm.stream("hello world", greedy(40))]
    assert "".join(pieces) == text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    cut = llm.generate("hello world", greedy(40, stop=[stop]))[0].outputs[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
    kept = llm.generate("hello world", greedy(40, stop=[stop], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == text[: text.index(stop) + len(stop)]
    assert not llm.core.has_work()


def test_logprobs_carry_the_token_s_text(with_text: Path) -> None:
    llm = LLM(with_text, block_size=8, num_blocks=40, max_model_len=128)
    made = llm.generate("hello", greedy(4, logprobs=0))[0].outputs[0]
    assert made.logprobs is not None
    for token, row in zip(made.token_ids, made.logprobs, strict=True):
        assert list(row) == [token]
        assert row[token].decoded_token == llm.tokenizer.decode([token])  # type: ignore[union-attr]


def test_interleaved_streams_equal_their_own_runs(with_text: Path) -> None:
    llm = LLM(with_text, block_size=8, num_blocks=60, max_num_seqs=4, max_model_len=128)
    prompts = ["one", "another one", "3"]
    expected = [llm.generate(prompt, greedy(15))[0].outputs[0].text for prompt in prompts]
    streams = [llm.stream(prompt, greedy(15)) for prompt in prompts]
    texts = [""] * 3
    rng = random.Random(0)
    open_streams = [0, 1, 2]
    while open_streams:
        i = rng.choice(open_streams)
        delta = next(streams[i], None)
        if delta is None:
            open_streams.remove(i)
        else:
            texts[i] += delta.text
    assert texts == expected


def test_dummy_weights_need_only_a_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, _ = checkpoint
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    runs = [
        LLM(tmp_path, load_format="dummy", seed=seed, block_size=8, num_blocks=20, max_model_len=64)
        .generate([3, 4, 5, 6] * 6, greedy(8, logprobs=1))[0]
        .outputs[0]
        for seed in (1, 1, 2)
    ]
    assert runs[0].logprobs == runs[1].logprobs
    assert runs[0].logprobs != runs[2].logprobs


def test_parameters_for_each_prompt_must_match_in_number(with_text: Path) -> None:
    llm = LLM(with_text, block_size=8, num_blocks=40, max_model_len=128)
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [greedy(1), greedy(1)])
