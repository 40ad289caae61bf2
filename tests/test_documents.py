"""The guides: their examples run as they stand there, and what they name exists."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.opening import family
from tests.families import ROWS
from tests.helpers import relative

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted(DOCS.glob("api/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["architecture.md", "state.md"])
def test_examples_run(name, monkeypatch, capsys):
    monkeypatch.setattr(family, "_families", dict(family._families))
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    assert blocks
    exec("\n".join(blocks), {"__name__": name})
    assert "cached = uncached" in capsys.readouterr().out


def block_with(words):
    """Return the example in the guide to families that has these words."""
    text = (DOCS / "families.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (block,) = (x for x in blocks if words in x)
    return block


@pytest.mark.slow
def test_the_example_of_chat_runs(capsys):
    chat = block_with("chat_prompt")
    folder = ROOT / "tests/fixtures/hf_chat"
    code = chat.replace('"./Qwen3-0.6B"', f'"{folder}", load_weights=False')
    assert code != chat
    exec(code, {"__name__": "families", "bs": bs})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_example_of_long_texts_runs():
    code = block_with("long_factor").replace(
        "Phi-4-mini-instruct", str(ROOT / "tests/fixtures/hf_families/phi3")
    )
    names = {"__name__": "families", "bs": bs}
    exec(code, names)
    assert names["lm"].backbone.rope_scaling_short_factor == names["scaling"]["long_factor"]


@pytest.mark.slow
def test_the_example_of_serving_runs(capsys):
    text = (DOCS / "serving.md").read_text()
    engine, _ = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    exec(engine, {"__name__": "serving"})
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.slow
def test_the_worked_example_of_a_family(monkeypatch):
    """The file that the guide shows opens Qwen 3 as the package does."""
    code = block_with("def open_block")
    names = {"__name__": "families"}
    exec(code, names)
    backbone = ROWS["qwen3"].make()
    inputs = {"token_ids": np.array([[3, 1, 4, 1, 5]]), "padding_mask": np.ones((1, 5), "int32")}
    known = {name: f for name, f in family._families.items() if name != "qwen3"}
    monkeypatch.setattr(family, "_families", known)
    bs.register_family(names["FAMILY"])
    opened = bs.open_backbone(backbone)
    assert opened.family.name == "my_qwen3"
    assert relative(opened.predict_on_batch(inputs), backbone.predict_on_batch(inputs)) <= 5e-6
    assert max(bs.check(opened).errors.values()) <= 1e-5


@pytest.mark.slow
def test_the_example_of_qwen3_runs(capsys):
    """On a random model, as `transformers` saves it with its tokenizer."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"<!-- example: qwen3 -->\n```python\n(.*?)^```", text, re.M | re.S)
    folder = ROOT / "tests/fixtures/hf_qwen3"
    code = block.replace("./Qwen3-0.6B", str(folder), 1)
    assert code != block
    exec(code, {"__name__": "readme"})
    assert len(set(capsys.readouterr().out.splitlines())) >= 3


def test_every_public_name_is_on_one_api_page():
    public = {name: 1 for name in bs.__all__ if name != "__version__"}
    text = "".join(page.read_text() for page in API)
    assert Counter(re.findall(r"^::: backbone_surgery\.(\w+)$", text, re.M)) == public
    assert Counter(re.findall(r"\[`(\w+)`\]\[backbone_surgery\.\1\]", text)) == public


def exists(name):
    """Whether `backbone_surgery.a.b` is a module, or an attribute of something that exists."""
    parent, _, last = name.rpartition(".")
    if not parent or (exists(parent) and is_module(name)):
        return True
    owner = bs if parent == "backbone_surgery" else getattr(bs, parent.split(".")[1], None)
    if is_module(parent) and parent != "backbone_surgery":
        owner = importlib.import_module(parent)
    return hasattr(owner, last)


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pages
def test_names_exist(page):
    text = page.read_text()
    names = re.findall(r"\bbackbone_surgery(?:\.[A-Za-z_]\w*)+", text)
    short = re.findall(r"\bbs\.(\w+(?:\.[a-z_]\w*)?)", text)
    names += [f"backbone_surgery.{name}" for name in short]
    assert [name for name in sorted(set(names)) if not exists(name)] == []


def missing_files(text, *roots):
    """Return the files named in a text that are under none of the roots."""
    paths = re.findall(r"`([\w./-]+(?:\.(?:py|md|ipynb|toml)|/))`", text)
    paths += re.findall(r"(?<![\w./-])((?:docs|tests|scripts|notebooks)/[\w./-]*\w)", text)
    roots = (ROOT, ROOT / "backbone_surgery", *roots)
    return [p for p in sorted(set(paths)) if not any((root / p).exists() for root in roots)]


@pages
def test_files_exist(page):
    """Files of the repository, by their path from its root or from the package."""
    assert missing_files(page.read_text()) == []


def test_files_that_sources_name_exist():
    sources = [*ROOT.glob("backbone_surgery/**/*.py"), *ROOT.glob("scripts/*.py")]
    missing = {source.name: missing_files(source.read_text(), source.parent) for source in sources}
    assert {name: paths for name, paths in missing.items() if paths} == {}
