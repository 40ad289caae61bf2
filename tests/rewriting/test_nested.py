"""`rewrite_nested` changes what runs inside composite layers, in the new model and nowhere else."""

import collections
import threading
from pathlib import Path

import h5py
import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import backbone_surgery as bs
from tests.helpers import make_gpt2, ragged, relative

IMAGES = [np.random.default_rng(k).normal(size=(2, 5, 5, 2)).astype("float32") for k in range(2)]
X = np.random.default_rng(3).normal(size=(2, 3)).astype("float32")


def double(layer, *args, **kwargs):
    return 2 * layer(*args, **kwargs)


class ConvNorm(layers.Layer):
    """Two layers in a layer: the example of the TensorFlow Model Optimization issue."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(3, 3, padding="valid", bias_initializer="normal")
        self.norm = layers.BatchNormalization()

    def call(self, x):
        return self.norm(self.conv(x))


class Residual(layers.Layer):
    """Some layers in any kind of holder, called one after the other."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def call(self, x):
        return x + self.run(x)

    def run(self, x):
        for layer in layers_of(self.inner):
            x = layer(x)
        return x


def layers_of(inner):
    if isinstance(inner, dict):
        inner = inner.values()
    if isinstance(inner, list | tuple | type({}.values())):
        return [layer for item in inner for layer in layers_of(item)]
    return [inner]


def dense(name=None, **kwargs):
    return layers.Dense(3, "tanh", name=name, bias_initializer="normal", **kwargs)


def model_of(*composites, shape=(3,)):
    x = y = keras.Input(shape)
    for composite in composites:
        y = composite(y)
    return keras.Model(x, y)


def predict(model, x=X):
    return ops.convert_to_numpy(model.predict_on_batch(x))


def tanh_dense(layer, x):
    return np.tanh(x @ ops.convert_to_numpy(layer.kernel) + ops.convert_to_numpy(layer.bias))


NODES = ("_inbound_nodes", "_outbound_nodes")


def state(layer):
    """Everything that a layer is, and the nodes that are on it."""
    held = {name: (id(value), str(value)) for name, value in vars(layer).items()}
    held |= {name: list(map(id, getattr(layer, name))) for name in NODES}
    return type(layer), held, [state(sub) for sub in layer._layers]


# The example.


class FakeQuantised(layers.Layer):
    """A convolution with an 8-bit kernel, whose range is learned, in floating point."""

    def build(self, shape):
        self.range = self.add_weight(shape=(), initializer="ones", name="range")

    def call(self, x, kernel, bias):
        step = self.range / 127
        rounded = ops.clip(ops.round(kernel / step), -127, 127) * step
        kernel = kernel + ops.stop_gradient(rounded - kernel) + (self.range - self.range)
        return ops.conv(x, kernel, padding="valid") + bias


def siamese(extractor):
    a, b = keras.Input((5, 5, 2)), keras.Input((5, 5, 2))
    return keras.Model([a, b], [extractor(a), extractor(b)])


def test_fake_quantised_convolution_in_a_shared_extractor():
    extractor = ConvNorm(name="extractor")
    model = siamese(extractor)
    for variable in extractor.norm.variables:
        variable.assign(np.random.default_rng(1).uniform(0.5, 2, variable.shape))
    before, was = model.predict_on_batch(IMAGES), state(extractor)
    quantised = FakeQuantised()

    def fake_quantise(layer, x):
        return quantised(x, ops.convert_to_tensor(layer.kernel), ops.convert_to_tensor(layer.bias))

    new = bs.rewrite_nested(model, "extractor.conv", fake_quantise)
    for image, got in zip(IMAGES, new.predict_on_batch(IMAGES), strict=True):
        kernel = np.clip(np.round(np.asarray(extractor.conv.kernel) * 127), -127, 127) / 127
        np.testing.assert_allclose(got, conv_norm(extractor, kernel, image), rtol=1e-4, atol=1e-5)
    assert not np.allclose(before[0], new.predict_on_batch(IMAGES)[0], atol=1e-5)
    assert all(map(np.array_equal, model.predict_on_batch(IMAGES), before))
    assert state(extractor) == was
    assert {id(v) for v in new.variables} == {
        id(v) for v in [*model.variables, *quantised.variables]
    }
    assert len(new.variables) == 7


