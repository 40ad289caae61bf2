"""What a body may hold, read without a server: OpenAI's fields, and what is said of others."""

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import ValidationError

from backbone_surgery.serving.web.body import ChatCompletion, TextCompletion

PROMPT = {"prompt": "Once"}
CHAT = {"messages": [{"role": "user", "content": "Once"}]}


@pytest.mark.parametrize("body", [TextCompletion, ChatCompletion])
def test_null_is_as_if_left_out(body):
    required = PROMPT if body is TextCompletion else CHAT
    names = set(body.model_fields) - set(required)
    read = body.model_validate({**required, **dict.fromkeys(names)})
    assert read == body.model_validate(required)
    assert (read.choices, read.stops, read.likeliest) == (1, [], None)


def test_a_prompt_that_is_null_is_empty():
    assert TextCompletion.model_validate({"prompt": None}).prompts == [""]
    with pytest.raises(ValidationError, match="Field required"):
        TextCompletion.model_validate({})


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "metadata": {"run": "3"}, "user": "me", "safety_identifier": "me"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "service_tier": "auto"},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"},
        {"parallel_tool_calls": True},
        {"prompt_cache_key": "a", "prompt_cache_retention": "in_memory"},
        {"reasoning_effort": "none", "verbosity": "medium"},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ],
)
def test_what_changes_nothing_is_taken(fields):
    assert ChatCompletion.model_validate({**CHAT, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "auto"},
        {"audio": {"voice": "alloy", "format": "mp3"}},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        {"messages": [{"role": "assistant", "content": None, "refusal": "no"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"stream_options": {"include_obfuscation": True}},
    ],
)
def test_what_would_change_something_is_refused(fields):
    with pytest.raises(ValidationError, match="as nothing else of it is supported; leave it out"):
        ChatCompletion.model_validate({**CHAT, **fields})


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.0, "1"])
def test_seeds_are_integers_of_64_bits(seed):
    with pytest.raises(ValidationError, match="seed"):
        TextCompletion.model_validate({**PROMPT, "seed": seed})


def test_messages_as_the_template_gets_them():
    parts = [{"type": "text", "text": "Once"}, {"type": "text", "text": " upon"}]
    said = ChatCompletionMessage(role="assistant", content="a time", annotations=[])
    nothing = ChatCompletionMessage(role="assistant")
    sent = [{"role": "user", "content": parts, "name": "Ann"}]
    sent += [said.model_dump(), nothing.model_dump(), nothing.model_dump(exclude_none=True)]
    read = ChatCompletion.model_validate({"messages": sent})
    assert [message.plain for message in read.messages] == [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "a time"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "\ud800"},
        {"\ud800": 1},
        {"steering": {"\ud800": 1}},
        {"steering": {"mood": {"vector": ["\udfff"]}}},
        {"capture": ["\ud800"]},
        {"stop": "\ud800"},
    ],
)
def test_half_a_surrogate_pair_is_refused(fields):
    with pytest.raises(ValidationError, match="surrogates not allowed"):
        TextCompletion.model_validate({**PROMPT, **fields})


def test_brackets_that_json_cannot_write_are_refused():
    deep = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(ValidationError, match="recursion"):
        TextCompletion.model_validate({**PROMPT, "steering": {"mood": deep}})


def test_of_many_wrong_entries_one_is_told():
    with pytest.raises(ValidationError) as error:
        TextCompletion.model_validate({"prompt": [True] * 1000})
    assert len(error.value.errors()) < 10
