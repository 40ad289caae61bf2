"""The command line, `backbone-surgery`."""

import os
import sys

import typer

from backbone_surgery.cli.console import plain_errors, plain_warnings
from backbone_surgery.cli.datasets import batch, harvest
from backbone_surgery.cli.generating import generate
from backbone_surgery.cli.serving import serve
from backbone_surgery.cli.showing import inspect, plan, plot
from backbone_surgery.cli.steering import steer, sweep
from backbone_surgery.cli.training import train_vector

_INTERRUPTED = 130
"""The exit status of what is interrupted, in a shell's count."""

app = typer.Typer(
    help="Surgery on LLM backbones, with the KV cache rewired automatically.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _prepare(context: typer.Context) -> None:
    context.with_resource(plain_warnings())


for command in (generate, steer, sweep, batch, harvest, train_vector, inspect, plot, plan, serve):
    app.command()(plain_errors(command))


def main() -> None:
    """Run a command. One that is interrupted ends at once.

    A compiled program may still run on other threads, and would read what Python has freed.
    """
    try:
        app()
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_INTERRUPTED)
        raise
