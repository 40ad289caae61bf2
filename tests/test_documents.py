"""The guides: what they name exists."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import backbone_surgery as bs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = sorted(DOCS.glob("api/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


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
