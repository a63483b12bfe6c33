"""Takes the text of GLM and DeepSeek models apart: reasoning, answer, tool calls.

Formats as their chat templates write them: GLM-4.5 and later put a call's name and ``<arg_key>``, ``<arg_value>`` pairs
into ``<tool_call>``; DeepSeek-V3.1 puts JSON between its own tokens; DeepSeek-V3.2 writes ``DSML`` elements.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from sidestream.server.answer_pieces import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    Piece,
    PlainParser,
    Reasoning,
)
from sidestream.server.protocol import Tool
from sidestream.server.tag_reader import TagReader

BAR = "\N{FULLWIDTH VERTICAL LINE}"
"""Part of DeepSeek's tags."""
THINK, END_THINK = "<think>", "</think>"
Steps = Generator[None, None, None]
Types = Mapping[str, Mapping[str, Any]]
"""Function name -> parameter name -> its JSON schema."""


class TaggedParser:
    """What the formats share: a part in ``think`` tags first, perhaps, then text with calls in it.

    Args:
        prompt: the end of the prompt says whether the model is thinking already.
        tools: of the request; without any, what looks like a call is text.
    """

    opening: str
    """Begins calls."""

    def __init__(self, prompt: str, tools: Sequence[Tool] | None) -> None:
        self.reader = TagReader()
        self.types: Types = {
            tool.function.name: (tool.function.parameters or {}).get("properties") or {} for tool in tools or ()
        }
        self._thinking = prompt.rstrip().endswith(THINK)
        self._tools = bool(tools)
        self._pieces: list[Piece] = []
        self._space = ""
        self._calls = 0
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

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._pieces.append(CallArguments(self._calls - 1, text))

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
    """``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, with newlines between."""

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
        before = "{"
        while tag == "<arg_key>":
            key, _ = yield from self.reader.until("</arg_key>")
            yield from self.reader.until("<arg_value>", self.closing)
            value, ended = yield from self.reader.until("</arg_value>")
            if ended is None:
                return  # cut off within a value: what can be said was said
            self.arguments(before + _member(key.strip(), value, self.types.get(name, {})))
            before = ", "
            _, tag = yield from self.reader.until("<arg_key>", self.closing)
        if tag is not None:
            self.arguments("{}" if before == "{" else "}")


class DeepSeekV31Parser(TaggedParser):
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>``."""

    opening = f"<{BAR}tool▁calls▁begin{BAR}>"

    def calls(self) -> Steps:
        begin, end = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
        while True:
            _, tag = yield from self.reader.until(begin, end)
            if tag != begin:
                return
            name, tag = yield from self.reader.until(f"<{BAR}tool▁sep{BAR}>")
            if tag is None:
                return
            self.start_call(name.strip())
            yield from self.reader.until(f"<{BAR}tool▁call▁end{BAR}>", show=self.arguments)


class DeepSeekV32Parser(TaggedParser):
    """``invoke`` elements with ``parameter`` elements in them; ``string`` says whether a value is text or JSON."""

    opening = f"<{BAR}DSML{BAR}function_calls>"

    def calls(self) -> Steps:
        invoke, end = f'<{BAR}DSML{BAR}invoke name="', f"</{BAR}DSML{BAR}function_calls>"
        while True:
            _, tag = yield from self.reader.until(invoke, end)
            if tag != invoke:
                return
            name, tag = yield from self.reader.until('">')
            if tag is None:
                return
            self.start_call(name)
            yield from self._parameters()

    def _parameters(self) -> Steps:
        parameter, end = f'<{BAR}DSML{BAR}parameter name="', f"</{BAR}DSML{BAR}invoke>"
        before = "{"
        while True:
            _, tag = yield from self.reader.until(parameter, end)
            if tag != parameter:
                if tag is not None:
                    self.arguments("{}" if before == "{" else "}")
                return
            key, _ = yield from self.reader.until('" string="')
            kind, _ = yield from self.reader.until('">')
            value, ended = yield from self.reader.until(f"</{BAR}DSML{BAR}parameter>")
            if ended is None:
                return
            self.arguments(before + _member(key, value, {key: {"type": "string" if kind == "true" else "any"}}))
            before = ", "


def _member(key: str, value: str, types: Mapping[str, Any]) -> str:
    """One member of a JSON object; a value is text if its parameter says so, or if it is no JSON."""
    schema = types.get(key)
    if not (isinstance(schema, Mapping) and schema.get("type") == "string"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value, parse_constant=_refuse)
    return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


PARSERS: dict[str, type[TaggedParser]] = {
    "glm": GlmParser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
}
NO_PARSER = "none"
OF_ARCHITECTURE = {"glm5_next": "glm", "glm_moe_dsa": "glm", "deepseek_v32": "deepseek_v32"}


def parser_for(name: str, prompt: str, tools: Sequence[Tool] | None) -> Callable[[], AnswerParser]:
    """Makes parsers for one request's completions; ``none`` takes nothing apart."""
    made = PARSERS.get(name)
    if made is None:
        return PlainParser
    return lambda: made(prompt, tools)
