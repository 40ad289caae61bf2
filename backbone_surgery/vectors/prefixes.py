"""Prefixes: texts that begin another are read from its run.

What a causal model computes at a token depends on those before it alone. Pairs for control vectors
are often the beginnings of few texts, cut after each of their tokens: then few texts are run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from backbone_surgery.generation.buckets import bucket


@dataclass(frozen=True)
class Runs:
    """Which texts to run, and where to read what is asked of each text.

    Attributes:
        texts: int[runs], the texts to run.
        tokens: int32[runs, asked], the tokens to read of each.
        run: int[texts], in which run a text is read.
        place: int[texts], at which of the tokens of that run.
    """

    texts: np.ndarray
    tokens: np.ndarray
    run: np.ndarray
    place: np.ndarray


def plan_runs(
    rows: list[np.ndarray], tokens: np.ndarray | None, controls: Mapping[str, np.ndarray]
) -> Runs:
    """Find the texts that begin no other one that is run under the same controls.

    Args:
        rows: token ids of each text.
        tokens: int32[texts], which token of each is asked for. Without it, all texts are run.
        controls: `{input: [texts, ...]}`.
    """
    if tokens is None:
        each = np.arange(len(rows))
        return Runs(each, np.zeros((len(rows), 1), "int32"), each, 0 * each)
    # In reverse order a text comes right after one that it begins, if there is any.
    keys = [
        (b"".join(value[i].tobytes() for value in controls.values()), row.astype(">i4").tobytes())
        for i, row in enumerate(rows)
    ]
    order = sorted(range(len(rows)), key=keys.__getitem__, reverse=True)
    texts: list[int] = []
    asked: list[list[int]] = []
    run, place = np.zeros((2, len(rows)), "int64")
    for last, i in zip([None, *order], order, strict=False):
        if last is None or not _begins(keys[i], keys[last]):
            texts.append(i)
            asked.append([])
        run[i], place[i] = len(texts) - 1, len(asked[-1])
        asked[-1].append(int(tokens[i]))
    most = bucket(max(map(len, asked)), 1)
    filled = [own + [own[-1]] * (most - len(own)) for own in asked]
    return Runs(np.array(texts), np.array(filled, "int32"), run, place)


def _begins(key: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> bool:
    return key[0] == other[0] and other[1].startswith(key[1])
