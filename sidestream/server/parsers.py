"""Takes the text of GLM and DeepSeek models apart: reasoning, answer, tool calls.

Formats as their chat templates write them: GLM-4.5 and later put a call's name and ``<arg_key>``, ``<arg_value>`` pairs
into ``<tool_call>``; DeepSeek-V3.1 puts JSON between its own tokens; DeepSeek-V3.2 writes ``DSML`` elements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence

from sidestream.server.answer_pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Piece,
    PlainParser,
    Reasoning,
)
from sidestream.server.argument_types import ALL_TYPES, TEXT, JsonText, json_types, properties_of, value_text
from sidestream.server.protocol import Tool
from sidestream.server.tag_reader import TagReader

BAR = "\N{FULLWIDTH VERTICAL LINE}"
"""Part of DeepSeek's tags."""
THINK, END_THINK = "<think>", "</think>"
Steps = Generator[None, None, None]


class TaggedParser:
    """What the formats share: a part in ``think`` tags first, perhaps, then text with calls in it.

    Args:
        thinking: the prompt has opened that part.
        tools: of the request; without any, what looks like a call is text.
    """

    opening: str
    """Begins calls."""

    def __init__(self, thinking: bool, tools: Sequence[Tool] | None) -> None:
        self.reader = TagReader()
        self._parameters = {tool.function.name: tool.function.parameters or {} for tool in tools or ()}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        self._thinking = thinking
        self._tools = bool(tools)
        self._pieces: list[Piece] = []
        self._space = ""
        self._calls = 0
        self._members = 0
        self._steps = self._read()
        self._done = False

    def push(self, text: str) -> list[Piece]:
        self.reader.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        self.reader.end()
        return self._advance()

    def calls(self) -> Steps:
        """Read what follows ``opening``, up to where text may go on."""
        raise NotImplementedError

    def start_call(self, name: str) -> None:
        self._pieces.append(CallStart(self._calls, name))
        self._calls += 1
        self._members = 0

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._pieces.append(CallArguments(self._calls - 1, text))

    def types(self, function: str, key: str) -> frozenset[str]:
        """Types that an argument may have, by the function's schema."""
        parameters = self._parameters.get(function, {})
        if (function, key) not in self._types:
            self._types[function, key] = json_types(properties_of(parameters).get(key), parameters)
        return self._types[function, key]

    def member(self, key: str, types: frozenset[str], end: str) -> Generator[None, None, bool]:
        """Read one argument up to ``end``: text as it comes, other values when they are complete; whether they were."""
        self._members += 1
        name = f"{'{' if self._members == 1 else ', '}{json.dumps(key, ensure_ascii=False)}: "
        if types == TEXT:
            self.arguments(name + '"')
            _, ended = yield from self.reader.until(
                end, show=lambda text: self.arguments(_within_quotes(text)), whole=True
            )
            self.arguments('"' if ended is not None else "")
        else:
            value, ended = yield from self.reader.until(end)
            self.arguments(name + value_text(value, types) if ended is not None else "")
        return ended is not None

    def end_call(self) -> None:
        """The last call's arguments are complete."""
        self.arguments("}" if self._members else "{}")

    def content(self, text: str) -> None:
        """Text for the user; white space waits for what follows it, since before a call it is no content."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._pieces.append(Content(kept))

    def _advance(self) -> list[Piece]:
        if not self._done:
            self._done = next(self._steps, True) is True
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Steps:
        if not self._thinking:
            self._thinking = yield from self.reader.takes(THINK)
        if self._thinking:
            yield from self._reason()
        while True:
            tags = (self.opening,) if self._tools else ()
            _, tag = yield from self.reader.until(*tags, show=self.content)
            if tag is None:
                break
            self._space = ""
            yield from self.calls()
        if self._space and not self._calls:
            self._pieces.append(Content(self._space))

    def _reason(self) -> Steps:
        yield from self.reader.skip_space()
        yield from self.reader.until(END_THINK, show=lambda text: self._pieces.append(Reasoning(text)))
        yield from self.reader.skip_space()


class GlmParser(TaggedParser):
    """``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, with newlines between or not."""

    opening = "<tool_call>"
    closing = "</tool_call>"

    def calls(self) -> Steps:
        name, tag = yield from self.reader.until("<arg_key>", self.closing)
        name = name.strip()
        if tag is None:
            return  # cut off within the name
        if not name:
            self.content(self.opening + tag)
            return
        self.start_call(name)
        while tag == "<arg_key>":
            key, tag = yield from self.reader.until("</arg_key>", "<arg_value>", self.closing)
            if tag == "</arg_key>":
                _, tag = yield from self.reader.until("<arg_value>", self.closing)
            if tag == "<arg_value>":
                key = key.strip()
                if not (yield from self.member(key, self.types(name, key), "</arg_value>")):
                    return
                _, tag = yield from self.reader.until("<arg_key>", self.closing)
        if tag is not None:
            self.end_call()


class DeepSeekV31Parser(TaggedParser):
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>``."""

    opening = f"<{BAR}tool▁calls▁begin{BAR}>"
    closing = f"<{BAR}tool▁calls▁end{BAR}>"
    call = f"<{BAR}tool▁call▁begin{BAR}>"
    separator = f"<{BAR}tool▁sep{BAR}>"
    end_of_call = f"<{BAR}tool▁call▁end{BAR}>"

    def calls(self) -> Steps:
        while True:
            _, tag = yield from self.reader.until(self.call, self.closing)
            if tag != self.call:
                return
            name, tag = yield from self.reader.until(self.separator)
            if tag is None:
                return
            self.start_call(name.strip())
            yield from self._json_arguments(JsonText())

    def _json_arguments(self, json_text: JsonText) -> Steps:
        yield from self.reader.until(
            self.end_of_call, show=lambda text: self.arguments(json_text.push(text)), whole=True
        )


