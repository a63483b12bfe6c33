"""The real ``openai`` client against a live server: what it gets is what ``LLM`` gives."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import openai
import pytest

from sidestream import LLM, SamplingParams
from tests.server.live_server import LiveServer

MODEL = "glm5-next-tiny"
PROMPT = "Question: What is 12 + 30?\nAnswer:"
CHAT = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def greedy(llm: LLM, prompt: object, **params: object) -> str:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, **params))  # type: ignore[arg-type]
    return output.outputs[0].text


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_completion_is_the_offline_one(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=40)
    (choice,) = answer.choices
    assert choice.text == greedy(llm, PROMPT, max_tokens=40)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(llm.tokenizer(PROMPT).input_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streams_join_to_the_whole_answer_with_equal_usage(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": [PROMPT, "Question: What is 7 + 5?\nAnswer:"], "max_tokens": 20, "n": 2}
    fields |= {"temperature": 1.5, "seed": 3, "logprobs": 2}
    whole = client.completions.create(**fields)
    texts, reasons, tokens, usage = {}, {}, {}, None
    for chunk in client.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert usage == whole.usage
    assert len({choice.text for choice in whole.choices}) > 1, "completions of different seeds differ"
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        assert tokens[choice.index] == choice.logprobs.tokens
    assert sorted(texts) == [0, 1, 2, 3]


def test_every_chunk_can_carry_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 5]


def test_token_ids_are_prompts_too(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer(PROMPT).input_ids
    one = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=8)
    two = client.completions.create(model=MODEL, prompt=[ids, ids[:5]], temperature=0, max_tokens=8)
    assert one.choices[0].text == two.choices[0].text == greedy(llm, ids, max_tokens=8)
    assert two.choices[1].text == greedy(llm, [ids[:5]], max_tokens=8)


def test_echo_gives_the_prompt_and_its_logprobs(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=3, logprobs=2, echo=True)
    (choice,) = answer.choices
    (offline,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2))
    assert choice.text == PROMPT + offline.outputs[0].text
    columns = choice.logprobs
    assert columns.token_logprobs[0] is None
    assert columns.top_logprobs[0] is None
    ids = [*offline.prompt_token_ids, *offline.outputs[0].token_ids]
    rows = [*offline.prompt_logprobs[1:], *offline.outputs[0].logprobs]
    assert len(columns.tokens) == len(ids)
    assert columns.token_logprobs[1:] == pytest.approx(
        [row[token].logprob for token, row in zip(ids[1:], rows, strict=True)], abs=1e-4
    )
    assert "".join(columns.tokens) == choice.text
    assert [
        choice.text[at : at + len(token)] for at, token in zip(columns.text_offset, columns.tokens, strict=True)
    ] == (columns.tokens)


def test_a_prompt_can_be_scored_without_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.text == PROMPT
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


def test_a_chat_is_the_offline_one(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0)
    (offline,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=None))
    assert answer.choices[0].message.content == offline.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    pieces, roles, usage = "", [], None
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
        usage = chunk.usage
    assert pieces == offline.outputs[0].text
    assert roles == ["assistant"]
    assert usage == answer.usage


def test_chat_logprobs_are_finite_and_name_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, logprobs=True, top_logprobs=3, max_completion_tokens=6
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6 == answer.usage.completion_tokens
    for entry in entries:
        assert math.isfinite(entry.logprob)
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the first"


def test_extra_fields_of_vllm_are_taken(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_p": 0.1, "ignore_eos": True, "min_tokens": 30}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, extra_body=extra)
    assert answer.usage.completion_tokens == 30
    assert answer.choices[0].finish_reason == "length"


def test_logit_bias_and_seed(client: openai.OpenAI, llm: LLM) -> None:
    (token,) = llm.tokenizer("9").input_ids
    biased = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, logit_bias={str(token): 100}
    )
    assert biased.choices[0].text == "9999"
    drawn = [
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=2, max_tokens=12, seed=seed).choices[0].text
        for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_penalties_reach_the_sampler(client: openai.OpenAI, llm: LLM) -> None:
    fields = {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    extra = {"repetition_penalty": 5.0, "ignore_eos": True}
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=20, extra_body=extra, **fields
    )
    expected = greedy(llm, PROMPT, max_tokens=20, **extra, **fields)
    assert answer.choices[0].text == expected != greedy(llm, PROMPT, max_tokens=20, ignore_eos=True)


def test_async_clients_at_once(server: LiveServer, llm: LLM) -> None:
    questions = [f"Question: What is {i} + {2 * i}?\nAnswer:" for i in range(3, 9)]

    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt=question, temperature=0, max_tokens=30, stream=True
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any") as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    assert asyncio.run(ask_all()) == [greedy(llm, question, max_tokens=30) for question in questions]


def test_errors_are_those_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match=r"top_p is 1\.5") as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, top_p=1.5)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model=MODEL, prompt=[5] * 40000)


def test_tokenize_and_back(server: LiveServer, llm: LLM) -> None:
    text = "Answer: 42 €"
    status, tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert tokens["tokens"] == llm.tokenizer(text).input_ids
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": text})
    status, chat = server.post("/tokenize", {"messages": CHAT})
    assert (status, chat["tokens"]) == (
        200,
        llm.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False),
    )
