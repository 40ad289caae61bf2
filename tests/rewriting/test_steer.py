"""Steering: ranges, schedules, vectors and strengths of each row, against steering by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from backbone_surgery.rewriting.steering import Steering
from tests.by_hand import generate_by_hand, model_by_hand
from tests.helpers import make_deep_gpt2, make_gpt2, ragged, relative

LENGTHS, STEPS = [7, 3, 5, 1], 6


def vector(rng, blocks=(0, 1), size=2.0):
    return bs.ControlVector({b: size * rng.normal(size=32) / np.sqrt(32) for b in blocks})


def run(model, inputs):
    return np.asarray(model.predict_on_batch(inputs), "float32")


def addition(directions, strength, tokens, schedule=None):
    """What a setting adds to one row, in plain NumPy: float[time, blocks, hidden]."""

    def add(prompt_length, time, blocks):
        extra = np.zeros((time, blocks, 32))
        for position in range(time):
            step = position - prompt_length
            factor = 1.0
            if schedule is not None:
                values, prompt = schedule
                factor = prompt if step < 0 else values[min(step, len(values) - 1)]
            start, stop = {
                "all": (0, time),
                "prompt": (0, prompt_length),
                "generated": (prompt_length, time),
                "last": (prompt_length - 1, prompt_length),
            }.get(tokens, tokens)
            start, stop = (x + prompt_length if x < 0 else x for x in (start, stop))
            if start <= position < stop:
                for block, direction in directions.items():
                    extra[position, block] = strength * factor * direction
        return extra

    return add


@pytest.fixture(scope="module")
def steered():
    """A backbone, its steered task, and the same backbone by hand."""
    backbone = make_gpt2()
    start = vector(np.random.default_rng(0))
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", start)]))
    lm.compile(sampler="greedy")
    return backbone, lm, model_by_hand(backbone), start


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens",
    [
        ["generated", (2, 6), "all", "prompt"],
        [(-1, 100), (-3, -1), (1, -1), "last"],  # counted from the end of each prompt
    ],
)
def test_each_row_has_its_own_setting(steered, tokens, rng):
    """Vectors, strengths, token ranges and schedules, ragged and cached, equal to by hand."""
    backbone, lm, by_hand, _ = steered
    prompts = ragged(rng, LENGTHS, 8)
    rows = [prompts["token_ids"][i, :n] for i, n in enumerate(LENGTHS)]
    vectors = [vector(rng), vector(rng, [1]), vector(rng, [0]), vector(rng)]
    schedule = bs.Schedule([0.5, 3.0, 0.0, -1.0], prompt=2.0)
    strengths = [3.0, -2.0, schedule, 2.5]
    settings = [
        addition(vectors[0].directions, 3.0, tokens[0]),
        addition(vectors[1].directions, -2.0, tokens[1]),
        addition(vectors[2].directions, 1.0, tokens[2], ([0.5, 3.0, 0.0, -1.0], 2.0)),
        addition(vectors[3].directions, 2.5, tokens[3]),
    ]
    blocks = backbone.num_layers
    wanted = generate_by_hand(by_hand, rows, STEPS, lambda i, n, t: settings[i](n, t, blocks))
    control = bs.Control(strength=strengths, directions=vectors, tokens=tokens)
    before = dict(lm.programs.compilations)
    options = {"max_new_tokens": STEPS, "stop_token_ids": None}
    got = lm.generate(prompts, controls={"mood": control}, **options)
    for i, row in enumerate(wanted):
        assert got["token_ids"][i, : len(row)].tolist() == row.tolist()
    plain = lm.generate(prompts, controls={"mood": 0}, **options)["token_ids"]
    assert not np.array_equal(plain, got["token_ids"])
    after = lm.programs.compilations
    assert after["decode"] - before["decode"] <= 1
    assert after["prefill"] - before["prefill"] <= 1


def test_uncached_equals_by_hand_and_a_range_changes_nothing_before_it(steered, rng):
    backbone, lm, by_hand, start = steered
    inputs = ragged(rng, [9, 9], 9)
    blocks = backbone.num_layers
    extra = np.stack([addition(start.directions, 2.0, (4, 7))(9, 9, blocks)] * 2)
    wanted = by_hand.predict_on_batch({**inputs, "extra": extra.astype("float32")})
    controls = {
        "mood_strength": np.full((2, 2), 2.0, "float32"),
        "mood_tokens": np.array([[4, 7, 9]] * 2, "int32"),
    }
    got = run(lm.opened, {**inputs, **controls})
    assert relative(got, wanted["hidden_states"]) <= 1e-5
    controls["mood_strength"][:] = 0
    plain = run(lm.opened, {**inputs, **controls})
    assert np.array_equal(got[:, :4], plain[:, :4])
    assert (np.abs(got[:, 4:7] - plain[:, 4:7]).max(axis=-1) > 1e-3).all()
    assert relative(plain, run(bs.open_backbone(backbone), inputs)) == 0


def test_strengths(steered, rng):
    backbone, lm, _, start = steered
    inputs = ragged(rng, [9, 6], 9)

    def at(strength, directions=start):
        stacked = np.stack([list(directions.directions.values())] * 2)
        full = np.full((2, 2), strength, "float32")
        return run(lm.opened, {**inputs, "mood_strength": full, "mood_directions": stacked})

    assert np.array_equal(at(-1.5, -start), at(1.5))
    seen = [at(s) for s in (0, 1, 2, 4)]
    for i, a in enumerate(seen):
        assert not any(np.array_equal(a, b) for b in seen[:i])
    other = vector(rng)
    stacked = bs.operate(backbone, [bs.Steer("one", start), bs.Steer("two", other)])
    assert relative(run(stacked, inputs), at(1.0, start + other)) <= 2e-6


@pytest.mark.slow
def test_64_settings_in_one_batch_equal_each_alone(rng):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", vector(rng))]))
    lm.compile(sampler="greedy")
    lengths = rng.integers(2, 9, 64)
    prompts = ragged(rng, lengths, 8)
    vectors = [vector(rng, size=3.0) for _ in range(64)]
    strengths = np.linspace(-3, 3, 64)
    options = {"max_new_tokens": 8, "stop_token_ids": None}
    control = bs.Control(strength=strengths, directions=vectors)
    together = lm.generate(prompts, controls={"mood": control}, **options)["token_ids"]
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    again = bs.Control(strength=-strengths, directions=[-v for v in vectors], tokens=(0, 100))
    assert np.array_equal(
        lm.generate(prompts, controls={"mood": again}, **options)["token_ids"], together
    )
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    for i in range(64):
        alone = lm.generate(
            {name: x[i : i + 1, : lengths[i]] for name, x in prompts.items()},
            controls={"mood": bs.Control(strength=strengths[i], directions=vectors[i])},
            **options,
        )["token_ids"][0]
        assert alone.tolist() == together[i, : len(alone)].tolist()
    assert lm.programs.compilations == {"prefill": 2, "decode": 2}
    assert len({tuple(row) for row in together[:, 8:].tolist()}) > 8


@pytest.mark.parametrize("mode", ["add", "ablate"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_modes_equal_numpy(rng, mode, renormalize):
    backbone = make_gpt2(num_layers=1)
    direction = rng.normal(size=32).astype("float32")
    steer = bs.Steer("s", {0: direction}, mode=mode, renormalize=renormalize, strength=0.8)
    inputs = ragged(rng, [9, 6], 9)
    extra = np.zeros((2, 9, 1, 32), "float32")
    h = np.asarray(
        model_by_hand(backbone).predict_on_batch({**inputs, "extra": extra})["blocks"][0]
    )
    unit = direction / np.linalg.norm(direction)
    wanted = h + 0.8 * direction if mode == "add" else h - 0.8 * (h @ unit)[..., None] * unit
    if renormalize:
        norms = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (h, wanted)]
        wanted = wanted * norms[0] / norms[1]
    wanted = np.asarray(backbone.layer_norm(wanted))
    assert relative(run(bs.operate(backbone, [steer]), inputs), wanted) <= 1e-5


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_gradients_where_a_renormalised_site_is_zero(rng, strength):
    layer = Steering(0, "add", renormalize=True)
    scale, directions = jnp.ones((1, 2)), jnp.asarray(rng.normal(size=(1, 1, 8)), "float32")

    def total(x):
        return layer(x, scale, jnp.full((1, 1), strength), directions).sum()

    x = jnp.asarray(rng.normal(size=(1, 2, 8)), "float32").at[0, 0].set(0.0)
    assert np.isfinite(jax.grad(total)(x)).all()


@pytest.mark.slow
def test_schedules_up_to_64_steps_share_a_program(rng):
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Steer("mood", vector(rng))]))
    lm.compile(sampler="greedy")
    prompts = ragged(rng, [4, 4], 4)
    options = {"max_new_tokens": 5, "stop_token_ids": None}
    seen = [
        lm.generate(prompts, controls={"mood": value}, **options)["token_ids"].tolist()
        for value in (
            2.0,
            bs.Schedule([2.0]),
            bs.Schedule([2.0] * 64),
            bs.Schedule.linear(2, -2, 5),
        )
    ]
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    assert (
        lm.generate(prompts, controls={"mood": bs.Schedule([2.0] * 70)}, **options)[
            "token_ids"
        ].tolist()
        == seen[0]
    )
    assert lm.programs.compilations == {"prefill": 2, "decode": 2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_range_is_exact_in_chunks_of_any_size(rng, dtype):
    """Cached in one pass, token by token and in uneven chunks, over left-padded rows."""
    backbone = make_deep_gpt2(dtype=dtype)
    steers = [
        bs.Steer("early", vector(rng), tokens=(2, 5), strength=3.0),
        bs.Steer("late", vector(rng, [2]), tokens=(6, None), renormalize=True),
    ]
    report = bs.check(bs.operate(backbone, steers))
    assert max(report.errors.values()) <= (5e-6 if dtype == "float32" else 3e-2)


def test_a_vector_for_another_type_of_model_is_warned_of(rng):
    made_for_llama = bs.ControlVector(vector(rng).directions, {"model_hint": "llama"})
    with pytest.warns(UserWarning, match="made for a model of type 'llama'"):
        bs.operate(make_gpt2(), [bs.Steer("mood", made_for_llama)])


BAD_CONTROLS = {
    "strength of the wrong length": (lambda: [1.0, 2.0, 3.0], "'mood': expected finite numbers"),
    "text": (
        lambda: "much",
        r"\[2, 2\] \(rows first, then sites\), or a Schedule",
    ),
    "tokens": (lambda: bs.Control(tokens="sometimes"), "expected tokens 'all', 'prompt'"),
    "empty range": (lambda: bs.Control(tokens=(4, 4)), "'last' or .* <= start < stop"),
    "empty range at the end": (lambda: bs.Control(tokens=(-3, 0)), r"start < stop.*\(-3, 0\)"),
    "range from the end, backwards": (lambda: bs.Control(tokens=(-1, -3)), r"Received \(-1, -3\)"),
    "range of int64": (lambda: bs.Control(tokens=(0, 2**32)), r"stop <= 2147483647. Received \(0"),
    "rows or a range": (lambda: bs.Control(tokens=[None, None]), r"\(start, stop\).*Received None"),
    "tokens of three rows": (lambda: bs.Control(tokens=["all"] * 3), "expected tokens for 2 rows"),
    "other blocks": (
        lambda: bs.Control(directions={7: np.ones(32)}),
        r"Received size 32, for blocks \[7\]",
    ),
    "other size": (lambda: bs.Control(directions={0: np.ones(31)}), "Received size 31"),
    "three vectors": (lambda: bs.Control(directions=[{0: np.ones(32)}] * 3), "a list of 2"),
    "array": (lambda: bs.Control(directions=np.ones((3, 32))), r"finite float\[2, 2, 32\]"),
    "no vector": (lambda: bs.Control(directions=[None, None]), "as a control vector, finite float"),
    "not finite": (lambda: bs.Control(directions={0: np.full(32, np.inf)}), "NaN or Inf"),
    "no strength": (lambda: bs.Control(strength="much"), "Control: expected a finite strength"),
}


def test_bad_controls_are_refused_before_anything_is_compiled(rng):
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Steer("mood", vector(rng))]))
    lm.compile(sampler="greedy")
    for value, words in BAD_CONTROLS.values():
        with pytest.raises(bs.SurgeryError, match=words):
            lm.generate(ragged(rng, [4, 4], 4), controls={"mood": value()}, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}


def test_a_list_of_two_positions_is_the_range_that_the_tuple_is(rng):
    start = vector(rng)
    steer = bs.Steer("mood", start, tokens=[0, 9])
    assert steer.tokens == bs.Steer("mood", start, tokens=np.array([0, 9])).tokens == (0, 9)
    edited = bs.operate(make_gpt2(), [steer])
    tables = [
        bind_controls(edited, {"mood": control}, np.array([4, 3]))["mood_tokens"].tolist()
        for control in (None, bs.Control(tokens=[0, 9]), bs.Control(tokens=[(0, 9), [0, 9]]))
    ]
    assert tables == [[[0, 9, 4], [0, 9, 3]]] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strength": np.nan}, "`strength` to be a finite number. Received nan"),
        ({"strength": None}, "Received None. A Schedule, or one for each row, goes into"),
        ({"strength": True}, "`strength` to be a finite number. Received True"),
        ({"strength": bs.Schedule([1.0])}, "`strength` to be a finite number. Received Schedule"),
        ({"vector": {1.7: np.ones(32)}}, r"blocks counted from 0, .* Received \[1.7\]"),
        ({"vector": {True: np.ones(32)}}, r"blocks counted from 0, .* Received \[True\]"),
        ({"vector": {0: np.ones(32), "0": np.ones(32)}}, r"Received \['0'\]"),
        ({"vector": {2**32: np.ones(32)}}, "at most 999999"),
        ({"tokens": (0, 2**32)}, r"Received \(0, 4294967296\)"),
        ({"tokens": (False, 3)}, r"Received \(False, 3\)"),
        ({"tokens": ["all", "prompt"]}, "expected tokens 'all'"),
        ({"tokens": [None, None]}, r"Received \[None, None\]"),
        ({"mode": "sub"}, "mode 'add' or 'ablate'. Received 'sub'"),
        ({"renormalize": "no"}, "`renormalize` to be True or False"),
        ({"at": 3}, "expected a site selector .* Received 3 of type int"),
        ({"name": "mood!"}, "`name` to be a name of letters, digits"),
        ({"when": 3}, "`when` to be a name of letters, digits"),
        ({"learned": 3}, "`learned` to be the layer of a trainable Steer"),
    ],
)
def test_what_cannot_be_used_is_refused_when_it_is_built(options, words):
    with pytest.raises(bs.SurgeryError, match=f"Steer at 'mood!?': .*{words}"):
        bs.Steer(**{"name": "mood", "vector": {1: np.ones(32)}, **options})


def test_bad_schedules():
    bad = (([], None), ([np.nan], None), ([1.0], np.inf), ([[1.0]], None), ([1.0, [2.0]], None))
    for values, prompt in (*bad, ([True], None), ("much", None), ([1.0], "much"), ([1e300], None)):
        with pytest.raises(bs.SurgeryError, match="expected a list of finite strengths"):
            bs.Schedule(values, prompt)
    for start, steps in ((0, 0), (0, 2**32), (0, True), (0, 2.0), (np.nan, 3), ("low", 3)):
        with pytest.raises(bs.SurgeryError, match=r"Schedule\.linear: expected two finite"):
            bs.Schedule.linear(start, 1, steps)
    assert bs.Schedule.linear(0, 1, np.int64(3)).values == (0.0, 0.5, 1.0)
