"""Conditional steering, against the same decision in plain NumPy."""

import itertools

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.by_hand import generate_by_hand, model_by_hand
from tests.helpers import make_deep_gpt2, ragged

LENGTHS = [7, 3, 5, 6, 4, 2]


def cosines(states, direction):
    norms = np.linalg.norm(states, axis=-1) * np.linalg.norm(direction)
    return np.abs(states @ direction) / norms


def some_but_not_all(found):
    """A threshold that some rows never meet, and some only after their first token."""
    values = np.sort(found[found > 0])
    for low, high in itertools.pairwise(values):
        threshold = float((low + high) / 2)
        met = np.maximum.accumulate(found > threshold, axis=1)
        if high - low > 1e-3 and not met.any(axis=1).all() and (met.any(axis=1) & ~met[:, 0]).any():
            return met, threshold
    raise AssertionError("no such threshold")


@pytest.fixture(scope="module")
def watched():
    """A backbone, its conditionally steered task, and what both were made of."""
    rng = np.random.default_rng(3)
    backbone = make_deep_gpt2()
    direction, push = rng.normal(size=32), 3 * rng.normal(size=32) / np.sqrt(32)
    rewrites = [
        bs.Condition("weather", direction, 0.3, at="blocks.0"),
        bs.Steer("mood", {1: push}, when="weather", strength=2.0),
    ]
    lm = bs.CachedCausalLM(bs.operate(backbone, rewrites))
    lm.compile(sampler="greedy")
    return backbone, lm, model_by_hand(backbone), direction, push


def states(by_hand, inputs, blocks):
    batch, time = inputs["token_ids"].shape
    extra = np.zeros((batch, time, blocks, 32), "float32")
    return np.asarray(by_hand.predict_on_batch({**inputs, "extra": extra})["blocks"][0])


def test_rows_are_steered_from_the_token_on_that_meets_it(watched, rng):
    backbone, lm, by_hand, direction, push = watched
    inputs = ragged(rng, LENGTHS, 8)
    found = cosines(states(by_hand, inputs, backbone.num_layers), direction)
    found = np.where(inputs["padding_mask"], found, 0)
    met, threshold = some_but_not_all(found)
    extra = np.zeros((*met.shape, backbone.num_layers, 32), "float32")
    extra[:, :, 1] = np.where(met[..., None], 2.0 * push, 0)
    wanted = np.asarray(by_hand.predict_on_batch({**inputs, "extra": extra})["hidden_states"])
    controls = {"weather_threshold": np.full(len(LENGTHS), threshold, "float32")}
    got = np.asarray(lm.opened.predict_on_batch({**inputs, **controls}))
    real = inputs["padding_mask"]
    assert np.abs(got - wanted)[real].max() <= 1e-5 * np.abs(wanted).max()
    plain = np.asarray(bs.open_backbone(backbone).predict_on_batch(inputs))
    untouched = ~met.any(axis=1)
    assert np.array_equal(got[untouched], plain[untouched])
    assert np.array_equal(got[~met & real], plain[~met & real])
    assert not np.array_equal(got[~untouched], plain[~untouched])


@pytest.mark.slow
def test_rows_are_steered_unless_they_meet_it(watched, rng, tmp_path):
    """In one pass as in NumPy; in generation by what the prompt says, by a recipe too."""
    backbone, _, by_hand, direction, push = watched
    inputs = ragged(rng, LENGTHS, 8)
    found = cosines(states(by_hand, inputs, backbone.num_layers), direction)
    met, threshold = some_but_not_all(np.where(inputs["padding_mask"], found, 0))
    extra = np.zeros((*met.shape, backbone.num_layers, 32), "float32")
    extra[:, :, 1] = np.where(met[..., None], 0, push)
    wanted = np.asarray(by_hand.predict_on_batch({**inputs, "extra": extra})["hidden_states"])
    condition = bs.Condition("weather", direction, threshold, at="blocks.0", tokens="prompt")
    steer = bs.Steer("mood", {1: push}, unless="weather")
    edited = bs.operate(backbone, [condition, steer])
    got, real = np.asarray(edited.predict_on_batch(inputs)), inputs["padding_mask"]
    assert np.abs(got - wanted)[real].max() <= 1e-5 * np.abs(wanted).max()

    def texts(model, **controls):
        lm = bs.CachedCausalLM(model)
        lm.compile(sampler="greedy")
        made = lm.generate(inputs, max_new_tokens=6, stop_token_ids=None, controls=controls)
        return made["token_ids"]

    bs.save_recipe(edited, tmp_path / "recipe")
    generated = {"mood": bs.Control(strength=4.0, tokens="generated")}
    ours = texts(bs.load_recipe(tmp_path / "recipe", backbone), **generated)
    plain = texts(backbone)
    always = texts(bs.operate(backbone, [bs.Steer("mood", {1: push})]), **generated)
    decided = met.any(axis=1)
    assert np.array_equal(ours, np.where(decided[:, None], plain, always))
    assert not np.array_equal(plain[~decided], always[~decided])
    assert max(bs.check(edited).errors.values()) <= 1e-5
    with pytest.raises(bs.SurgeryError, match="acts on a condition"):
        bs.merge(edited)
    with pytest.raises(bs.SurgeryError, match=r"'mood': .*a condition by `when` or by `unless`"):
        bs.Steer("mood", {1: push}, when="weather", unless="weather")


