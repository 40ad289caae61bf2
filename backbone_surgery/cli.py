"""The command line: `backbone-surgery generate`, `inspect` and `plot`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Surgery on LLM backbones, with the KV cache rewired automatically.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="tiny_gpt2, tiny_gemma, a KerasHub preset or URL, or a folder."
    ),
]


class SamplerName(StrEnum):
    """The samplers that can be chosen by name."""

    greedy = "greedy"
    random = "random"
    top_k = "top_k"
    top_p = "top_p"
    beam = "beam"


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, run in one batch.")],
    model: Model = "tiny_gpt2",
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="New tokens of each text at most.")
    ] = 100,
    sampler: Annotated[
        SamplerName, typer.Option(help="How tokens are chosen.")
    ] = SamplerName.greedy,
    seed: Annotated[int | None, typer.Option(help="Seed of every prompt.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show text as it comes.")] = False,
) -> None:
    """Generate text from prompts."""
    lm = _load(model)
    _attempt(lm.compile, sampler=sampler.value)
    options = {"max_new_tokens": max_new_tokens, "seed": seed}
    if stream:
        for prompt in prompts:
            for piece in _attempt(lm.stream, prompt, **options):
                out.print(piece, end="", markup=False)
            out.print()
        return
    for text in _attempt(lm.generate, prompts, **options):
        out.print(text, markup=False)


@app.command()
def inspect(model: Model = "tiny_gpt2") -> None:
    """Show the sites, the parameters and the size of the cache of a model."""
    import backbone_surgery as bs
    from backbone_surgery.cache import bytes_per_token

    lm = _load(model)
    opened = bs.open_backbone(lm.backbone)
    paths = bs.sites(opened)
    blocks = sorted({int(p.split(".")[1]) for p in paths if p.startswith("blocks.")})
    roles = list(dict.fromkeys(p.split(".")[2] for p in paths if p.count(".") == 2))
    table = Table(title=model, show_header=False)
    table.add_row("architecture", opened.family.name)
    table.add_row("parameters", f"{lm.backbone.count_params():,}")
    table.add_row("blocks", str(len(blocks)))
    table.add_row("cache", f"{bytes_per_token(lm.backbone_with_cache):,} bytes per token and row")
    limit = opened.family.max_positions(opened)
    table.add_row("positions", f"{limit:,} at most" if limit else "no fixed limit")
    outer = [p for p in paths if not p.startswith("blocks.")]
    shape = f"blocks.0 ... blocks.{blocks[-1]}"
    table.add_row("sites", "\n".join([*outer, shape, *(f"blocks.*.{r}" for r in roles)]))
    out.print(table)


@app.command()
def plot(
    to_file: Annotated[Path, typer.Argument(help="The picture: .png, .svg, .pdf, or .mmd.")],
    model: Model = "tiny_gpt2",
    expand: Annotated[bool, typer.Option("--expand", help="Draw the inside of blocks.")] = False,
) -> None:
    """Draw the backbone with its caches; a .mmd file gets Mermaid text, which needs no Graphviz."""
    import backbone_surgery as bs

    lm = _load(model)
    if to_file.suffix == ".mmd":
        text = bs.to_mermaid(lm.backbone_with_cache, expand_nested=expand)
        _attempt(to_file.write_text, text + "\n")
    else:
        _attempt(bs.plot_model, lm.backbone_with_cache, str(to_file), expand_nested=expand)
    out.print(f"wrote {to_file}")


def _load(model: str) -> Any:
    """Load a model, with Keras imported only once a command runs."""
    import backbone_surgery as bs

    return _attempt(bs.CachedCausalLM.from_preset, model)


def _attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function; turn bad input into a message and exit code 2."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError) as error:
        err.print(f"[bold red]error:[/] {type(error).__name__}", end=" ")
        err.print(str(error), markup=False)
        raise typer.Exit(2) from None
