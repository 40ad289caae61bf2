"""The examples of the guides run as they stand there."""

import re
from pathlib import Path

import pytest

from backbone_surgery.opening import family

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["architecture.md", "state.md"])
def test_examples_run(name, monkeypatch, capsys):
    monkeypatch.setattr(family, "_families", dict(family._families))
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.M | re.S)
    assert blocks
    exec("\n".join(blocks), {"__name__": name})
    assert "cached = uncached" in capsys.readouterr().out
