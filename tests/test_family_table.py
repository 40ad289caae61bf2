"""Every family: opened, cached, edited and generating, against KerasHub's own layers and tasks.

A family is a row of `tests/families.py`; a test here is a column. By default some families are
opened, cached and generate, on their first shapes.
"""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.edits import EDITS, TIME
from tests.families import ROWS
from tests.helpers import ragged, relative
from tests.recording import on_first, patched, recorded, sublayer
from tests.reference import run_chunks, tokens

ROOT = Path(__file__).parents[1]
SHAPES = [(name, shape) for name, row in ROWS.items() for shape in ({}, *row.shapes)]
slow = pytest.mark.slow


def shown(x):
    """Name a family, or a shape of it."""
    return x if isinstance(x, str) else ",".join(f"{k}={v}" for k, v in x.items())


every_shape = pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(n, s, marks=[slow] if s else []) for n, s in SHAPES],
    ids=shown,
)
every_family = pytest.mark.parametrize("name", list(ROWS))
BY_DEFAULT = ("gpt2", "llama", "gemma3")
"""Those that are cached, and generate, by default. Others are slow tests."""


def complete(name, inputs, task=False):
    """Add what the backbone, or the task, takes besides a text."""
    more = {**ROWS[name].inputs, **(ROWS[name].task_inputs if task else {})}
    return {**inputs, **{k: v(inputs) if callable(v) else v for k, v in more.items()}}


def run(name, backbone, inputs):
    """Run the backbone itself, and return the hidden states."""
    model = ROWS[name].without_head(backbone)
    return np.asarray(model.predict_on_batch(complete(name, inputs)), "float32")


@functools.lru_cache(maxsize=4)
def unchanged(name):
    """A backbone that no test changes, and a model that generates from it."""
    backbone = ROWS[name].make()
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    return backbone, lm


def blocks_of(backbone):
    """Return the decoder blocks, in the order in which they run."""
    family = bs.open_backbone(backbone).family
    return [layer for layer in family.layers(backbone) if family.owns(layer)]


def backbone_of(name, shape):
    return ROWS[name].make(**shape) if shape else unchanged(name)[0]


@pytest.mark.by_default(4)
@every_shape
def test_opened_is_the_backbone(name, shape, rng):
    backbone = backbone_of(name, shape)
    inputs = ragged(rng, [20, 11, 3], 20)
    inputs["padding_mask"] = inputs["padding_mask"].astype("int32")
    real = inputs["padding_mask"].astype(bool)
    opened = bs.open_backbone(backbone)
    wanted = run(name, backbone, inputs)
    assert relative(opened.predict_on_batch(inputs), wanted, real) <= ROWS[name].tolerance


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(n, s, marks=[slow] if s or n not in BY_DEFAULT else []) for n, s in SHAPES],
    ids=shown,
)
def test_cached_is_opened(name, shape):
    opened = bs.open_backbone(backbone_of(name, shape))
    bs.rewire(opened)  # probes what it does not know
    assert max(bs.check(opened).errors.values()) <= 3e-5


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in BY_DEFAULT else [slow]) for n in ROWS]
)
def test_greedy_is_the_backbones_own(name, rng):
    """Against the backbone uncached, token by token; rows stop at different times."""
    backbone, lm = unchanged(name)
    inputs = ragged(rng, (3, 9, 5), 16)
    free = lm.generate(inputs, stop_token_ids=None)
    stops = tuple(int(i) for i in free["token_ids"][0, -3:])
    got = lm.generate(inputs, stop_token_ids=stops)
    head = lm.opened.token_embedding
    ids, mask = free["token_ids"], np.ones((3, 16), "int32")
    logits = np.asarray(
        head(run(name, backbone, {"token_ids": ids, "padding_mask": mask}), reverse=True)
    )
    for i, length in enumerate((3, 9, 5)):
        assert np.array_equal(logits[i, length - 1 : -1].argmax(-1), ids[i, length:])
        new = ids[i, length:]
        ends = np.flatnonzero(np.isin(new, stops))
        end = length + (ends[0] + 1 if len(ends) else len(new))
        assert got["padding_mask"][i].sum() == end
        assert np.array_equal(got["token_ids"][i, :end], ids[i, :end])
    assert not np.asarray(got["padding_mask"], bool).all()


