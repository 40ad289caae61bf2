"""Sweeps: what cannot be swept, scored or plotted is refused in words. No text is generated."""

from types import SimpleNamespace

import pytest

import backbone_surgery as bs
from backbone_surgery.generation.sweep import Sweep, SweepRow


def echo(texts, **options):
    return texts


LM = SimpleNamespace(preprocessor="any", programs="any", generate=echo)
WITHOUT_TEXT = SimpleNamespace(preprocessor=None, programs="any", generate=echo)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.sweep(WITHOUT_TEXT, "x", "mood", [1.0]), "CachedCausalLM with a preprocessor"),
        (lambda: bs.sweep(LM, [], "mood", [1.0]), "at .mood.*at least one prompt"),
        (lambda: bs.sweep(LM, "x", "mood", [float("nan")]), "at least one finite strength"),
        (lambda: bs.sweep(LM, "x", "mood", [1.0], 3), "at 'score': expected a function of a text"),
        (
            lambda: bs.sweep(LM, "x", "mood", [1.0], controls={"mood": 2.0}),
            "at control 'mood': expected a Control without a strength",
        ),
        (
            lambda: bs.sweep(LM, "x", "mood", [1.0], lambda text: None),
            "at score 'score': expected a function that returns a number. Received None",
        ),
        (
            lambda: bs.sweep(LM, "x", "mood", [1.0], lambda text: "1"),
            "at score 'score': expected a function that returns a number. Received '1'",
        ),
        (
            lambda: bs.sweep(LM, "x", "mood", [1.0], lambda text: float("nan")),
            "at score 'score': expected a finite number. Received nan",
        ),
        (lambda: Sweep("mood", (), (), ()).plot(), "plot of a sweep: expected scores"),
        (lambda: Sweep("mood", (), (), ()).plot("x"), "plot of a sweep at 'x': expected a file"),
        (lambda: Sweep("mood", (), (), ("a",)).mean("b"), r"at score 'b': expected one of \['a'\]"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(bs.SurgeryError, match=words):
        call()


def test_the_control_keeps_what_else_is_set_of_it():
    seen = []
    model = SimpleNamespace(
        preprocessor="any", programs="any", generate=lambda t, **o: seen.append(o) or t
    )
    control = bs.Control(tokens="generated")
    bs.sweep(model, ["a", "b"], "mood", [0, 2], controls={"mood": control, "other": 1.0})
    (options,) = seen
    assert options["controls"]["other"] == 1.0
    assert options["controls"]["mood"].tokens == "generated"
    assert options["controls"]["mood"].strength == [0.0, 2.0, 0.0, 2.0]


def test_scores_are_taken_of_each_text():
    swept = bs.sweep(LM, ["a", "bbb"], "mood", [0, 2], {"length": len})
    assert [(row.prompt, row.strength) for row in swept.rows] == [
        ("a", 0.0),
        ("a", 2.0),
        ("bbb", 0.0),
        ("bbb", 2.0),
    ]
    assert swept.mean("length") == {0.0: 2.0, 2.0: 2.0}


@pytest.mark.parametrize(("counts", "top"), [((0, 0), 1), ((0, 3), 3)])
def test_counts_are_drawn_from_zero_up(counts, top):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    rows = tuple(SweepRow("x", float(i), "", {"words": n}) for i, n in enumerate(counts))
    axes = Sweep("mood", (0.0, 1.0), rows, ("words",)).plot(ax=Figure().add_subplot())
    assert axes.get_ylim() == pytest.approx((-0.05 * top, 1.05 * top))
