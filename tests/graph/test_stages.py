"""A model that is cut gives what it gave, also from a cut on with another value there."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from backbone_surgery import graph


class Cut(layers.Layer):
    def call(self, x):
        return x


def dense(name):
    return layers.Dense(4, name=name, kernel_initializer="normal", bias_initializer="normal")


def block(number, cut=True):
    """A nested model with two inputs and a cut in the middle, and a branch around it."""
    x, y = keras.Input((4,)), keras.Input((4,))
    inside = dense(f"in_{number}")(x) * y
    inside = Cut(name=f"cut_{number}")(inside) if cut else inside
    return keras.Model([x, y], [x + dense(f"out_{number}")(inside), inside], name=f"block_{number}")


@pytest.fixture
def model():
    """Two blocks, the first of which runs twice, and a branch that no cut is above."""
    x, scale = keras.Input((4,), name="x"), keras.Input(batch_shape=(), name="scale")
    side = dense("side")(x)
    first = block(0, cut=False)
    y, _ = first([x, side])
    y, seen = block(1)([y, side])
    y, _ = block(2)([y, side])
    y, _ = first([y, side])
    return keras.Model({"x": x, "scale": scale}, {"y": y * scale, "seen": seen, "side": side})


def run(stages, values, first=0):
    for stage in stages.stages[first:]:
        made = stage([values[n] for n in stage.takes])
        values |= zip(stage.makes, made, strict=True)
    return {name: np.asarray(values[n]) for name, n in stages.outputs.items()}


def by_numpy(model, x, scale, at=None, value=None):
    """The model in NumPy, with another value at one of the cuts."""
    weights = {
        layer.name: layer for b in model.layers if hasattr(b, "layers") for layer in b.layers
    }
    weights["side"] = model.get_layer("side")

    def apply(name, x):
        kernel, bias = (np.asarray(w) for w in weights[name].weights)
        return x @ kernel + bias

    side, y, insides = apply("side", x), x, []
    for i, number in enumerate((0, 1, 2, 0)):
        inside = apply(f"in_{number}", y) * side
        inside = value if i == at else inside
        insides.append(inside)
        y = y + apply(f"out_{number}", inside)
    return {"y": y * scale, "seen": insides[1], "side": side}


def close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_stages_give_what_the_model_gives_also_with_another_value_at_a_cut(model, rng):
    stages = graph.Stages(model, model.output, Cut)
    assert list(stages.cuts) == ["cut_1", "cut_2"]
    assert [stage for stage, _ in stages.cuts.values()] == [1, 2]
    x, scale = rng.normal(size=(1, 4)).astype("float32"), np.float32(2.5)
    base = {stages.inputs["x"]: x, stages.inputs["scale"]: scale}
    close(run(stages, base), by_numpy(model, x, scale))
    for at, (stage, number) in enumerate(stages.cuts.values(), 1):
        value = rng.normal(size=(3, 4)).astype("float32")
        rows = np.repeat(x, 3, axis=0)
        wanted = by_numpy(model, rows, scale, at, value)
        if at == 2:
            wanted["seen"] = base[stages.outputs["seen"]]  # of the one row: it comes before
        wanted["side"] = base[stages.outputs["side"]]
        close(run(stages, {**base, number: value}, stage), wanted)


@pytest.mark.slow
def test_a_stage_takes_only_what_crosses_its_cut(model):
    """The second one: the cut tensor, the way around it, the branch, and the scalar."""
    stages = graph.Stages(model, {"y": model.output["y"]}, Cut)
    assert [len(stage.takes) for stage in stages.stages] == [1, 3, 4]
    assert [len(stage.makes) for stage in stages.stages] == [3, 2, 1]
    names = [[layer.name for layer in s.layers if layer.weights] for s in stages.stages]
    assert names == [
        ["side", "in_0", "out_0", "in_1"],
        ["out_1", "in_2"],
        ["out_2", "in_0", "out_0"],
    ]


def test_layers_are_told_whether_they_are_trained():
    x = keras.Input((4,), name="x")
    model = keras.Model({"x": x}, {"y": layers.Dropout(0.5)(Cut(name="cut")(x))})
    stage = graph.Stages(model, model.output, Cut).stages[1]
    ones = np.ones((50, 4), "float32")
    (same,), (dropped,) = stage([ones], training=False), stage([ones], training=True)
    assert (np.asarray(same) == 1).all()
    assert (np.asarray(dropped) == 0).any()


def test_a_nested_model_that_is_called_with_a_mask_is_one_call(rng):
    inner_x = keras.Input((3, 4))
    inner = keras.Model(inner_x, layers.GlobalAveragePooling1D()(inner_x), name="inner")
    inner.supports_masking = True
    x, mask = keras.Input((3, 4), name="x"), keras.Input((3,), dtype="bool", name="mask")
    model = keras.Model({"x": x, "mask": mask}, {"y": inner(Cut(name="cut")(x), mask=mask)})
    stages = graph.Stages(model, model.output, Cut)
    value = rng.normal(size=(2, 3, 4)).astype("float32")
    keep = np.array([[True, True, False], [True, False, False]])
    values = {stages.inputs["x"]: value, stages.inputs["mask"]: keep}
    wanted = model({"x": ops.convert_to_tensor(value), "mask": ops.convert_to_tensor(keep)})["y"]
    np.testing.assert_allclose(run(stages, values)["y"], np.asarray(wanted), rtol=1e-6)
