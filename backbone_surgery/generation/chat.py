"""Chat: a tokenizer's template, as Hugging Face folders bring it, and prompts rendered with it.

A template is a program in Jinja that comes with somebody's model, so it runs in Jinja's sandbox,
and sees plain data alone.
"""

import functools
import json
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import read_json, reading

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
_HUB = "hf://"
_MOST = 2**26
_HOW = (
    "Pass a Jinja template as `template`, or set `lm.chat_template`; a model tuned for chat brings "
    f"one in `{TEMPLATE_FILE}` or `{CONFIG_FILE}`."
)


class ChatPrompt(str):
    """A prompt that already has its start token, if it is to have one: none is added to it.

    It is a string like any other, and stays a `ChatPrompt` where text is added to its end.
    """

    def __add__(self, other: str) -> "ChatPrompt":
        return ChatPrompt(str(self) + other)


@dataclass(frozen=True)
class Chat:
    """What a tokenizer knows of chat.

    Attributes:
        template: in Jinja; `None` if there is none.
        tokens: special tokens by the names that templates use, such as `bos_token`.
        others: further special tokens.
        ends: ids of the tokens that end a text, beside the tokenizer's own end token.
    """

    template: str | None = None
    tokens: Mapping[str, str | None] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()


_chats: weakref.WeakKeyDictionary[Any, Chat] = weakref.WeakKeyDictionary()
"""By tokenizer, so that a model edited later finds it too."""


def chat_of(preprocessor: Any) -> Chat:
    """Return what the tokenizer of a preprocessor knows of chat."""
    return Chat() if preprocessor is None else _chats.get(preprocessor.tokenizer, Chat())


def set_template(preprocessor: Any, template: Any) -> None:
    """Give a tokenizer another template, or with `None` no template."""
    if template is not None:
        _check_template(template)
    _require(preprocessor, "chat_template")
    _chats[preprocessor.tokenizer] = replace(chat_of(preprocessor), template=template)


def load_chat(preprocessor: Any, preset: str) -> None:
    """Read what comes with a tokenizer about chat, as `transformers` reads it.

    Args:
        preprocessor: whose tokenizer it is; or `None`, and nothing is read.
        preset: a folder, or a repository such as `hf://Qwen/Qwen3-0.6B`; others know nothing of
            chat.

    Raises:
        SurgeryError: a file is damaged.
    """
    if preprocessor is None:
        return
    chat, path = Chat(), _find(preset, CONFIG_FILE)
    if path is not None:
        with reading(path, "from_preset", "a tokenizer's config"):
            chat = _from_config(read_json(path, _MOST))
    path = _find(preset, TEMPLATE_FILE)
    if path is not None:
        with reading(path, "from_preset", "a template as text in UTF-8"):
            chat = replace(chat, template=path.read_bytes().decode("utf-8"))
    path = _find(preset, GENERATION_FILE)
    if path is not None:
        with reading(path, "from_preset", "how `transformers` is to generate"):
            chat = replace(chat, ends=_ends(json.loads(path.read_bytes())))
    _chats[preprocessor.tokenizer] = chat


def _find(preset: str, name: str) -> Path | None:
    if not preset.startswith(_HUB):
        path = Path(preset) / name
        return path if path.is_file() else None
    hub = import_extra("from_preset", "huggingface_hub")
    errors = import_extra("from_preset", "huggingface_hub.errors")
    repository = preset.removeprefix(_HUB)
    try:
        return Path(hub.hf_hub_download(repo_id=repository, filename=name))
    except errors.LocalEntryNotFoundError:
        if hub.try_to_load_from_cache(repository, name) is None:  # nor is it known to be missing
            warnings.warn(
                f"from_preset at '{preset}': expected '{name}', if the repository has it. The hub "
                "cannot be reached, and it is not in the cache. Chat templates and what ends a "
                "turn may be missing. Load the model once with the hub at hand.",
                stacklevel=2,
            )
        return None
    except errors.EntryNotFoundError:
        return None


def save_chat(preprocessor: Any, folder: Path) -> None:
    """Write the files that `load_chat` reads."""
    chat = chat_of(preprocessor)
    if chat.template is not None:
        (folder / TEMPLATE_FILE).write_bytes(chat.template.encode("utf-8"))
    if chat.tokens or chat.others:
        config = {**chat.tokens, "extra_special_tokens": chat.others}
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    if chat.ends:
        text = json.dumps({"eos_token_id": list(chat.ends)}, indent=2)
        (folder / GENERATION_FILE).write_text(text, encoding="utf-8")