def conv_norm(extractor, kernel, image):
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(1, 2))
    y = np.einsum("bhwcij,ijco->bhwo", windows, kernel) + np.asarray(extractor.conv.bias)
    gamma, beta, mean, variance = map(np.asarray, extractor.norm.variables)
    return (y - mean) / np.sqrt(variance + extractor.norm.epsilon) * gamma + beta


def test_fit_trains_shared_variables_and_moving_averages():
    extractor, scale = ConvNorm(name="extractor"), Scale()
    model = model_of(extractor, shape=(5, 5, 2))
    new = bs.rewrite_nested(model, "extractor.conv", lambda layer, x: scale(layer(x)))
    scale.scale.assign(3.0)
    kernel, bias = map(np.asarray, extractor.conv.variables)
    targets = np.ones((2, 3, 3, 3))
    new.compile(keras.optimizers.SGD(0.0), "mse")
    new.fit(IMAGES[0], targets, verbose=0, shuffle=False)
    windows = np.lib.stride_tricks.sliding_window_view(IMAGES[0], (3, 3), axis=(1, 2))
    mean = 3 * (np.einsum("bhwcij,ijco->bhwo", windows, kernel) + bias).mean((0, 1, 2))
    np.testing.assert_allclose(extractor.norm.moving_mean, 0.01 * mean, rtol=1e-4, atol=1e-6)
    new.compile(keras.optimizers.SGD(0.1), "mse")
    new.fit(IMAGES[0], targets, verbose=0, shuffle=False)
    assert not np.array_equal(kernel, extractor.conv.kernel)
    assert float(scale.scale) != 3.0


class Scale(layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


# What is reached, and how.

Pair = collections.namedtuple("Pair", ["a", "b"])


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("hold", "path", "residuals"),
    [
        (lambda a, b: [a, b], "inner.1", 1),
        (lambda a, b: (a, b), "inner.1", 1),
        (lambda a, b: Pair(a, b), "inner.1", 1),
        (lambda a, b: {"a": a, "b": b}, "inner.b", 1),
        (lambda a, b: [a, ({"deep": b},)], "inner.1.0.deep", 1),
        (lambda a, b: [a, b], "second", 1),
        (lambda a, b: keras.Sequential([a, b]), "inner.second", 1),
        (lambda a, b: keras.Sequential([a, keras.Sequential([b], name="s")]), "inner.s.second", 1),
        (lambda a, b: model_of(a, b), "inner.second", 1),
        (lambda a, b: [a, Residual([b], name="r")], "inner.1.inner.0", 2),
        (lambda a, b: [a, Residual([b], name="r")], "r.second", 2),
    ],
)
def test_layers_in_any_holder_are_reached(hold, path, residuals):
    first, second = dense("first"), dense("second")
    composite = Residual(hold(first, second), name="outer")
    model = model_of(composite)
    before, was = predict(model), state(composite)
    new = bs.rewrite_nested(model, f"outer.{path}", double)
    y = tanh_dense(first, X)
    wanted = X + 2 * tanh_dense(second, y) + (y if residuals == 2 else 0)
    np.testing.assert_allclose(predict(new), wanted, rtol=1e-5, atol=1e-6)
    assert np.array_equal(predict(model), before)
    assert state(composite) == was
    assert [id(v) for v in new.variables] == [id(v) for v in model.variables]


@pytest.mark.parametrize("build", [keras.Sequential, lambda held: model_of(*held)])
def test_layers_of_a_model_called_one_by_one_are_reached(build):
    class OneByOne(Residual):
        def build(self, shape):
            self.inner.build(shape)

        def run(self, x):
            return self.inner.get_layer("second")(self.inner.get_layer("first")(x))

    first, second = dense("first"), dense("second")
    model = model_of(OneByOne(build([first, second]), name="outer"))
    new = bs.rewrite_nested(model, "outer.inner.first", double)
    wanted = X + tanh_dense(second, 2 * tanh_dense(first, X))
    np.testing.assert_allclose(predict(new), wanted, rtol=1e-5, atol=1e-6)


