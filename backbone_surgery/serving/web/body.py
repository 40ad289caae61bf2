"""What a client may send: the fields of both completion routes, and nothing else."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from backbone_surgery.errors import SurgeryError
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.penalties import MOST_BIASED, Penalties
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.serving.logprobs import MOST_LIKELIEST

MOST_CHOICES = 16
MOST_STOPS = 16

_Some = Field(min_length=1, fail_fast=True)  # the first wrong one of millions says enough
Strings = Annotated[list[str], _Some]
TokenIds = Annotated[list[int], _Some]
_Count = Annotated[int, Field(ge=0, le=MOST_LIKELIEST)]
_Text = Annotated[str, Field(min_length=1)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_NewTokens = Annotated[int, Field(ge=0, le=LONGEST)]


def _only(*values: Any) -> AfterValidator:
    """Return a check of a field that is OpenAI's: it may be null or what changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in values:
            expected = " or ".join([*map(json.dumps, values), "null"])
            raise PydanticCustomError(
                "unsupported",
                "expected {expected}, as nothing else of it is supported; leave it out",
                {"expected": expected},
            )
        return value

    return AfterValidator(check)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, _only(False)] = None


class JsonSchema(_Body):
    """A JSON Schema, as OpenAI's clients send it."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class Format(_Body):
    """What the answer has to be, as OpenAI has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Any:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "one", "expected `json_schema` where `type` is 'json_schema', and only there"
            )
        return self

    @property
    def wanted(self) -> ResponseFormat | None:
        """The format; `None` for any text."""
        if self.json_schema is not None:
            return ResponseFormat.json_schema(self.json_schema.schema_)
        return None if self.type == "text" else ResponseFormat.json_object()


class StructuredOutputs(_Body):
    """What the answer has to be, as vLLM has it: one of these."""

    choice: Strings | None = None
    regex: _Text | None = None
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        given = [self.choice, self.regex, self.json_, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise PydanticCustomError(
                "one", "expected one of `choice`, `regex`, `json` and `json_object`"
            )
        return self

    @property
    def wanted(self) -> ResponseFormat:
        """The format."""
        if self.choice is not None:
            return ResponseFormat.choice(self.choice)
        if self.regex is not None:
            return ResponseFormat(self.regex)
        if self.json_ is not None:
            return ResponseFormat.json_schema(self.json_)
        return ResponseFormat.json_object()


class _Asked(_Body):
    """What is sent to a route, as a whole."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        """Refuse half a surrogate pair, which no tokenizer can read and no answer can show."""
        if isinstance(data, dict):
            try:
                json.dumps(data, ensure_ascii=False).encode()
            except (UnicodeEncodeError, RecursionError) as error:
                raise PydanticCustomError(
                    "text", "expected what JSON can hold in UTF-8 ({error})", {"error": str(error)}
                ) from error
        return data


class Completion(_Asked):
    """The fields that both routes share.

    `top_k`, `repetition_penalty`, `structured_outputs`, `steering` and `capture` are not OpenAI's.
    Null is as if a field was left out.
    """

    model: str | None = None
    max_tokens: _NewTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: _Text | Annotated[list[_Text], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MOST_BIASED)] | None = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    steering: dict[str, Any] | None = None
    capture: Strings | None = None

    @field_validator("stream_options")
    @classmethod
    def _check_stream(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("alone", "expected it only with `stream`, as true")
        return value

    @property
    def choices(self) -> int:
        """How many choices each prompt gets."""
        return self.n or 1

    @property
    def penalties(self) -> Penalties:
        """What logits are changed by before a token is chosen."""
        return Penalties(
            repetition=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence=self.presence_penalty or 0.0,
            frequency=self.frequency_penalty or 0.0,
            bias={int(token): number for token, number in (self.logit_bias or {}).items()},
        )

    @property
    def wanted_format(self) -> ResponseFormat | None:
        """What the text has to be."""
        asked = [f.wanted for f in (self.response_format, self.structured_outputs) if f is not None]
        formats = [wanted for wanted in asked if wanted is not None]
        if len(formats) > 1:
            raise SurgeryError(
                "structured_outputs: expected it or `response_format`. Received both. Send one."
            )
        return formats[0] if formats else None

    @property
    def stops(self) -> list[str]:
        """The stop sequences, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def prompt_logprobs(self) -> bool:
        """Whether to answer with log-probabilities of the prompt, too."""
        return False


class TextCompletion(Completion):
    """The body of `/v1/completions`."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], _Some] | None
    echo: bool | None = None
    logprobs: _Count | None = None
    best_of: Annotated[Any, _only(1)] = None
    suffix: Annotated[Any, _only("")] = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids; null is an empty text."""
        prompt = "" if self.prompt is None else self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show; `None` for no log-probabilities."""
        return self.logprobs

    @property
    def prompt_logprobs(self) -> bool:
        """Whether to answer with log-probabilities of the prompt: where it is echoed."""
        return bool(self.echo) and self.logprobs is not None


class TextPart(_Body):
    """A part of a message."""

    type: Annotated[Any, _only("text")]
    text: str


class Message(_Body):
    """One message of a chat; also one that a client was answered with, and sends back."""

    role: str
    content: str | Annotated[list[TextPart], _Some] | None = None
    name: str | None = None
    refusal: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None
    audio: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only()] = None
    tool_calls: Annotated[Any, _only([])] = None

    @property
    def texts(self) -> list[str]:
        """What is said, part by part."""
        content = self.content or ""
        return [content] if isinstance(content, str) else [part.text for part in content]

    @property
    def plain(self) -> dict[str, Any]:
        """The message as `lm.chat_prompt` takes it; an assistant may have said nothing."""
        plain = self.model_dump(include={"role", "content", "name"}, exclude_none=True)
        return {"content": "", **plain} if self.role == "assistant" else plain


class Tokenize(_Asked):
    """The body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], _Some] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one", "expected `prompt` or `messages`, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise PydanticCustomError(
                "one",
                "expected `add_special_tokens` with `prompt` alone: a template writes its own",
            )
        if self.prompt is not None and self.add_generation_prompt:
            raise PydanticCustomError(
                "one", "expected `add_generation_prompt` with `messages` alone"
            )
        return self


class Detokenize(_Asked):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], _Some]


class ChatCompletion(Completion):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], _Some]
    max_completion_tokens: _NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: _Count | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Annotated[Any, _only("in_memory")] = None
    store: Annotated[Any, _only(False)] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    modalities: Annotated[Any, _only(["text"])] = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    verbosity: Annotated[Any, _only("medium")] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only("none")] = None
    audio: Annotated[Any, _only()] = None
    prediction: Annotated[Any, _only()] = None
    moderation: Annotated[Any, _only()] = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show; `None` for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None
