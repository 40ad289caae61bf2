"""The command line, `backbone-surgery`: generate, steer, sweep, train-vector, inspect and plot."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

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


Vector = Annotated[
    list[str],
    typer.Option(
        "--vector",
        "-v",
        help="A control vector: the name of one that comes with the model, or a .gguf or "
        ".safetensors file. With NAME=FILE the control gets that name, else the file's.",
    ),
]
Strengths = Annotated[str, typer.Option(help="Strengths, separated by commas.")]
NewTokens = Annotated[int, typer.Option(min=0, help="New tokens of each text at most.")]
Seed = Annotated[int | None, typer.Option(help="Seed of every prompt.")]


class SamplerName(StrEnum):
    """The samplers that can be chosen by name."""

    greedy = "greedy"
    random = "random"
    top_k = "top_k"
    top_p = "top_p"
    beam = "beam"


class MethodName(StrEnum):
    """How a direction is found."""

    pca_diff = "pca_diff"
    pca_center = "pca_center"
    mean_diff = "mean_diff"
    logistic = "logistic"


Sampler = Annotated[SamplerName, typer.Option(help="How tokens are chosen.")]


@app.command()
def generate(
    prompts: Annotated[list[str], typer.Argument(help="One or more prompts, run in one batch.")],
    model: Model = "tiny_gpt2",
    max_new_tokens: NewTokens = 100,
    sampler: Sampler = SamplerName.greedy,
    seed: Seed = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show text as it comes.")] = False,
    vector: Vector = [],  # noqa: B006 - typer copies it
    control: Annotated[
        list[str],
        typer.Option("--control", "-c", help="NAME=STRENGTH for a vector, such as mood=1.5."),
    ] = [],  # noqa: B006
) -> None:
    """Generate text from prompts, steered by control vectors if any are named."""
    strengths = _attempt(_parse_controls, control)
    files = _attempt(_parse_vectors, vector)
    files.update({name: name for name in strengths if name not in files})
    lm = _load(model, files, sampler)
    options = {"max_new_tokens": max_new_tokens, "seed": seed, "controls": strengths}
    if stream:
        for prompt in prompts:
            for piece in _attempt(lm.stream, prompt, **options):
                out.print(piece, end="", markup=False)
            out.print()
        return
    for text in _attempt(lm.generate, prompts, **options):
        out.print(text, markup=False)


@app.command()
def steer(
    prompt: Annotated[str, typer.Argument(help="How the text begins.")],
    vector: Annotated[str, typer.Option("--vector", "-v", help="As of generate.")],
    strengths: Strengths = "-2,0,2",
    model: Model = "tiny_gpt2",
    max_new_tokens: NewTokens = 60,
    sampler: Sampler = SamplerName.greedy,
    seed: Seed = 0,
) -> None:
    """Show what a control vector does: one text for each strength, all in one batch."""
    import backbone_surgery as bs

    values = _attempt(_parse_strengths, strengths)
    files = _attempt(_parse_vectors, [vector])
    lm = _load(model, files, sampler)
    options = {"max_new_tokens": max_new_tokens, "seed": seed}
    found = _attempt(bs.sweep, lm, prompt, *files, values, **options)
    out.print(prompt, style="bold", markup=False)
    table = Table(show_lines=True)
    table.add_column(f"{found.control} at", justify="right")
    table.add_column("goes on")
    for row in found.rows:
        table.add_row(f"{row.strength:+g}", row.text.strip())
    Console(highlight=False).print(table)


@app.command()
def sweep(
    prompts: Annotated[list[str], typer.Argument(help="Prompts, or files with one on each line.")],
    vector: Annotated[str, typer.Option("--vector", "-v", help="As of generate.")],
    strengths: Strengths = "-3,-2,-1,0,1,2,3",
    model: Model = "tiny_gpt2",
    words: Annotated[
        str, typer.Option(help="Words, separated by commas, to count in each text.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the count, such as out.png.")
    ] = None,
    max_new_tokens: NewTokens = 60,
    sampler: Sampler = SamplerName.random,
    seed: Seed = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts at once.")] = None,
) -> None:
    """Generate from many prompts at several strengths, and count words in what comes."""
    import backbone_surgery as bs

    values = _attempt(_parse_strengths, strengths)
    files = _attempt(_parse_vectors, [vector])
    counted = [word.strip().lower() for word in words.split(",") if word.strip()]
    if plot is not None and not counted:
        _fail("sweep --plot: expected something to plot. Received no --words. Name words to count.")
    begun = _attempt(_read_prompts, prompts)
    lm = _load(model, files, sampler)
    found = _attempt(
        bs.sweep,
        lm,
        begun,
        *files,
        values,
        score={"words": lambda text: _count(text, counted)} if counted else None,
        max_new_tokens=max_new_tokens,
        seed=seed,
        batch_size=batch_size,
        verbose=1,
    )
    Console(highlight=False).print(found.table())
    if plot is not None:
        _attempt(found.plot, plot)
        out.print(f"wrote {plot}")


@app.command()
def train_vector(
    pairs: Annotated[
        Path,
        typer.Argument(
            help='JSON lines: {"positive": "...", "negative": "..."} or ["...", "..."].'
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The vector: .gguf or .safetensors.")],
    model: Model = "tiny_gpt2",
    method: Annotated[MethodName, typer.Option(help="How.")] = MethodName.pca_diff,
    token: Annotated[int, typer.Option(help="Token to measure; -1 is the last.")] = -1,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 32,
) -> None:
    """Train a control vector on contrast pairs."""
    import warnings

    import backbone_surgery as bs

    if output.suffix not in (".gguf", ".safetensors"):
        _fail(f"train-vector at '{output}': expected a name that ends in .gguf or .safetensors.")
    listed = _attempt(_read_pairs, pairs)
    lm = _load(model)
    vector = _attempt(
        bs.ControlVector.train, lm, listed, method.value, batch_size, token, verbose=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _attempt(vector.save, output)
    for warning in caught:
        err.print(f"note: {warning.message}", markup=False)
    out.print(f"wrote {output}: {len(listed)} pairs, {method.value}")


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


def _load(
    model: str,
    vectors: dict[str, str] | None = None,
    sampler: SamplerName = SamplerName.greedy,
) -> Any:
    """Load a model, steered by vectors, with Keras imported only once a command runs."""
    import backbone_surgery as bs
    from backbone_surgery.generation.presets import load_preset

    backbone, preprocessor = _attempt(load_preset, model)
    if vectors:
        steers = [
            bs.Steer(name, _load_vector(model, file), strength=0.0)
            for name, file in vectors.items()
        ]
        backbone = _attempt(bs.operate, backbone, steers)
    lm = _attempt(bs.CachedCausalLM, backbone, preprocessor)
    _attempt(lm.compile, sampler=sampler.value)
    return lm


def _load_vector(model: str, file: str) -> Any:
    import backbone_surgery as bs

    if file.endswith((".gguf", ".safetensors")):
        return _attempt(bs.ControlVector.load, file)
    return _attempt(bs.ControlVector.from_preset, model, file)


def _parse_vectors(texts: Sequence[str]) -> dict[str, str]:
    """Parse `FILE` and `NAME=FILE` into `{name: file}`."""
    found = {}
    for text in texts:
        name, equals, file = text.partition("=")
        found[name if equals else re.sub(r"\W", "_", Path(text).stem)] = file or text
    return found


def _parse_controls(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=STRENGTH` into `{name: strength}`."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(
                f"--control: expected NAME=STRENGTH, such as mood=1.5. Received {text!r}."
            ) from None
    return found


def _parse_strengths(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--strengths: expected numbers separated by commas, such as -2,0,2. Received {text!r}."
        ) from None


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    """Take prompts as they are, and the lines of those that are files."""
    found = []
    for prompt in prompts:
        is_file = prompt.endswith(".txt") and Path(prompt).is_file()
        lines = Path(prompt).read_text(encoding="utf-8").splitlines() if is_file else [prompt]
        found += [line for line in lines if line.strip()]
    return found


def _read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read contrast pairs from a file of JSON lines."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            pair = (item["positive"], item["negative"]) if isinstance(item, dict) else tuple(item)
        except (ValueError, KeyError, TypeError):
            pair = ()
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(
                f"train-vector at {path}:{number}: expected "
                '{"positive": "...", "negative": "..."} or ["...", "..."]. '
                f"Received {line[:80]!r}."
            )
        pairs.append(pair)
    return pairs


def _count(text: str, words: Sequence[str]) -> int:
    return sum(word in words for word in re.findall(r"\w+", text.lower()))


def _attempt(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function; turn bad input into a message and exit code 2."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError) as error:
        _fail(f"{type(error).__name__} {error}")


def _fail(message: str) -> NoReturn:
    err.print("[bold red]error:[/]", end=" ")
    err.print(message, markup=False)
    raise typer.Exit(2) from None
