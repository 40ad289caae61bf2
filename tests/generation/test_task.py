"""`CachedCausalLM` is a KerasHub task: generation sees at once what is done to the weights."""

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation import loop
from tests.helpers import FAMILIES, TASKS, make_gpt2, ragged

OPTIONS = {"max_new_tokens": 12, "stop_token_ids": None}


@pytest.fixture
def backbone(family):
    """Deep enough for what it writes to depend on more than the last token."""
    return FAMILIES[family](num_layers=4)


@pytest.fixture(params=["gpt2", "gemma2"])
def family(request):
    return request.param


def greedy(lm, inputs):
    lm.compile(sampler="greedy")
    return lm.generate(inputs, **OPTIONS)["token_ids"]


def wanted(family, backbone, inputs):
    task = TASKS[family](backbone=backbone, preprocessor=None)
    task.compile(sampler="greedy")
    width = inputs["token_ids"].shape[1] + OPTIONS["max_new_tokens"]
    padded = {k: np.pad(v, ((0, 0), (0, width - v.shape[1]))) for k, v in inputs.items()}
    return np.asarray(task.generate(padded, stop_token_ids=None)["token_ids"])


def batch(rng):
    ids = rng.integers(1, 60, (8, 10))
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((8, 9), "int32")}
    return x, ids[:, 1:], np.ones((8, 9))


