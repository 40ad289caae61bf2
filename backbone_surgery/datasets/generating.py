"""`generate_dataset`: a text for every row of a data set."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backbone_surgery import hosts
from backbone_surgery.contexts import setting
from backbone_surgery.datasets.carry_out import carry_out
from backbone_surgery.datasets.facts import (
    LM,
    Columns,
    Controls,
    controls_digest,
    defaults,
    read_controls,
    sampler_facts,
    score_facts,
    vectors_digest,
)
from backbone_surgery.datasets.job import Advance, plan_job
from backbone_surgery.datasets.rows import by_row, doubtful, place, read_column, read_tokens
from backbone_surgery.datasets.shards import Rows, Shard, check_columns, column_names
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls, ends_count
from backbone_surgery.generation.formats.requested import read_format
from backbone_surgery.generation.formats.response_format import ResponseFormat
from backbone_surgery.generation.penalties import Penalized, Penalties, read_penalties
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.request import read_request
from backbone_surgery.generation.samplers import make_strategy
from backbone_surgery.generation.text_scores import Score, read_scores, score_text
from backbone_surgery.numbers import check_count, is_int, read_number
from backbone_surgery.rewriting import Control
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
    penalties: Penalties | None = None,
    response_format: ResponseFormat | None = None,
) -> list[Path]:
    r"""Generate from every row of Parquet files or files of JSON lines.

    Each file is read in shards, and each shard gives one file of output: the rows as they were,
    with the text (without its prompt) and its scores in new columns. Within a shard, rows of like
    length are run together. A file of output is put in place whole, so a job that was killed goes
    on where it was when it is started again; `_manifest.json` says what made it. All rows are
    checked before anything is generated. One job gives one text to each row, whoever computes it.

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
        score: a function of a generated text, or `{name: function}`: a column each. The manifest
            tells functions apart by their names, their code, and what they close over.
        seed: of the whole job. The seed of a row is made of it and of the row's id.
        id_column: what tells rows apart; by default the name of the file and the number of the row.
            Rows of one id share a seed, so equal prompts with one id get one text.
        output_column: for the texts.
        batch_size: how many rows to run at once.
        shard_rows: how many rows make a shard.
        ray: address of a Ray cluster to work on, such as `"auto"`. `lm` must then be a function,
            and the folders must be the same on every node.
        verbose: 1 shows a progress bar, with the time left.
        penalties: see `generate`.
        response_format: see `generate`; of all rows.

    Returns:
        The files of output, in the order of the rows.

    Raises:
        SurgeryError: bad input, with its file and row, before anything is generated; or a score
            that is no finite number, or a file that cannot be written, as to a full disk.

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
    if not is_int(seed) or abs(seed) >= 2**64:
        raise SurgeryError(
            f"{_OPERATION} at 'seed': expected an int of at most 64 bits. Received {shown(seed)}. "
            "Pass one."
        )
    with hosts.telling(lm):
        job = plan_job(_OPERATION, inputs, output, shard_rows)
    fixed, by_column = read_controls(controls)
    options = {
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": stop_token_ids,
        "stop_sequences": stop_sequences,
    }
    columns = {"column": column, "output_column": output_column, "id_column": id_column}
    _check_names(columns)
    vectors = {} if vectors is None else vectors
    digests = vectors_digest(vectors, by_column)
    work = _Work(
        columns,
        fixed,
        by_column,
        vectors,
        options,
        scores,
        seed,
        batch_size,
        penalties,
        response_format,
    )

    def facts(model: CachedCausalLM) -> dict[str, Any]:
        return {**work.facts(model, job.shards), "vectors": digests}

    return carry_out(job, lm, work, facts, ray, verbose)


def _check_names(names: Mapping[str, Any]) -> None:
    """Refuse what is no name of a column; that of ids may be left out."""
    for name, value in names.items():
        is_left_out = name == "id_column" and value is None
        if not is_left_out and not (isinstance(value, str) and value):
            raise SurgeryError(
                f"{_OPERATION} at '{name}': expected the name of a column. Received "
                f"{shown(value)}. Pass one."
            )


class _Values(NamedTuple):
    """What rows hold for a control: strengths, and the names of vectors, if any."""

    strengths: list[Any]
    vectors: list[str] | None = None


class _Asked(NamedTuple):
    """What the rows of a shard ask for."""

    prompts: list[np.ndarray]
    controls: dict[str, _Values]
    seeds: list[int]


