"""`inspect`, `plot` and `plan`: what a model is made of, and what it takes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from backbone_surgery.cli.console import write, write_table
from backbone_surgery.cli.loading import load
from backbone_surgery.cli.options import Mesh, Model, parse_mesh
from backbone_surgery.files import picture_path, replace_file, writing


def inspect(model: Model = "tiny_gpt2") -> None:
    """Show the sites and parameters of a model, and the size of its cache."""
    import backbone_surgery as bs
    from backbone_surgery.caching.cache import bytes_per_token
    from backbone_surgery.opening.site import block_of

    lm = load(model)
    opened = bs.open_backbone(lm.backbone)
    paths = bs.sites(opened)
    blocks = sorted({b for p in paths if (b := block_of(p)) is not None})
    roles = list(dict.fromkeys(p.split(".")[2] for p in paths if p.count(".") == 2))
    table = Table(title=Text(model, "table.title"), show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # in a narrow terminal, a name in two pieces and not cut off
    table.add_row("architecture", opened.family.name)
    table.add_row("parameters", f"{lm.backbone.count_params():,}")
    table.add_row("blocks", str(len(blocks)))
    table.add_row("cache", f"{bytes_per_token(lm.backbone_with_cache):,} bytes per token and row")
    limit = opened.max_positions
    table.add_row("positions", f"{limit:,} at most" if limit else "no fixed limit")
    outer = [p for p in paths if block_of(p) is None]
    shape = f"blocks.0 ... blocks.{blocks[-1]}"
    table.add_row("sites", "\n".join([*outer, shape, *(f"blocks.*.{r}" for r in roles)]))
    write_table(table)


def plot(
    to_file: Annotated[
        Path, typer.Argument(help="File to write: .png, .svg, .pdf or .jpg, or .mmd for Mermaid.")
    ],
    model: Model = "tiny_gpt2",
    expand: Annotated[bool, typer.Option("--expand", help="Draw the inside of blocks.")] = False,
) -> None:
    """Draw the backbone with its caches. Mermaid is text that many viewers of Markdown draw."""
    import backbone_surgery as bs

    picture_path(to_file, "plot", ".mmd")
    lm = load(model)
    if to_file.suffix.lower() == ".mmd":
        text = bs.to_mermaid(lm.backbone_with_cache, expand_nested=expand)
        with writing(to_file, "plot"):
            replace_file(to_file, lambda part: part.write_text(text + "\n", encoding="utf-8"))
    else:
        bs.plot_model(lm.backbone_with_cache, str(to_file), expand_nested=expand)
    write(f"wrote {to_file}")


def plan(
    model: Annotated[
        str, typer.Argument(help="A preset, its URL, or a folder, which needs no weights.")
    ],
    mesh: Mesh = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows that run at once.")] = 1,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each row; 2048 by default, if it has the positions."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Such as H100, h100:8, h100:2x8, L4, v5e:4x4 or v5p:2x2x4.")
    ] = "H100",
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights and the cache; by default bfloat16.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt; half of --length by default.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the programs for the device, here.")
    ] = False,
) -> None:
    """Tell what each device of a mesh would hold, and what bounds a token; nothing runs on it."""
    import backbone_surgery as bs

    sizes = None if mesh is None else parse_mesh(mesh)
    plan = bs.plan(model, sizes, batch, length, device, dtype, prompt=prompt, compile=compile)
    write(str(plan))