def _ends(config: Any) -> tuple[int, ...]:
    """Return the ids of end tokens: there may be one, several or none, which -1 says too."""
    given = config.get("eos_token_id") if isinstance(config, dict) else None
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"eos_token_id is {shown(given)}")
    return tuple(i for i in ids if i >= 0)


def _from_config(config: dict[str, Any]) -> Chat:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if not isinstance(template, str | None):
        raise ValueError(f"chat_template is {shown(template)}")
    # A token is a string, or a dict that says more of it.
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict | None)
    }
    others: list[Any] = list((config.get("added_tokens_decoder") or {}).values())
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(name) or []
        others += extra.values() if isinstance(extra, dict) else extra
    texts = dict.fromkeys(t["content"] if isinstance(t, dict) else t for t in others)
    return Chat(template, tokens, tuple(texts))


def chat_prompt(
    preprocessor: Any, messages: Any, add_generation_prompt: bool, template: Any
) -> ChatPrompt:
    """See `CachedCausalLM.chat_prompt`."""
    _require(preprocessor, "chat_prompt")
    chat, tokenizer = chat_of(preprocessor), preprocessor.tokenizer
    template = chat.template if template is None else template
    if template is None:
        raise SurgeryError(
            f"chat_prompt: expected a tokenizer with a chat template. Received one without. {_HOW}"
        )
    own = {"bos_token": "start_token", "eos_token": "end_token", "pad_token": "pad_token"}
    known = {name: getattr(tokenizer, theirs, None) for name, theirs in own.items()}
    tokens = {name: str(t) for name, t in {**known, **chat.tokens}.items() if t is not None}
    messages = _read_messages(messages)
    if not _goes_over_parts(template, messages, add_generation_prompt, tokens):
        messages = [_with_parts(m, lambda p: "\n".join(x["text"] for x in p)) for m in messages]
    prompt = ChatPrompt(_render(template, messages, add_generation_prompt, tokens))
    _check_tokens(prompt, tokenizer, {*tokens.values(), *chat.others})
    return prompt


def chat_ids(prompt: ChatPrompt, tokenizer: Any) -> np.ndarray:
    """Return the token ids of a prompt, int32[length]: those of its text, and none else.

    A SentencePiece model does not read its start token in text, so that one is put by hand.
    """
    start = getattr(tokenizer, "start_token", None) or ""
    begins = bool(start) and prompt.startswith(start)
    text = str(prompt)[len(start) :] if begins else str(prompt)
    ids = np.asarray(tokenizer(text), np.int32) if text else np.zeros(0, np.int32)
    return np.append(np.int32(tokenizer.start_token_id), ids) if begins else ids


def _require(preprocessor: Any, operation: str) -> None:
    if preprocessor is None:
        raise SurgeryError(
            f"{operation}: expected a preprocessor, whose tokenizer has the template. Received a "
            "model without one. Attach a preprocessor."
        )


def compile_template(template: Any) -> Any:
    """Compile a template for Jinja's sandbox.

    Raises:
        SurgeryError: it is no string, or there is an error in it.
    """
    _check_template(template)
    sandbox = import_extra("chat_prompt", "jinja2.sandbox")
    try:
        return _compiled(sandbox.ImmutableSandboxedEnvironment, template)
    except Exception as error:  # Python's too, as where brackets are too deep
        line = getattr(error, "lineno", None)
        raise SurgeryError(
            "chat_prompt: expected a template in Jinja. Received one with an error"
            f"{'' if line is None else f' in line {line}'}: {getattr(error, 'message', error)} "
            f"{_HOW}"
        ) from error


def _check_template(template: Any) -> None:
    if not isinstance(template, str):
        raise SurgeryError(
            f"chat template: expected a string in Jinja. Received {shown(template)}. {_HOW}"
        )


def _check_tokens(prompt: ChatPrompt, tokenizer: Any, specials: set[str]) -> None:
    """Refuse a prompt of whose special tokens the tokenizer makes several."""
    ids = chat_ids(prompt, tokenizer).tolist()
    rest = str(prompt)
    for token in sorted(filter(str.strip, specials), key=len, reverse=True):
        count = rest.count(token)
        rest = rest.replace(token, "\0")  # a shorter token may be a part of it
        if count and ids.count(token_id(token, tokenizer)) < count:
            raise SurgeryError(
                f"chat_prompt: expected a tokenizer that makes one token of {token!r}, which the "
                "prompt holds as a special token. Received one that takes it for plain text. Use "
                "the tokenizer that the template was made for, or pass another `template`."
            )


