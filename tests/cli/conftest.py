"""Run a command in this process."""

import pytest
from typer.testing import CliRunner

from backbone_surgery.cli import app

PROMPT = "Once upon a time there was a girl named Lily."


@pytest.fixture
def run():
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])
