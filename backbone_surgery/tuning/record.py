"""The record of a search: what was measured so far, in memory and in a file to resume from."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backbone_surgery.errors import SurgeryError
from backbone_surgery.files import reading, writing
from backbone_surgery.tuning.candidates import Candidate

Measured = np.ndarray
"""float64[prompts, 2, 2]: of each prompt, at strengths 1 and -1, the judge and the fluency."""


class Record:
    """What was measured of each candidate on the first prompts of a list.

    Args:
        file: a file of JSON lines to go on from and to write to, if any.
        search: what tells this search from another.

    Raises:
        SurgeryError: the file is of another search, or damaged.
    """

    def __init__(self, file: Path | None, search: str) -> None:
        self.file = file
        self.known: dict[tuple[Candidate, int, int], Measured] = {}
        self.header = json.dumps({"search": search}) + "\n"
        if file is not None and not file.parent.is_dir():
            raise SurgeryError(
                f"tune at '{file}': expected a file in a folder that exists. Received one in "
                f"'{file.parent}'. Make the folder first."
            )
        if file is None or not file.exists():
            return
        with reading(file, "tune", "a file of `tune`", advice="Name another file."):
            self._resume(file, search)

    def _resume(self, file: Path, search: str) -> None:
        text = file.read_bytes().decode("utf-8")
        whole = text[: text.rfind("\n") + 1]  # it may have been killed while it wrote a line
        if not self.header.startswith(text):
            first, *lines = whole.splitlines()
            if json.loads(first)["search"] != search:
                raise SurgeryError(
                    f"tune at '{file}': expected the file of this search. Received one of another "
                    "model, other texts or other settings. Name another file, or remove it."
                )
            for line in lines:
                self._take(json.loads(line))
        if whole != text:
            os.truncate(file, len(whole.encode("utf-8")))

    def _take(self, line: Mapping[str, Any]) -> None:
        candidate = Candidate(line["method"], tuple(line["blocks"]), line["strength"])
        self.known[candidate, line["start"], line["stop"]] = np.array(line["measured"])

    def get(self, candidate: Candidate, start: int, stop: int) -> Measured | None:
        """Return what was measured on some prompts, if it was."""
        return self.known.get((candidate, start, stop))

    def add(
        self, candidates: Sequence[Candidate], start: int, stop: int, values: Sequence[Measured]
    ) -> None:
        """Keep what was measured on some prompts."""
        lines = []
        for candidate, measured in zip(candidates, values, strict=True):
            self.known[candidate, start, stop] = measured
            place = {"start": start, "stop": stop, "measured": measured.tolist()}
            lines.append(json.dumps({**vars(candidate), **place}) + "\n")
        if self.file is not None:
            with writing(self.file, "tune"), self.file.open("a") as stream:
                stream.write(("" if stream.tell() else self.header) + "".join(lines))

    def all_of(self, candidate: Candidate, start: int, stop: int) -> Measured:
        """Return all that was measured of a candidate on prompts of a range, joined."""
        parts = [
            measured
            for (other, first, last), measured in sorted(self.known.items(), key=lambda x: x[0][1])
            if other == candidate and start <= first and last <= stop
        ]
        return np.concatenate(parts)
