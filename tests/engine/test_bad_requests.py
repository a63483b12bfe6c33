"""Fault 1 of docs/faults.md: beside a long stream, each bad request is refused by name and changes nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sidestream import LLM, CapacityError, CheckpointError, RequestError, SamplingParams
from tests.engine.llm_fixtures import make_checkpoint

Bad = tuple[Any, Callable[[], Any], str]


def default() -> SamplingParams:
    return SamplingParams()


def params(**kw: Any) -> Callable[[], SamplingParams]:
    return lambda: SamplingParams(**kw)


BAD: dict[str, Bad] = {
    "empty text": ("", default, "empty"),
    "list of empty text": ([""], default, "prompt 0.*empty"),
    "no prompts": ([], default, "no prompts"),
    "empty ids": ([[]], default, "empty list"),
    "negative id": ([[5, -1]], default, r"token id -1.*0 to"),
    "id of vocab size": ([[5, 300]], default, r"token id 300.*0 to 299"),
    "id not an integer": ([[5, 1.5]], default, "1.5"),
    "id is a bool": ([[True, 5]], default, "True"),
    "a number": ([7.5], default, "float"),
    "none": ([None], default, "NoneType"),
    "bytes": (b"abc", default, "bytes"),
    "set of ids": ([{5, 6}], default, "set"),
    "half a surrogate pair": (["a\ud800"], default, "surrogate pair at character 1"),
    "parameters as a dict": ("a", lambda: {"max_tokens": 3}, "must be SamplingParams, got dict"),
    "parameters as a list of dicts": ("a", lambda: [{"max_tokens": 3}], "must be SamplingParams, got dict"),
    "parameters as a number": ("a", lambda: 5, "must be SamplingParams, got int"),
    "odd keys": ([{1: 2, "a": 3}], default, "exactly one"),
    "flag as text": ("a", params(ignore_eos="yes"), "ignore_eos must be true or false"),
    "temperature of 401 digits": ("a", params(temperature=10**400), "temperature is an integer beyond"),
    "penalty below float32": ("a", params(repetition_penalty=1e-46), "repetition_penalty"),
    "penalty above float32": ("a", params(repetition_penalty=1e39), "repetition_penalty"),
    "everything masked": ("a", params(min_tokens=2, stop_token_ids=list(range(300))), "whole vocabulary"),
    "two kinds": ([{"prompt": "a", "prompt_token_ids": [1]}], default, "exactly one"),
    "no kind": ([{"text": "a"}], default, "exactly one"),
    "messages without template": ([{"messages": [{"role": "user", "content": "a"}]}], default, "chat template"),
    "prompt too long": ([[5] * 500], default, r"500 tokens.*128.*max_model_len"),
    "second prompt bad": (["fine", ""], default, "prompt 1"),
    "top_k fraction": ("a", params(top_k=0.01), "top_k"),
    "top_k -2": ("a", params(top_k=-2), r"top_k is -2"),
    "top_p 0": ("a", params(top_p=0), r"top_p is 0"),
    "top_p 1.5": ("a", params(top_p=1.5), r"top_p is 1.5"),
    "top_p text": ("a", params(top_p="x"), "top_p"),
    "min_p 2": ("a", params(min_p=2), r"min_p is 2"),
    "temperature -1": ("a", params(temperature=-1), r"temperature is -1"),
    "temperature nan": ("a", params(temperature=math.nan), r"temperature is nan"),
    "temperature inf": ("a", params(temperature=math.inf), r"temperature is inf"),
    "max_tokens 0": ("a", params(max_tokens=0), r"max_tokens is 0"),
    "max_tokens -1": ("a", params(max_tokens=-1), r"max_tokens is -1"),
    "max_tokens fraction": ("a", params(max_tokens=1.5), "max_tokens"),
    "min over max": ("a", params(max_tokens=2, min_tokens=3), "min_tokens 3"),
    "n 0": ("a", params(n=0), r"n is 0"),
    "n huge": ("a", params(n=10**6), r"n is 1000000"),
    "bias out of vocab": ("a", params(logit_bias={300: 1.0}), r"token id 300"),
    "bias negative id": ("a", params(logit_bias={-1: 1.0}), "logit_bias"),
    "bias nan": ("a", params(logit_bias={3: math.nan}), "logit_bias"),
    "bias not a number": ("a", params(logit_bias={3: "x"}), "logit_bias"),
    "bias not a mapping": ("a", params(logit_bias=[3]), "logit_bias"),
    "stop empty": ("a", params(stop=""), "empty string"),
    "1000 stops": ("a", params(stop=["x"] * 1000), "1000 strings"),
    "stop not text": ("a", params(stop=[3]), "stop"),
    "stop none": ("a", params(stop=None), "stop"),
    "stop id out of vocab": ("a", params(stop_token_ids=[300]), "300"),
    "stop id not a list": ("a", params(stop_token_ids=5), "stop_token_ids"),
    "logprobs huge": ("a", params(logprobs=10**6), r"logprobs is 1000000"),
    "logprobs -1": ("a", params(logprobs=-1), "logprobs"),
    "seed text": ("a", params(seed="x"), "seed"),
    "penalty 3": ("a", params(presence_penalty=3), "presence_penalty"),
    "repetition 0": ("a", params(repetition_penalty=0), "repetition_penalty"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    make_checkpoint("kimi", path, tokenizer=True)
    return path


def refusal(llm: LLM, prompt: Any, make: Callable[[], SamplingParams]) -> str:
    """The message of the RequestError, "" if the request was taken."""
    try:
        llm.generate(prompt, make())
    except RequestError as error:
        return str(error)
    return ""


def test_bad_requests_leave_a_running_stream_alone(folder: Path) -> None:
    # without the prefix cache, so that the same prompt has the same schedule twice, and so the same bits
    llm = LLM(folder, block_size=8, num_blocks=40, max_num_seqs=4, max_model_len=128, enable_prefix_caching=False)
    assert llm.built.config.model.vocab_size == 300
    good = SamplingParams(temperature=0.8, seed=3, max_tokens=100, ignore_eos=True, logprobs=1)
    expected = llm.generate("a long good stream", good)[0].outputs[0]
    free = llm.core.scheduler.num_free_blocks, llm.core.scheduler.num_free_slots
    stream = llm.stream("a long good stream", good)
    last = next(stream)
    for name, (prompt, make, message) in BAD.items():
        assert re.search(message, refusal(llm, prompt, make)), name
        last = next(stream)
        assert llm.core.scheduler.num_running == 1, name
    for delta in stream:
        last = delta
    made = last.output.outputs[0]
    assert made.token_ids == expected.token_ids
    assert made.text == expected.text
    assert made.logprobs == expected.logprobs
    assert (llm.core.scheduler.num_free_blocks, llm.core.scheduler.num_free_slots) == free
    assert not llm.core.has_work()
    llm.core.scheduler.check_integrity()


def test_a_prompt_larger_than_the_pool_names_pool_and_knob(folder: Path) -> None:
    with pytest.raises(CapacityError, match=r"max_model_len 128.*num_blocks"):
        LLM(folder, block_size=8, num_blocks=4, max_model_len=128)
    llm = LLM(folder, block_size=8, num_blocks=4)
    with pytest.raises(RequestError, match=r"40 tokens.*at most 32"):
        llm.generate([[5] * 40])
    assert len(llm.generate([5] * 30, SamplingParams(max_tokens=50, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_a_request_id_in_use_is_refused(folder: Path) -> None:
    llm = LLM(folder, block_size=8, num_blocks=40, max_model_len=128)
    request = llm._inputs.process("same", [5, 6], SamplingParams()).requests[0]
    llm.core.add(request)
    with pytest.raises(RequestError, match="'same' is in use"):
        llm.core.add(request)
    assert llm.core.abort("same")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('no system') }}", [{"role": "system", "content": "a"}], "refuses.*no system"),
        ("{% if %}", [{"role": "user", "content": "a"}], "refuses"),
        ("{{ 1 / 0 }}", [{"role": "user", "content": "a"}], "refuses"),
        ("{{ x.y.z }}", [{"role": "user", "content": "a"}], "refuses"),
        ("", [{"role": "user", "content": "a"}], "chat template"),
        (" ", [{"role": "user", "content": 5}], "content"),
        (" ", [{"role": 5, "content": "a"}], "role"),
        (" ", [{"content": "a"}], "role"),
        (" ", [], "non-empty"),
        (" ", "hi", "non-empty"),
    ],
)
def test_chat_templates_and_messages_are_refused_by_name(
    folder: Path, template: str, messages: Any, message: str
) -> None:
    llm = LLM(folder, block_size=8, num_blocks=40, max_model_len=128)
    llm.tokenizer.chat_template = template  # type: ignore[union-attr]
    with pytest.raises(RequestError, match=message):
        llm.generate({"messages": messages})
    assert not llm.core.has_work()


def test_arrays_of_token_ids_are_prompts(folder: Path) -> None:
    llm = LLM(folder, block_size=8, num_blocks=40, max_model_len=128)
    greedy = SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate([5, 6, 7], greedy)[0].outputs[0].token_ids
    for prompt in (
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [np.int64(5), 6, 7],
        (5, 6, 7),
        torch.tensor([[5, 6, 7]]),
    ):
        assert llm.generate(prompt, greedy)[0].outputs[0].token_ids == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["", 5, b"x", "nowhere"])
def test_a_model_that_is_no_folder_is_refused(model: Any) -> None:
    with pytest.raises(CheckpointError, match="folder"):
        LLM(model)
