"""What a client may send: the fields of both completion routes, and nothing else."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from backbone_surgery.serving.logprobs import MOST_LIKELIEST

MOST_CHOICES = 16
MOST_STOPS = 16

Strings = Annotated[list[str], Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1)]
_Count = Annotated[int, Field(ge=0, le=MOST_LIKELIEST)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False


class Completion(_Body):
    """The fields that both routes share.

    `top_k`, `steering` and `capture` are not OpenAI's. Penalties are known, and must be 0.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    user: str | None = None
    steering: dict[str, Any] = {}
    capture: Strings | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextCompletion(Completion):
    """The body of `/v1/completions`."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    echo: bool = False
    logprobs: _Count | None = None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else list(prompt)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show; `None` for no log-probabilities."""
        return self.logprobs


class Message(_Body):
    """One message of a chat."""

    role: str
    content: str
    name: str | None = None


class ChatCompletion(Completion):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: _Count | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to show; `None` for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None
