"""Every rewrite on a family, cached and uncached, against plain NumPy.

A rewrite is an entry of `tests/edits.py`. The families here are those that `tests/numpy_models.py`
has in NumPy; `test_family_table.py` has all of them.
"""

import itertools
import json

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.controls import bind_controls
from tests.edits import EDITS, SIZE, TIME
from tests.families import FAMILIES, ROWS
from tests.helpers import ragged, relative
from tests.numpy_models import Model
from tests.reference import run_chunks, tokens

EXACT = 1e-5


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def backbone(family):
    return ROWS[family].make(num_layers=3)


def make(names, backbone, rng, folder):
    """Make the edits of these names, the edited model, and the same in NumPy."""
    extra = {key: {"folder": folder} for key in ("sparse_autoencoder", "transcoder")}
    edits = [EDITS[name](rng, backbone, **extra.get(name, {})) for name in names]
    rewrites = [edit.rewrite for edit in edits]
    edited = bs.operate(backbone, [*rewrites, bs.Capture("blocks.*", "blocks.*.*")])
    inputs = {k: v for edit in edits for k, v in edit.inputs.items()}
    reference = Model(backbone)
    for edit in edits:
        edit.in_numpy(reference)
    return edited, inputs, reference


def assert_equal(names, backbone, rng, folder, chunked):
    edited, controls, reference = make(names, backbone, rng, folder)
    inputs = tokens(rng, 2, TIME)
    wanted = reference(inputs["token_ids"])
    captures = reference.captures()
    # One operation at a time: what is compiled here is generation, below.
    outputs = edited({**inputs, **controls})
    results, seen = [outputs["hidden_states"]], [outputs["captures"]]
    cached = bs.rewire(edited)
    for chunks in chunked:
        hidden, captured = run_chunks(cached, inputs, chunks, compiled=False, **controls)
        results.append(hidden)
        seen.append(captured)
    assert relative(Model(backbone)(inputs["token_ids"]), wanted) > 1e-3
    for hidden, captured in zip(results, seen, strict=True):
        assert relative(hidden, wanted) <= EXACT
        for path, value in captured.items():
            if path in captures:
                assert relative(value, captures[path]) <= EXACT, path


@pytest.mark.by_default(1)
def test_numpy_models_are_the_backbones(backbone, rng):
    inputs = tokens(rng, 2, 12)
    got = backbone.predict_on_batch(inputs)
    assert relative(Model(backbone)(inputs["token_ids"]), got) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EDITS))
