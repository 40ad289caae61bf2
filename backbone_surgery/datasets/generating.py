"""`generate_dataset`: a text for every row of a data set."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras_hub
import numpy as np

from backbone_surgery.datasets.carry_out import carry_out
from backbone_surgery.datasets.facts import (
    LM,
    Columns,
    Controls,
    controls_digest,
    read_controls,
    vectors_digest,
)
from backbone_surgery.datasets.job import Advance, plan_job
from backbone_surgery.datasets.shards import Rows, Shard, check_columns, column_names
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.request import check_count, read_request
from backbone_surgery.generation.scores import Score, read_scores, score_text
from backbone_surgery.numbers import is_int, read_number
from backbone_surgery.rewriting import Control
from backbone_surgery.vectors.activations import read_texts
from backbone_surgery.vectors.vector import ControlVector

_OPERATION = "generate_dataset"


def generate_dataset(
    lm: LM,
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    column: str = "prompt",
    *,
    controls: Controls | None = None,
    vectors: Mapping[str, ControlVector] | None = None,
    max_new_tokens: int = 64,
    stop_token_ids: Any = "auto",
    stop_sequences: Any = None,
    score: Score | Mapping[str, Score] | None = None,
    seed: int = 0,
    id_column: str | None = None,
    output_column: str = "generated",
    batch_size: int = 32,
    shard_rows: int = 4096,
    ray: str | None = None,
    verbose: int = 1,
) -> list[Path]:
    r"""Generate from every row of Parquet files or files of JSON lines.

    Each file is read in shards, and each shard gives one file of output: the rows as they were,
    with the text (without its prompt) and its scores in new columns. Within a shard, rows of like
    length are run together. A file of output is put in place whole, so a job that was killed goes
    on where it was when it is started again; `_manifest.json` says what made it. The text of a row
    depends on the row alone, not on who computes it, or when.

    Args:
        lm: a compiled `CachedCausalLM`, or a function that makes one.
        inputs: a `.parquet` or `.jsonl` file, a folder of them, or several of these.
        output: the folder to write: a new one, or that of this very job.
        column: where the prompts are; without a preprocessor, lists of token ids.
        controls: `{name: value}` for the controls of the model, as of `generate`, where a text is
            the name of a column with a number in each row, and a pair of texts that of another
            column too, with the name of a vector.
        vectors: the control vectors that such a column names.
        max_new_tokens: see `generate`, as for the next two.
        stop_token_ids: see there.
        stop_sequences: see there.
        score: a function of a generated text, or `{name: function}`: a column each.
        seed: of the whole job. The seed of a row is made of it and of the row's id.
        id_column: what tells rows apart; by default the name of the file and the number of the row.
        output_column: for the texts.
        batch_size: how many rows to run at once.
        shard_rows: how many rows make a shard.
        ray: address of a Ray cluster to work on, such as `"auto"`. `lm` must then be a function,
            and the folders must be the same on every node.
        verbose: 1 shows a progress bar, with the time left.

    Returns:
        The files of output, in the order of the rows.

    Raises:
        SurgeryError: bad input, before anything is generated; or a prompt that is too long or no
            text, when its shard is reached.

    Examples:
        >>> import backbone_surgery as bs, json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> rows = [{"prompt": [1, 2, 3], "strength": 0.5}, {"prompt": [4], "strength": 2.0}]
        >>> lines = "".join(json.dumps(row) + "\n" for row in rows)
        >>> _ = (folder / "in.jsonl").write_text(lines)
        >>> import keras_hub, numpy as np
        >>> edit = bs.Steer("mood", {1: np.ones(8)})
        >>> backbone = bs.operate(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16), [edit])
        >>> lm = bs.CachedCausalLM(backbone)
        >>> options = dict(max_new_tokens=4, stop_token_ids=None, verbose=0)
        >>> controls = {"mood": "strength"}
        >>> [path] = bs.generate_dataset(
        ...     lm, folder / "in.jsonl", folder / "out", controls=controls, **options
        ... )
        >>> [len(json.loads(line)["generated"]) for line in path.read_text().splitlines()]
        [4, 4]
    """
    check_count(_OPERATION, "batch_size", batch_size, "rows")
    scores = read_scores(_OPERATION, score)
    if not is_int(seed):
        raise SurgeryError(
            f"{_OPERATION} at 'seed': expected an int. Received {shown(seed)}. Pass one."
        )
    job = plan_job(_OPERATION, inputs, output, shard_rows)
    fixed, by_column = read_controls(controls)
    options = {
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids,
        "stop_sequences": stop_sequences,
    }
    vectors = dict(vectors or {})
    digests = vectors_digest(vectors)
    work = _Work(
        column,
        fixed,
        by_column,
        vectors,
        options,
        scores,
        seed,
        id_column,
        output_column,
        batch_size,
    )

    def facts(model: CachedCausalLM) -> dict[str, Any]:
        work.check(model, job.shards)
        return {
            "sampler": keras_hub.samplers.serialize(model.sampler),
            "controls": {"values": controls_digest(model, fixed), "columns": by_column},
            "vectors": digests,
            "options": {**options, "seed": seed, "batch_size": batch_size},
            "columns": [column, id_column, output_column],
            "scores": {name: _qualified(function) for name, function in scores.items()},
        }

    return carry_out(job, lm, work, facts, ray, verbose)


def _qualified(function: Any) -> str:
    """Return where a function is from, as far as that can be told."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"