@slow
@every_shape
def test_greedy_is_that_of_kerashub(name, shape, rng):
    row = ROWS[name]
    if not row.task_is_right:
        pytest.skip("KerasHub's own task generates something else, or takes prompts otherwise")
    if shape:
        backbone = row.make(**shape)
        lm = bs.CachedCausalLM(backbone)
        lm.compile(sampler="greedy")
    else:
        backbone, lm = unchanged(name)
    upstream = row.task(backbone=backbone, preprocessor=None)
    upstream.compile(sampler="greedy")
    inputs = ragged(rng, (3, 9, 5), 16)
    free = lm.generate(inputs, stop_token_ids=None)
    stops = tuple(int(i) for i in free["token_ids"][0, -3:])
    copies = {k: v.copy() for k, v in inputs.items()}
    wanted = upstream.generate(complete(name, copies, task=True), stop_token_ids=stops)
    mask = np.asarray(wanted["padding_mask"], bool)
    got = lm.generate(inputs, stop_token_ids=stops)
    assert np.array_equal(got["padding_mask"], mask)
    assert np.array_equal(got["token_ids"][mask], np.asarray(wanted["token_ids"])[mask])


@slow
@every_family
def test_the_default_sampler_is_that_of_kerashub(name):
    backbone, _ = unchanged(name)
    upstream = ROWS[name].task(backbone=backbone, preprocessor=None)
    lm = bs.CachedCausalLM(backbone)
    assert type(lm.sampler) is type(upstream.sampler)
    assert lm.sampler.get_config() == upstream.sampler.get_config()


@slow
@every_family
def test_steered_by_row(name, rng):
    """Against KerasHub's own block, that gives what it gives and the vector."""
    backbone, unsteered = unchanged(name)
    inputs = tokens(rng, 3, 12)
    vector = rng.normal(size=32).astype("float32")
    strength = np.array([1.5, 0.0, -0.5], "float32")
    model = bs.operate(backbone, [bs.Steer("mood", {0: vector})])
    steering = {**inputs, "mood_strength": strength[:, None]}
    got = model.predict_on_batch(steering)
    plain = bs.open_backbone(backbone).predict_on_batch(inputs)
    assert relative(got[1], plain[1]) <= ROWS[name].tolerance
    # One operation at a time: in a program, XLA rounds a product and a sum once or twice, whichever
    # it likes.
    assert np.array_equal(model(steering)[1], bs.open_backbone(backbone)(inputs)[1])

    def steered(x):
        stream = ROWS[name].stream
        return on_first(lambda first: first + strength[:, None, None] * vector, x, stream)

    with patched(blocks_of(backbone)[0], steered):
        wanted = ROWS[name].without_head(backbone)(complete(name, inputs))
    assert relative(got, wanted) <= ROWS[name].tolerance
    assert relative(plain, wanted) > 1e-3

    lm = bs.CachedCausalLM(model)
    lm.compile(sampler="greedy")
    options = {"max_new_tokens": 6, "stop_token_ids": None}
    text = lm.generate(inputs, controls={"mood": strength}, **options)
    wanted = unsteered.generate(inputs, **options)
    assert np.array_equal(text["token_ids"][1], wanted["token_ids"][1])


def scored_by_layers(name, backbone, inputs, intercept):
    """Score by the backbone's own layers, each of which hands what it gives to a function."""
    opened, row = bs.open_backbone(backbone), ROWS[name]
    if row.embeddings:
        embeddings = sublayer(backbone, row.embeddings)
    else:
        embeddings = backbone.get_layer(opened.family.embeddings)
    with contextlib.ExitStack() as stack:
        for index, layer in enumerate([embeddings, *blocks_of(backbone)], -1):
            give = functools.partial(
                on_first,
                lambda x, i=index: intercept(x, i),
                stream=row.stream if index >= 0 else None,
            )
            stack.enter_context(patched(layer, give))
        hidden_states = ROWS[name].without_head(backbone)(complete(name, inputs))
    return opened.token_embedding(hidden_states, reverse=True)