def test_each_rewrite(backbone, rng, tmp_path, name):
    assert_equal([name], backbone, rng, tmp_path, [[TIME], [3, 1, 1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES)[:1], indirect=True)
@pytest.mark.parametrize("pair", list(itertools.combinations(EDITS, 2)), ids="-".join)
def test_each_pair(backbone, rng, tmp_path, pair):
    assert_equal(pair, backbone, rng, tmp_path, [[3, 1, 1, 1]])


@pytest.mark.slow
def test_all_together(backbone, rng, tmp_path):
    assert_equal(list(EDITS), backbone, rng, tmp_path, [[3, 1, 1, 1]])


@pytest.mark.slow
def test_all_together_in_reverse(backbone, rng, tmp_path):
    assert_equal(list(EDITS)[::-1], backbone, rng, tmp_path, [[3, 1, 1, 1]])


CONTROLS = {
    "mood": [1.5, -0.5],
    "patch": {"positions": [[2], [5]], "values": np.ones((2, 1, SIZE))},
    "ablate": [1.0, 0.0],
    "skip": [0.25, 0.0],
}


@pytest.mark.slow
def test_all_together_in_generation(backbone, rng, tmp_path):
    """Every token follows from an uncached pass over the text, and so do the captures."""
    edited, _, _ = make(list(EDITS), backbone, rng, tmp_path)
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    prompts = ragged(rng, (4, 7), 7)
    options = {"max_new_tokens": 6, "stop_token_ids": None, "controls": CONTROLS}
    text, captures = lm.generate(prompts, return_captures=True, **options)
    controls = bind_controls(edited, CONTROLS, np.array([4, 7]))
    for i, length in enumerate((4, 7)):
        ids = text["token_ids"][i : i + 1, : length + 5]
        inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
        row = {name: value[i : i + 1] for name, value in controls.items()}
        outputs = edited.predict_on_batch({**inputs, **row})
        logits = lm.opened.token_embedding(outputs["hidden_states"], reverse=True)
        new = text["token_ids"][i, length : length + 6]
        assert np.array_equal(np.asarray(logits)[0, length - 1 :].argmax(-1), new)
        for path, value in captures.row(i).items():
            wanted = np.asarray(outputs["captures"][path][0])
            assert np.abs(value - wanted).max() <= EXACT * max(np.abs(wanted).max(), 1), path


@pytest.mark.slow
def test_all_together_in_bfloat16_with_lora(family, rng, tmp_path):
    backbone = ROWS[family].make(num_layers=3, dtype="bfloat16")
    backbone.enable_lora(2)
    for variable in backbone.trainable_variables:
        variable.assign(rng.normal(0, 0.05, variable.shape))
    edited, controls, _ = make(list(EDITS), backbone, rng, tmp_path)
    inputs = tokens(rng, 2, TIME)
    wanted = edited.predict_on_batch({**inputs, **controls})["hidden_states"]
    cached = bs.rewire(edited)
    assert {t.dtype for pair in cached.input["cache"] for t in pair.values()} == {"bfloat16"}
    got = run_chunks(cached, inputs, [3, 1, 1, 1], **controls)[0]
    assert relative(got, wanted) <= 3e-2


def fingerprint(backbone, inputs):
    """Everything about a backbone that an edit could have changed."""
    layers = list(backbone._flatten_layers())
    return {
        "outputs": np.asarray(backbone.predict_on_batch(inputs)).tobytes(),
        "config": json.dumps(backbone.get_config(), default=str),
        "graph": graph_of(backbone),
        "calls": [(layer.name, layer.call.__func__, layer.trainable) for layer in layers],
        "attributes": [sorted(vars(layer)) for layer in layers],
        "weights": [(v.path, v.trainable, np.asarray(v).tobytes()) for v in backbone.variables],
    }


def graph_of(model):
    return [
        (op.name, [t.name for t in node.input_tensors], [id(t) for t in node.outputs])
        for depth in sorted(model._nodes_by_depth)
        for node in model._nodes_by_depth[depth]
        for op in [node.operation]
    ]


@pytest.mark.slow
def test_the_source_stays_what_it_was(backbone, rng, tmp_path):
    inputs = tokens(rng, 2, TIME)
    before = fingerprint(backbone, inputs)
    edited, controls, _ = make(list(EDITS), backbone, rng, tmp_path)
    edited.predict_on_batch({**inputs, **controls})
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.1))
    ids = inputs["token_ids"]
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])}
    lm.fit(x, ids[:, 1:], epochs=1, shuffle=False, verbose=0)
    lm.generate(ragged(rng, (4, 7), 7), max_new_tokens=2, stop_token_ids=None)
    plain = bs.CachedCausalLM(backbone)
    bs.patch_grid(plain, ids[0], ids[1], metric=(1, 2))
    bs.logit_lens(plain, ids[0])
    bs.attribution(plain, ids[0], target=1)
    layer = backbone.transformer_layers[1]
    inside = next(
        x.name
        for x in layer._layers
        if isinstance(x, keras.layers.EinsumDense | keras.layers.Dense)
    )
    nested = bs.rewrite_nested(backbone, f"{layer.name}.{inside}", lambda x, *args: 2 * x(*args))
    assert relative(nested.predict_on_batch(inputs), backbone.predict_on_batch(inputs)) > 1e-3
    after = fingerprint(backbone, inputs)
    for what, value in before.items():
        assert after[what] == value, what
