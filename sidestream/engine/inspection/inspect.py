"""Runs one request and keeps what can be seen of it: the indexers' choices, one step's timeline, the memory ledger."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.config.model import AttentionKind
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.input_processor import Prompt
from sidestream.engine.inspection.selection import Selection, record
from sidestream.engine.inspection.timeline import Lane, trace_step
from sidestream.engine.llm import LLM
from sidestream.errors import RequestError

TRACED_AT = 4
"""Tokens generated before the step that is traced: a decode, with everything warm."""


ATTENTION_NAMES = {
    AttentionKind.KDA: "KDA",
    AttentionKind.SPARSE_MLA: "sparse MLA",
    AttentionKind.DENSE_MLA: "dense MLA",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """One request, from outside and inside.

    Attributes:
        tokens: text of every token, prompt and completion.
        num_prompt: how many of them are the prompt's.
        layers: of the model, what attends there: "KDA", "dense MLA", "sparse MLA".
        selections: by index group, leaders in layer order.
        lanes: of the traced step, which computed the token at ``traced_position``; its Chrome trace is ``trace``.
        ledger: as plain data, in bytes.
    """

    model: str
    device: str
    tokens: list[str]
    num_prompt: int
    topk: int | None
    selections: list[Selection]
    layers: list[str]
    lanes: list[Lane]
    traced_position: int | None
    trace: Path
    ledger: dict[str, Any]


def inspect_request(folder: Path, prompt: Prompt, *, max_tokens: int, trace: Path, **settings: Any) -> Inspection:
    """Complete one prompt greedily, without graphs and without a prefix cache, and record.

    Every graph mode chooses the same tokens; without graphs Python sees each step's choice. A first run finds how long
    the completion is: the recorded one ends there, or at the step that is traced if that comes later.

    Args:
        trace: where the Chrome trace of one decode step goes.
        settings: of ``LLM``.
    Raises:
        RequestError: the prompt cannot be served, or leaves no room to trace a decode.
    """
    llm = LLM(folder, cudagraph_mode="none", enable_prefix_caching=False, max_num_seqs=1, **settings)
    (plain,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    if max_tokens > TRACED_AT:  # to the end token, or on to the step that is traced
        max_tokens = max(len(plain.outputs[0].token_ids), TRACED_AT + 1)
    selections = record(llm.built.runner.attention.groups)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    lanes: list[Lane] = []
    traced: int | None = None
    stream = llm.stream(prompt, params)
    delta = next(stream)
    if len(delta.output.prompt_token_ids) + TRACED_AT > llm.built.max_model_len or max_tokens <= TRACED_AT:
        raise RequestError(
            f"max_tokens is {max_tokens} and the prompt has {len(delta.output.prompt_token_ids)} tokens of at most "
            f"{llm.built.max_model_len}; at least {TRACED_AT + 1} tokens must fit behind it"
        )
    while not delta.output.finished:
        if delta.num_tokens == TRACED_AT:
            traced = len(delta.output.prompt_token_ids) + delta.num_tokens - 1

            def step() -> None:
                nonlocal delta
                delta = next(stream)

            lanes = trace_step(step, llm.built.config.device, trace, settle=llm.built.runner.settle)
        else:
            delta = next(stream)
    token_ids = [*delta.output.prompt_token_ids, *delta.output.outputs[0].token_ids]
    indexer = llm.built.config.model.indexer
    return Inspection(
        model=folder.resolve().name,
        device=llm.built.config.device,
        tokens=[_text(llm.tokenizer, token) for token in token_ids],
        num_prompt=len(delta.output.prompt_token_ids),
        topk=None if indexer is None else indexer.topk,
        selections=selections,
        layers=[ATTENTION_NAMES[layer.attention] for layer in llm.built.config.model.layers],
        lanes=lanes,
        traced_position=traced,
        trace=trace,
        ledger=llm.ledger().as_json(),
    )


def _text(tokenizer: Any | None, token: int) -> str:
    return f"[{token}]" if tokenizer is None else str(tokenizer.decode([token]))