@slow
@every_family
def test_score(name, rng):
    """Against the backbone's own layers, and KerasHub's `score` where the task has one."""
    row = ROWS[name]
    backbone, lm = unchanged(name)
    inputs = ragged(rng, (5, 8, 6), 8)
    inputs["padding_mask"] = inputs["padding_mask"].astype("int32")

    def run(score):
        seen = {}

        def intercept(x, index):
            seen[index] = np.asarray(x)
            # Some tasks go on from the embeddings themselves, whatever the function returned.
            return x * 1.5 + 0.1 * index if index >= 0 else x

        return score(intercept), seen

    got, seen = run(lambda f: lm.score(**inputs, layer_intercept_fn=f))
    wanted = [run(lambda f: scored_by_layers(name, backbone, inputs, f))]
    if hasattr(row.task, "score"):
        upstream = row.task(backbone=backbone, preprocessor=None)
        wanted.append(run(lambda f: upstream.score(**inputs, layer_intercept_fn=f)))
    real = inputs["padding_mask"].astype(bool)
    for logits, activations in wanted:
        assert relative(got, logits, real) <= row.tolerance
        assert list(seen) == list(activations) == [-1, *range(backbone.num_layers)]
        for index, x in activations.items():
            assert relative(seen[index], x, real) <= row.tolerance


@slow
@every_family
def test_captures_are_what_the_backbones_own_layers_give(name, rng):
    row = ROWS[name]
    backbone, _ = unchanged(name)
    model = bs.operate(backbone, [bs.Capture("embeddings", "blocks.*", "blocks.*.*")])
    inputs = tokens(rng, 2, 12)
    captures = model.predict_on_batch(inputs)["captures"]
    layers = {
        f"blocks.{i}.{role}": sublayer(block, path)
        for i, block in enumerate(blocks_of(backbone))
        for role, path in row.layers.items()
    }
    layers |= {f"blocks.{i}": block for i, block in enumerate(blocks_of(backbone))}
    for path, wanted in recorded(backbone, complete(name, inputs), layers).items():
        if row.stream is not None and isinstance(
            layers[path], tuple(map(type, blocks_of(backbone)))
        ):
            wanted = wanted[row.stream]
        value = np.asarray(captures[path])
        assert relative(value, wanted.reshape(value.shape)) <= row.tolerance, path


@slow
@every_family
def test_captures_of_generation_are_those_of_the_finished_text(name, rng):
    model = bs.operate(unchanged(name)[0], [bs.Capture("blocks.*", "blocks.*.*")])
    lm = bs.CachedCausalLM(model)
    lm.compile(sampler="greedy")
    prompts = ragged(rng, (4, 7), 7)
    text, captures = lm.generate(
        prompts, max_new_tokens=6, stop_token_ids=None, return_captures=True
    )
    for i, length in enumerate((4, 7)):
        ids = text["token_ids"][i : i + 1, : length + 5]
        outputs = model.predict_on_batch({"token_ids": ids, "padding_mask": np.ones_like(ids)})
        for path, value in captures.row(i).items():
            wanted = np.asarray(outputs["captures"][path][0])
            assert np.abs(value - wanted).max() <= 3e-5 * max(np.abs(wanted).max(), 1), path


@slow
@every_family
def test_every_rewrite(name, rng, tmp_path):
    """All together: each takes effect wherever its site exists, cached as uncached."""
    backbone = ROWS[name].make(num_layers=3)
    paths = bs.sites(backbone)
    edits = dict(EDITS)
    if "blocks.1.attention_pattern" not in paths:
        edits = {k: v for k, v in edits.items() if k not in ("ablate_pattern", "knockout")}
    if ROWS[name].needs_first_block:
        del edits["reorder"]
        with pytest.raises(bs.SurgeryError, match="block 1 without block 0 before it"):
            bs.operate(backbone, [bs.Reorder([1, 0])])
    if "blocks.0.mlp_hidden" not in paths:
        del edits["replace"]
        with pytest.raises(bs.SelectorError, match="matches nothing among"):
            bs.operate(backbone, [bs.Ablate("blocks.0.mlp_hidden")])
    extra = {key: {"folder": tmp_path} for key in ("sparse_autoencoder", "transcoder")}
    made = [edit(rng, backbone, **extra.get(key, {})) for key, edit in edits.items()]
    model = bs.operate(backbone, [edit.rewrite for edit in made])
    controls = {k: v for edit in made for k, v in edit.inputs.items()}
    inputs = tokens(rng, 2, TIME)
    wanted = np.asarray(model.predict_on_batch({**inputs, **controls}))
    assert relative(run(name, backbone, inputs), wanted) > 1e-3
    got = run_chunks(bs.rewire(model), inputs, [3, 1, 1, 1], **controls)[0]
    assert relative(got, wanted) <= 3e-5


