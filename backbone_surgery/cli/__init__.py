"""The command line, `backbone-surgery`."""

import typer

from backbone_surgery.cli.console import plain_errors, plain_warnings
from backbone_surgery.cli.datasets import batch, harvest
from backbone_surgery.cli.generating import generate
from backbone_surgery.cli.interrupt import INTERRUPTED, end_at_once, end_when_interrupted
from backbone_surgery.cli.serving import serve
from backbone_surgery.cli.showing import inspect, plan, plot
from backbone_surgery.cli.steering import steer, sweep
from backbone_surgery.cli.training import train_vector

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
    """Run a command. One that is interrupted ends at once."""
    end_when_interrupted()
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            end_at_once()
        raise