class DeepSeekV32Parser(TaggedParser):
    """``invoke`` elements with ``parameter`` elements in them; ``string`` says whether a value is text or JSON."""

    opening = f"<{BAR}DSML{BAR}function_calls>"
    closing = f"</{BAR}DSML{BAR}function_calls>"
    invoke = f'<{BAR}DSML{BAR}invoke name="'
    end_of_call = f"</{BAR}DSML{BAR}invoke>"
    parameter = f'<{BAR}DSML{BAR}parameter name="'
    end_of_value = f"</{BAR}DSML{BAR}parameter>"

    def calls(self) -> Steps:
        while True:
            _, tag = yield from self.reader.until(self.invoke, self.closing)
            if tag != self.invoke:
                return
            name, tag = yield from self.reader.until('">')
            if tag is None:
                return
            self.start_call(name)
            yield from self._parameters_of()

    def _parameters_of(self) -> Steps:
        while True:
            _, tag = yield from self.reader.until(self.parameter, self.end_of_call)
            if tag != self.parameter:
                if tag is not None:
                    self.end_call()
                return
            attributes, tag = yield from self.reader.until('">')
            if tag is None:
                return
            key, _, kind = attributes.partition('" string="')
            types = ALL_TYPES if kind == "false" else TEXT
            if not (yield from self.member(key, types, self.end_of_value)):
                return


def _within_quotes(text: str) -> str:
    """Text as it stands in a JSON string; pieces of it can be joined."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


PARSERS: dict[str, type[TaggedParser]] = {
    "glm": GlmParser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
}
NO_PARSER = "none"
OF_ARCHITECTURE = {"glm5_next": "glm", "glm_moe_dsa": "glm", "deepseek_v32": "deepseek_v32"}


def parser_of(architecture: str, template: object) -> str:
    """Which parser fits a checkpoint: DeepSeek-V3.2-Exp is a ``deepseek_v32`` with calls of V3.1 in its template."""
    name = OF_ARCHITECTURE.get(architecture, NO_PARSER)
    return "deepseek_v31" if name == "deepseek_v32" and DeepSeekV31Parser.separator in str(template) else name


def parser_for(name: str, thinking: bool, tools: Sequence[Tool] | None) -> Callable[[], AnswerParser]:
    """Makes parsers for one request's completions; ``none`` takes nothing apart."""
    made = PARSERS.get(name)
    if made is None:
        return PlainParser
    return lambda: made(thinking, tools)


def opens_thinking(prompt: str, *, continued: str = "") -> bool:
    """Whether a prompt ends within the part in ``think`` tags: behind the tag, or in a message that goes on.

    Args:
        continued: content of the last message, if it is that which the answer goes on with.
    """
    _, tag, rest = continued.rpartition(THINK)
    return prompt.rstrip().endswith(THINK) or bool(tag and END_THINK not in rest)