def token_id(token: str, tokenizer: Any) -> int | None:
    """Return the id of a token; `None` where there is none, whatever a tokenizer says then."""
    try:
        number = int(tokenizer.token_to_id(token))
        return number if tokenizer.id_to_token(number) == token else None
    except Exception:
        return None


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as plain data, without the keys that are `None`."""
    if not isinstance(messages, list | tuple) or not messages:
        raise SurgeryError(
            "chat_prompt at 'messages': expected a list of at least one message. Received "
            f"{shown(messages)}. Pass some such as `{{'role': 'user', 'content': 'Hello'}}`."
        )
    read = []
    for i, message in enumerate(messages):
        problem = _problem(message)
        if not problem:
            try:
                message = json.loads(json.dumps(message))
            except Exception as error:
                problem = f"one that JSON cannot hold ({type(error).__name__}: {error})"
        if problem:
            raise SurgeryError(
                f"chat_prompt at 'messages[{i}]': expected a dict with a `role` and a `content` of "
                f"text. Received {problem}. Pass one such as `{{'role': 'user', 'content': "
                "'Hello'}`."
            )
        read.append({key: value for key, value in message.items() if value is not None})
    return read


def _problem(message: Any) -> str:
    """Say what is wrong with a message; an empty string where nothing is."""
    if not isinstance(message, dict):
        return shown(message)
    if not isinstance(message.get("role"), str):
        return f"{shown(message)}, whose role is {shown(message.get('role'))}"
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return ""
    parts: Any = content if isinstance(content, list | tuple) and content else [content]
    for part in parts:
        known = isinstance(part, dict) and part.get("type") == "text"
        if not known or not isinstance(part.get("text"), str):
            return f"{shown(message)}, whose content has {shown(part)}"
    return ""


def _with_parts(message: dict[str, Any], change: Callable[[list[Any]], Any]) -> dict[str, Any]:
    """Return a message with its parts changed, if its content is a list of them."""
    content = message.get("content")
    return {**message, "content": change(content)} if isinstance(content, list) else message


def _goes_over_parts(
    template: str, messages: list[dict[str, Any]], generate: bool, tokens: dict[str, str]
) -> bool:
    """Tell whether a template writes the text of every part, and not the list as Python shows it.

    It is tried with a text that no list shows as it is, and that no template finds to strip.
    """
    count = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), list))
    probe = [_with_parts(m, lambda p: [{**x, "text": "\0"} for x in p]) for m in messages]
    try:
        return not count or _render(template, probe, generate, tokens).count("\0") >= count
    except SurgeryError:
        return False


def _render(
    template: str, messages: list[dict[str, Any]], generate: bool, tokens: dict[str, str]
) -> str:
    compiled = compile_template(template)
    errors = import_extra("chat_prompt", "jinja2.exceptions")
    try:
        return str(
            compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generate,
                **tokens,
            )
        )
    except errors.SecurityError as error:
        raise SurgeryError(
            "chat_prompt: expected a template that reads its variables alone. Received one that "
            f"its sandbox stopped: {error} Do not trust it; pass another `template`."
        ) from error
    except Exception as error:  # templates raise anything, such as a TypeError
        raise SurgeryError(
            "chat_prompt: expected messages that the template can render. Received an error from "
            f"it: {type(error).__name__}, {error}. Change the messages, or pass another `template`."
        ) from error


@functools.lru_cache(maxsize=32)
def _compiled(environment_class: Any, template: str) -> Any:
    """Compile a template, with what `transformers` gives to templates."""
    environment = environment_class(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), "jinja2.ext.loopcontrols"]
    )
    # Unlike Jinja's own filter without HTML escapes.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _generation() -> Any:
    """Return the extension for `{% generation %}`, which marks what an assistant said."""
    extension = import_extra("chat_prompt", "jinja2.ext").Extension
    nodes = import_extra("chat_prompt", "jinja2.nodes")

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

    return type("Generation", (extension,), {"tags": {"generation"}, "parse": parse})


def _raise(message: str) -> None:
    raise ValueError(message)
