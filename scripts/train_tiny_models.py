"""Make the two bundled tiny models from nothing: data, tokenizers, weights, cards and checksums.

Both models learn the stories of `story_grammar` and are saved as KerasHub presets. Every seed is
fixed, every story is new to the model (one pass, no repeats), and each figure in the cards is
measured by this script. Run it as

    KERAS_BACKEND=jax python scripts/train_tiny_models.py --output models
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any

import jax
import keras
import keras_hub
import numpy as np
import typer
from model_card import measure, write_card
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from story_grammar import ATTRIBUTES, classify, generate_story
from tiny_models import RECIPES, SEQUENCE_LENGTH, TRAIN_SEED, Recipe, build_model, write_stories

HELD_OUT_SEED, SAMPLE_SEED = 2, 4
HELD_OUT_STORIES = 512
SAMPLES = 256
EXAMPLE_PROMPT = "Once upon a time there was a girl named Lily."

console = Console()


def _tokenize(model: keras_hub.models.CausalLM, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Turn stories into rows of start token, story, end token and padding."""
    preprocessor = model.preprocessor
    start, end = preprocessor.tokenizer.start_token_id, preprocessor.tokenizer.end_token_id
    rows = [[start, *map(int, ids), end] for ids in preprocessor.tokenizer(texts)]
    width = max(map(len, rows))
    tokens = np.full((len(rows), width), preprocessor.tokenizer.pad_token_id, "int32")
    mask = np.zeros((len(rows), width), "bool")
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, : len(row)] = True
    return tokens, mask


def _make_loss(model: keras_hub.models.CausalLM) -> Callable[..., Any]:
    """Return the mean cross-entropy in nats per token as a pure function of the weights."""

    def loss_fn(trainable: list, frozen: list, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        inputs = {"token_ids": tokens[:, :-1], "padding_mask": mask[:, :-1]}
        logits, _ = model.stateless_call(trainable, frozen, inputs, training=True)
        log_probs = jax.nn.log_softmax(logits.astype("float32"))
        picked = jax.numpy.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        return -(picked * mask[:, 1:]).sum() / mask[:, 1:].sum()

    return loss_fn


def _train(name: str, model: keras_hub.models.CausalLM) -> None:
    """Train a model on fresh stories, showing the loss."""
    recipe = RECIPES[name]
    total = sum(recipe.cycles)
    stories = enumerate(_batches(model, recipe.batch_size, total))
    with _progress_bar(name) as (bar, task):
        bar.update(task, total=total)

        def show(step: int, loss: jax.Array) -> None:
            bar.update(task, completed=step + 1)
            if step % 10 == 0:
                bar.update(task, loss=float(loss))
            if not console.is_terminal and step % 100 == 0:
                console.print(f"{name} step {step} loss {float(loss):.4f}")

        for steps in recipe.cycles:
            _train_cycle(recipe, model, itertools.islice(stories, steps), steps, show)


def _train_cycle(
    recipe: Recipe,
    model: keras_hub.models.CausalLM,
    stories: Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]],
    steps: int,
    show: Callable[[int, jax.Array], None],
) -> None:
    """Train through one warmup and cosine decay, with a new optimizer."""
    optimizer = _make_optimizer(recipe, steps)
    optimizer.build(model.trainable_variables)
    gradient_fn = jax.value_and_grad(_make_loss(model))

    @jax.jit
    def step_fn(state: tuple, frozen: list, tokens: jax.Array, mask: jax.Array) -> tuple:
        trainable, slots = state
        loss, gradients = gradient_fn(trainable, frozen, tokens, mask)
        return optimizer.stateless_apply(slots, gradients, trainable), loss

    state = (
        [variable.value for variable in model.trainable_variables],
        [variable.value for variable in optimizer.variables],
    )
    frozen = [variable.value for variable in model.non_trainable_variables]
    for step, (tokens, mask) in stories:
        state, loss = step_fn(state, frozen, tokens, mask)
        show(step, loss)
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)


def _make_optimizer(recipe: Recipe, steps: int) -> keras.optimizers.Optimizer:
    """Return AdamW with the warmup and cosine decay of a recipe."""
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        decay_steps=steps - recipe.warmup_steps,
        alpha=0.01,
        warmup_target=recipe.peak_learning_rate,
        warmup_steps=recipe.warmup_steps,
    )
    return keras.optimizers.AdamW(
        schedule,
        weight_decay=recipe.weight_decay,
        beta_2=0.98,
        global_clipnorm=recipe.gradient_norm,
    )


