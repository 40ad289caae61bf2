"""Chat templates: rendered and tokenised as `transformers` does, kept with the model, and safe.

The expected values were made by `scripts/make_hf_chat_fixture.py`.
"""

import datetime
import json
import shutil
import sys
import warnings
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.chat import ChatPrompt, load_chat
from backbone_surgery.generation.prompts import read_prompts
from tests.helpers import make_gpt2

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = json.loads((FIXTURES / "hf_chat" / "expected.json").read_text(encoding="utf-8"))["cases"]
HELLO = [{"role": "user", "content": "The fox"}]
WEIGHTS = "model.safetensors"
CONTENT = "{{ messages[0].content }}"

# KerasHub leaves the file of a SentencePiece model to the garbage collector to close.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.*tokenizer\.model:pytest.PytestUnraisableExceptionWarning"
)


def open_folder(folder):
    return bs.CachedCausalLM.from_preset(str(folder), load_weights=(folder / WEIGHTS).is_file())


@pytest.fixture(scope="module")
def models():
    """The models of the fixture, by the names of their folders."""
    names = dict.fromkeys(case["folder"] for case in CASES)
    return {name: open_folder(FIXTURES / name) for name in names}


@pytest.fixture
def lm(models):
    """Qwen 3, and afterwards with its own template again."""
    yield models["hf_chat"]
    load_chat(models["hf_chat"].preprocessor, str(FIXTURES / "hf_chat"))


def ids(lm, prompt):
    """The token ids that `generate` starts from."""
    vocabulary = lm.opened.token_embedding.input_dim
    return read_prompts(prompt, lm.preprocessor, vocabulary, "generate").rows[0].tolist()


