"""Configs of layers: what is built in or registered comes back, and nothing else is ever made."""

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.recipes.configs import layer_config, make_layer
from tests.helpers import make_gpt2
from tests.recipes.edits import Put, outputs


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.Dense(4, kernel_regularizer="l2", bias_constraint="non_neg", dtype="bfloat16"),
        keras.layers.Dense(
            4,
            kernel_initializer=keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
        ),
        keras.layers.Dense(4, dtype=keras.dtype_policies.DTypePolicyMap()),
        keras.layers.Dense(4, dtype="int8_from_float32"),
        keras.layers.RNN(keras.layers.LSTMCell(4)),
        keras.layers.Hashing(4),
        keras.Sequential([keras.layers.Dropout(0.5), keras.layers.LayerNormalization()]),
        keras_hub.layers.TransformerDecoder(4, 2, activation="gelu"),
        keras_hub.layers.ReversibleEmbedding(4, 2),
    ],
    ids=lambda layer: layer.name,
)
def test_built_in_layers_are_described(layer):
    again = make_layer(layer_config(layer, "here"), "here")
    assert type(again) is type(layer)
    assert {**again.get_config(), "name": layer.name} == layer.get_config()


@keras.saving.register_keras_serializable("tests")
class Measured(keras.layers.Layer):
    """A layer with a metric, whose state is none of its weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.auc = keras.metrics.AUC()

    def call(self, x):
        return 2 * x


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        Measured(),
        keras_hub.layers.TransformerDecoder(16, 2),
        keras.layers.GRU(32, return_sequences=True),
        keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(32)]),
        keras.layers.Rescaling(np.linspace(0, 2, 32), offset=np.ones(32, "float32")),
    ],
    ids=["metric", "built by a call alone", "recurrent", "nested", "with arrays"],
)
def test_layers_in_an_edit_come_back(gpt2, tmp_path, layer):
    edited = bs.operate(gpt2, [Put("blocks.0", layer)])
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), outputs(edited))


class Loose(keras.layers.Layer):
    def call(self, x):
        return x * 2


@keras.saving.register_keras_serializable("tests")
class Silent(keras.layers.Layer):
    """A layer that does not tell what it was made with."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size


def tuned():
    layer = keras.layers.Dense(32)
    layer.build((None, None, 32))
    layer.enable_lora(2, lora_alpha=8)
    return layer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Loose, "or registered in this process"),
        (
            lambda: Silent(object()),
            "that its config describes.* Give the class a `get_config`",
        ),
        (tuned, "expected LoRA whose alpha is its rank"),
        (lambda: keras.layers.Rescaling(np.array([1.0, np.inf])), "holds finite numbers.* inf"),
        (lambda: keras.layers.Lambda(lambda x: x), "functions and Lambda layers are never saved"),
        (lambda: keras.layers.Dense(3, activation=np.sin), "functions and Lambda|config describes"),
    ],
)
def test_layers_that_a_recipe_cannot_hold(make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        layer_config(make(), "here")


def config(module, name, inner=None, **more):
    return {"module": module, "class_name": name, "config": inner or {}, **more}


@pytest.mark.parametrize(
    "config",
    [
        config("keras.layers", "Lambda"),
        config("os", "system", registered_name=None),
        config("builtins", "function", "print"),
        {"class_name": "__lambda__", "config": {"value": "x"}},
        config("keras", "layers.Lambda"),
        config("keras.src.layers.core.lambda_layer", "Lambda"),
        config("keras_hub.src.utils.transformers.export.gemma", "Gemma"),
        config("keras.layers", "Nothing"),
        config("keras.optimizers", "SGD"),
        config("keras", "layers"),
        config("keras.saving", "load_model"),
        config(["keras.layers"], "Dense"),
        *(
            config("keras.layers", name)
            for name in (
                *("StringLookup", "IntegerLookup", "TextVectorization", "TFSMLayer"),
                *("TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
            )
        ),
        config(
            "keras_hub.tokenizers",
            "GPT2Tokenizer",
            {"vocabulary": "/etc/passwd"},
            registered_name="keras_hub>GPT2Tokenizer",
        ),
        config("keras_hub.models", "GPT2Backbone", registered_name="keras_hub>GPT2Backbone"),
        config("subprocess", "Popen", {"args": ["true"]}),
        config("keras.layers", "Wrapper", {"layer": config("keras.layers", "Lambda")}),
    ],
)
def test_no_code_is_named(config, monkeypatch):
    monkeypatch.setattr(
        keras.saving, "deserialize_keras_object", lambda *_: pytest.fail("it was made")
    )
    with pytest.raises(bs.RecipeError, match="functions and Lambda layers are never saved"):
        make_layer(config, "here")


@pytest.mark.parametrize(
    "config",
    [
        config("keras.layers", "Dense", {"units": -1}),
        config("keras.initializers", "Zeros"),
        {},
        None,
        [[]],
    ],
)
def test_configs_that_make_no_layer(gpt2, tmp_path, config):
    from tests.recipes.edits import rewritten

    bs.save_recipe(bs.operate(gpt2, [Put("blocks.0", keras.layers.Dense(32))]), tmp_path / "r")
    rewritten(tmp_path / "r", layers=[config])
    with pytest.raises(bs.RecipeError, match="a recipe that can be applied"):
        bs.load_recipe(tmp_path / "r", gpt2)
