"""The prefix cache: prefilled chunks of prompts, kept for prompts that begin alike."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from backbone_surgery.generation.loop import State
from backbone_surgery.rewriting import Rewrite

Key = bytes


class PrefixCache:
    """Keeps what chunks of prompts left in the cache, up to a number of bytes.

    Those that were used least recently are let go first. What is kept holds for one graph and its
    weights: `clear` it when they change.

    Args:
        capacity: in bytes.

    Attributes:
        nbytes: how much is kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.nbytes = capacity, 0
        self._chunks: OrderedDict[Key, State] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: Key, captures: bool) -> State | None:
        """Return what is kept under a key, with captures if they are needed."""
        chunk = self._chunks.get(key)
        if chunk is None or (captures and "captures" not in chunk):
            return None
        self._chunks.move_to_end(key)
        return chunk

    def put(self, key: Key, chunk: State) -> None:
        """Keep a chunk, unless it alone is too large."""
        self._drop(key)
        size = _nbytes(chunk)
        if size > self.capacity:
            return
        self._chunks[key] = chunk
        self.nbytes += size
        while self.nbytes > self.capacity:
            self._drop(next(iter(self._chunks)))

    def clear(self) -> None:
        """Let go of everything."""
        self._chunks.clear()
        self.nbytes = 0

    def _drop(self, key: Key) -> None:
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.nbytes -= _nbytes(chunk)


def _nbytes(chunk: State) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(chunk))


def chunk_key(
    before: Key,
    token_ids: np.ndarray,
    rewrites: tuple[Any, ...],
    controls: Mapping[str, np.ndarray],
    end: int,
) -> Key:
    """Return the key of a chunk: of all tokens up to its end, and of what acts on them.

    Args:
        before: the key of the chunk before; empty for the first.
        token_ids: int32[tokens], of the chunk.
        rewrites: of the graph.
        controls: `{input name: array[1, ...]}`, bound to the prompt.
        end: the position after the last token of the chunk.
    """
    acting = dict(controls)
    for rewrite in rewrites:
        if isinstance(rewrite, Rewrite):
            acting.update(rewrite.before(end, controls))
    digest = hashlib.sha256(before)
    digest.update(np.ascontiguousarray(token_ids).tobytes())
    for name in sorted(acting):
        array = np.ascontiguousarray(acting[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()
