"""Make the two bundled tiny models from nothing: data, tokenizers, weights, cards and checksums.

Both models learn the stories of `story_grammar` and are saved as KerasHub presets. Every seed is
fixed, every story is new to the model (one pass, no repeats), and each figure in the cards is
measured by this script. Run it as

    KERAS_BACKEND=jax python scripts/train_tiny_models.py --output models
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import jax
import keras
import keras_hub
import numpy as np
import sentencepiece
import typer
from model_card import measure, write_card
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from story_grammar import ATTRIBUTES, classify, generate_story
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 1024
SEQUENCE_LENGTH = 256
TOKENIZER_STORIES = 4000
TRAIN_SEED, HELD_OUT_SEED, WEIGHT_SEED, SAMPLE_SEED = 1, 2, 3, 4
HELD_OUT_STORIES = 512
SAMPLES = 256
END = "<|endoftext|>"
EXAMPLE_PROMPT = "Once upon a time there was a girl named Lily."

console = Console()


@dataclass(frozen=True)
class Recipe:
    """How one model is made.

    Attributes:
        architecture: name of the KerasHub backbone, for the card.
        config: keyword arguments of the backbone, without the vocabulary size.
        gaps: what the model was seen to be bad at, for the card.
        cycles: optimizer steps of each cycle of warmup and decay. Each has a new optimizer; the
            return to a high rate gets small models out of having learned everything but one fact.
        batch_size: stories a step.
        peak_learning_rate: of the warmup and cosine decay schedule.
    """

    architecture: str
    config: dict[str, Any]
    gaps: str
    cycles: tuple[int, ...]
    batch_size: int = 16
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.05
    gradient_norm: float = 1.0


RECIPES = {
    "tiny_gpt2": Recipe(
        architecture="GPT2",
        config={
            "num_layers": 6,
            "num_heads": 4,
            "hidden_dim": 128,
            "intermediate_dim": 512,
            "dropout": 0.0,
            "max_sequence_length": SEQUENCE_LENGTH,
        },
        gaps=(
            "It keeps names,\nits own objects, the mood and the number of characters well, but "
            "mostly forgets the friend's\nobject, and often the time of day."
        ),
        cycles=(2000, 800),
    ),
    "tiny_gemma": Recipe(
        architecture="Gemma",
        config={
            "num_layers": 6,
            "num_query_heads": 4,
            "num_key_value_heads": 2,
            "hidden_dim": 128,
            "head_dim": 32,
            # Half of it is the gate.
            "intermediate_dim": 512,
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "attention_logit_soft_cap": 50.0,
            "final_logit_soft_cap": 30.0,
            "use_sliding_window_attention": True,
            "sliding_window_size": 64,
            "dropout": 0.0,
        },
        gaps=(
            "It keeps names,\nobjects, the mood and the number of characters well, but mostly "
            "forgets the room that the story\nbegan in."
        ),
        # The second cycle is what makes it remember the time of day.
        cycles=(1300, 1300),
    ),
}


def write_stories(seed: int, count: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Write `count` different stories, none of them in `without`.

    Args:
        seed: of the generator.
        count: how many.
        without: stories to leave out, so that held-out stories stay unseen.

    Returns:
        The texts.
    """
    rng = Random(seed)
    stories: dict[str, None] = {}
    while len(stories) < count:
        text = generate_story(rng).text
        if text not in without:
            stories[text] = None
    return list(stories)


def _train_byte_pairs(texts: list[str]) -> keras_hub.tokenizers.GPT2Tokenizer:
    """Train a byte-level byte-pair tokenizer whose end token is also its start token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    # Last, as in GPT-2: KerasHub's GPT-2 pads with token 0, and if that were the end token too,
    # generation would take the padding after a prompt for the end of the story.
    vocabulary = {**model["vocab"], END: len(model["vocab"])}
    return keras_hub.tokenizers.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)


def _train_sentence_pieces(texts: list[str]) -> keras_hub.tokenizers.GemmaTokenizer:
    """Train a SentencePiece tokenizer with Gemma's special tokens and byte fallback."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=proto,
        model_type="bpe",
        vocab_size=VOCABULARY_SIZE,
        byte_fallback=True,
        # As in Gemma: text in, the same text out, whatever its spaces.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        num_threads=1,
        minloglevel=2,
    )
    return keras_hub.models.GemmaTokenizer(proto=proto.getvalue())


def build_model(name: str) -> keras_hub.models.CausalLM:
    """Train the tokenizer of a recipe and build its untrained model.

    Args:
        name: one of `RECIPES`.

    Returns:
        The causal language model, with its preprocessor.
    """
    recipe = RECIPES[name]
    texts = write_stories(TRAIN_SEED, TOKENIZER_STORIES)
    is_gpt2 = recipe.architecture == "GPT2"
    tokenizer = _train_byte_pairs(texts) if is_gpt2 else _train_sentence_pieces(texts)
    keras.utils.set_random_seed(WEIGHT_SEED)
    backbone_cls = getattr(keras_hub.models, f"{recipe.architecture}Backbone")
    model_cls = getattr(keras_hub.models, f"{recipe.architecture}CausalLM")
    backbone = backbone_cls(vocabulary_size=tokenizer.vocabulary_size(), **recipe.config)
    if is_gpt2:
        _widen_initial_weights(backbone)
    preprocessor = model_cls.preprocessor_cls(tokenizer, sequence_length=SEQUENCE_LENGTH)
    return model_cls(backbone=backbone, preprocessor=preprocessor)


def _widen_initial_weights(backbone: keras_hub.models.Backbone) -> None:
    """Give a narrow GPT-2 initial weights that it learns from quickly.

    GPT-2's standard deviation of 0.02 suits widths of 768 and more. At a width of 128 it leaves
    attention flat for hundreds of steps, so kernels get 1/sqrt(width) here, as Gemma's have.
    Positions start as sines and cosines, of the same size as the token embeddings: in random
    ones it takes long to find the token before, which copying a name needs.
    """
    width = backbone.hidden_dim
    for variable in backbone.trainable_variables:
        if variable.path.endswith("kernel"):
            variable.assign(variable * (width**-0.5 / keras.ops.std(variable)))
    size = 0.05
    tokens = backbone.token_embedding.embeddings
    tokens.assign(tokens * (size / keras.ops.std(tokens)))
    positions = backbone.get_layer("position_embedding").position_embeddings
    angles = np.arange(positions.shape[0])[:, None] / 1000 ** (np.arange(0, width, 2) / width)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    positions.assign(waves * (size / waves.std()))


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
