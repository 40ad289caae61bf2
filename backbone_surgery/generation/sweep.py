"""Sweep: the same prompts at several strengths, as one compiled batch, scored and tabulated."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backbone_surgery.errors import SurgeryError, shown
from backbone_surgery.extras import import_extra
from backbone_surgery.files import picture_path, save_picture
from backbone_surgery.generation.controls import check_names
from backbone_surgery.generation.prompts import text_list
from backbone_surgery.generation.text_scores import Score, read_scores, score_text
from backbone_surgery.numbers import read_finite
from backbone_surgery.rewriting.control import Control


@dataclass(frozen=True)
class SweepRow:
    """One text of a sweep.

    Attributes:
        prompt: what it began with.
        strength: of the control.
        text: what was generated, without the prompt.
        scores: `{name: score of the text}`.
    """

    prompt: str
    strength: float
    text: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Sweep:
    """The texts and scores of a sweep: print it for a table, `plot` it for a figure.

    Attributes:
        control: name of the control.
        strengths: in the order in which they were passed.
        rows: one for each prompt and strength.
        names: names of the scores.
    """

    control: str
    strengths: tuple[float, ...]
    rows: tuple[SweepRow, ...]
    names: tuple[str, ...]

    def mean(self, name: str = "score") -> dict[float, float]:
        """Return the mean score of each strength.

        Raises:
            SurgeryError: there is no score of this name.
        """
        if name not in self.names:
            raise SurgeryError(
                f"sweep at score '{name}': expected one of {list(self.names)}. Received another. "
                "Pass `score=` to `sweep`, and name one of its scores."
            )
        return {
            s: float(np.mean([r.scores[name] for r in self.rows if r.strength == s]))
            for s in self.strengths
        }

    def table(self, width: int = 300) -> Table:
        """Return a rich table: a line for each strength, with its scores and its first text."""
        # As `Text`, since rich reads strings as markup.
        title = Text(f"{self.control}: {len(self.rows)} texts", "table.title")
        table = Table(title=title, show_lines=True)
        table.add_column("strength", justify="right")
        for name in self.names:
            table.add_column(Text(name), justify="right")
        table.add_column("first text")
        means = {name: self.mean(name) for name in self.names}
        for strength in self.strengths:
            first = next(r.text for r in self.rows if r.strength == strength)
            shown = first if len(first) <= width else first[: width - 1] + "…"
            scores = (f"{means[name][strength]:.2f}" for name in self.names)
            table.add_row(f"{strength:g}", *scores, Text(shown.strip()))
        return table

    def plot(self, to_file: str | Path | None = None, ax: Any = None) -> Any:
        """Plot the mean of each score, with its standard error, against the strength.

        Args:
            to_file: where to save the picture, if anywhere.
            ax: matplotlib axes to draw into; new ones by default.

        Returns:
            The axes.

        Raises:
            SurgeryError: there are no scores, the file cannot be written, or matplotlib is missing.
        """
        if to_file is not None:
            to_file = picture_path(to_file, "plot of a sweep")
        if not self.names:
            raise SurgeryError(
                "plot of a sweep: expected scores. Received a sweep without any. Pass "
                "`score=function_of_a_text` to `sweep`."
            )
        pyplot = import_extra("plot of a sweep", "matplotlib.pyplot")
        axes: Any = ax
        if ax is None:
            _, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        order = sorted(self.strengths)
        for name in self.names:
            groups = [[r.scores[name] for r in self.rows if r.strength == s] for s in order]
            errors = [np.std(g, ddof=1) / np.sqrt(len(g)) if len(g) > 1 else 0.0 for g in groups]
            axes.errorbar(order, [np.mean(g) for g in groups], errors, marker="o", label=name)
        if not any(axes.dataLim.intervaly):  # else matplotlib goes as far below zero as above
            axes.update_datalim([(0, 1)], updatex=False)
        axes.set_xlabel(f"strength of {self.control}")
        axes.set_ylabel("mean score" if len(self.names) > 1 else self.names[0])
        axes.axvline(0, color="0.8", linewidth=1, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        if len(self.names) > 1:
            axes.legend(frameon=False)
        if to_file is not None:
            save_picture(axes.figure, to_file, "plot", dpi=150)
        return axes

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100, force_jupyter=False, color_system=None).print(self.table())
        return text.getvalue()


def sweep(
    lm: Any,
    prompts: str | Sequence[str],
    control: str,
    strengths: Sequence[float],
    score: Score | Mapping[str, Score] | None = None,
    **options: Any,
) -> Sweep:
    """Generate from each prompt at each strength, in one batch, which compiles once at most.

    Args:
        lm: a `CachedCausalLM` with a preprocessor, over a backbone with a `Steer` of this name.
        prompts: one or more.
        control: name of the control.
        strengths: numbers.
        score: function of a generated text (without its prompt), or `{name: function}`.
        **options: for `generate`, such as `max_new_tokens`, `seed` and `batch_size`. `controls` may
            set the directions and tokens of this control by a `Control`.

    Returns:
        A `Sweep`.

    Raises:
        SurgeryError: no prompts or strengths, a score that is no finite number, or what
            `generate` refuses.
    """
    if getattr(lm, "preprocessor", None) is None or not hasattr(lm, "programs"):
        raise SurgeryError(
            f"sweep: expected a CachedCausalLM with a preprocessor, to make text. Received "
            f"{shown(lm)}. Attach a preprocessor."
        )
    texts = _listed(prompts)
    numbers = read_finite(strengths)
    if not texts or numbers is None or numbers.ndim > 1 or not isinstance(control, str):
        raise SurgeryError(
            f"sweep at {shown(control)}: expected the name of a control, at least one prompt, and "
            f"at least one finite strength. Received prompts {shown(prompts)} and strengths "
            f"{shown(strengths)}. Pass all three."
        )
    scores = read_scores("sweep", score)
    for name in ("strip_prompt", "return_captures"):
        if name in options:
            raise SurgeryError(
                f"sweep at '{name}': expected other options of `generate`, since `sweep` decides "
                f"what is returned. Received {shown(options[name])}. Leave it out."
            )
    floats = [float(strength) for strength in np.atleast_1d(strengths)]
    pairs = [(text, strength) for text in texts for strength in floats]
    controls = check_names("sweep", options.pop("controls", None))
    swept = _at(control, controls.get(control), [strength for _, strength in pairs])
    written = lm.generate(
        [text for text, _ in pairs],
        controls={**controls, control: swept},
        strip_prompt=True,
        **options,
    )
    rows = []
    for (prompt, strength), text in zip(pairs, written, strict=True):
        values = {
            name: score_text("sweep", name, function, text) for name, function in scores.items()
        }
        rows.append(SweepRow(prompt, strength, text, values))
    return Sweep(control, tuple(floats), tuple(rows), tuple(scores))


def _at(name: str, value: Any, strengths: list[float]) -> Any:
    """Return what is passed for the control: strengths, and what else was set of it."""
    if value is None:
        return strengths
    if isinstance(value, Mapping) and "values" not in value:  # of a `Clamp`
        return {**value, "values": np.array(strengths, "float32")[:, None]}
    if not isinstance(value, Control) or value.strength is not None:
        raise SurgeryError(
            f"sweep at control '{name}': expected a Control without a strength, since `strengths` "
            f"has them. Received {shown(value)}. Pass such as Control(tokens='generated')."
        )
    return replace(value, strength=strengths)


def _listed(prompts: Any) -> list[str]:
    """Return the prompts as a list; an empty one for what are none."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = text_list(prompts)
    texts = list(prompts) if isinstance(prompts, Sequence) else []
    return texts if all(isinstance(text, str) for text in texts) else []
