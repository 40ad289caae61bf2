"""`serve`: an OpenAI-compatible server, with steering by vectors or a recipe."""

from pathlib import Path
from typing import Annotated

import typer

from backbone_surgery.cli.console import note, read_text
from backbone_surgery.cli.loading import load, load_vectors
from backbone_surgery.cli.options import (
    Adapters,
    Mesh,
    Model,
    Sampler,
    SamplerName,
    Vectors,
    parse_adapters,
    parse_controls,
    parse_vectors,
)
from backbone_surgery.errors import SurgeryError


def serve(
    model: Model = "tiny_gpt2",
    vector: Vectors = [],  # noqa: B006 - typer copies it
    adapter: Adapters = [],  # noqa: B006
    control: Annotated[
        list[str],
        typer.Option(
            "--control",
            "-c",
            help="NAME=STRENGTH, such as mood=1.5, for requests that say none. Of a control that "
            "is not there otherwise, the vector NAME that comes with the model is loaded.",
        ),
    ] = [],  # noqa: B006
    recipe: Annotated[
        Path | None, typer.Option(help="The folder of an edit, as `save_recipe` writes it.")
    ] = None,
    capture: Annotated[
        list[str],
        typer.Option(help="Sites whose activations clients may ask for, such as 'blocks.*'."),
    ] = [],  # noqa: B006
    rows: Annotated[int, typer.Option(min=1, help="How many requests run at once.")] = 16,
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of a request at most, prompt and new ones.")
    ] = 2048,
    sampler: Sampler = SamplerName.greedy,
    mesh: Mesh = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="BACKBONE_SURGERY_API_KEY", help="What every request but /health has to bring."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja template, instead of the tokenizer's.")
    ] = None,
) -> None:
    """Serve a model with OpenAI's routes; each request is steered by itself."""
    import backbone_surgery as bs
    from backbone_surgery.serving.serve import check_server

    if sampler is SamplerName.beam:
        raise SurgeryError(
            "serve --sampler: expected greedy, random, top_k or top_p. Received beam, which a "
            "server cannot run. Choose another."
        )
    files, adapters = parse_vectors(vector), parse_adapters(adapter)
    controls = parse_controls(control)
    template = None if chat_template is None else read_text(chat_template, "serve")
    check_server(host, port, api_key)
    lm = load(model, files, sampler, recipe, capture, mesh, controls, adapters)
    note("compiling the programs that requests will need")
    bs.serve(
        lm,
        host,
        port,
        load_vectors(model, files),
        api_key,
        name=Path(model).name,
        chat_template=template,
        controls=controls,
        rows=rows,
        length=length,
    )