def load(config, tmp_path, files=()):
    """Load a folder with more in its `tokenizer_config.json`, and with these further files."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "hf_chat", folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    for name, text in dict(files).items():
        (folder / name).write_bytes(text)
    return open_folder(folder)


# Equality with `transformers`


@pytest.mark.by_default(4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["folder"])
def test_text_and_tokens_are_those_of_transformers(models, case):
    lm = models[case["folder"]]
    prompt = lm.chat_prompt(case["messages"], case["add_generation_prompt"], case["template"])
    assert prompt == case["text"]
    assert ids(lm, prompt) == case["token_ids"]
    assert ids(lm, [prompt]) == case["token_ids"]


def test_special_tokens_in_the_text_are_single_ids(models):
    lm, case = models["hf_chat"], CASES[0]
    start = lm.preprocessor.tokenizer.token_to_id("<|im_start|>")
    assert case["text"].count("<|im_start|>") == 5
    assert ids(lm, ChatPrompt(case["text"])).count(start) == 5


def test_the_template_that_transformers_saved_is_read(models):
    case = CASES[0]
    assert models["hf_chat"].chat_template == case["template"]
    assert models["hf_chat"].chat_prompt(case["messages"]) == case["text"]
    assert models["hf_gpt2"].chat_template is None


@pytest.mark.slow
def test_generation_starts_from_these_tokens(models, monkeypatch):
    """Without the start token that any other text gets, and with the text before the new one."""
    lm = models["hf_gpt2"]
    lm.compile(sampler="greedy")
    bare = lm.chat_prompt(HELLO, template=CONTENT)
    options = {"max_new_tokens": 4, "stop_token_ids": None, "strip_prompt": True}
    answers = [lm.generate(text, **options) for text in (bare, "The fox")]
    assert lm.generate([bare, "The fox"], **options) == answers
    assert "".join(lm.stream(bare, **options)) == answers[0]
    with bs.Engine(lm, rows=1, length=16) as engine:
        assert engine.submit(bare, **options).result() == answers[0]
    tokens = lm.preprocessor.tokenizer("The fox")
    monkeypatch.setattr(lm, "preprocessor", None)
    arrays = {"token_ids": np.array([tokens]), "padding_mask": np.ones((1, len(tokens)))}
    options.pop("strip_prompt")
    new = lm.generate(arrays, **options)["token_ids"][0, len(tokens) :]
    monkeypatch.undo()
    assert answers[0] == lm.preprocessor.tokenizer.detokenize(new)


def test_a_prompt_with_text_added_keeps_its_start_token_alone(models):
    lm = models["hf_gemma"]
    prompt = lm.chat_prompt(HELLO, template="{{ bos_token }}" + CONTENT) + " ran"
    assert prompt == "<bos>The fox ran"
    assert ids(lm, prompt) == ids(lm, "The fox ran")


def test_the_time_is_told(lm):
    year = lm.chat_prompt(HELLO, template="{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.datetime.now().year) <= 1


# Where the template is kept


def test_a_template_in_the_config(tmp_path):
    lm = load({"chat_template": CONTENT + "{{ eos_token }}"}, tmp_path)
    assert lm.chat_template == CONTENT + "{{ eos_token }}"
    assert lm.chat_prompt(HELLO) == "The fox<|im_end|>"


def test_of_several_templates_the_default_is_taken(tmp_path):
    listed = [{"name": n, "template": n + CONTENT} for n in ("tool_use", "default")]
    assert load({"chat_template": listed}, tmp_path).chat_template == "default" + CONTENT


@pytest.mark.slow
def test_the_file_wins_and_a_saved_model_keeps_it(tmp_path):
    """Also by way of an edit, and with tokens that only the config names."""
    template = "é{{ cls_token }}{{ sep_token is defined }}" + CONTENT
    config = {"chat_template": "x", "cls_token": {"content": "<c>"}, "sep_token": None}
    lm = load(config, tmp_path, {"chat_template.jinja": template.encode()})
    assert lm.chat_template == template
    edited = bs.operate(lm.backbone, [bs.Steer("mood", {1: np.ones(32)})])
    steered = bs.CachedCausalLM(edited, lm.preprocessor)
    for _ in range(2):
        steered.save_to_preset(tmp_path / "p")
    assert (tmp_path / "p" / "chat_template.jinja").read_bytes() == template.encode()
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "p"))
    assert loaded.chat_template == template
    with pytest.raises(bs.SurgeryError, match="makes one token of '<c>'"):
        loaded.chat_prompt(HELLO)
    wanted = "é<|im_end|>The fox"
    assert loaded.chat_prompt(HELLO, template="é{{ eos_token }}" + CONTENT) == wanted


def test_a_template_in_a_repository(lm, monkeypatch):
    """As KerasHub loads one; the second file is not there."""

    def download(repo_id, filename):
        assert repo_id == "some/model"
        if filename != "chat_template.jinja":
            raise huggingface_hub.errors.EntryNotFoundError("none")
        return FIXTURES / "hf_chat" / filename

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    lm.chat_template = None
    load_chat(lm.preprocessor, "hf://some/model")
    assert lm.chat_prompt(CASES[0]["messages"]) == CASES[0]["text"]


@pytest.mark.parametrize("known_to_be_missing", [False, True])
def test_a_repository_that_cannot_be_asked(lm, monkeypatch, known_to_be_missing):
    """Its weights are in the cache, and the hub is out of reach."""

    def download(repo_id, filename):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    found = object() if known_to_be_missing else None
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: found)
    lm.chat_template = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        load_chat(lm.preprocessor, "hf://some/model")
    told = [str(w.message) for w in warned if "The hub cannot be reached" in str(w.message)]
    assert len(told) == (0 if known_to_be_missing else 3)
    assert all(message.startswith("from_preset at 'hf://some/model'") for message in told)


def test_a_template_can_be_set_and_taken_away(lm):
    lm.chat_template = CONTENT
    assert lm.chat_prompt(HELLO) == "The fox"
    assert lm.chat_prompt(HELLO, template="!" + CONTENT) == "!The fox"
    lm.chat_template = None
    with pytest.raises(bs.SurgeryError, match=r"Received one without\. Pass a Jinja template as"):
        lm.chat_prompt(HELLO)
    with pytest.raises(bs.SurgeryError, match=r"expected a string in Jinja\. Received 3"):
        lm.chat_template = 3


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"chat_template": 3}, {}, "expected a tokenizer's config.*chat_template is 3"),
        ({}, {"tokenizer_config.json": b"{"}, "expected a tokenizer's config"),
        ({}, {"chat_template.jinja": b"\xff"}, "expected a template as text in UTF-8"),
    ],
)
def test_damaged_files(config, files, words, tmp_path):
    with pytest.raises(bs.SurgeryError, match=words):
        load(config, tmp_path, files)


def test_a_model_without_a_preprocessor():
    lm = bs.CachedCausalLM(make_gpt2())
    assert lm.chat_template is None
    for use in (lambda: lm.chat_prompt(HELLO), lambda: setattr(lm, "chat_template", CONTENT)):
        with pytest.raises(bs.SurgeryError, match="expected a preprocessor, whose tokenizer"):
            use()


def test_without_jinja(lm, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(bs.SurgeryError, match=r"expected the package jinja2.*pip install jinja2"):
        lm.chat_prompt(HELLO, template=CONTENT)


# What is refused


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("The fox", "a list of at least one message. Received 'The fox'"),
        ([], "a list of at least one message"),
        (HELLO[0], "a list of at least one message"),
        (["The fox"], r"messages\[0\].*Received 'The fox'"),
        ([*HELLO, {"content": "x"}], r"messages\[1\].*whose role is None"),
        ([{"role": 3, "content": "x"}], "whose role is 3"),
        ([{"role": "user"}], "whose content has None"),
        ([{"role": "user", "content": []}], r"whose content has \[\]"),
        ([{"role": "user", "content": 3}], "whose content has 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], "whose content has {'type': 'image'"),
        ([{"role": "user", "content": "x", "more": {1}}], "one that JSON cannot hold"),
    ],
)
def test_bad_messages(lm, messages, words):
    with pytest.raises(bs.SurgeryError, match=rf"chat_prompt at '.*{words}"):
        lm.chat_prompt(messages, template=CONTENT)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% for p in m.content %}{{ p.text | trim }}{% endfor %}", "The fox.ran"),
        ("{{ m.content }}", "The fox.\n ran"),
        ("{{ '[' + m['content'] + ']' }}", "[The fox.\n ran]"),
        ("{{ '[' ~ m.content | trim ~ ']' }}", "[The fox.\n ran]"),
        ("{{ m.content.strip() }}", "The fox.\n ran"),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "The fox.\n ran"),
        ("{{ m.content if m.content is string else m.content[0].text }}", "The fox.\n ran"),
        ("{{ m.content | tojson }}", '"The fox.\\n ran"'),
    ],
)
def test_parts_are_joined_for_a_template_that_does_not_go_over_them(lm, template, wanted):
    parts = [{"type": "text", "text": text} for text in ("The fox.", " ran")]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "x"}]
    assert lm.chat_prompt(messages, template="{% set m = messages[0] %}" + template) == wanted


def test_a_call_of_tools_needs_no_content(lm):
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = "{{ messages[0].tool_calls[0].name }}{{ 'content' in messages[0] }}"
    assert lm.chat_prompt([message], template=template) == "fFalse"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "an error in line 1: Expected an expression"),
        ("\n{% nothing %}", "an error in line 2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate. Change the"),
        ("{{ nothing.at_all }}", "UndefinedError, 'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "its sandbox stopped: access to attribute '__class__'"),
        ("{{ raise_exception.__globals__['json'] }}", "its sandbox stopped"),
        ("{{ messages.append(1) }}", "its sandbox stopped"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "its sandbox stopped"),
        (3, "expected a string in Jinja. Received 3"),
    ],
)
def test_bad_templates(lm, template, words):
    with pytest.raises(bs.SurgeryError, match=words):
        lm.chat_prompt(HELLO, template=template)


def test_a_special_token_that_the_tokenizer_takes_for_text(models):
    """SentencePiece reads no special token in text, so one after the start is refused."""
    words = "one token of '<eos>', which .*Received one that takes it for plain text"
    with pytest.raises(bs.SurgeryError, match=words):
        models["hf_gemma"].chat_prompt(HELLO, template=CONTENT + "{{ eos_token }}")


def test_a_prompt_without_tokens(lm):
    with pytest.raises(bs.SurgeryError, match="expected at least one token to start from"):
        lm.generate(lm.chat_prompt(HELLO, template=""))


@pytest.mark.slow
def test_a_folder_says_which_tokens_end_a_text(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    lm.save_to_preset(tmp_path / "first")
    prompt = "Once upon a time"
    tokens = lm.preprocessor.tokenizer(lm.generate(prompt, max_new_tokens=12, strip_prompt=True))
    end = int(tokens[5])
    assert end not in tokens[:5]
    file = tmp_path / "first" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [end, 10**9], "temperature": float("nan")}))
    bs.CachedCausalLM.from_preset(str(tmp_path / "first")).save_to_preset(tmp_path / "second")
    lm = bs.CachedCausalLM.from_preset(str(tmp_path / "second"))
    lm.compile(sampler="greedy")
    text = lm.generate(prompt, max_new_tokens=12, strip_prompt=True)
    assert list(lm.preprocessor.tokenizer(text)) == list(tokens[:6])
    file.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(bs.SurgeryError, match=r"generation_config.json': expected how .*'</s>'"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "first"))
