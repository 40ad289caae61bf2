"""What commands write: text as it is, tables, warnings, and errors with exit code 2.

Nothing that comes from a model or a user is read as markup of rich.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from backbone_surgery.files import reading


def write(text: str, end: str = "\n") -> None:
    """Write text as it is, at once."""
    typer.echo(f"{text}{end}", nl=False)


def write_table(table: Table) -> None:
    """Write a table, with the text in it as it is."""
    Console(markup=False, emoji=False, highlight=False).print(table)


def note(text: str) -> None:
    """Write to standard error what is worth knowing."""
    typer.echo(f"note: {text}", err=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Write warnings to standard error as they are, without a line of Python."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        typer.echo(f"warning: {message}", err=True)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Have a command end with a message and exit code 2 where the input is bad."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # nobody reads on, as behind `| head`; typer ends quietly
            raise
        except (OSError, ValueError) as error:
            kind = f"{type(error).__name__} " if isinstance(error, OSError) else ""
            typer.secho("error:", fg="red", bold=True, err=True, nl=False)
            typer.echo(f" {kind}{error}", err=True)
            raise typer.Exit(2) from None

    return run


def count_files(files: Sized) -> str:
    """Say how many files there are."""
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"


def read_text(path: Path, operation: str) -> str:
    """Read a text file in UTF-8; `operation` is named in the error."""
    advice = "Check the path, or save the text as UTF-8."
    with reading(path, operation, "a text file in UTF-8", advice=advice):
        return path.read_text(encoding="utf-8-sig")  # as some editors begin a file
