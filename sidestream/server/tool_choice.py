"""Which tools an answer may or must call, and what generation is held to for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidestream.core.sampling_params import SamplingParams
from sidestream.core.structured_outputs import JSON_WHITESPACE, StructuredOutputs
from sidestream.errors import RequestError
from sidestream.server.argument_types import json_types
from sidestream.server.call_forms import (
    FORMS,
    CallForms,
    Form,
    behind_reasoning,
    const,
    either,
    regex,
    writable,
)
from sidestream.server.errors import shown
from sidestream.server.parsers import END_THINK, THINK
from sidestream.server.protocol import ChatRequest, NamedTool, Tool
from sidestream.server.tool_schemas import Totals

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolChoice:
    """What a request says of tools, checked.

    Args:
        parser: that takes the answer apart; its format is what generation is held to.
    Attributes:
        tools: whose calls are taken out of the answer; None if none may be.
        forced: the answer must be calls.
        named: the only function that must be called.
        strict: generation is held to the format of calls, whether it must call or only may.
        formatted: an answer that is no call has the form of ``response_format``.
    Raises:
        RequestError: naming the field at fault.
    """

    def __init__(self, body: ChatRequest, parser: str) -> None:
        choice, tools = body.tool_choice, body.tools or None
        self.named = choice.function.name if isinstance(choice, NamedTool) else None
        self.forced = choice == "required" or self.named is not None
        self.tools = None if choice == "none" else tools
        self.parallel = body.parallel_tool_calls is not False and self.named is None
        self._forms = FORMS.get(parser)
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            ((twice, _),) = Counter(names).most_common(1)
            raise RequestError(f"tools holds two functions of the name {shown(twice)}")
        if self.forced and not tools:
            raise RequestError(f"tool_choice is {_said(body)}, which needs tools")
        if self.named is not None and self.named not in names:
            raise RequestError(f"tool_choice names the function {shown(self.named)}, tools has {shown(names)}")
        strict = [tool.function.name for tool in self.tools or () if tool.function.strict]
        asked = body.response_format is not None and body.response_format.type != "text"
        self.formatted = bool(self.tools) and asked and self._forms is not None
        limited = bool(self.tools) and not self.parallel and self._forms is not None and body.structured_outputs is None
        self.strict = self.forced or bool(strict) or limited or self.formatted
        if self.strict and self._forms is None:
            what = (
                f"tool_choice is {_said(body)}" if self.forced else f"tools holds {shown(strict[0])}, which is strict"
            )
            raise RequestError(f"{what}: that needs an answer parser, and this server has none (--answer-parser)")
        if self.strict:
            for place, tool in enumerate(self.tools or ()):
                if not writable(tool.function.name):
                    where = f"tools.{place}.function.name is {shown(tool.function.name)}"
                    raise RequestError(f"{where}, which a call cannot spell")
        self._form: Form | None = None

    def form(self, asked: StructuredOutputs | None) -> Form:
        """What the answer must look like behind any reasoning. Made once; that may take a tenth of a second.

        Args:
            asked: what it must be where it is no call; None for text.
        Raises:
            RequestError: two forms contradict each other, or there is a schema that generation cannot be held to.
        """
        if self._form is None:
            if asked is not None and not self.formatted:
                raise RequestError("tools that generation is held to contradict structured_outputs; give one of them")
            self._form = self._make(None if asked is None or self.forced else _as_form(asked))
        return self._form

    def _make(self, answer: Form | None) -> Form:
        assert self._forms is not None, "only an answer parser's format can be held to"
        totals = Totals()
        calls = []
        for place, tool in enumerate(self.tools or ()):
            if self.named in (None, tool.function.name):
                calls.append(self._call(self._forms, tool, totals, f"tools.{place}.function"))
        if not self.forced and answer is None:
            return self._forms.among_text(calls, parallel=self.parallel)
        block = self._forms.block(calls, parallel=self.parallel)
        return block if self.forced or answer is None else either([answer, block])

    def _call(self, forms: CallForms, tool: Tool, totals: Totals, where: str) -> Form:
        function = tool.function
        held = self.forced or function.strict
        parameters = (NO_ARGUMENTS if function.parameters is None else function.parameters) if held else ANY_ARGUMENTS
        form = forms.call(function.name, {"type": "object", **parameters}, totals)
        types = json_types(parameters, parameters)
        if "object" not in types:
            raise RequestError(f"{where}.parameters are of type {' or '.join(sorted(types))}, they must be an object")
        return form


def constrain(
    params: SamplingParams, choice: ToolChoice, *, parser: str, prompt: str, thinking: bool, tokenizer: Any
) -> SamplingParams:
    """Parameters that hold generation to what the request asks for, and leave visible what the parser looks for.

    A part in ``think`` tags that the prompt has opened goes on to its end before any form begins: the parser takes all
    up to there for reasoning, and a model that was made to think answers badly without it. A prompt that has neither
    opened nor ended it leaves the model free to begin with it where calls are asked for, unless the chat template does
    not know the tags: such a model was never shown them.

    Args:
        params: with the form of ``response_format`` or ``structured_outputs``, if there is one.
        thinking: the prompt ends within that part.
    Raises:
        RequestError: two forms contradict each other, or the tokenizer cannot spell the tags.
    """
    forms = FORMS.get(parser)
    if forms is None:
        return params
    params = replace(params, skip_special_tokens=params.skip_special_tokens and not _special(tokenizer, forms.opening))
    asked = params.structured_outputs
    if choice.strict:
        form = choice.form(asked)
        _check_spelling(tokenizer, forms.opening, parser)
        closed = not thinking and (prompt.rstrip().endswith(END_THINK) or not _reasons(tokenizer))
        form = behind_reasoning(form, thinking=thinking, closed=closed)
        control_characters = asked is None or choice.forced or asked.control_characters
        return replace(params, structured_outputs=_outputs(form, source="tools", control_characters=control_characters))
    if asked is not None and thinking:
        form = behind_reasoning(_as_form(asked), thinking=True, closed=False)
        outputs = _outputs(form, source=asked.source, control_characters=asked.control_characters)
        return replace(params, structured_outputs=outputs)
    return params


def _outputs(form: Form, *, source: str, control_characters: bool = True) -> StructuredOutputs:
    tag = {"type": "structural_tag", "format": form}
    return StructuredOutputs(structural_tag=tag, source=source, control_characters=control_characters)


def _as_form(asked: StructuredOutputs) -> Form:
    """A form of the whole text as a part of one."""
    if asked.choice is not None:
        return either([const(text) for text in asked.choice])
    if asked.regex is not None:
        return regex(asked.regex)
    if asked.grammar is not None:
        return {"type": "grammar", "grammar": asked.grammar}
    try:
        schema = {"type": "object"} if asked.json_object else json.loads(str(asked.json))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{asked.source} json is not a JSON schema: {error}") from None
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": JSON_WHITESPACE}


def _said(body: ChatRequest) -> str:
    choice = body.tool_choice
    return repr(choice) if isinstance(choice, str) else "a named function"


def _reasons(tokenizer: Any) -> bool:
    """Whether the chat template knows a part in ``think`` tags."""
    template = str(tokenizer.chat_template)
    return THINK in template or END_THINK in template


def _special(tokenizer: Any, opening: str) -> bool:
    """Whether decoding leaves out some of the tags that parsers look for."""
    shown_text = tokenizer.decode(_ids(tokenizer, opening + THINK + END_THINK), skip_special_tokens=True)
    return opening not in shown_text or THINK not in shown_text or END_THINK not in shown_text


def _check_spelling(tokenizer: Any, opening: str, parser: str) -> None:
    if opening not in tokenizer.decode(_ids(tokenizer, opening), skip_special_tokens=False):
        raise RequestError(
            f"tools of the format {parser!r} begin with {opening!r}, which this checkpoint's tokenizer cannot spell"
        )


def _ids(tokenizer: Any, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
