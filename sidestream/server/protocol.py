"""What clients may send: OpenAI's fields, and those that vLLM added. Unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

T = TypeVar("T")


def _whole_characters(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds half a surrogate pair at character {error.start}") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_whole_characters)]
Integer: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Listed: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first fault: millions of complaints would take more memory than the body."""
TokenIds: TypeAlias = Listed[Integer]
NotSupported: TypeAlias = Annotated[None, Field(description="Not supported here: must be null.")]
"""A field of OpenAI's or vLLM's that clients may send as null."""


class Strict(BaseModel):
    """No conversions: 0.01 is not an integer, "1" not a number, and a field that is not known is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Strict):
    """Which chunks of a stream carry token counts: a last one without choices, or all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Strict):
    """OpenAI's wrapping of a JSON schema."""

    name: Text
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(Strict):
    """vLLM's way to ask for a form: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    grammar: Text | None = None
    choice: Listed[Text] | None = None
    json_object: bool | None = None


class SamplingFields(Strict):
    """What both kinds of completion share; null is the default everywhere. Ranges are checked by ``SamplingParams``."""

    model: Text | None = None
    n: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Integer | None = None
    stop: Text | Listed[Text] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = None
    max_tokens: Integer | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    cache_salt: Text | None = Field(None, description="Only requests of equal salts share cached prefixes.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = Field(None, description="Accepted and not used.")

    def names(self) -> dict[str, str]:
        """What the engine calls a field, to what this body calls it, where that differs."""
        return {} if self.response_format is None else {"structured_outputs": "response_format"}


class CompletionRequest(SamplingFields):
    """Body of ``/v1/completions``."""

    prompt: Text | Listed[Text] | TokenIds | Listed[TokenIds]
    best_of: Integer | None = Field(None, description="Must equal n.")
    echo: bool | None = None
    logprobs: Integer | None = None
    suffix: NotSupported = None


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text


Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Strict):
    """One message of a conversation, or an answer as clients send it back; what is given goes to the chat template."""

    role: Role
    content: Text | Listed[TextPart] | None = None
    name: Text | None = None
    tool_calls: Listed[dict[str, Any]] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    refusal: Text | None = None
    annotations: Listed[dict[str, Any]] | None = None
    audio: NotSupported = None
    function_call: NotSupported = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, content: object) -> object:
        """Images and the like are refused by name."""
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else "text"
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"holds a part of type {kind[:40]!r}; this model reads text only")
        return content


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: Text = Field(min_length=1, max_length=256)
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """Names one of the request's functions."""

    name: Text


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(SamplingFields):
    """Body of ``/v1/chat/completions``."""

    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(None, description="Accepted and not used.")
    store: bool | None = Field(None, description="Accepted and not used.")
    service_tier: Text | None = Field(None, description="Accepted and not used.")
    safety_identifier: Text | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: Text | None = Field(None, description="Accepted and not used.")
    audio: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    include_reasoning: NotSupported = None
    modalities: NotSupported = None
    moderation: NotSupported = None
    prediction: NotSupported = None
    prompt_cache_options: NotSupported = None
    prompt_cache_retention: NotSupported = None
    reasoning_effort: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None

    def names(self) -> dict[str, str]:
        changed = {"prompt": "messages"}
        if self.max_completion_tokens is not None and self.max_tokens is None:
            changed["max_tokens"] = "max_completion_tokens"
        if self.logprobs and self.top_logprobs is not None:
            changed["logprobs"] = "top_logprobs"
        return super().names() | changed


class TokenizeRequest(Strict):
    """Body of ``/tokenize``: text, or a conversation for the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Listed[Message] | None = Field(None, min_length=1)
    tools: Listed[Tool] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