@pytest.mark.slow
def test_cached_equals_uncached(watched):
    _, lm, _, _, _ = watched
    for threshold in (0.05, 0.2, 0.3, 0.4):
        bs.check(lm.opened, controls={"weather_threshold": np.float32(threshold)})


@pytest.mark.slow
def test_generation_equals_by_hand(watched, rng):
    """Conditions that are met in the prompt, while generating, and never, in one batch."""
    backbone, lm, by_hand, direction, push = watched
    prompts = ragged(rng, LENGTHS, 8)
    rows = [prompts["token_ids"][i, :n] for i, n in enumerate(LENGTHS)]
    blocks, steps, threshold = backbone.num_layers, 8, 0.32
    met_at = []

    def one_row(i, prompt_length, time):
        """Block 0 is before the steered one, so steering never changes what is watched."""
        ids = np.zeros((1, time), "int32")
        ids[0, :prompt_length] = rows[i]
        extra, first = np.zeros((time, blocks, 32), "float32"), None
        for length in range(prompt_length, prompt_length + steps):
            inputs = {"token_ids": ids, "padding_mask": (np.arange(time) < length)[None]}
            found = cosines(states(by_hand, inputs, blocks)[0, :length], direction) > threshold
            if found.any() and first is None:
                first = int(found.argmax())
                extra[first:, 1] = 2.0 * push
            logits = by_hand.predict_on_batch({**inputs, "extra": extra[None]})["logits"]
            ids[0, length] = np.argmax(np.asarray(logits)[0, length - 1])
        met_at.append("never" if first is None else "prompt" if first < prompt_length else "later")
        return extra

    wanted = generate_by_hand(by_hand, rows, steps, one_row)
    assert len(set(met_at)) > 1
    got = lm.generate(
        prompts, max_new_tokens=steps, controls={"weather": threshold}, stop_token_ids=None
    )["token_ids"]
    for i, row in enumerate(wanted):
        assert got[i, : len(row)].tolist() == row.tolist(), met_at[i]
    before = dict(lm.programs.compilations)
    lm.generate(prompts, max_new_tokens=steps, controls={"weather": 0.9}, stop_token_ids=None)
    assert lm.programs.compilations == before


@pytest.mark.slow
def test_signed_and_tokens(rng):
    backbone = make_deep_gpt2()
    inputs = ragged(rng, [6, 6], 6)
    own = states(model_by_hand(backbone), inputs, 3)
    direction = own[0, 3]
    plain = np.asarray(bs.open_backbone(backbone).predict_on_batch(inputs))

    def changed(sign=1, **options):
        condition = bs.Condition("c", sign * direction, 0.999, at="blocks.0", **options)
        steer = bs.Steer("s", {2: np.ones(32)}, when="c")
        got = np.asarray(bs.operate(backbone, [condition, steer]).predict_on_batch(inputs))
        return (np.abs(got - plain).max(axis=-1) > 0).tolist()

    from_third = [[False] * 3 + [True] * 3, [False] * 6]
    assert changed() == changed(-1) == changed(signed=True) == from_third
    assert changed(-1, signed=True) == changed(tokens=(0, 3)) == [[False] * 6] * 2