@contextmanager
def _progress_bar(name: str) -> Iterator[tuple[Progress, Any]]:
    """Show a progress bar with a loss column."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task(name, total=None, loss=math.nan)


def _batches(
    model: keras_hub.models.CausalLM, batch_size: int, steps: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows of training stories, every story once, all batches of one width."""
    held_out = frozenset(write_stories(HELD_OUT_SEED, HELD_OUT_STORIES))
    tokens, mask = _tokenize(model, write_stories(TRAIN_SEED, batch_size * steps, held_out))
    for start in range(0, batch_size * steps, batch_size):
        yield tokens[start : start + batch_size], mask[start : start + batch_size]


def _held_out_loss(model: keras_hub.models.CausalLM) -> float:
    """Measure the mean cross-entropy on stories the model has not seen."""
    loss_fn = jax.jit(_make_loss(model))
    weights = [variable.value for variable in model.trainable_variables]
    frozen = [variable.value for variable in model.non_trainable_variables]
    tokens, mask = _tokenize(model, write_stories(HELD_OUT_SEED, HELD_OUT_STORIES))
    losses, counts = [], []
    for start in range(0, HELD_OUT_STORIES, 64):
        part = slice(start, start + 64)
        losses.append(float(loss_fn(weights, frozen, tokens[part], mask[part])))
        counts.append(int(mask[part, 1:].sum()))
    return float(np.average(losses, weights=counts))


def _sample_stories(model: keras_hub.models.CausalLM) -> list[str]:
    """Sample stories at temperature 1 from neutral openings."""
    rng = Random(SAMPLE_SEED)
    prompts = [generate_story(rng).prompt for _ in range(SAMPLES)]
    model.compile(sampler=keras_hub.samplers.RandomSampler(seed=SAMPLE_SEED))
    return list(model.generate(prompts, max_length=SEQUENCE_LENGTH))


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS for every other file of a folder, as `sha256sum -c` reads it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in files
        if path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def _pick_samples(model: keras_hub.models.CausalLM, texts: list[str]) -> dict[str, str]:
    """Pick example stories: the first sampled one of each mood, and a greedy one."""
    samples = {}
    for mood in ATTRIBUTES["mood"]:
        text = next((text for text in texts if classify(text, "mood") == mood), None)
        if text is not None:
            samples[f"Sampled at temperature 1, {mood}"] = text.strip()
    model.compile(sampler="greedy")
    samples["Greedy"] = model.generate(EXAMPLE_PROMPT, max_length=SEQUENCE_LENGTH).strip()
    return samples


def make_model(name: str, folder: Path) -> None:
    """Train one model, measure it and save it with its card and checksums.

    Args:
        name: one of `RECIPES`.
        folder: where to write the preset; what is there is replaced.
    """
    # Core time, because time on the clock depends on what else the machine does.
    start = time.process_time()
    model = build_model(name)
    _train(name, model)
    core_minutes = (time.process_time() - start) / 60
    _save(name, model, folder, core_minutes)


def _save(name: str, model: keras_hub.models.CausalLM, folder: Path, core_minutes: float) -> None:
    """Measure a trained model and save it with its card and checksums."""
    if folder.exists():
        shutil.rmtree(folder)
    model.save_to_preset(str(folder))
    texts = _sample_stories(model)
    facts = {
        "parameters": model.count_params(),
        "vocabulary": model.preprocessor.tokenizer.vocabulary_size(),
        "core-minutes": core_minutes,
        "loss": _held_out_loss(model),
        "quality": measure(texts),
        "held-out": HELD_OUT_STORIES,
        "samples": SAMPLES,
    }
    samples = _pick_samples(model, texts)
    write_card(folder, dataclasses.asdict(RECIPES[name]), facts, samples)
    write_checksums(folder)
    console.print_json(data=facts)
    for caption, text in samples.items():
        console.print(f"[bold]{caption}[/bold]\n{text}\n")


def main(
    only: Annotated[
        str | None, typer.Option(help=f"Make one model: {' or '.join(RECIPES)}.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to write the presets to.")] = Path("models"),
) -> None:
    """Make the bundled tiny models from nothing."""
    if only is not None and only not in RECIPES:
        raise typer.BadParameter(
            f"expected one of {sorted(RECIPES)}. Received {only!r}. Leave it out to make all."
        )
    if keras.backend.backend() != "jax":
        raise typer.BadParameter(
            f"expected the JAX backend. Received {keras.backend.backend()!r}. "
            "Set KERAS_BACKEND=jax in the environment."
        )
    for name in [only] if only else RECIPES:
        make_model(name, output / name)


if __name__ == "__main__":
    typer.run(main)
