"""Conversations as prompts, by the checkpoint's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sidestream.engine.input_processor import TEMPLATE_ERRORS
from sidestream.errors import RequestError
from sidestream.server.errors import shown
from sidestream.server.protocol import Message, Tool

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names of the template's own arguments that ``chat_template_kwargs`` cannot replace."""


def tokenize_chat(
    tokenizer: Any | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> tuple[str, list[int]]:
    """The prompt's text and token ids; the template itself writes the special tokens.

    Args:
        tools: handed to the template.
        kwargs: further variables of the template, such as ``enable_thinking``.
        add_generation_prompt: let the template begin the answer; as a rule it does, but where a message goes on.
        continue_final_message: the prompt ends with the last message's text, which the answer goes on with.
    Raises:
        RequestError: there is no template, or it refuses these messages.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError("add_generation_prompt and continue_final_message are true; give one of them")
    turn = {
        "add_generation_prompt": add_generation_prompt is not False and not continue_final_message,
        "continue_final_message": bool(continue_final_message),
    }
    text = _render(tokenizer, messages, tools=tools, variables={**_checked(kwargs), **turn})
    return text, encode_text(tokenizer, text, add_special_tokens=False)


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of text; RequestError if it cannot be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds half a surrogate pair at character {error.start}") from None
    return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def content_text(message: Message) -> str:
    """A message's content as one text."""
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _checked(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if taken := sorted(RESERVED & set(kwargs or {})):
        raise RequestError(f"chat_template_kwargs holds {taken[0]!r}, which is not the template's to change")
    return kwargs or {}


def _render(
    tokenizer: Any | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt's text."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages need a chat template, and this checkpoint has none; use /v1/completions")
    listed = [_plain(message, index) for index, message in enumerate(messages)]
    if "developer" not in str(tokenizer.chat_template):  # OpenAI's newer name for the same
        listed = [plain | {"role": "system"} if plain["role"] == "developer" else plain for plain in listed]
    functions = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
    try:
        text = tokenizer.apply_chat_template(listed, tools=functions, tokenize=False, **variables)
    except TEMPLATE_ERRORS as error:
        raise RequestError(f"messages are refused by the checkpoint's chat template: {_first_line(error)}") from error
    if not text:
        raise RequestError("messages make an empty prompt in the checkpoint's chat template")
    return str(text)


class Arguments(dict[str, Any]):
    """Arguments of a call in a message: an object for templates that go through its members, as GLM's do; where
    DeepSeek-V3.1's joins it to text, the JSON that the client sent.
    """

    def __init__(self, members: Mapping[str, Any], text: str) -> None:
        super().__init__(members)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it."""
    where = f"messages.{index}"
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}: a message needs content, or tool_calls")
    plain = {name: value for name, value in message.model_dump().items() if value is not None}
    plain["content"] = content_text(message)
    if reasoning := plain.pop("reasoning", None):
        plain.setdefault("reasoning_content", reasoning)
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(message.tool_calls)]
    return plain


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message's call with its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} must hold a function with a name, got {shown(dict(call))}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            members = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.function.arguments are not JSON: {shown(arguments)}") from None
    else:
        members, arguments = arguments or {}, json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(members, dict):
        raise RequestError(f"{where}.function.arguments must be an object as JSON, got {shown(arguments)}")
    return {**call, "function": {**function, "arguments": Arguments(members, arguments.strip() or "{}")}}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