@slow
@every_family
def test_lora(name, rng):
    backbone = ROWS[name].make()
    inputs = tokens(rng, 2, 12)
    before = run(name, backbone, inputs)
    opened = bs.open_backbone(backbone)
    backbone.enable_lora(2, ROWS[name].lora)
    for variable in backbone.trainable_variables:
        if "lora" in variable.path:
            variable.assign(rng.normal(0, 0.1, variable.shape))
    wanted = run(name, backbone, inputs)
    assert relative(before, wanted) > 1e-3
    assert relative(opened.predict_on_batch(inputs), wanted) <= ROWS[name].tolerance
    got = run_chunks(bs.rewire(backbone), inputs, [11, 1])[0]
    assert relative(got, wanted) <= ROWS[name].tolerance


@slow
@every_family
def test_int8(name, rng, no_collecting):
    backbone = ROWS[name].make()
    inputs = tokens(rng, 2, 12)
    before = run(name, backbone, inputs)
    opened = bs.open_backbone(backbone)
    if ROWS[name].int8_error:
        with pytest.raises(ValueError, match=ROWS[name].int8_error):
            backbone.quantize("int8")
        return
    backbone.quantize("int8")
    wanted = run(name, backbone, inputs)
    assert relative(before, wanted) > 1e-3
    uncached = opened.predict_on_batch(inputs)
    if not ROWS[name].int8_is_right:
        assert relative(uncached, before) <= 0.05 < relative(wanted, before)
        wanted = uncached
    assert relative(uncached, wanted) <= ROWS[name].tolerance
    got = run_chunks(bs.rewire(backbone), inputs, [11, 1])[0]
    assert relative(got, wanted) <= ROWS[name].tolerance


@slow
@every_family
def test_bfloat16(name, rng):
    """Rounding errs no more than in the backbone itself."""
    half = ROWS[name].make(dtype="bfloat16")
    full = ROWS[name].make()
    full.set_weights([np.asarray(w, "float32") for w in half.get_weights()])
    inputs = tokens(rng, 2, 12)
    wanted = run(name, full, inputs)
    allowed = 1.5 * relative(run(name, half, inputs), wanted) + 1e-2
    opened = np.asarray(bs.open_backbone(half).predict_on_batch(inputs), "float32")
    assert relative(opened, wanted) <= allowed
    cached = run_chunks(bs.rewire(half), inputs, [11, 1])[0]
    assert relative(cached, wanted) <= allowed


@slow
@every_family
def test_fit_changes_what_is_computed(name, rng):
    backbone = ROWS[name].make()
    lm = bs.CachedCausalLM(backbone)
    lm.compile(optimizer=keras.optimizers.SGD(0.01), sampler="greedy")
    ids = tokens(rng, 2, 13)["token_ids"]
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])}
    before = run(name, backbone, x)
    losses = lm.fit(x, ids[:, 1:], epochs=2, shuffle=False, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    assert relative(run(name, backbone, x), before) > 1e-5


def edited(name):
    """Make the edit that the next test keeps."""
    backbone = ROWS[name].make(num_layers=3)
    vector = np.random.default_rng(1).normal(size=32).astype("float32")
    rewrites = [
        bs.Steer("mood", {1: vector}, strength=0.7),
        bs.Ablate("blocks.0.head_outputs", heads=[1]),
    ]
    return bs.operate(backbone, rewrites)


def outputs_of(model):
    return np.asarray(model.predict_on_batch(tokens(np.random.default_rng(2), 2, 9)))


def load_all(folder):
    """Load each recipe, in another process, and keep what the models compute."""
    results = {}
    for name in ROWS:
        keras.utils.clear_session(free_memory=False)
        backbone = ROWS[name].make(num_layers=3)
        results[name] = outputs_of(bs.load_recipe(Path(folder) / name, backbone))
    np.savez(Path(folder) / "results.npz", **results)


@slow
def test_recipes_are_bit_equal_in_another_process(tmp_path):
    wanted = {}
    for name in ROWS:
        keras.utils.clear_session(free_memory=False)
        model = edited(name)
        bs.save_recipe(model, tmp_path / name)
        wanted[name] = outputs_of(model)
    code = f"from tests.test_family_table import load_all; load_all({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)
    results = np.load(tmp_path / "results.npz")
    for name, value in wanted.items():
        assert np.array_equal(results[name], value), name
