"""`harvest`: the activations of some sites over a corpus, in Parquet files."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from backbone_surgery import graph, hosts
from backbone_surgery.datasets.carry_out import carry_out
from backbone_surgery.datasets.facts import LM, Controls, controls_digest
from backbone_surgery.datasets.job import Advance, plan_job
from backbone_surgery.datasets.rows import doubtful, place, read_column, read_tokens
from backbone_surgery.datasets.shards import Shard, check_columns
from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.generation.buckets import bucket
from backbone_surgery.generation.causal_lm import CachedCausalLM
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.generation.prompts import pack_right
from backbone_surgery.generation.request import LONGEST
from backbone_surgery.numbers import check_count
from backbone_surgery.opening.once import made_once
from backbone_surgery.opening.predict import predict
from backbone_surgery.opening.site import is_pattern
from backbone_surgery.rewriting import Capture
from backbone_surgery.rewriting.operate import operate

_OPERATION = "harvest"
_WIDTHS = {"smallest": 16, "steps": 4}


def harvest(
    lm: LM,
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    sites: str | Sequence[str] | np.ndarray,
    column: str = "text",
    *,
    dtype: Literal["float16", "float32"] = "float16",
    length: int | None = None,
    controls: Controls | None = None,
    batch_size: int = 32,
    shard_rows: int = 1024,
    ray: str | None = None,
    verbose: int = 1,
) -> list[Path]:
    """Write the activations of some sites over a corpus, to train autoencoders and probes on.

    Each shard of the texts gives one Parquet file with a row for each token: `row` (the number of
    the text in its file), `position` and `token_id`, and for each site a list of numbers of fixed
    size. Texts of like length are run together, so the texts come in the order of their lengths. An
    empty one has no rows. Activations are those of the edited model, as `Capture` takes them.

    A file is put in place whole, so a job that was killed goes on where it was when it is started
    again; `_manifest.json` says what made it.

    Args:
        lm: a `CachedCausalLM`, or a function that makes one.
        inputs: a `.parquet` or `.jsonl` file, a folder of them, or several of these.
        output: the folder to write: a new one, or that of this very job.
        sites: site selectors; any sites but attention patterns.
        column: where the texts are; without a preprocessor, lists of token ids.
        dtype: of the numbers.
        length: the most tokens of a text that are run: longer ones are cut. By default none is
            cut, and one that is longer than the model has learned positions is refused.
        controls: one value for each control, as of `generate`.
        batch_size: how many texts to run at once.
        shard_rows: how many texts make a shard.
        ray: see `generate_dataset`.
        verbose: 1 shows a progress bar, with the time left.

    Returns:
        The files of output.

    Raises:
        SurgeryError: bad input, with its file and row, before anything is run; or an activation
            that the dtype cannot hold, with its row and site, or a file that cannot be written.

    Examples:
        >>> import backbone_surgery as bs, keras_hub, json, pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "in.jsonl").write_text(json.dumps({"text": [1, 2, 3]}))
        >>> lm = bs.CachedCausalLM(keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16))
        >>> [path] = bs.harvest(lm, folder / "in.jsonl", folder / "out", "blocks.*", verbose=0)
        >>> import pyarrow.parquet as pq
        >>> pq.read_table(path).column_names
        ['row', 'position', 'token_id', 'blocks.0', 'blocks.1']
    """
    check_count(_OPERATION, "batch_size", batch_size, "texts")
    selectors = _read_selectors(sites)
    if length is not None:
        check_count(_OPERATION, "length", length, "tokens")
    if dtype not in ("float16", "float32"):
        raise SurgeryError(
            f"{_OPERATION} at 'dtype': expected 'float16' or 'float32'. Received {shown(dtype)}. "
            "Pass one of them."
        )
    with hosts.telling(lm):
        job = plan_job(_OPERATION, inputs, output, shard_rows, ".parquet")
        check_columns(_OPERATION, job.shards, [column])
    work = _Work(selectors, column, dtype, length, controls, batch_size)

    def facts(model: CachedCausalLM) -> dict[str, Any]:
        return {
            "sites": list(_capturing(model, selectors, dtype).output),
            "options": {"dtype": dtype, "length": length, "batch_size": batch_size},
            "controls": {"values": controls_digest(_OPERATION, model, controls)},
            "columns": {"column": column},
        }

    return carry_out(job, lm, work, facts, ray, verbose)


def _read_selectors(sites: Any) -> tuple[str, ...]:
    listed = np.atleast_1d(sites).tolist() if isinstance(sites, str | np.ndarray) else sites
    is_list = isinstance(listed, list | tuple) and len(listed) > 0
    if not is_list or not all(isinstance(site, str) for site in listed):
        raise SurgeryError(
            f"{_OPERATION} at 'sites': expected site selectors, at least one. Received "
            f"{shown(sites)}. Pass 'blocks.*', say."
        )
    return tuple(listed)


def _capturing(lm: CachedCausalLM, selectors: tuple[str, ...], dtype: str) -> keras.Model:
    """Return the model that gives the activations of some sites alone, the same one each time."""
    key = _OPERATION, selectors, dtype
    return made_once(lm.opened, key, lambda: _build(lm, selectors, dtype))


@graph.building()
def _build(lm: CachedCausalLM, selectors: tuple[str, ...], dtype: str) -> keras.Model:
    capturing = operate(lm.opened, [Capture(*selectors, name=_OPERATION)])
    outputs = {}
    for name, tensor in capturing.captures.items():
        path = name.removeprefix(f"{_OPERATION}/")
        if path == name:
            continue  # a capture of the edit itself
        if is_pattern(path):
            raise SurgeryError(
                f"{_OPERATION} at '{path}': expected sites with a value for each token. Received "
                "an attention pattern. Choose `head_outputs`, say."
            )
        outputs[path] = ops.cast(tensor, dtype)
    return keras.Model(capturing.input, outputs, name=_OPERATION)


@dataclass(frozen=True)
class _Work:
    """Writes the activations of the texts of a shard; it can be sent to another process."""

    selectors: tuple[str, ...]
    column: str
    dtype: str
    length: int | None
    controls: Mapping[str, Any] | None
    batch_size: int

    def __call__(self, lm: CachedCausalLM, shard: Shard, path: Path, advance: Advance) -> None:
        """Write a file, batch by batch."""
        arrow = import_extra(_OPERATION, "pyarrow")
        parquet = import_extra(_OPERATION, "pyarrow.parquet")
        model = _capturing(lm, self.selectors, self.dtype)
        sizes = {site: math.prod(x.shape[2:]) for site, x in model.output.items()}
        values = arrow.float16() if self.dtype == "float16" else arrow.float32()
        lists = {site: arrow.list_(values, size) for site, size in sizes.items()}
        numbers = {"row": arrow.int64(), "position": arrow.int32(), "token_id": arrow.int32()}
        schema = arrow.schema({**numbers, **lists})
        rows = self._read(lm, shard)
        order = np.argsort([len(row) for row in rows], kind="stable")
        empty = sum(len(row) == 0 for row in rows)
        order = order[empty:]
        advance(empty)
        options = {"compression": "none", "use_dictionary": False}
        with (
            parquet.ParquetWriter(path, schema, **options) as writer,
            ThreadPoolExecutor(1) as pool,
        ):
            written: list[Future] = []
            for start in range(0, len(order), self.batch_size):
                index = order[start : start + self.batch_size]
                columns = self._columns(arrow, lm, model, shard, [rows[i] for i in index], index)
                for before in written:
                    before.result()
                # It is written while the next texts run.
                written = [pool.submit(writer.write_table, arrow.table(columns, schema=schema))]
                advance(len(index))
            for last in written:
                last.result()

    def check(self, lm: CachedCausalLM, shard: Shard) -> None:
        """Refuse texts of a shard that cannot be run."""
        self._tokens(lm, shard, doubtful(lm, self._texts(shard)))

    def _read(self, lm: CachedCausalLM, shard: Shard) -> list[np.ndarray]:
        """Return the token ids of each text, none for an empty one."""
        texts = self._texts(shard)
        rows = dict(zip(texts, self._tokens(lm, shard, texts), strict=True))
        none = np.zeros(0, np.int32)
        return [rows.get(i, none) for i in range(shard.stop - shard.start)]

    def _tokens(
        self, lm: CachedCausalLM, shard: Shard, texts: Mapping[int, Any]
    ) -> list[np.ndarray]:
        remedy = f"Pass `length={lm.max_positions}` to cut such texts, or shorten them."
        return read_tokens(_OPERATION, lm, shard, texts, self.length, remedy)

    def _texts(self, shard: Shard) -> dict[int, Any]:
        """Read the texts that are not empty, by the number of the row within the shard."""

        def is_text(value: Any) -> bool:
            return isinstance(value, str | list)

        table = shard.read([self.column])
        texts = read_column(_OPERATION, shard, table, self.column, "a text", is_text)
        return {i: text for i, text in enumerate(texts) if text}

    def _columns(
        self,
        arrow: Any,
        lm: CachedCausalLM,
        model: keras.Model,
        shard: Shard,
        chosen: list[np.ndarray],
        index: np.ndarray,
    ) -> dict[str, Any]:
        """Run some of the texts, and return what is to be known of their tokens."""
        lengths = np.array([len(row) for row in chosen])
        # The last batch of a shard is filled up, so that it runs in the program of the others.
        filled = np.resize(np.arange(len(chosen)), self.batch_size)
        width = min(bucket(int(lengths.max()), **_WIDTHS), lm.max_positions or LONGEST)
        inputs = pack_right([chosen[i] for i in filled], width, 0)
        inputs |= bind_controls(lm.opened, self.controls, lengths[filled], _OPERATION)
        outputs = predict(model, inputs)
        mask = inputs["padding_mask"][: len(chosen)]
        columns = {
            "row": np.repeat(shard.start + index, lengths),
            "position": np.nonzero(mask)[1].astype(np.int32),
            "token_id": inputs["token_ids"][: len(chosen)][mask],
        }
        for site in model.output:
            values = outputs[site][: len(chosen)][mask]
            if not np.isfinite(values).all():
                wrong = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
                row = columns["row"][wrong.argmax()] - shard.start
                raise SurgeryError(
                    f"{place(_OPERATION, shard, row)}, site '{site}': expected activations "
                    f"that {self.dtype} can hold. Received infinity or NaN. Pass "
                    "dtype='float32', or look at the model."
                )
            flat = arrow.array(np.ascontiguousarray(values).reshape(-1))
            columns[site] = arrow.FixedSizeListArray.from_arrays(flat, values[0].size)
        return columns