@dataclass(frozen=True)
class _Work:
    """Generates from the rows of a shard; it can be sent to another process."""

    columns: Mapping[str, Any]
    fixed: Mapping[str, Any]
    by_column: Mapping[str, Columns]
    vectors: Mapping[str, ControlVector]
    options: Mapping[str, Any]
    scores: Mapping[str, Score]
    seed: int
    batch_size: int
    penalties: Penalties | None
    response_format: ResponseFormat | None

    @property
    def output_column(self) -> str:
        """For the texts."""
        return self.columns["output_column"]

    def facts(self, lm: CachedCausalLM, shards: Sequence[Shard]) -> dict[str, Any]:
        """Check the settings, and return what the texts depend on, but for the vectors."""
        self._check_settings(lm, shards)
        controls = defaults(lm, self.fixed, self.by_column)
        scores = {name: score_facts(_OPERATION, name, f) for name, f in self.scores.items()}
        options = dict(self.options)
        if self.penalties is not None and not self.penalties.change_nothing:
            bias = {str(token): number for token, number in dict(self.penalties.bias).items()}
            options["penalties"] = {**asdict(self.penalties), "bias": bias}
        if self.response_format is not None:
            options["response_format"] = self.response_format.regex
        return {
            "sampler": sampler_facts(lm.sampler),
            "controls": {
                "values": controls_digest(_OPERATION, lm, controls),
                "columns": self.by_column,
            },
            "options": {**options, "seed": self.seed, "batch_size": self.batch_size},
            "columns": self.columns,
            "scores": scores,
        }

    def _check_settings(self, lm: CachedCausalLM, shards: Sequence[Shard]) -> None:
        """Refuse what can be refused without a look at the rows."""
        check_columns(_OPERATION, shards, self._needed())
        if self.options["max_new_tokens"] is None:
            raise SurgeryError(
                f"{_OPERATION} at 'max_new_tokens': expected a number of tokens. Received None. "
                "Pass one."
            )
        size = lm.programs.head.input_dim
        read_format(self.response_format, lm.preprocessor, size, _OPERATION)
        penalties = read_penalties(self.penalties, size, _OPERATION)
        if penalties is not None:
            Penalized(make_strategy(lm.sampler), penalties, _OPERATION)  # no beams
        controls = defaults(lm, self.fixed, self.by_column)
        shortest = pack_right([np.zeros(1, np.int32)], 1, 0)
        with setting({ends_count: False}):
            read_request(
                lm,
                shortest,
                seed=0,
                controls=controls,
                operation=_OPERATION,
                **self.options,
            )
        if self.output_column in self.scores:
            raise SurgeryError(
                f"{_OPERATION} at 'score': expected names other than '{self.output_column}', where "
                "the texts go. Received that one. Rename the score."
            )
        for file in dict.fromkeys(shard.file for shard in shards):
            self._check_free(file, column_names(file))

    def _needed(self) -> list[str]:
        """Return the names of the columns that are read."""
        of_controls = (name for columns in self.by_column.values() for name in columns)
        names = (self.columns["column"], *of_controls, self.columns["id_column"])
        return list(dict.fromkeys(name for name in names if name is not None))

    def check(self, lm: CachedCausalLM, shard: Shard) -> None:
        """Refuse rows of a shard that cannot be run."""
        table = shard.read(self._needed())
        self._check_free(shard.file, table.names())
        texts = self._texts(shard, table)
        self._prompts(lm, shard, doubtful(lm, texts, self.options["max_new_tokens"]))
        self._seeds(shard, table)
        controls = self._values(shard, table)
        strengths = {name: _Values(values.strengths) for name, values in controls.items()}

        def bind(index: list[int]) -> None:
            bound = self._controls(lm, strengths, index)
            bind_controls(lm.opened, bound, np.ones(len(index), np.int32), _OPERATION)

        by_row(_OPERATION, shard, {i: i for i in texts}, bind)
        others = defaults(lm, self.fixed, self.by_column)
        for name, values in controls.items():
            for vector in dict.fromkeys(values.vectors or ()):
                control = Control(1.0, self.vectors[vector])
                try:
                    bound = {**others, name: control}
                    bind_controls(lm.opened, bound, np.ones(1, np.int32), _OPERATION)
                except SurgeryError as error:
                    raise SurgeryError(f"{_OPERATION} at vector '{vector}': {error}") from error

    def _check_free(self, file: Path, names: Sequence[str]) -> None:
        """Refuse rows that have a column which is to be written."""
        taken = sorted(set(names) & {self.output_column, *self.scores})
        if taken:
            raise SurgeryError(
                f"{_OPERATION} at '{file}': expected no column {taken}, which is to be "
                "written. Received one. Choose another `output_column` (--output-column), or name "
                "of a score."
            )

    def __call__(self, lm: CachedCausalLM, shard: Shard, path: Path, advance: Advance) -> None:
        """Write the rows of a shard to a path, with what is generated from them."""
        table = shard.read()
        self._check_free(shard.file, table.names())
        prompts = self._prompts(lm, shard, self._texts(shard, table))
        asked = _Asked(prompts, self._values(shard, table), self._seeds(shard, table))
        order = np.argsort([len(prompt) for prompt in prompts], kind="stable").tolist()
        texts: list[Any] = [None] * len(order)
        for start in range(0, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            for i, text in zip(index, self._run(lm, shard, asked, index), strict=True):
                texts[i] = text
            advance(len(index))
        table.write(path, {self.output_column: texts, **self._scored(shard, texts)})

    def _run(self, lm: CachedCausalLM, shard: Shard, asked: _Asked, index: list[int]) -> list[Any]:
        """Generate from some of the rows."""
        prompts = [asked.prompts[i] for i in index]
        try:
            with setting({ends_count: False}):
                generated = lm.generate(
                    pack_right(prompts, max(map(len, prompts)), 0),
                    seed=[asked.seeds[i] for i in index],
                    controls=self._controls(lm, asked.controls, index),
                    strip_prompt=True,
                    penalties=self.penalties,
                    response_format=self.response_format,
                    **self.options,
                )
        except SurgeryError as error:
            numbers = ", ".join(str(shard.start + i) for i in index)
            raise SurgeryError(f"in a batch of rows {numbers}, in this order: {error}") from error
        return _listed(generated)

    def _scored(self, shard: Shard, texts: list[Any]) -> dict[str, list[float]]:
        """Return the scores of the texts by name."""
        columns: dict[str, list[float]] = {name: [] for name in self.scores}
        for row, text in enumerate(texts):
            where = place(_OPERATION, shard, row)
            for name, function in self.scores.items():
                columns[name].append(score_text(where, name, function, text))
        return columns

    def _texts(self, shard: Shard, table: Rows) -> dict[int, Any]:
        """Read the prompts, by the number of the row within the shard."""

        def is_prompt(value: Any) -> bool:
            return isinstance(value, str | list) and len(value) > 0

        texts = read_column(_OPERATION, shard, table, self.columns["column"], "a prompt", is_prompt)
        return dict(enumerate(texts))

    def _prompts(
        self, lm: CachedCausalLM, shard: Shard, texts: Mapping[int, Any]
    ) -> list[np.ndarray]:
        """Return the token ids of prompts, and refuse those that leave no room for new ones."""
        prompts = read_tokens(_OPERATION, lm, shard, texts)
        most, new = lm.max_positions, self.options["max_new_tokens"]
        for i, prompt in zip(texts, prompts, strict=True):
            if most is not None and len(prompt) + new > most:
                raise SurgeryError(
                    f"{place(_OPERATION, shard, i)}: expected at most {most} tokens, the {new} new "
                    "ones included, since the model has learned no more positions. Received a "
                    f"prompt of {len(prompt)}. Shorten it, or ask for fewer new tokens."
                )
        return prompts

    def _values(self, shard: Shard, table: Rows) -> dict[str, _Values]:
        """Read what the rows hold for each control."""

        def is_number(value: Any) -> bool:
            return read_number(_as_float(value)) is not None

        known = list(self.vectors)
        expected = f"one of the vectors {', '.join(known) or '(none)'}"
        found = {}
        for name, (column, other) in self.by_column.items():
            vectors = None
            strengths = read_column(_OPERATION, shard, table, column, "a number", is_number)
            if other is not None:
                vectors = read_column(
                    _OPERATION, shard, table, other, expected, lambda vector: vector in known
                )
            found[name] = _Values([_as_float(value) for value in strengths], vectors)
        return found

    def _controls(
        self, lm: CachedCausalLM, controls: Mapping[str, _Values], index: list[int]
    ) -> dict[str, Any]:
        """Return the controls of some of the rows, for `generate`."""
        axes = {name: len(tensor.shape) for name, tensor in lm.opened.inputs_by_hand.items()}
        own = {}
        for name, (strengths, vectors) in controls.items():
            chosen: Any = [strengths[i] for i in index]
            if vectors is not None:
                chosen = Control(chosen, [self.vectors[vectors[i]] for i in index])
            elif name in axes:
                chosen = np.reshape(chosen, (-1, *[1] * (axes[name] - 1)))
            own[name] = chosen
        return {**self.fixed, **own}

    def _seeds(self, shard: Shard, table: Rows) -> list[int]:
        """Return a seed for each row, made of its id."""
        ids = [f"{shard.file.name}/{i}" for i in range(shard.start, shard.stop)]
        column = self.columns["id_column"]
        if column is not None:
            values = read_column(_OPERATION, shard, table, column, "an id", _is_id)
            ids = [repr(value) for value in values]
        keys = (f"{self.seed}/{name}".encode(errors="surrogatepass") for name in ids)
        digests = (hashlib.sha256(key).digest() for key in keys)
        return [int.from_bytes(digest[:4], "big") for digest in digests]


def _is_id(value: Any) -> bool:
    """Whether a value tells a row from others: none that is missing, of which NaN is one."""
    return value is not None and value == value


def _as_float(value: Any) -> Any:
    """Make a float of a decimal number of Parquet, and nothing of another value."""
    return float(value) if isinstance(value, Decimal) else value


def _listed(generated: Any) -> list[Any]:
    """Return a text for each row; without a preprocessor, a list of token ids."""
    if isinstance(generated, list):
        return generated
    pairs = zip(generated["token_ids"], generated["padding_mask"], strict=True)
    return [ids[mask].tolist() for ids, mask in pairs]
