"""The result of a search: what each method came to, as a table, a figure, and an edit."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backbone_surgery.errors import SurgeryError
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path, save_picture
from backbone_surgery.rewriting import Rewrite
from backbone_surgery.tuning.candidates import Candidate
from backbone_surgery.vectors.vector import ControlVector


@dataclass(frozen=True)
class Trial:
    """What came of one candidate on some prompts.

    Attributes:
        candidate: the edit; `None` for the model as it is.
        up: mean of the judge at the strength of the candidate.
        down: mean of the judge at its negative.
        fluency: the lower of the two strengths' fluencies, from 0 to 1.
        prompts: how many texts were written at each of the two strengths.
    """

    candidate: Candidate | None
    up: float
    down: float
    fluency: float
    prompts: int

    @property
    def score(self) -> float:
        """The harmonic mean of `up`, 1 - `down` and `fluency`: none of them may be low."""
        parts = (self.up, 1 - self.down, self.fluency)
        return 0.0 if min(parts) <= 0 else len(parts) / sum(1 / part for part in parts)


@dataclass(frozen=True)
class Tuning:
    """What a search found: print it for a table, `plot` it for a figure.

    Attributes:
        control: name of the control of each edit.
        unedited: the model as it is, on the prompts that nothing was chosen by.
        trials: the best candidate of each method, on these prompts, the best first.
        edits: `{method: rewrite}`, ready for `operate`. Its default strength is what was chosen: 1
            for a direction, which has its length, and for `"reft"` that of the candidate.
        finals: the same candidates on the prompts of the search, with new seeds. The best of these
            is `chosen`.
        tried: all that was tried in the search.
    """

    control: str
    unedited: Trial
    trials: tuple[Trial, ...]
    edits: Mapping[str, Rewrite]
    finals: tuple[Trial, ...]
    tried: tuple[Trial, ...]

    @property
    def best(self) -> Rewrite:
        """The edit of the method that was chosen."""
        return self.edits[self.chosen]

    @property
    def chosen(self) -> str:
        """The method that came out best in `finals`, on the prompts of the search."""
        scores = {t.candidate.method: t.score for t in self.finals if t.candidate}
        return max(scores, key=lambda method: (scores[method], method))

    @property
    def table(self) -> Table:
        """A rich table: a line for each method, on the prompts that nothing was chosen by."""
        table = Table(title=f"{self.control}: {self.unedited.prompts} prompts not searched on")
        for column in ("method", "blocks", "strength", "judge at -1, 0, 1", "fluency", "score"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for trial in self.trials:
            candidate = trial.candidate
            if candidate is None:
                continue
            shares = (trial.down, self.unedited.up, trial.up)
            table.add_row(
                candidate.method + (" (chosen)" if candidate.method == self.chosen else ""),
                ", ".join(map(str, candidate.blocks)),
                f"{candidate.strength:.2f}",
                " / ".join(f"{share:.2f}" for share in shares),
                f"{trial.fluency:.2f}",
                f"{trial.score:.2f}",
            )
        return table

    def plot(self, to_file: str | Path | None = None, ax: Any = None) -> Any:
        """Plot what the judge says at strengths -1 and 1, and the fluency, for each method.

        Args:
            to_file: where to save the picture, if anywhere.
            ax: matplotlib axes to draw into; new ones by default.

        Returns:
            The axes.

        Raises:
            SurgeryError: the file cannot be written, or matplotlib is missing.
        """
        if to_file is not None:
            to_file = picture_path(to_file, "plot of a tuning")
        pyplot = import_extra("plot of a tuning", "matplotlib.pyplot")
        axes: Any = ax
        if ax is None:
            size = (6.4, 1.2 + 0.45 * len(self.trials))
            _, axes = pyplot.subplots(figsize=size, layout="constrained")
        for y, trial in enumerate(reversed(self.trials)):
            axes.plot([trial.down, trial.up], [y, y], color="0.8", linewidth=3, zorder=1)
            points = ((trial.down, "tab:blue"), (trial.up, "tab:red"))
            for value, colour in points:
                axes.scatter([value], [y], color=colour, zorder=2)
            axes.scatter([trial.fluency], [y], marker="|", s=140, color="black", zorder=2)
        names = [t.candidate.method for t in reversed(self.trials) if t.candidate]
        axes.set_yticks(range(len(names)), names)
        axes.axvline(self.unedited.up, color="0.6", linestyle=":", zorder=0)
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.5, len(names) - 0.5)
        axes.set_xlabel("judge at -1 (blue), unedited (dotted), at 1 (red); fluency (bar)")
        axes.spines[["top", "right"]].set_visible(False)
        if to_file is not None:
            save_picture(axes.figure, to_file, "plot", dpi=150)
        return axes

    def save(self, path: str | Path) -> None:
        """Save the direction of the best edit as `ControlVector.save` does.

        Raises:
            SurgeryError: the best edit is none that adds a direction.
        """
        vector = getattr(self.best, "vector", None)
        if not isinstance(vector, ControlVector):
            raise SurgeryError(
                f"save at '{path}': expected an edit that adds a direction. Received one of method "
                f"'{self.chosen}'. Save the edited model by `save_recipe`, or leave the method out."
            )
        vector.save(path)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, force_jupyter=False, color_system=None).print(self.table)
        return text.getvalue()
