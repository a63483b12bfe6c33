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
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
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
) -> tuple[str, list[int]]:
    """The prompt's text and token ids; the template itself writes the special tokens. Arguments as of ``_render``."""
    text = _render(tokenizer, messages, tools=tools, kwargs=kwargs)
    return text, encode_text(tokenizer, text, add_special_tokens=False)


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of text; RequestError if it cannot be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds half a surrogate pair at character {error.start}") from None
    return list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


def _render(
    tokenizer: Any | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None,
    kwargs: Mapping[str, Any] | None,
) -> str:
    """The prompt's text.

    Args:
        tools: handed to the template.
        kwargs: further variables of the template, such as ``enable_thinking``.
    Raises:
        RequestError: there is no template, or it refuses these messages.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages need a chat template, and this checkpoint has none; use /v1/completions")
    if taken := sorted(RESERVED & set(kwargs or {})):
        raise RequestError(f"chat_template_kwargs holds {taken[0]!r}, which is not the template's to change")
    listed = [_plain(message, index) for index, message in enumerate(messages)]
    functions = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
    try:
        text = tokenizer.apply_chat_template(
            listed, tools=functions, tokenize=False, add_generation_prompt=True, **dict(kwargs or {})
        )
    except TEMPLATE_ERRORS as error:
        raise RequestError(f"messages are refused by the checkpoint's chat template: {error}") from error
    if not text:
        raise RequestError("messages make an empty prompt in the checkpoint's chat template")
    return str(text)


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it; arguments of tool calls are objects there, and text in the protocol."""
    if message.content is None and not message.tool_calls:
        raise RequestError(f"messages.{index}: a message needs content, or tool_calls")
    plain = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                value = shown(function["arguments"])
                raise RequestError(f"messages.{index}: arguments of a tool call are not JSON: {value}") from None
    return plain