@dataclass(frozen=True)
class _Work:
    """Generates from the rows of a shard; it can be sent to another process."""

    column: str
    fixed: Mapping[str, Any]
    by_column: Mapping[str, Columns]
    vectors: Mapping[str, ControlVector]
    options: Mapping[str, Any]
    scores: Mapping[str, Score]
    seed: int
    id_column: str | None
    output_column: str
    batch_size: int

    def check(self, lm: CachedCausalLM, shards: Sequence[Shard]) -> None:
        """Refuse what can be refused by a look at the columns and the first prompt."""
        ids = [] if self.id_column is None else [self.id_column]
        pairs = self.by_column.values()
        others = [column for pair in pairs for column in pair if column is not None]
        check_columns(_OPERATION, shards, [self.column, *others, *ids])
        if self.options["max_new_tokens"] is None:
            raise SurgeryError(
                f"{_OPERATION} at 'max_new_tokens': expected a number of tokens. Received None. "
                "Pass one."
            )
        first = Shard(shards[0].file, 0, 1, "")
        rows, controls = self._read(lm, first, first.read([self.column, *others]))
        prompts, options = self._request(lm, rows, controls, [0])
        read_request(lm, prompts, seed=0, **options)
        if self.output_column in self.scores:
            raise SurgeryError(
                f"{_OPERATION} at 'score': expected names other than '{self.output_column}', where "
                "the texts go. Received that one. Rename the score."
            )
        for file in dict.fromkeys(shard.file for shard in shards):
            self._check_free(file, column_names(file))

    def _check_free(self, file: Path, names: Sequence[str]) -> None:
        """Refuse rows that have a column which is to be written."""
        taken = sorted(set(names) & {self.output_column, *self.scores})
        if taken:
            raise SurgeryError(
                f"{_OPERATION} at '{file}': expected no column {taken}, which is to be "
                "written. Received one. Choose another `output_column`, or name of a score."
            )

    def __call__(self, lm: CachedCausalLM, shard: Shard, path: Path, advance: Advance) -> None:
        """Write the rows of a shard to a path, with what is generated from them."""
        table = shard.read()
        self._check_free(shard.file, table.names())
        rows, controls = self._read(lm, shard, table)
        seeds = self._seeds(shard, table)
        order = np.argsort([len(row) for row in rows], kind="stable")
        texts: list[Any] = [None] * len(rows)
        for start in range(0, len(rows), self.batch_size):
            index = order[start : start + self.batch_size]
            prompts, options = self._request(lm, rows, controls, index)
            seed = [seeds[i] for i in index]
            generated = lm.generate(prompts, seed=seed, strip_prompt=True, **options)
            for i, text in zip(index, _listed(generated), strict=True):
                texts[i] = text
            advance(len(index))
        columns = {self.output_column: texts}
        for name, function in self.scores.items():
            columns[name] = [score_text(_OPERATION, name, function, text) for text in texts]
        table.write(path, columns)

    def _read(
        self, lm: CachedCausalLM, shard: Shard, table: Rows
    ) -> tuple[list[np.ndarray], dict[str, list[Control]]]:
        """Read the prompts and the controls of the rows of a shard."""
        prompts = table.column(self.column)
        wrong = [i for i, p in enumerate(prompts) if not isinstance(p, str | list) or not len(p)]
        if wrong:
            raise SurgeryError(
                f"{_OPERATION} at row {shard.start + wrong[0]} of '{shard.file}': expected a "
                f"prompt in column '{self.column}'. Received {shown(prompts[wrong[0]])}. Give it "
                "one, or leave the row out."
            )
        controls = {name: self._control(shard, table, c) for name, c in self.by_column.items()}
        return read_texts(lm, prompts, _OPERATION), controls

    def _control(self, shard: Shard, table: Rows, columns: Columns) -> list[Control]:
        """Read a control of each row."""

        def read(column: str, expected: str, fits: Callable[[Any], bool]) -> list[Any]:
            values = table.column(column)
            for i, value in enumerate(values):
                if not fits(value):
                    raise SurgeryError(
                        f"{_OPERATION} at row {shard.start + i} of '{shard.file}': expected "
                        f"{expected} in column '{column}'. Received {shown(value)}. Give it one."
                    )
            return values

        strengths = read(columns.strength, "a number", lambda x: read_number(x) is not None)
        if columns.vector is None:
            return [Control(strength) for strength in strengths]
        known = f"one of the vectors {', '.join(self.vectors) or '(none)'}"
        names = read(columns.vector, known, lambda x: isinstance(x, str) and x in self.vectors)
        return [Control(x, self.vectors[n]) for x, n in zip(strengths, names, strict=True)]

    def _request(
        self,
        lm: CachedCausalLM,
        rows: list[np.ndarray],
        controls: Mapping[str, list[Control]],
        index: Sequence[int] | np.ndarray,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return prompts and options of some of the rows, for `generate`."""
        chosen = [rows[i] for i in index]
        prompts = pack_right(chosen, max(map(len, chosen)), 0)
        own = {name: _joined([values[i] for i in index]) for name, values in controls.items()}
        return prompts, {**self.options, "controls": {**self.fixed, **own}}

    def _seeds(self, shard: Shard, table: Rows) -> list[int]:
        """Return a seed for each row, made of its id."""
        rows = range(shard.start, shard.stop)
        ids = [f"{shard.file.name}/{i}" for i in rows]
        if self.id_column is not None:
            values = table.column(self.id_column)
            if None in values:
                raise SurgeryError(
                    f"{_OPERATION} at row {shard.start + values.index(None)} of '{shard.file}': "
                    f"expected an id in column '{self.id_column}'. Received none. Give it one."
                )
            ids = [repr(value) for value in values]
        digests = (hashlib.sha256(f"{self.seed}/{name}".encode()).digest() for name in ids)
        return [int.from_bytes(digest[:4], "big") for digest in digests]


def _joined(controls: list[Control]) -> Any:
    """Make one control of those of several rows; any kind of control takes plain numbers."""
    strengths = [control.strength for control in controls]
    vectors = [control.directions for control in controls]
    return strengths if vectors[0] is None else Control(strengths, vectors)


def _listed(generated: Any) -> list[Any]:
    """Return a text for each row; without a preprocessor, a list of token ids."""
    if isinstance(generated, list):
        return generated
    pairs = zip(generated["token_ids"], generated["padding_mask"], strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]
