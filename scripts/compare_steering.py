"""Steering beside repeng and steering-vectors: the same weights, pairs, prompts and judge.

    pip install repeng steering-vectors --no-deps
    KERAS_BACKEND=jax python scripts/compare_steering.py --measured methods.json --output peers.json

For both bundled models and each attribute of the story grammar, each library finds directions in
all of its own ways, over the same weights. `bs.tune` searches blocks and strength of all of them
alike: the same prompts, candidates and budget for each way. Then each library writes from prompts
that nothing was chosen by, with its own code and what the search chose for it, and the grammar
judges. What this library reaches is what `measure_methods.py` measured in the same way: by the
method that the search chose, and by the best that adds a direction, as the other libraries do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench_convert import convert
from measure_methods import chosen_of, console, measure
from measure_steering import TEMPERATURE, held_out_prompts
from rich.table import Table
from steering_cases import cases_of, formed, judge_of, open_model, pairs_of, searched_prompts
from transformers import BatchEncoding

import backbone_surgery as bs

OURS, OUR_DIRECTION = "ours", "ours, a direction"


class Tokenizer:
    """The model's own tokenizer, called as those of `transformers` are.

    It pads at the right, as GPT-2's does, unless texts are to be gone on with: without positions of
    their own, `transformers`' GPT-2 counts padding at the left as tokens.
    """

    pad_token_id = 0

    def __init__(self, lm: bs.CachedCausalLM) -> None:
        self.preprocessor = lm.preprocessor

    def __call__(self, texts: list[str], at: str = "right", **options: Any) -> BatchEncoding:
        """Return `input_ids` and `attention_mask`, int64[texts, tokens]."""
        made = self.preprocessor.generate_preprocess(list(texts))
        mask = np.asarray(made["padding_mask"]).astype(bool)
        rows = [ids[own] for ids, own in zip(np.asarray(made["token_ids"]), mask, strict=True)]
        longest = max(map(len, rows))
        gaps = [longest - len(row) for row in rows]
        pads = [(gap, 0) if at == "left" else (0, gap) for gap in gaps]
        padded = [np.pad(row, pad) for row, pad in zip(rows, pads, strict=True)]
        real = [np.pad(np.ones(len(row)), pad) for row, pad in zip(rows, pads, strict=True)]
        arrays = {"input_ids": np.stack(padded), "attention_mask": np.stack(real)}
        return BatchEncoding({k: torch.tensor(v.astype("int64")) for k, v in arrays.items()})

    def texts(self, rows: torch.Tensor) -> list[str]:
        """Return the texts of new tokens, up to the end of each."""
        tokenizer = self.preprocessor.tokenizer
        found = []
        for row in rows.tolist():
            ends = [i for i, token in enumerate(row) if token == tokenizer.end_token_id]
            found.append(tokenizer.detokenize(row[: ends[0] if ends else None]))
        return found


class Peer:
    """A library over the `transformers` model with the weights of one of ours."""

    def __init__(self, lm: bs.CachedCausalLM) -> None:
        self.model, self.tokenizer = convert(lm.backbone), Tokenizer(lm)
        self.blocks = list(range(self.model.config.num_hidden_layers))

    def directions(self, pairs: list[tuple[str, str]]) -> dict[str, dict[int, np.ndarray]]:
        """Return the directions of each of its methods."""
        raise NotImplementedError

    def write(self, prompts: list[str], steering: dict[int, np.ndarray], tokens: int) -> list[str]:
        """Write on, steered by what is added to the output of each block."""
        raise NotImplementedError

    def sample(self, prompts: list[str], tokens: int) -> list[str]:
        """Write on with `transformers`, 100 prompts at a time."""
        torch.manual_seed(0)
        written = []
        for i in range(0, len(prompts), 100):
            given = self.tokenizer(prompts[i : i + 100], at="left")
            rows = self.model.generate(
                **given,
                max_new_tokens=tokens,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                pad_token_id=0,
                eos_token_id=self.tokenizer.preprocessor.tokenizer.end_token_id,
            )
            written += self.tokenizer.texts(rows[:, given["input_ids"].shape[1] :])
        return written


class Repeng(Peer):
    """repeng: principal components of differences, or of what is centred for each pair."""

    def __init__(self, lm: bs.CachedCausalLM) -> None:
        np.float_ = np.float64  # a name that NumPy 2 dropped, in a type annotation of repeng
        import repeng

        super().__init__(lm)
        self.repeng, self.model = repeng, convert(lm.backbone)
        self.model = repeng.ControlModel(self.model, self.blocks)

    def directions(self, pairs: list[tuple[str, str]]) -> dict[str, dict[int, np.ndarray]]:
        """Train a vector in both ways."""
        data = [self.repeng.DatasetEntry(*pair) for pair in pairs]
        make = self.repeng.ControlVector.train
        options = {"hidden_layers": self.blocks}
        return {
            method: make(self.model, self.tokenizer, data, method=method, **options).directions
            for method in ("pca_diff", "pca_center")
        }

    def write(self, prompts: list[str], steering: dict[int, np.ndarray], tokens: int) -> list[str]:
        """Set the vector, and write."""
        size = self.model.config.hidden_size
        added = {b: np.asarray(steering.get(b, np.zeros(size)), "float32") for b in self.blocks}
        self.model.set_raw_control({b: torch.tensor(d) for b, d in added.items()})
        try:
            return self.sample(prompts, tokens)
        finally:
            self.model.reset()


class SteeringVectors(Peer):
    """steering-vectors: means, principal components and logistic regression of last tokens."""

    def directions(self, pairs: list[tuple[str, str]]) -> dict[str, dict[int, np.ndarray]]:
        """Train a vector in all three ways."""
        from steering_vectors import aggregators, train_steering_vector

        ways = {"mean": aggregators.mean_aggregator, "pca": aggregators.pca_aggregator}
        ways["logistic"] = aggregators.logistic_aggregator
        found = {}
        for method, way in ways.items():
            vector = train_steering_vector(
                self.model, self.tokenizer, pairs, aggregator=way(), batch_size=32
            )
            layers = vector.layer_activations
            found[method] = {b: x.detach().numpy().reshape(-1) for b, x in layers.items()}
        return found

    def write(self, prompts: list[str], steering: dict[int, np.ndarray], tokens: int) -> list[str]:
        """Apply the vector, and write."""
        from steering_vectors import SteeringVector

        vector = {b: torch.tensor(d, dtype=torch.float32) for b, d in steering.items()}
        with SteeringVector(vector).apply(self.model):
            return self.sample(prompts, tokens)


PEERS: dict[str, Callable[[bs.CachedCausalLM], Peer]] = {
    "repeng": Repeng,
    "steering-vectors": SteeringVectors,
}


def compare(model: str, attribute: str, count: int, tokens: int) -> dict[str, Any]:
    """Measure one attribute of one model: what the other libraries reach."""
    lm, pairs = open_model(model), pairs_of(attribute)
    prompts = held_out_prompts(count)
    peers = {name: make(lm) for name, make in PEERS.items()}
    vectors = {
        f"{name} {method}": bs.ControlVector(directions)
        for name, peer in peers.items()
        for method, directions in peer.directions(pairs).items()
    }
    result = bs.tune(
        lm,
        pairs,
        judge_of(attribute),
        searched_prompts(prompts),
        (),
        vectors=vectors,
        fluency=formed,
        max_new_tokens=100,
    )
    console.print(f"{model} {attribute}", result.table)
    rows = {}
    for name, peer in peers.items():
        method = best(result, [v for v in vectors if v.startswith(name)])
        added = result.edits[method].vector.directions
        nothing = {block: 0 * direction for block, direction in added.items()}
        texts = {0: peer.write(prompts, nothing, tokens)}
        for sign in (-1, 1):
            texts[sign] = peer.write(prompts, {b: sign * d for b, d in added.items()}, tokens)
        rows[name] = {"method": method.removeprefix(f"{name} "), **measure(texts, attribute)}
    return rows


def ours(found: dict[str, Any]) -> dict[str, Any]:
    """Return what this library reached: by what the search chose, and by its best direction."""
    methods = found["methods"]
    directions = [m for m, row in methods.items() if "AUROC" in row]
    direction = max(directions, key=lambda m: methods[m]["searched"])
    kinds = {OURS: chosen_of(found), OUR_DIRECTION: direction}
    return {kind: {"method": method, **methods[method]} for kind, method in kinds.items()}


def best(result: Any, methods: Any) -> str:
    """Return which of some methods came out best where `tune` decides."""
    scores = {t.candidate.method: t.score for t in result.finals if t.candidate}
    return max((m for m in scores if m in methods), key=lambda m: (scores[m], m))


def show(results: dict[str, Any]) -> None:
    """Print a line for each library of each case, and what each reaches over all."""
    table = Table()
    for column in ("case", "library", "method", "share at -1, 0, 1", "well formed", "mean"):
        table.add_column(column)
    for case, rows in results.items():
        for library, row in rows.items():
            table.add_row(
                case,
                library,
                row["method"],
                " / ".join(f"{100 * x:.0f}" for x in row["share"]),
                f"{100 * min(row['well formed'][0], row['well formed'][2]):.0f}",
                f"{row['harmonic mean']:.2f}" + (" reached" if row["reached"] else ""),
            )
    console.print(table)
    for library in next(iter(results.values())):
        rows = [found[library] for found in results.values()]
        mean = np.mean([row["harmonic mean"] for row in rows])
        console.print(f"{library}: {sum(r['reached'] for r in rows)} at the goal, mean {mean:.2f}")


def read_measured(file: Path, cases: list[str]) -> dict[str, Any]:
    """Return what `measure_methods.py` measured, which must hold all cases.

    Raises:
        typer.BadParameter: there is no such file, or a case is missing in it.
    """
    found = json.loads(file.read_text()) if file.is_file() else {}
    missing = [name for name in cases if name not in found]
    if missing:
        raise typer.BadParameter(
            f"--measured: expected a file of measure_methods.py with all cases. {file} has none of "
            f"{missing}. Measure them first."
        )
    return found


def main(
    measured: Annotated[Path, typer.Option(help="JSON that measure_methods.py wrote.")],
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = 200,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each continuation.")] = 120,
    case: Annotated[list[str], typer.Option(help="MODEL:ATTRIBUTE; all by default.")] = [],  # noqa: B006
    known: Annotated[list[Path], typer.Option(help="JSON of other runs, to take in.")] = [],  # noqa: B006
) -> None:
    """Compare on all cases; cases that are in the output file already are kept."""
    cases = cases_of(case)
    found = read_measured(measured, cases)
    done: dict[str, Any] = {}
    for file in (*known, output):
        if file is not None and file.exists():
            done |= json.loads(file.read_text())
    for name in cases:
        if name not in done:
            done[name] = compare(*name.split(":"), prompts, new_tokens)
        if output is not None:
            output.write_text(json.dumps(done, indent=1) + "\n")
    show({name: {**ours(found[name]), **done[name]} for name in cases})


if __name__ == "__main__":
    typer.run(main)