@pytest.mark.slow
def test_fit_changes_what_is_generated(family, backbone, rng):
    lm = bs.CachedCausalLM(bs.operate(backbone, []))
    inputs = ragged(rng, (4, 4), 4)
    before = greedy(lm, inputs)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.5))
    x, y, weight = batch(rng)
    history = lm.fit(x, y, sample_weight=weight, epochs=3, shuffle=False, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    after = lm.generate(inputs, **OPTIONS)["token_ids"]
    assert not np.array_equal(before, after)
    assert np.array_equal(after, wanted(family, backbone, inputs))
    assert np.isfinite(lm.evaluate(x, y, sample_weight=weight, verbose=0)).all()


@pytest.mark.slow
def test_fit_equals_kerashub(family, rng):
    x, y, weight = batch(rng)
    losses = []
    for make in (lambda b: TASKS[family](backbone=b, preprocessor=None), bs.CachedCausalLM):
        lm = make(FAMILIES[family]())
        lm.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.1))
        history = lm.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    assert np.allclose(*losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("edited", [False, True])
def test_lora(family, backbone, rng, edited):
    lm = bs.CachedCausalLM(bs.operate(backbone, []) if edited else backbone)
    inputs = ragged(rng, (4, 4), 4)
    before = greedy(lm, inputs)
    lm.backbone.enable_lora(2)
    assert np.array_equal(greedy(lm, inputs), before)
    for variable in backbone.trainable_variables:
        variable.assign(rng.normal(0, 0.6, variable.shape))
    after = greedy(lm, inputs)
    assert not np.array_equal(after, before)
    assert np.array_equal(after, wanted(family, backbone, inputs))
    count = lm.programs.compilations["decode"]
    backbone.trainable_variables[0].assign(
        rng.normal(0, 0.6, backbone.trainable_variables[0].shape)
    )
    greedy(lm, inputs)
    assert lm.programs.compilations["decode"] == count


def tuned(backbone):
    """Return the layers of a backbone that have LoRA factors, with all of them filled."""
    backbone.enable_lora(2)
    rng = np.random.default_rng(1)
    for variable in backbone.trainable_variables:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    layers = [x for x in backbone._flatten_layers() if getattr(x, "lora_enabled", False)]
    assert layers
    return layers


@pytest.mark.slow
def test_what_keras_compiled_follows_lora_too():
    """Keras keeps its functions until `compile`; a task of KerasHub goes on with the old alpha."""
    backbone = make_gpt2(num_layers=1)
    layers = tuned(backbone)
    ids = np.array([[1, 2, 3, 4]])
    x, y = {"token_ids": ids, "padding_mask": np.ones_like(ids)}, ids + 1

    def fresh():
        lm = bs.CachedCausalLM(backbone)
        lm.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
        return lm

    def answers(lm):
        values = [v.numpy() for v in backbone.trainable_variables]
        found = [lm.predict(x, verbose=0), lm.evaluate(x, y, verbose=0)[0], lm.predict_on_batch(x)]
        found.append(lm.train_on_batch(x, y)[0])
        for variable, value in zip(backbone.trainable_variables, values, strict=True):
            variable.assign(value)
        return found

    lm = fresh()
    before = answers(lm)
    kept = lm.train_function, lm.test_function, lm.predict_function  # as by an error's traceback
    assert all(kept)
    for layer in layers:
        layer.lora_alpha = 40.0
    for one, other, old in zip(answers(lm), answers(fresh()), before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert not np.allclose(one, old, rtol=1e-3)


@pytest.mark.slow
def test_lora_that_is_scaled_and_switched_off(rng):
    """`lora_alpha` and `lora_enabled` are no variables, but reach compiled programs too."""
    backbone = make_gpt2(num_layers=2)
    layers = tuned(backbone)
    lm = bs.CachedCausalLM(bs.operate(backbone, []))
    inputs, row = ragged(rng, (4, 4), 4), np.arange(1, 7)

    def answers(lm):
        return [
            greedy(lm, inputs),
            bs.logit_lens(lm, row).probabilities,
            bs.attribution(lm, row, target=3, at="blocks.*").values,
        ]

    before, seen = answers(lm), []
    engine = bs.Engine(lm, rows=2, length=32)
    rows = [{k: v[i : i + 1] for k, v in inputs.items()} for i in range(2)]
    for setting, value in {"lora_alpha": 40.0, "lora_enabled": False}.items():
        for layer in layers:
            setattr(layer, setting, value)
        found = answers(lm)
        fresh = answers(bs.CachedCausalLM(bs.operate(backbone, [])))
        for one, other, old in zip(found, fresh, before, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            assert not np.allclose(one, old, rtol=1e-3)
        texts = [engine.submit(x, **OPTIONS).result() for x in rows]
        seen.append([np.ravel(t).tolist() for t in texts])
        assert seen[-1] == [t[t != 0].tolist() for t in found[0]]
        before = found
    engine.close()


@pytest.mark.slow
def test_lora_set_by_another_thread_while_a_program_is_made(rng, monkeypatch):
    """No program is kept for a setting other than it was made under."""
    backbone = make_gpt2(num_layers=2)
    layers = tuned(backbone)
    inputs, own = ragged(rng, (4, 4), 4), layers[0].lora_alpha
    wanted = {}
    for alpha in (40.0, own):
        layers[0].lora_alpha = alpha
        wanted[alpha] = greedy(bs.CachedCausalLM(bs.operate(backbone, [])), inputs)
    lm = bs.CachedCausalLM(bs.operate(backbone, []))
    prefill, alphas = loop.prefill, iter([40.0])

    def late(*args):
        state = prefill(*args)
        layers[0].lora_alpha = next(alphas, layers[0].lora_alpha)
        return state

    monkeypatch.setattr(loop, "prefill", late)
    np.testing.assert_array_equal(greedy(lm, inputs), wanted[40.0])
    layers[0].lora_alpha = own
    np.testing.assert_array_equal(greedy(lm, inputs), wanted[own])
    assert not np.array_equal(wanted[40.0], wanted[own])


@pytest.mark.slow
@pytest.mark.parametrize("through", ["lm", "backbone", "edited"])
def test_int8(family, backbone, rng, through, no_collecting):
    edited = bs.operate(backbone, [])
    lm = bs.CachedCausalLM(edited if through == "edited" else backbone)
    inputs = ragged(rng, (4, 4), 4)
    greedy(lm, inputs)
    {"lm": lm, "backbone": backbone, "edited": edited}[through].quantize("int8")
    kernels = [v for v in backbone.variables if str(v.dtype) == "int8"]
    assert len(kernels) > 4 * backbone.num_layers
    assert np.array_equal(greedy(lm, inputs), wanted(family, backbone, inputs))


@pytest.mark.slow
def test_weights_are_saved_and_loaded_through_the_backbone(family, backbone, rng, tmp_path):
    edited = bs.operate(backbone, [bs.Steer("s", {0: np.ones(32)})])
    path = str(tmp_path / "edited.weights.h5")
    edited.save_weights(path)
    other = FAMILIES[family](seed=3, num_layers=4)
    changed = bs.operate(other, [])
    lm = bs.CachedCausalLM(changed)
    inputs = ragged(rng, (4, 4), 4)
    before = greedy(lm, inputs)
    changed.load_weights(path)
    for a, b in zip(other.weights, backbone.weights, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(greedy(lm, inputs), before)
    assert np.array_equal(greedy(lm, inputs), wanted(family, backbone, inputs))


def test_weights_of_a_task_survive_an_edit(rng, tmp_path):
    """A block is skipped, and saved all the same: each weight comes back where it was."""
    backbone, path = make_gpt2(), str(tmp_path / "task.weights.h5")

    def skip(layer, *args, **kwargs):
        return args[0] if layer.name == "transformer_layer_1" else layer(*args, **kwargs)

    bs.CachedCausalLM(bs.operate(backbone, [skip])).save_weights(path)
    other = make_gpt2(seed=5)
    bs.CachedCausalLM(other).load_weights(path)
    for a, b in zip(other.weights, backbone.weights, strict=True):
        assert np.array_equal(a, b)


def test_default_sampler_is_that_of_kerashub(family, backbone):
    task = TASKS[family](backbone=backbone, preprocessor=None)
    assert type(bs.CachedCausalLM(backbone).sampler) is type(task.sampler)


def test_it_is_a_kerashub_causal_lm(backbone):
    lm = bs.CachedCausalLM(backbone)
    assert isinstance(lm, keras_hub.models.CausalLM)
    assert lm.backbone is backbone
    assert lm.backbone_with_cache.name == "backbone_with_cache"


class ControlVectorLayer(keras.layers.Layer):
    """The layer that the two keras-hub examples put behind each block."""

    def build(self, shape):
        self.vector = self.add_weight(shape=(shape[-1],), initializer="random_normal")

    def call(self, x):
        return x + self.vector


@pytest.mark.slow
@pytest.mark.parametrize("how", ["clone", "operate"])
def test_the_examples_of_keras_hub_1598(family, backbone, rng, how):
    def clone_fn(layer, *args, **kwargs):
        if type(layer) is type(backbone.transformer_layers[0]):
            x = layer(*args, **kwargs)
            return ControlVectorLayer()(x)
        return layer(*args, **kwargs)

    if how == "clone":
        outputs = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
        model = keras.Model(backbone.input, outputs)
    else:
        model = bs.operate(backbone, [clone_fn])
    lm = bs.CachedCausalLM(model)
    inputs = ragged(rng, (4, 4), 4)
    vectors = [v for v in lm.variables if v.path.endswith("control_vector_layer/vector")]
    vectors = vectors or [v for v in lm.variables if "control_vector" in v.path]
    assert len(vectors) == backbone.num_layers
    for vector in vectors:
        vector.assign(np.zeros(32))
    assert np.array_equal(greedy(lm, inputs), wanted(family, backbone, inputs))
    for vector in vectors:
        vector.assign(rng.normal(0, 2, 32))
    got = greedy(lm, inputs)
    assert not np.array_equal(got, wanted(family, backbone, inputs))
    assert np.array_equal(got, _token_by_token(model, lm, inputs))
    assert max(bs.check(model).errors.values()) <= 5e-6


def _token_by_token(model, lm, inputs):
    """Greedy generation by the uncached model, one whole pass for each token."""
    ids = inputs["token_ids"]
    width = ids.shape[1] + OPTIONS["max_new_tokens"]
    padded = np.pad(ids, ((0, 0), (0, width - ids.shape[1])))
    mask = np.ones_like(padded)
    embedding = np.asarray(lm.opened.token_embedding.embeddings)
    for slot in range(ids.shape[1], width):
        hidden = model.predict_on_batch({"token_ids": padded, "padding_mask": mask})
        padded[:, slot] = (hidden[:, slot - 1] @ embedding.T).argmax(-1)
    return padded


@pytest.mark.slow
def test_an_input_that_a_user_adds_is_a_control(rng):
    """A plain graph with a strength of its own, used inside a nested part of it."""
    backbone = make_gpt2()
    strength = keras.Input((), name="strength")

    class Scaled(keras.layers.Layer):
        def call(self, x, strength):
            return x + strength[:, None, None] * x[..., ::-1]

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        if layer.name == "transformer_layer_1":
            return Scaled()(result, strength)
        return result

    outputs = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    model = keras.Model({**backbone.input, "strength": strength}, outputs)
    lm = bs.CachedCausalLM(model)
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (4, 4), 4)
    zero = lm.generate(inputs, controls={"strength": 0.0}, **OPTIONS)["token_ids"]
    assert np.array_equal(zero, wanted("gpt2", backbone, inputs))
    mixed = lm.generate(inputs, controls={"strength": [0.0, 9.0]}, **OPTIONS)["token_ids"]
    assert np.array_equal(mixed[0], zero[0])
    assert not np.array_equal(mixed[1], zero[1])
    with pytest.raises(bs.SurgeryError, match="'strength': expected a value"):
        lm.generate(inputs, **OPTIONS)
    with pytest.raises(bs.SurgeryError, match="numbers that broadcast to"):
        lm.generate(inputs, controls={"strength": np.ones(3)}, **OPTIONS)
    cache = bs.new_cache(lm.backbone_with_cache, 2, 8)
    for run in (
        lambda: lm.score(inputs["token_ids"]),
        lambda: lm.call_with_cache(inputs["token_ids"], cache, 0),
        lambda: lm.opened(inputs),
        lambda: lm.opened.predict(inputs, verbose=0),
        lambda: bs.check(model),
    ):
        with pytest.raises(bs.SurgeryError, match="at input 'strength': expected a value, since"):
            run()
    again = lm.generate(inputs, controls={"strength": 0.0}, **OPTIONS)["token_ids"]
    assert np.array_equal(again, zero)
    assert max(bs.check(model, {"strength": 2.0}).errors.values()) <= 1e-5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_stay_where_keras_fails(backbone):
    """On JAX `predict` of Keras itself loses them, and those of whatever shares its layers."""
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.LowRank("blocks.*.query", rank=2)]))
    lm.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    before = [np.array(v) for v in lm.variables]
    ids = {"token_ids": np.ones((2, 3), "int32")}
    for run in (lm.predict, lm.evaluate, lm.fit, lm.opened.predict):
        with pytest.raises((ValueError, bs.SurgeryError)):
            run(ids, verbose=0)
        for value, variable in zip(before, lm.variables, strict=True):
            np.testing.assert_array_equal(variable, value)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["int8", "lora"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_optimizer_of_other_variables_is_to_be_compiled_anew(rng, change):
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    lm.optimizer.build(lm.trainable_variables)  # as a first `fit` does
    lm.backbone.enable_lora(2) if change == "lora" else lm.quantize("int8")
    before = [np.array(v) for v in lm.variables]
    x, y, _ = batch(rng)
    with pytest.raises(bs.SurgeryError, match=r"variables that learn now.*Call `compile` again"):
        lm.fit(x, y, verbose=0)
    for value, variable in zip(before, lm.variables, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.slow
def test_generation_without_weights_says_so(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    other = bs.CachedCausalLM(make_gpt2())
    x, *_ = batch(rng)
    # `Callback.model` would put the weights back first; another thread does not.
    row = np.arange(1, 7)
    for use in (
        lambda: greedy(lm, x),
        lambda: lm.score(row[None]),
        lambda: bs.logit_lens(lm, row),
        lambda: bs.attribution(lm, row, target=3),
    ):
        use()
        meanwhile = keras.callbacks.Callback()
        meanwhile.on_predict_batch_end = lambda batch, logs=None, use=use: use()
        with pytest.raises(bs.SurgeryError, match=r"weights that are in place. .* `predict` of K"):
            lm.predict(x, callbacks=[meanwhile], verbose=0)
    for one, another in zip(lm.backbone.variables, other.backbone.variables, strict=True):
        another.assign(one)
    lm.predict(x, verbose=0)
    with pytest.raises(bs.SurgeryError, match="if the weights are gone, load them again"):
        greedy(other, x)


class Interrupt(keras.callbacks.Callback):
    """Stop where a batch ends, as a user does by Ctrl-C."""

    def on_test_batch_end(self, batch, logs=None):
        raise KeyboardInterrupt

    on_predict_batch_end = on_test_batch_end


@pytest.mark.slow
@pytest.mark.parametrize("way", ["evaluate", "predict"])
def test_weights_stay_where_keras_is_interrupted(rng, way):
    backbone = make_gpt2()
    plain, lm = (bs.CachedCausalLM(x) for x in (backbone, bs.operate(backbone, [])))
    lm.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [np.array(v) for v in plain.variables]
    x, y, _ = batch(rng)
    with pytest.raises(KeyboardInterrupt):
        getattr(lm, way)(x, *[y] * (way == "evaluate"), batch_size=2, callbacks=[Interrupt()])
    for value, variable in zip(before, plain.variables, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.slow
def test_a_final_norm_that_is_scaled_makes_no_sparse_logits(rng):
    """Keras takes `x * 2.0` to be sparse. Warnings, which there were, are errors in tests."""
    backbone = make_gpt2(num_layers=1)

    def scale_norm(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        return x * 2.0 if layer.name == "site_final_norm" else x

    edited = bs.operate(backbone, [bs.Steer("mood", {0: np.ones(32)}, strength=0), scale_norm])
    assert edited.output.sparse
    lm, inputs = bs.CachedCausalLM(edited), ragged(rng, (4, 4), 4)
    states = np.asarray(backbone(inputs)) * 2
    wanted = states @ np.asarray(backbone.token_embedding.embeddings).T
    np.testing.assert_allclose(lm(inputs), wanted, rtol=1e-5, atol=1e-5)
