"""Run AxBench's own files through this library, and write the columns that its evaluators read.

    python scripts/axbench.py detect train_data.parquet latent_eval_data.parquet out/ --model MODEL
    python scripts/axbench.py steer steering_data.parquet out/ --model MODEL

AxBench (Wu et al. 2025, https://arxiv.org/abs/2501.17148, https://github.com/stanfordnlp/axbench)
asks how well a method detects a concept, by AUROC, and how well it steers towards it, by a judge of
its own. `detect` finds a direction for each concept in its training file by AxBench's DiffMean, the
mean state of the tokens of texts with the concept, less that of texts without. It writes

* `out/vectors/ID.safetensors`, a direction of length 1 at one block for each concept;
* `out/latent_data.parquet`, the rows of the second file with `BackboneSurgery_max_act`, how far a
  text goes along the direction of its concept at most, the first token left out;
* `out/detection.jsonl`, the AUROC of each concept, the hard negatives counted as negatives.

`steer` writes `out/steering_data.parquet`: the rows that it was given, with
`BackboneSurgery_steered_generation`, the new text; `BackboneSurgery_strength`, what was added along
the direction, which is the factor of the row times the largest activation of its concept; and
`BackboneSurgery_perplexity` of the new text under the model. All factors run as rows of a batch.

AxBench's judge then rates these columns. What comes out is a figure of AxBench only where its
models, its data and its judge were used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import keras
import keras_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from keras import ops
from rich.console import Console
from rich.progress import track

import backbone_surgery as bs
from backbone_surgery.tuning.judging import Perplexity
from backbone_surgery.vectors.activations import measure, read_texts
from backbone_surgery.vectors.detection import largest_projections

NAME = "BackboneSurgery"
SHARED = -1
"""The concept of negative rows that all concepts share."""
UNKNOWN = 50.0
"""What AxBench takes for the largest activation of a concept where none is above zero."""

console = Console(stderr=True)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
Model = Annotated[str, typer.Option(help="A preset, or a folder in KerasHub or HF layout.")]
Output = Annotated[Path, typer.Argument(help="The folder to write.")]


def read(path: Path, columns: tuple[str, ...]) -> pa.Table:
    """Read a Parquet file that has some columns."""
    if not path.is_file():
        raise typer.BadParameter(f"expected a Parquet file. There is no {path}.")
    table = pq.read_table(path)
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise typer.BadParameter(
            f"{path}: expected the columns {', '.join(columns)}. Missing are {', '.join(missing)}; "
            f"there are {', '.join(table.column_names)}."
        )
    return table


def refuse_to_overwrite(*paths: Path) -> None:
    """Refuse to write over what is there."""
    for path in paths:
        if path.exists():
            raise typer.BadParameter(f"{path} is there already. Name another folder, or remove it.")


def texts_of(table: pa.Table, with_input: bool) -> list[str]:
    """Return the texts of the rows: what was answered, after what was asked if that is wanted."""
    outputs = table["output"].to_pylist()
    if not with_input:
        return outputs
    inputs = table["input"].to_pylist()
    return [asked + answered for asked, answered in zip(inputs, outputs, strict=True)]


class SumOfStates(keras.layers.Layer):
    """Add up the hidden states of a row, the first token left out, float32[batch, hidden_dim]."""

    def call(self, x, positions, padding_mask, token):
        """Add up those that count; `token` is not used."""
        counted = ops.logical_and(ops.cast(padding_mask, "bool"), positions > 0)[..., None]
        return ops.sum(ops.where(counted, ops.cast(x, "float32"), 0), axis=1)

    def compute_output_spec(self, x, positions, padding_mask, token):
        """One vector for each row."""
        return keras.KerasTensor((x.shape[0], x.shape[-1]), "float32")


def sides_of(concepts: np.ndarray, categories: np.ndarray, concept: int) -> list[np.ndarray]:
    """Return the positive rows of a concept, and the negative ones, of its own or shared."""
    positives = np.flatnonzero((concepts == concept) & (categories == "positive"))
    negatives = np.flatnonzero(np.isin(concepts, (concept, SHARED)) & (categories == "negative"))
    if min(len(positives), len(negatives)) < 2:
        raise typer.BadParameter(
            f"concept {concept}: expected two positive and two negative rows at least to train on. "
            f"Received {len(positives)} and {len(negatives)}."
        )
    return [positives, negatives]


def differences(lm: Any, sides: list[list[np.ndarray]]) -> bs.ControlVector:
    """Return the mean state of all tokens of one side less that of the other, of length 1."""
    sums = measure(lm, [row for rows in sides for row in rows], SumOfStates, "axbench")
    counts = [sum(len(row) - 1 for row in rows) for rows in sides]
    directions = {}
    for path, states in sums.items():
        first, second = states[: len(sides[0])].sum(axis=0), states[len(sides[0]) :].sum(axis=0)
        direction = first / counts[0] - second / counts[1]
        directions[int(path.split(".")[1])] = direction / np.linalg.norm(direction)
    return bs.ControlVector(directions, {"method": "mean_diff"})


def find_direction(lm: Any, sides: list[list[np.ndarray]], block: int | None) -> bs.ControlVector:
    """Find the direction at one block; by default where half of the texts tell the others best."""
    if block is None:
        vector, unseen = differences(lm, [rows[::2] for rows in sides]), [r[1::2] for r in sides]
        along = largest_projections(lm, vector, [row for rows in unseen for row in rows])
        is_positive = np.arange(sum(map(len, unseen))) < len(unseen[0])
        block = max(along, key=lambda at: auroc(along[at], is_positive) or 0)
    found = differences(lm, sides).directions
    if block not in found:
        raise typer.BadParameter(f"--block {block}: the model has {len(found)} blocks.")
    return bs.ControlVector({block: found[block]}, {"method": "mean_diff"})


@app.command()
def detect(
    train: Annotated[Path, typer.Argument(help="AxBench's training file.")],
    evaluation: Annotated[Path, typer.Argument(help="Its file of texts to detect concepts in.")],
    output: Output,
    model: Model,
    block: Annotated[int | None, typer.Option(help="By default chosen, by AUROC.")] = None,
    with_input: Annotated[bool, typer.Option(help="Texts begin with what was asked.")] = False,
) -> None:
    """Train a direction for each concept, and write how far each text goes along it."""
    columns = ("input", "output", "category", "concept_id")
    seen, unseen = read(train, columns), read(evaluation, columns)
    refuse_to_overwrite(output / "latent_data.parquet", output / "vectors")
    concepts, categories = (np.array(seen[name].to_pylist()) for name in ("concept_id", "category"))
    others, kinds = (np.array(unseen[name].to_pylist()) for name in ("concept_id", "category"))
    texts, new = texts_of(seen, with_input), texts_of(unseen, with_input)
    wanted = sorted(set(others.tolist()))
    sides = {concept: sides_of(concepts, categories, concept) for concept in wanted}
    lm = bs.CachedCausalLM.from_preset(model)
    known, rows = (read_texts(lm, t, "detect", most=lm.max_positions) for t in (texts, new))
    short = [i for i, row in enumerate(rows) if len(row) < 2]
    if short:
        raise typer.BadParameter(f"{evaluation}: the texts of the rows {short} have no token.")
    vectors: dict[Any, bs.ControlVector] = {}
    activations, blocks, lines = np.zeros(len(new), "float32"), np.zeros(len(new), "int64"), []
    for concept in track(wanted, "concepts", console=console):
        vector = find_direction(lm, [[known[i] for i in side] for side in sides[concept]], block)
        [at] = vector.directions
        own = np.flatnonzero(others == concept)
        along = largest_projections(lm, vector, [rows[i] for i in own])[at]
        activations[own], blocks[own] = along, at
        result = {NAME: {"roc_auc": auroc(along, kinds[own] == "positive")}}
        lines.append({"concept_id": concept, "block": at, "results": {"AUCROCEvaluator": result}})
        vectors[concept] = vector
    (output / "vectors").mkdir(parents=True)
    for concept, vector in vectors.items():
        vector.save(output / "vectors" / f"{concept}.safetensors")
    table = unseen.append_column(f"{NAME}_max_act", pa.array(activations))
    pq.write_table(
        table.append_column(f"{NAME}_block", pa.array(blocks)), output / "latent_data.parquet"
    )
    (output / "detection.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    console.print(f"{len(lines)} concepts, written to {output}")


def auroc(along: np.ndarray, is_positive: np.ndarray) -> float | None:
    """Return the chance that a positive text goes further than a negative one, of both kinds."""
    first, second = along[is_positive], along[~is_positive]
    if not len(first) or not len(second):
        return None
    difference = first[:, None] - second
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


@app.command()
def steer(
    factors: Annotated[Path, typer.Argument(help="AxBench's file of prompts and factors.")],
    output: Annotated[Path, typer.Argument(help="The folder that `detect` wrote.")],
    model: Model,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    seed: int = 42,
) -> None:
    """Generate for each prompt at each factor, and write the columns that the judge reads."""
    table = read(factors, ("concept_id", "input_concept", "input_id", "factor", "input"))
    latent = read(output / "latent_data.parquet", ("concept_id", f"{NAME}_max_act"))
    written = output / "steering_data.parquet"
    refuse_to_overwrite(written)
    concepts, prompts = (np.array(table[name].to_pylist()) for name in ("concept_id", "input"))
    wanted = sorted(set(concepts.tolist()))
    files = {concept: output / "vectors" / f"{concept}.safetensors" for concept in wanted}
    unknown = [concept for concept, file in files.items() if not file.is_file()]
    if unknown:
        raise typer.BadParameter(f"{factors}: `detect` found no vectors of the concepts {unknown}.")
    lm = bs.CachedCausalLM.from_preset(model)
    strengths = np.array(table["factor"].to_pylist(), "float32") * largest(latent, concepts)
    perplexity, texts = Perplexity(lm, batch_size), np.empty(len(prompts), object)
    for concept in track(wanted, "concepts", console=console):
        own = np.flatnonzero(concepts == concept)
        steered = steered_by(lm, bs.ControlVector.load(files[concept]), temperature)
        texts[own] = steered.generate(
            prompts[own].tolist(),
            max_new_tokens=max_new_tokens,
            controls={"concept": strengths[own]},
            seed=[seed + int(i) for i in own],
            batch_size=batch_size,
            strip_prompt=True,
        )
    losses = perplexity.losses(prompts.tolist(), texts.tolist())
    columns = {"steered_generation": texts.tolist(), "strength": strengths}
    for name, values in {**columns, "perplexity": np.exp(losses)}.items():
        table = table.append_column(f"{NAME}_{name}", pa.array(values))
    pq.write_table(table, written)
    console.print(f"{len(prompts)} texts, written to {written}")


def largest(latent: pa.Table, concepts: np.ndarray) -> np.ndarray:
    """Return the largest activation of the concept of each row, float32."""
    known = np.array(latent["concept_id"].to_pylist())
    activations = np.array(latent[f"{NAME}_max_act"].to_pylist(), "float32")
    most = {c: activations[known == c].max() for c in set(known.tolist())}
    return np.array([m if (m := most[c]) > 0 else UNKNOWN for c in concepts.tolist()], "float32")


def steered_by(lm: Any, vector: bs.ControlVector, temperature: float) -> bs.CachedCausalLM:
    """Return the model with a concept as the control `concept`, the prompt steered too."""
    edited = bs.operate(lm.backbone, [bs.Steer("concept", vector, strength=0.0)])
    steered = bs.CachedCausalLM(edited, lm.preprocessor)
    greedy = temperature == 0
    steered.compile(
        sampler="greedy" if greedy else keras_hub.samplers.RandomSampler(temperature=temperature)
    )
    return steered


if __name__ == "__main__":
    app()
