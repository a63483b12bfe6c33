"""Tools of one request together: bounded over all functions, and looked at where they hold up nobody's prompt."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sidestream.core.structured_outputs import MAX_TAG_CHARACTERS
from sidestream.errors import RequestError
from sidestream.server.call_forms import FORMS
from sidestream.server.protocol import ChatRequest
from sidestream.server.tool_choice import ToolChoice
from sidestream.server.tool_schemas import MAX_MEMBERS, MAX_SCHEMAS, Totals
from tests.server.in_process import call, error_of, make

CHAT: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
NAMES = sorted(FORMS)


def of_arguments(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


def functions(count: int, parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(count)]


def body(tools: list[Any], **fields: Any) -> dict[str, Any]:
    return {"messages": CHAT, "tools": tools, "tool_choice": "required", **fields}


def form_of(parser: str, count: int, parameters: dict[str, Any]) -> Any:
    return ToolChoice(ChatRequest.model_validate(body(functions(count, parameters))), parser).form(None)


SCHEMAS = of_arguments() | {"$defs": {f"d{i}": {} for i in range(99)}}
ALTERNATIVES = of_arguments(a={"enum": list(range(1000))})
LONG = of_arguments() | {"$defs": {"d": {"description": "x" * (MAX_TAG_CHARACTERS // 8 - 100)}}}
SPREAD = of_arguments(**{f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/t"}} for i in range(40)})
SPREAD |= {"$defs": {"t": {"type": "null", "description": "x" * 4000}}}
FITTING = MAX_SCHEMAS // 100


@pytest.mark.parametrize("parser", NAMES)
@pytest.mark.parametrize(
    ("parameters", "fitting", "says"),
    [
        (SCHEMAS, FITTING, f"function 'f{FITTING}', whose parameters bring the request to more than 10000 schemas"),
        (ALTERNATIVES, 10, "function 'f10', whose parameters bring the request to more than 10000 alternatives"),
        (LONG, 8, r"function 'f8', whose parameters bring the schemas of the request to \d{7} characters"),
    ],
)
def test_functions_are_bounded_together(parser: str, parameters: dict[str, Any], fitting: int, says: str) -> None:
    """Not each alone: a hundred near a limit would take a hundred times as long."""
    form_of(parser, fitting, parameters)
    limit = "the limit of all functions together is (10000|1048576); send fewer functions, or simpler ones$"
    with pytest.raises(RequestError, match=f"^tools holds the {says}.*, {limit}"):
        form_of(parser, fitting + 1, parameters)


@pytest.mark.parametrize("parser", ["glm", "deepseek_v32"])
def test_forms_are_bounded_together(parser: str) -> None:
    """Each argument's form holds the definitions that it refers to."""
    form_of(parser, 3, SPREAD)
    with pytest.raises(RequestError, match=r"^tools holds arguments of a form of more than 1048576 characters"):
        form_of(parser, 6, SPREAD)


@pytest.mark.parametrize("parser", NAMES)
def test_schemas_of_many_keywords_are_refused(parser: str) -> None:
    """They would be copied wherever something refers to them."""
    wide = {f"x{i}": 1 for i in range(MAX_MEMBERS - 1)} | {"type": "null"}
    FORMS[parser].call("f", of_arguments(a=wide), Totals())
    with pytest.raises(RequestError, match="hold a schema of 257 keywords, the limit is 256"):
        FORMS[parser].call("f", of_arguments(a=wide | {"title": "a"}), Totals())


def test_only_what_is_held_to_counts() -> None:
    tools = functions(FITTING, SCHEMAS)
    tools += functions(1, of_arguments())
    tools[-1]["function"] |= {"name": "strict", "strict": True}
    for choice in ("auto", {"type": "function", "function": {"name": "strict"}}):
        ToolChoice(ChatRequest.model_validate(body(tools, tool_choice=choice)), "glm").form(None)


def test_a_form_is_made_once_and_neither_by_the_loop_nor_where_prompts_are_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in's loop tokenises too."""
    app, _, engine = make(answer_parser="glm")
    made: list[int] = []
    loops: list[int] = []
    inner, tokenizing = ToolChoice._make, engine.tokenizing

    def make_form(self: ToolChoice, *rest: Any) -> Any:
        made.append(threading.get_ident())
        return inner(self, *rest)

    async def watched(work: Any) -> Any:
        loops.append(threading.get_ident())
        return await tokenizing(work)

    async def nothing_comes(batch: Any) -> Any:
        raise RequestError("user is the end of this test")
        yield []

    monkeypatch.setattr(ToolChoice, "_make", make_form)
    monkeypatch.setattr(engine, "tokenizing", watched)
    monkeypatch.setattr(engine, "script", nothing_comes)
    answer = call(app, "POST", "/v1/chat/completions", json=body(functions(1, SCHEMAS)))
    assert "the end of this test" in error_of(answer)["message"]
    assert len(made) == 1
    assert loops
    assert made[0] not in loops


def test_too_large_tools_are_the_request_s_fault() -> None:
    app, _, _ = make(answer_parser="glm")
    answer = call(app, "POST", "/v1/chat/completions", json=body(functions(FITTING + 1, SCHEMAS)))
    error = error_of(answer)
    assert error["param"] == "tools"
    assert "more than 10000 schemas" in error["message"]
