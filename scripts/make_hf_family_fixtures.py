"""Make the fixtures of `tests/opening/test_hf_families.py`: a tiny model of each family.

As `make_hf_fixtures.py`, but without tokenizers and texts, and for every family: each folder is a
random model saved by `transformers`, with the logits and greedy continuations that it gave. The
weights are rounded to float16 and saved so, which halves the files and loses nothing. This does it:

    pip install torch transformers sentencepiece protobuf typer
    python scripts/make_hf_family_fixtures.py --output tests/fixtures/hf_families

Each recipe names changes of its config that must change the logits: so the fixture would notice if
a window, a cap or a scaling were lost. Seeds are tried in turn until the weights make a strong
fixture.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
import transformers
import typer
from hf_family_recipes import RECIPES, Recipe
from make_hf_fixtures import (
    VOCABULARY_SIZE,
    Oracle,
    expect_arrays,
    load_model,
    make_model,
    weaknesses,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

LARGEST_FOLDER = 150_000
LEAST_EFFECT = 1e-4
"""How much a change named in `matters` must change some logit, relative to the largest.

Ten times what the tests allow."""
MOST_ROUNDING = 3e-6
"""How far the logits may be from those in float64, relative to the largest: some random weights
multiply rounding by thousands."""


def four_bit_experts(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return random experts of GPT-OSS in MXFP4: 32 numbers of four bits share an exponent."""
    experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    tensors = {}
    for name, outputs, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator)
        exponents = torch.randint(123, 126, shape, generator=generator)  # 2 to the -4, -3 or -2
        tensors[f"{name}_proj_blocks"] = blocks.to(torch.uint8)
        tensors[f"{name}_proj_scales"] = exponents.to(torch.uint8)
    return tensors


def save_in_four_bits(folder: Path, config: Any, seed: int) -> None:
    """Put experts in four bits in the place of the saved ones."""
    generator = torch.Generator().manual_seed(seed)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        del tensors[f"{prefix}gate_up_proj"], tensors[f"{prefix}down_proj"]
        packed = four_bit_experts(config, generator).items()
        tensors |= {f"{prefix}{name}": tensor for name, tensor in packed}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})


def change_config(folder: Path, **kwargs: Any) -> None:
    """Write other values to the saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **kwargs}, indent=2) + "\n", encoding="utf-8")


def save(recipe: Recipe, seed: int, folder: Path) -> None:
    """Save the weights of a seed, in float16."""
    shutil.rmtree(folder, ignore_errors=True)
    auto_class = AutoModelForImageTextToText if recipe.images else AutoModelForCausalLM
    model = make_model(recipe.config, seed, recipe.embedding_scale, auto_class)
    for (name, tensor), (part, scale) in itertools.product(
        model.state_dict().items(), recipe.scales.items()
    ):
        if part in name:
            tensor.mul_(scale)
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if recipe.mxfp4:
        save_in_four_bits(folder, recipe.config, seed)


def rounding(recipe: Recipe, folder: Path, arrays: dict[str, np.ndarray]) -> float:
    """Return how far the logits are from those in float64, relative to the largest."""
    # Other implementations of experts know no float64.
    model = load_model(folder, recipe.attention, experts_implementation="eager").double()
    lost = 0.0
    for ids, n, logits in zip(
        *(arrays[k] for k in ("token_ids", "lengths", "logits")), strict=True
    ):
        exact = Oracle(model).logits(ids[:n].tolist())
        lost = max(lost, float(np.abs(exact - logits[:n]).max()))
    return lost / float(np.abs(arrays["logits"]).max())


def check_effects(name: str, recipe: Recipe, folder: Path, prompt: list[int]) -> None:
    """Refuse a fixture that would not notice if something of its config were lost."""
    logits = Oracle(load_model(folder, recipe.attention)).logits(prompt)
    for change in recipe.matters:
        other = Oracle(load_model(folder, recipe.attention, **change)).logits(prompt)
        effect = np.abs(other - logits).max() / np.abs(logits).max()
        if not effect > LEAST_EFFECT:
            raise ValueError(
                f"{name}: expected {change} to change the logits by {LEAST_EFFECT} or more. "
                f"Received {effect:.1e}. Change its config."
            )


def make(name: str, recipe: Recipe, folder: Path) -> None:
    """Make one fixture in place of the one that is there, from the first seed that is strong."""
    for seed in itertools.count():
        save(recipe, seed, folder)
        oracle = Oracle(load_model(folder, recipe.attention))
        arrays = expect_arrays(seed, VOCABULARY_SIZE - 1, oracle)
        weak = list(weaknesses(oracle.margin, arrays))
        if not weak and (lost := rounding(recipe, folder, arrays)) > MOST_ROUNDING:
            weak = [(f"rounding of at most {MOST_ROUNDING:.0e}", f"{lost:.1e}")]
        if not weak:
            break
        typer.echo(f"{name}, seed {seed}: not {weak[0][0]}, but {weak[0][1]}")
    longest = arrays["token_ids"][-1].tolist() + arrays["greedy"][-1].tolist()
    check_effects(name, recipe, folder, longest)
    change_config(folder, **recipe.saved)
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LARGEST_FOLDER:
        raise ValueError(
            f"{name}: expected at most {LARGEST_FOLDER} bytes. Received {size}. Make it smaller."
        )
    typer.echo(
        f"{name}: seed {seed}, {size} bytes, best two logits at least {oracle.margin:.1e} apart"
    )


def main(
    output: Annotated[Path, typer.Option(help="Folder for the fixtures.")] = Path(
        "tests/fixtures/hf_families"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Names of fixtures; all if none.")] = None,
) -> None:
    """Make the fixtures."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in only or RECIPES:
        make(name, RECIPES[name], output / name)


if __name__ == "__main__":
    typer.run(main)