@pytest.mark.slow
def test_a_call_may_say_which_tokens_are_watched(rng):
    """The last token of each prompt, whatever its length; and a threshold for each row."""
    backbone = make_deep_gpt2()
    prompts = ragged(rng, [6, 4], 6)
    own = states(model_by_hand(backbone), prompts, 3)
    condition = bs.Condition("c", own[1, 3], 0.999, at="blocks.0")
    push = bs.Steer("s", {2: 9 * rng.normal(size=32)}, when="c")
    lm, plain = (bs.CachedCausalLM(bs.operate(backbone, x)) for x in ([condition, push], []))
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    for model in (lm, plain):
        model.compile(sampler="greedy")
    unsteered = plain.generate(prompts, **options)["token_ids"]

    def steered(**control):
        controls = {"c": bs.Control(**control)}
        got = lm.generate(prompts, controls=controls, **options)["token_ids"]
        return (got != unsteered).any(axis=1).tolist()

    assert steered(tokens="last") == steered(tokens=(-1, None)) == [False, True]
    assert steered(tokens=(-2, -1)) == steered(tokens=["last", (0, 3)]) == [False, False]
    assert steered(tokens="last", threshold=[-1.0, 1.0]) == [True, False]
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize(
    ("control", "words"),
    [
        (
            bs.Control(1.0),
            "a Control of threshold and tokens, .* of a Condition. Received strength",
        ),
        (bs.Control(threshold=[0.1, 0.2, 0.3]), r"'c': expected finite numbers: one, \[2\]"),
        (bs.Control(tokens=["last"]), "'c': expected tokens for 2 rows"),
    ],
)
def test_controls_that_do_not_fit_are_refused(control, words):
    condition = bs.Condition("c", np.ones(32), 0.1, at="blocks.0")
    edited = bs.operate(make_deep_gpt2(), [condition, bs.Steer("s", {2: np.ones(32)}, when="c")])
    with pytest.raises(bs.SurgeryError, match=words):
        bind_controls(edited, {"c": control}, np.array([3, 4]))
    with pytest.raises(bs.SurgeryError, match="from -1 to 1"):
        bs.Control(threshold=1.5)
    with pytest.raises(bs.SurgeryError, match=r"of a Steer. Received threshold. L"):
        bind_controls(edited, {"s": bs.Control(threshold=0.5)}, np.array([3, 4]))


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("watched", "steered", "acts"),
    [
        ("generated", "prompt", False),
        ("generated", "last", False),
        ((5, None), (0, 5), False),
        ((5, None), (0, 6), True),
        ((-1, None), (0, -1), False),
        ("last", "last", True),
        ("generated", "all", True),
        ((5, None), "prompt", True),
        ((-2, None), (0, 5), True),
        ("generated", ["prompt", "all"], True),
        ("generated", [(0, 1), "last"], False),
    ],
)
def test_tokens_before_those_that_are_watched_are_not_steered(watched, steered, acts):
    """Whatever the length of the prompt: of (5, None) and the prompt, only a short one has none."""
    condition = bs.Condition("c", np.ones(32), 0.1, at="blocks.0")
    edited = bs.operate(make_deep_gpt2(), [condition, bs.Steer("s", {2: np.ones(32)}, when="c")])
    controls = {"c": bs.Control(tokens=watched), "s": bs.Control(tokens=steered)}
    if acts:
        bind_controls(edited, controls, np.array([3, 4]))
        return
    with pytest.raises(bs.SurgeryError, match=r"generate at control 's': .* nothing would be st"):
        bind_controls(edited, controls, np.array([3, 4]))


def test_a_condition_that_changes_nothing_is_named():
    condition = bs.Condition("alone", np.ones(32), 0.1, at="blocks.0")
    with pytest.warns(UserWarning, match=r"'alone' changes nothing. Put a `Steer\(..., when='al"):
        bs.rewire(bs.operate(make_deep_gpt2(), [condition]))


def test_errors(rng):
    backbone, direction = make_deep_gpt2(), rng.normal(size=32)
    condition = bs.Condition("wet", direction, 0.3, at="blocks.1")
    with pytest.raises(bs.SurgeryError, match="Did you mean 'wet'"):
        bs.operate(backbone, [condition, bs.Steer("s", {2: np.ones(32)}, when="wett")])
    with pytest.raises(bs.SurgeryError, match="a Condition that comes before"):
        bs.operate(backbone, [bs.Steer("s", {2: np.ones(32)}, when="wet"), condition])
    for at in ("blocks.*", "blocks.*.attention_output"):
        steer = bs.Steer("s", {1: np.ones(32)}, at=at, when="wet")
        with pytest.raises(bs.SurgeryError, match="Steer later blocks"):
            bs.operate(backbone, [condition, steer])
    with pytest.raises(bs.SurgeryError, match="expected one site to watch"):
        bs.operate(backbone, [bs.Condition("wet", direction, 0.3, at="blocks.*")])
    with pytest.raises(bs.SurgeryError, match="a direction for the block watched, 1"):
        bs.operate(backbone, [bs.Condition("wet", {2: direction}, 0.3, at="blocks.1")])
    with pytest.raises(bs.SurgeryError, match="expected a vector of the size"):
        bs.operate(backbone, [bs.Condition("wet", direction[:9], 0.3, at="blocks.1")])
    for threshold in (1.5, np.nan, "high"):
        with pytest.raises(bs.SurgeryError, match="expected a threshold from -1 to 1"):
            bs.Condition("wet", direction, threshold, at="blocks.1")
