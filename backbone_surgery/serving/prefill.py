"""Prefill: run one prompt in chunks of fixed length, or take them from the prefix cache.

A chunk is always run by the same program, at the same slots of a cache of the same length, whoever
asks for it: all of that depends on the number of the chunk alone. So a chunk out of the prefix
cache has the very bits of one that is run. Only where log-probabilities of the prompt are asked for
is it another program, and nothing goes to the prefix cache or comes out of it.
"""

from typing import Any

import jax
import numpy as np

from backbone_surgery.caching.cache import map_cache
from backbone_surgery.generation.captures import cut
from backbone_surgery.generation.loop import State, pad
from backbone_surgery.opening.site import is_pattern
from backbone_surgery.serving.job import Job
from backbone_surgery.serving.prefix_cache import Key, PrefixCache, chunk_key
from backbone_surgery.serving.row_programs import RowPrograms, lengthen_captures


class Prefill:
    """One prompt on its way through its chunks.

    Args:
        programs: that run it.
        job: whose prompt it is.
        chunk: tokens of a chunk.
        lengths: the lengths that a cache can have, multiples of `chunk`, in order.
        kept: the prefix cache, if there is one. Captured patterns are not kept in it, since their
            columns are as many as the slots; nor are log-probabilities of the prompt.

    Attributes:
        staging: the cache of the row, and its captures if they are wanted.
        logits: after the last token of the prompt, once it is done.
        reused: how many tokens came out of the prefix cache.
    """

    def __init__(
        self,
        programs: RowPrograms,
        job: Job,
        chunk: int,
        lengths: tuple[int, ...],
        kept: PrefixCache | None,
    ) -> None:
        self.programs, self.job, self.chunk, self.lengths = programs, job, chunk, lengths
        specs = programs.capture_specs if job.captures else {}
        self.kept = None if any(map(is_pattern, specs)) or job.prompt_logprobs else kept
        self._notes: list[tuple[State, int]] = []
        self.next, self.reused = 0, 0
        self.logits: jax.Array | None = None
        self.key: Key = b""
        self.length = self._length(0)
        self.staging: State = {"cache": programs.packing.new_cache(1, self.length)}
        if specs:
            self.staging["captures"] = programs.new_captures(1, self.length)

    @property
    def done(self) -> bool:
        """Whether the whole prompt has run."""
        return self.logits is not None

    def step(self) -> int:
        """Run the next chunk, after those that are in the prefix cache.

        Returns:
            How many tokens were run, padding included.
        """
        prompt = self.job.prompt
        while True:
            first, end = self.next, min(self.next + self.chunk, len(prompt))
            self._lengthen(self._length(first))
            key = self._key(first, end) if end - first == self.chunk else None
            self.next = end
            found = None
            if self.kept is not None and key is not None and end < len(prompt):
                found = self.kept.get(key, "captures" in self.staging)
            if found is None:
                break
            self.staging = self.programs.restore(self.staging, found, first, self.length)
            self.reused += self.chunk
        return self._run(prompt[first:end], first, key)

    def end(self) -> None:
        """End a job that asks for no new tokens."""
        job = self.job
        if job.captures:
            tokens = slice(0, len(job.prompt))
            job.captured = {
                name: cut(name, np.asarray(x[0], np.float32), tokens).copy()
                for name, x in self.staging["captures"].items()
            }
        job.update(job.new, "length")

    def _run(self, token_ids: np.ndarray, first: int, key: Key | None) -> int:
        tail = tail_size(self.chunk)
        size = tail if len(token_ids) <= tail else self.chunk
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(token_ids)] = token_ids
        arguments: State = {
            "token_ids": padded,
            "first": np.int32(first),
            "count": np.int32(len(token_ids)),
            "controls": self.job.controls,
        }
        is_noted = self.job.prompt_logprobs
        if is_noted:
            arguments["next"] = np.zeros(size, np.int32)
            following = self.job.prompt[first + 1 : first + 1 + size]
            arguments["next"][: len(following)] = following
        self.staging, logits, notes = self.programs.extend(self.staging, arguments, self.length)
        if is_noted:
            self._notes.append((notes, len(token_ids)))
        if self.kept is not None and key is not None:
            self.kept.put(key, self.programs.cut(self.staging, first, self.chunk, self.length))
        if self.next == len(self.job.prompt):
            self.logits = logits
            if is_noted:
                self.job.prompt_notes = self._notes
        return size

    def _key(self, first: int, end: int) -> Key:
        tokens = self.job.prompt[first:end]
        rewrites = self.programs.model.source.rewrites
        self.key = chunk_key(self.key, tokens, rewrites, self.job.controls, end)
        return self.key

    def _length(self, first: int) -> int:
        """Return how many slots the cache has for the chunk that begins at a token."""
        return next(n for n in self.lengths if n >= first + self.chunk)

    def _lengthen(self, length: int) -> None:
        if length == self.length:
            return
        packing = self.programs.packing

        def lengthened(spec: Any, x: jax.Array) -> jax.Array:
            axis = packing.slot_axis(spec, 1)
            return x if axis is None else pad(x, length, spec.initial, axis)

        self.staging["cache"] = map_cache(lengthened, self.staging["cache"], packing.model)
        if "captures" in self.staging:
            self.staging["captures"] = lengthen_captures(self.staging["captures"], length)
        self.length = length


def tail_size(chunk: int) -> int:
    """Return how many tokens are run where a few are left: a quarter of a chunk."""
    return -(-chunk // 4)