def test_rewritten_model_can_still_be_taken_apart():
    class Both(Residual):
        def run(self, x):
            return self.inner(x) + self.inner.layers[-1](x)

    first, second = dense("first"), dense("second")
    model = model_of(Both(keras.Sequential([first, second]), name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", double)
    y = 2 * tanh_dense(second, tanh_dense(first, X)) + tanh_dense(second, X)
    np.testing.assert_allclose(predict(new), X + y, rtol=1e-5, atol=1e-6)


def test_layer_that_is_run_by_its_method_call_is_reached():
    class Direct(Residual):
        def run(self, x):
            return self.inner.call(x) + ops.sum(self.inner.kernel)

    inner = dense("inner")
    inner.build((None, 3))
    new = bs.rewrite_nested(model_of(Direct(inner, name="outer")), "outer.inner", double)
    wanted = X + 2 * tanh_dense(inner, X) + np.asarray(inner.kernel).sum()
    np.testing.assert_allclose(predict(new), wanted, rtol=1e-5, atol=1e-6)


def test_paths_lead_through_nested_models_and_end_anywhere():
    inner = dense("inner")
    encoder = keras.Model(*ends(Residual(inner, name="block"), dense("last")), name="encoder")
    x = keras.Input((3,))
    model = keras.Model(x, encoder(encoder(x)))

    def block(x):
        return tanh_dense(encoder.layers[-1], x + 2 * tanh_dense(inner, x))

    new = bs.rewrite_nested(model, "encoder.block.inner", double)
    np.testing.assert_allclose(predict(new), block(block(X)), rtol=1e-5, atol=1e-6)
    whole = bs.rewrite_nested(keras.Sequential([keras.Input((3,)), inner]), "inner", double)
    np.testing.assert_allclose(predict(whole), 2 * tanh_dense(inner, X), rtol=1e-5, atol=1e-6)


def ends(*composites):
    model = model_of(*composites)
    return model.inputs, model.outputs


def test_each_call_is_seen_with_its_arguments():
    class Twice(Residual):
        def run(self, x):
            return self.inner(self.inner(x, training=False), training=True)

    seen = []

    def spy(layer, x, training):
        seen.append(training)
        return layer(x) * (3 if training else 1)

    inner = layers.Dropout(0.0, name="inner")
    new = bs.rewrite_nested(model_of(Twice(inner, name="outer")), "outer.inner", spy)
    seen.clear()
    np.testing.assert_allclose(predict(new), X + 3 * X, rtol=1e-6)
    assert seen == [False, True]


def test_sub_layer_called_in_training_only():
    class Noisy(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.noise = layers.Identity()

        def call(self, x, training=False):
            return self.noise(x) if training else x

    new = bs.rewrite_nested(model_of(Noisy(name="outer")), "outer.noise", lambda layer, x: x + 7)
    assert np.array_equal(predict(new), X)
    np.testing.assert_allclose(new(X, training=True), X + 7, rtol=1e-6)


def test_declared_output_shape_is_traced_again():
    class Declares(Residual):
        def call(self, x):
            return self.inner(x)

        def compute_output_shape(self, shape):
            return shape

    inner, wide = dense(), layers.Dense(5)
    model = model_of(Declares(inner, name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", lambda layer, x: wide(layer(x)))
    assert new.output_shape == (None, 5)
    assert model.output_shape == (None, 3)
    wanted = tanh_dense(inner, X) @ np.asarray(wide.kernel)
    np.testing.assert_allclose(predict(new), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_layers_of_keras_itself():
    sequence = np.random.default_rng(4).normal(size=(2, 4, 3)).astype("float32")
    x = keras.Input((4, 3))
    attention = layers.MultiHeadAttention(2, 2, name="attention")
    each, lstm = layers.TimeDistributed(dense(), name="each"), layers.LSTM(3, name="lstm")
    model = keras.Model(x, lstm(each(attention(x, x))))

    def rewritten(path, clone_fn):
        return predict(bs.rewrite_nested(model, path, clone_fn), sequence)

    def by_hand(before=0, sign=1):
        return predict(keras.Model(x, lstm(sign * each(attention(x, x) + before))), sequence)

    got = rewritten("each.layer", lambda layer, x, **k: layer(x + 1, **k))
    np.testing.assert_allclose(got, by_hand(before=1), rtol=1e-4, atol=1e-6)
    got = rewritten("lstm.cell", lambda layer, x, *args, **k: layer(-x, *args, **k))
    np.testing.assert_allclose(got, by_hand(sign=-1), rtol=1e-4, atol=1e-6)
    # Without a query, each position attends to all alike.
    got = rewritten("attention.query", lambda layer, x: 0 * layer(x))
    mean = np.repeat(np.mean(sequence, 1, keepdims=True), 4, 1)
    np.testing.assert_allclose(got, predict(model, mean), rtol=1e-4, atol=1e-5)


# What comes with a call: losses, seeds, dtypes, masks, threads.


class Penalised(layers.Layer):
    """Adds the sum of what it is given, times a weight, to the loss."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        self.add_loss(self.factor * ops.sum(x))
        return x


class LossOfItsOwn(Residual):
    def run(self, x):
        self.add_loss(1000 * ops.sum(x))
        return self.inner(x)


def test_losses_of_all_layers_count_once():
    parts = [Penalised(1.0), layers.Dense(3, use_bias=False, kernel_regularizer="l2")]
    inner = Residual(parts, name="inner")
    model = model_of(LossOfItsOwn(inner, name="outer"), Residual(inner, name="elsewhere"))
    brought_in = Penalised(100.0)
    new = bs.rewrite_nested(model, "outer.inner", lambda layer, x: brought_in(layer(x)))
    kernel = np.asarray(parts[1].kernel)

    def run(x):
        return x + x @ kernel

    y = X + run(X)
    new(X)
    wanted = [1000 * X.sum(), X.sum(), y.sum(), 0.01 * (kernel**2).sum(), 100 * run(X).sum()]
    np.testing.assert_allclose(sorted(map(float, new.losses)), sorted(wanted), rtol=1e-4)
    for each in (model, new):
        each.compile(keras.optimizers.SGD(0.0), "mse")
    more = new.train_on_batch(X, y + run(y)) - model.train_on_batch(X, y + run(y))
    np.testing.assert_allclose(more, 100 * run(X).sum(), rtol=1e-4)


def test_eager_losses_stay_apart():
    model = model_of(LossOfItsOwn(layers.Identity(), name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", double)
    model(X)
    new(2 * X)
    np.testing.assert_allclose([float(v) for v in model.losses], [1000 * X.sum()], rtol=1e-5)
    np.testing.assert_allclose([float(v) for v in new.losses], [2000 * X.sum()], rtol=1e-5)


def test_dropout_that_is_brought_in_draws_anew_at_each_step():
    ones = np.ones((2, 50), "float32")
    dropout = layers.Dropout(0.5, seed=1)
    model = model_of(Residual(layers.Identity(), name="outer"), shape=(50,))
    new = bs.rewrite_nested(model, "outer.inner", lambda layer, x: dropout(layer(x)))
    assert np.array_equal(predict(new, ones), 2 * ones)

    def step(state):
        return new.stateless_call([], state, ones, training=True)

    first, state = step([v.value for v in new.non_trainable_variables])
    second, _ = step(state)
    assert set(np.unique(first)) == {1.0, 3.0}
    assert not np.array_equal(first, second)


def test_metrics_and_seeds_of_inner_layers_are_listed_once():
    class Measured(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.mean, self.seed = keras.metrics.Mean(), keras.random.SeedGenerator(1)

        def call(self, x):
            self.mean.update_state(x)
            return keras.random.dropout(x, 0.5, seed=self.seed)

    inner = Measured(name="inner")
    model = model_of(Residual(inner, name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", double)
    assert [id(v) for v in new.metrics] == [id(inner.mean)]
    assert [v is inner.seed.state for v in new.variables] == [True]


@pytest.mark.slow
def test_mixed_precision_and_masks_are_as_in_a_call():
    ids = np.array([[3, 5, 0, 0], [1, 2, 4, 8]])
    outer = Residual(layers.GRU(4, return_sequences=True), dtype="mixed_bfloat16", name="outer")
    outer.supports_masking = True
    x = keras.Input((4,), dtype="int32")
    embedded = layers.Embedding(9, 4, mask_zero=True)(x)
    model = keras.Model(x, layers.GlobalAveragePooling1D()(outer(embedded)))
    dtypes = set()

    def spy(layer, x):
        dtypes.add(keras.backend.standardize_dtype(x.dtype))
        return layer(x)

    new = bs.rewrite_nested(model, "outer.inner", spy)
    assert np.array_equal(predict(new, ids), predict(model, ids))
    changed = ids.copy()
    changed[1, 3] = 0
    assert np.array_equal(predict(new, changed), predict(model, changed))
    assert dtypes == {"bfloat16"}


def test_threads_each_get_the_results_of_their_own_model():
    model = siamese(ConvNorm(name="extractor"))
    new = bs.rewrite_nested(model, "extractor.conv", double)
    wanted = {m: m.predict_on_batch(IMAGES)[0] for m in (model, new)}
    assert not np.allclose(wanted[model], wanted[new])
    got, start = [], threading.Barrier(4)

    def traced(model):
        # Not `predict`, in which Keras gives the shared variables away for the time of the call.
        state = [
            [v.value for v in vs]
            for vs in (model.trainable_variables, model.non_trainable_variables)
        ]
        return lambda images: jax.jit(model.stateless_call)(*state, images)[0]

    def work(model, run):
        start.wait()
        for _ in range(3):
            got.append((model, np.asarray(run(IMAGES)[0])))

    runs = [(m, run) for m in wanted for run in (m, traced(m))]
    threads = [threading.Thread(target=work, args=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 12
    for model, y in got:
        np.testing.assert_allclose(y, wanted[model], rtol=1e-4, atol=1e-5)


# Afterwards.


def test_lora_and_quantisation_of_the_source_reach_the_new_model():
    inner = layers.Dense(3, name="inner")
    new = bs.rewrite_nested(model_of(Residual(inner, name="outer")), "outer.inner", double)
    kernel = np.asarray(inner.kernel)
    inner.enable_lora(1)
    inner.lora_kernel_b.assign(np.ones((1, 3)))
    kernel = kernel + np.asarray(inner.lora_kernel_a)
    np.testing.assert_allclose(predict(new), X + 2 * X @ kernel, rtol=1e-5, atol=1e-6)
    assert any(v is inner.lora_kernel_a for v in new.trainable_variables)
    plain = layers.Dense(3, name="inner")
    model = model_of(Residual(plain, name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", double)
    model.quantize("int8")
    assert plain.quantization_mode == "int8"
    np.testing.assert_allclose(predict(new) - X, 2 * (predict(model) - X), rtol=1e-5, atol=1e-6)


def test_weights_are_saved_and_loaded_with_what_was_brought_in(tmp_path):
    def build(value):
        scale = Scale()
        model = model_of(Residual([dense(), dense()], name="outer"))
        new = bs.rewrite_nested(model, "outer.inner.0", lambda layer, x: scale(layer(x)))
        scale.scale.assign(value)
        return new

    saved, loaded = build(5.0), build(1.0)
    assert not np.array_equal(predict(loaded), predict(saved))
    saved.save_weights(tmp_path / "new.weights.h5")
    with h5py.File(tmp_path / "new.weights.h5") as file:
        arrays = []
        file.visititems(lambda _, item: arrays.append(item) if hasattr(item, "shape") else None)
    assert len(arrays) == len(saved.weights)
    loaded.load_weights(tmp_path / "new.weights.h5")
    assert np.array_equal(predict(loaded), predict(saved))
    with pytest.raises(bs.SurgeryError, match="Save the weights with `save_weights`"):
        saved.save(tmp_path / "new.keras")


def test_rewrites_add_up_in_any_order():
    inner = dense("inner")

    def plus(layer, x):
        return layer(x) + 1

    def source():
        return model_of(Residual(Residual(inner, name="middle"), name="outer"))

    new = bs.rewrite_nested(source(), "outer.middle.inner", double)
    new = bs.rewrite_nested(new, "outer.inner", plus)
    y = tanh_dense(inner, X)
    np.testing.assert_allclose(predict(new), X + (X + 2 * y) + 1, rtol=1e-5)
    new = bs.rewrite_nested(source(), "outer.inner", plus)
    new = bs.rewrite_nested(new, "outer.inner.inner", double)
    new = bs.rewrite_nested(new, "outer.middle.inner", plus)
    np.testing.assert_allclose(predict(new), X + (X + 2 * y + 1) + 1, rtol=1e-5)


class Adapter(layers.Layer):
    """A composite layer that a user puts into a backbone."""

    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.down, self.up = layers.Dense(4, name="down"), layers.Dense(dim, name="up")

    def call(self, x):
        return x + self.up(self.down(x))


@pytest.mark.slow
def test_adapter_in_a_backbone_is_rewritten_and_rewired(rng):
    backbone, adapter = make_gpt2(num_layers=1), Adapter(32, name="adapter")

    def insert(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        return adapter(x) if layer is backbone.transformer_layers[0] else x

    def by_hand(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        if layer is not backbone.transformer_layers[0]:
            return x
        return x - 2 * adapter.up(adapter.down(x))

    edited = bs.operate(backbone, [insert])
    new = bs.rewrite_nested(edited, "adapter.up", lambda layer, x: -2 * layer(x))
    assert isinstance(new, bs.EditedBackbone)
    assert max(bs.check(new).errors.values()) < 1e-5
    wanted = bs.clone_layer_graph(backbone.input, backbone.output, by_hand)
    wanted = keras.Model(backbone.input, wanted)
    inputs = ragged(rng, [5, 3], 6)
    got, wanted = (model.predict_on_batch(inputs) for model in (new, wanted))
    assert relative(got, wanted, inputs["padding_mask"]) < 1e-5


def test_what_is_brought_into_an_edited_backbone_trains_and_is_not_silently_lost(tmp_path):
    backbone, scale = make_gpt2(num_layers=1), Scale()
    inserted = bs.Insert("blocks.0", Adapter(32, name="adapter"))
    edited = bs.operate(backbone, [inserted, bs.LowRank("blocks.0.query", 2)])
    borrowed = backbone.layer_norm

    def scaled(layer, x):
        return scale(borrowed(layer(x)))

    new = bs.rewrite_nested(edited, "transformer_layer_0.adapter.up", scaled)
    wanted = [*edited.trainable_variables, scale.scale]
    assert {v.path for v in new.trainable_variables} == {v.path for v in wanted}
    assert len(new.trainable_variables) == len(wanted) == 7
    with pytest.warns(UserWarning, match="7 trainable weights, .* are not saved.*`save_recipe`"):
        new.save_weights(tmp_path / "new.weights.h5")
    backbone.load_weights(tmp_path / "new.weights.h5")


def test_decoder_block_of_a_known_family_is_opened_instead():
    path = "transformer_layer_0._feedforward_output_dense"
    new = bs.rewrite_nested(make_gpt2(num_layers=1), path, double)
    with pytest.raises(bs.SurgeryError, match="Open the backbone first"):
        bs.open_backbone(new)


# Errors.


class OnlyItsKernel(Residual):
    def run(self, x):
        return x @ self.inner.kernel


@pytest.fixture
def refused():
    unused = dense("unused")
    unused.build((None, 3))
    return model_of(
        Residual([dense("same"), dense("same"), dense("other")], name="outer"),
        OnlyItsKernel(unused, name="uses"),
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("outer.innr.0", "leads nowhere. .*Known: outer.inner.0, outer.inner.1, outer.inner.2"),
        ("outr", "Did you mean 'outer'"),
        ("", "leads nowhere"),
        ("outer.", "leads nowhere"),
        ("outer.other.kernel", "leads nowhere. .*Known: outer.inner.0"),
        ("outer.same", "fits 2 layers of the same name. Use attributes: .*outer.inner.1"),
        ("uses.inner", "Received one that never is.*outer.inner.0, .*uses.inner"),
    ],
)
def test_bad_path(refused, path, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.rewrite_nested(refused, path, double)


def test_miss_in_a_large_model_lists_what_is_near():
    model = make_gpt2(num_layers=4)
    with pytest.raises(bs.SelectorError, match=r"Known: transformer_layer_3\._self_att") as error:
        bs.rewrite_nested(model, "transformer_layer_3.attention", double)
    assert "layers.0" not in str(error.value)
    with pytest.raises(bs.SelectorError, match=r"transformer_layers\.2, ") as error:
        bs.rewrite_nested(model, "layer_3.attention", double)
    assert "dense" not in str(error.value)


@pytest.mark.parametrize(
    ("clone_fn", "error", "words"),
    [
        ("double", bs.SurgeryError, "and a `clone_fn.*Received 'double'"),
        (lambda layer, x: layers.Dense(3)(layer(x)), bs.SurgeryError, "makes no layers.* made den"),
        (lambda layer, x: None, TypeError, r"expected 1 tensor\(s\).*Received None"),
        (lambda layer, x: [layer(x), x], TypeError, r"expected 1 tensor\(s\).*2 value\(s\)"),
    ],
)
def test_bad_clone_fn(refused, clone_fn, error, words):
    with pytest.raises(error, match=words) as raised:
        bs.rewrite_nested(refused, "outer.other", clone_fn)
    assert "Exception encountered" not in str(raised.value)  # the words of Keras


def test_layer_that_is_called_on_weights_alone_is_tracked():
    scale, inner = Scale(), layers.Dense(3, use_bias=False, name="inner")
    model = model_of(Residual(inner, name="outer"))

    def scaled(layer, x):
        return x @ scale(ops.convert_to_tensor(layer.kernel))

    new = bs.rewrite_nested(model, "outer.inner", scaled)
    scale.scale.assign(3.0)
    wanted = X + 3 * X @ np.asarray(inner.kernel)
    np.testing.assert_allclose(predict(new), wanted, rtol=1e-5, atol=1e-6)
    assert [v for v in new.trainable_variables if v is scale.scale]


def test_only_what_clone_fn_itself_calls_is_brought_in():
    extra = Residual(Scale(), name="extra")
    model = model_of(Residual(dense("inner"), name="outer"))
    new = bs.rewrite_nested(model, "outer.inner", lambda layer, x: extra(layer(x)))
    assert new.get_layer("outer").inner.brought_in == [extra]


def test_variable_that_no_layer_holds(refused):
    free = keras.Variable(np.ones(3, "float32"), name="free")
    with pytest.raises(bs.SurgeryError, match="reads free, which the new model would not track"):
        bs.rewrite_nested(refused, "outer.other", lambda layer, x: layer(x) * free)


def test_model_without_a_graph():
    class Subclassed(keras.Model):
        pass

    with pytest.raises(bs.SurgeryError, match="expected a Functional model"):
        bs.rewrite_nested(Subclassed(), "outer.inner", double)


def test_the_page_about_it_runs():
    page = (Path(__file__).parents[2] / "docs" / "nested.md").read_text()
    names = {}
    exec(page.split("```python")[1].split("```")[0], names)
    quantised = np.asarray(names["new"].predict_on_batch(names["images"]))
    plain = np.asarray(names["model"].predict_on_batch(names["images"]))
    assert 1e-5 < np.abs(quantised - plain).max() < 0.2 * np.abs(plain).max()
    assert len(names["new"].variables) == len(names["model"].variables) + 1
