"""What is in the fields of rewrites comes back from a recipe as it was, or is refused in words."""

import random
from dataclasses import dataclass
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.weights.configs import check_config, layer_config, make_layer
from backbone_surgery.weights.store import read_recipe, write_recipe
from tests import test_recipe_rewrites
from tests.conftest import make_gemma, make_gpt2
from tests.test_recipe import Own, Put, outputs


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


def test_arrays_under_keys_that_look_alike(gpt2, tmp_path):
    values = {1: np.zeros(2), "1": np.ones(2), "a.b": np.full(3, 2.0), "a": {"b": np.full(3, 4.0)}}
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", values)]), tmp_path / "r")
    found = bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values
    assert list(found) == list(values)
    for key in (1, "1", "a.b"):
        np.testing.assert_array_equal(found[key], values[key])
    np.testing.assert_array_equal(found["a"]["b"], values["a"]["b"])


def built():
    layer = keras.layers.Dense(32, name="mine")
    layer.build((None, None, 32))
    return layer


def held_elsewhere(gpt2):
    trained = bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)}, trainable=True)]).rewrites[0]
    return [Own("blocks.0", trained)]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda gpt2: [Own("blocks.0", built())], r"rewrites\.0\.values"),
        (held_elsewhere, r"rewrites\.0\.values\.learned"),
        (lambda gpt2: [Put("blocks.1", built()), bs.Remove("blocks.1")], r"rewrites\.0\.layer"),
    ],
)
def test_weights_that_do_not_run_are_refused_by_name(gpt2, tmp_path, make, where):
    edited = bs.operate(gpt2, make(gpt2))
    with pytest.raises(bs.SurgeryError, match=f"{where}': expected a layer that runs in the edite"):
        bs.save_recipe(edited, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_an_unbuilt_layer_that_does_not_run_stays_unbuilt(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", keras.layers.Dense(4))]), tmp_path / "r")
    assert not bs.load_recipe(tmp_path / "r", gpt2).rewrites[0].values.built


# Presets


@pytest.mark.parametrize("make", [make_gpt2, make_gemma])
def test_a_preset_comes_back_in_its_own_dtype(tmp_path, monkeypatch, make):
    """And from inside of its folder, whose name is then a dot."""
    edited = bs.operate(make(dtype="bfloat16"), [bs.Steer("mood", {1: np.ones(32)})])
    bs.CachedCausalLM(edited).save_to_preset(tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    loaded = bs.CachedCausalLM.from_preset(".").backbone
    assert loaded.owner.dtype_policy.name == "bfloat16"
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))
    with pytest.raises(bs.RecipeError, match=r"of dtype bfloat16\. Received float32"):
        bs.CachedCausalLM.from_preset(".", dtype="float32")


@pytest.mark.parametrize("folder", ["/", "..", "."])
def test_folders_without_a_preset(tmp_path, monkeypatch, folder):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(bs.SurgeryError, match=r"one without `config\.json`"):
        bs.CachedCausalLM.from_preset(folder)


def test_no_preset_of_a_quantised_backbone(tmp_path):
    backbone = make_gpt2(num_layers=1)
    lm = bs.CachedCausalLM(bs.operate(backbone, []))
    backbone.quantize("int8")
    with pytest.raises(bs.SurgeryError, match=r"quantised to int8\. Use `save_recipe`"):
        lm.save_to_preset(tmp_path / "p")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["package.json", "assets/mine.png", "recipe/notes.txt", "assets/empty/", "model.h5"]
)
def test_what_is_no_part_of_a_preset_is_never_replaced(gpt2, tmp_path, name):
    lm = bs.CachedCausalLM(bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)})]))
    lm.save_to_preset(tmp_path / "p")
    file = tmp_path / "p" / name
    file.parent.mkdir(exist_ok=True)
    file.mkdir(parents=True) if name.endswith("/") else file.write_text("mine")
    with pytest.raises(bs.SurgeryError, match=rf"holds \['{name.rstrip('/')}'\], which would be l"):
        lm.save_to_preset(tmp_path / "p")
    assert file.exists()


@pytest.mark.parametrize(
    "files", [["config.json"], ["config.json", "metadata.json"], ["task.json"]]
)
def test_a_folder_that_only_looks_like_a_preset_is_never_replaced(gpt2, tmp_path, files):
    for name in files:
        Path(tmp_path, name).write_text("{}")
    with pytest.raises(bs.SurgeryError, match="which would be lost"):
        bs.CachedCausalLM(gpt2).save_to_preset(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == files


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_gemma"])
def test_a_preset_with_a_tokenizer_is_replaced(tmp_path, name):
    lm = bs.CachedCausalLM.from_preset(name)
    for _ in range(2):
        lm.save_to_preset(tmp_path / "p", max_shard_size=5e-4)
    assert bs.CachedCausalLM.from_preset(str(tmp_path / "p")).preprocessor is not None


# Values of a wrong kind, and of a wrong size, with right digests


def changed(source, value, *place, to=None, keep="edited."):
    """Write a recipe with another value at a place, with right digests and no spare arrays."""
    document, arrays = read_recipe(source)
    document = {k: document[k] for k in ("versions", "base", "dtype_policy", "layers", "rewrites")}
    *parents, last = place
    inner = document
    for key in parents:
        inner = inner[key]
    inner[last] = value
    text = str(document["rewrites"])
    kept = {n: a for n, a in arrays.items() if n.startswith(keep) or f"'{n}'" in text}
    write_recipe(to or source, document, kept)


WRONG = [
    *(None, True, 0, -1, 7, 10**400, 1.5, 1e300, "", "x", "blocks.0", "prompt"),
    *({"list": []}, {"list": ["x"]}, {"tuple": [0, 1]}, {"tuple": [{"list": [1]}, None]}),
    *({"dict": []}, {"dict": [[1, "x"]]}, {"dict": [["blocks.0.query", 3]]}),
    *({"registered": "keras_hub>GPT2Backbone"}, {"registered": "tests>Bias"}),
    {"rewrite": {"type": "backbone_surgery>Remove", "fields": {"at": "blocks.0"}}},
]


@pytest.mark.parametrize(
    "case",
    ["steering", "condition", "skip", "feature", "wrap", "reorder", "low_rank", "ablate", "insert"],
)
def test_values_in_wrong_fields_give_words_or_a_model(gpt2, tmp_path, case):
    """Nothing raw reaches the user, wherever a value of another kind fails."""
    rewrites = test_recipe_rewrites.CASES[case]("gpt2", "float32")
    bs.save_recipe(bs.operate(gpt2, rewrites), tmp_path / "good")
    described = read_recipe(tmp_path / "good")[0]["rewrites"]
    fields = [(i, n) for i, r in enumerate(described) for n in r["fields"]]
    rng = random.Random(case)
    refused = 0
    for _ in range(12):
        (i, name), value = rng.choice(fields), rng.choice(WRONG)
        changed(tmp_path / "good", value, "rewrites", i, "fields", name, to=tmp_path / "bad")
        try:
            bs.load_recipe(tmp_path / "bad", gpt2)
        except bs.SurgeryError:
            refused += 1
    assert refused > 1


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("steering", "strength", "x"),
        ("steering", "when", {"list": [1]}),
        ("skip", "amount", {"list": ["x"]}),
        ("feature", "layers", {"dict": [[1, 2]]}),
        ("wrap", "make_layer", {"registered": "keras_hub>GPT2Backbone"}),
        ("reorder", "blocks", 3),
        ("low_rank", "adapters", "x"),
    ],
)
def test_fields_of_a_wrong_kind(gpt2, tmp_path, case, name, value):
    rewrites = test_recipe_rewrites.CASES[case]("gpt2", "float32")
    bs.save_recipe(bs.operate(gpt2, rewrites), tmp_path / "r")
    changed(tmp_path / "r", value, "rewrites", 0, "fields", name)
    with pytest.raises(bs.SurgeryError):
        bs.load_recipe(tmp_path / "r", gpt2)


@pytest.mark.parametrize("value", [{"layer": 0.0}, {"dict": [[1.0, "x"]]}, {"dict": [[True, "x"]]}])
def test_numbers_that_are_no_integers(gpt2, tmp_path, value):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", keras.layers.Dense(3))]), tmp_path / "r")
    with pytest.raises(bs.SurgeryError, match="what the schema of recipes says"):
        changed(tmp_path / "r", value, "rewrites", 0, "fields", "values")


def test_a_key_that_is_given_twice(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0")]), tmp_path / "r")
    value = {"dict": [[1, "x"], [1, "y"]]}
    changed(tmp_path / "r", value, "rewrites", 0, "fields", "values")
    with pytest.raises(bs.RecipeError, match="Received one with a key given twice"):
        bs.load_recipe(tmp_path / "r", gpt2)


def nested(depth):
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([*range(200_000)], "expected rewrites that can be read again.* Keep numbers in arrays"),
        (nested(20), "values are nested more than 40 deep"),
        (nested(400), "expected values nested at most 40 deep"),
    ],
    ids=["large", "deep", "deeper"],
)
def test_no_save_that_cannot_be_loaded(gpt2, tmp_path, value, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", value)]), tmp_path / "r")
    assert not list(tmp_path.iterdir())


# Layers that are built in


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
    config = layer_config(layer, "here")
    check_config(config, "here")
    again = make_layer(config, "here")
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()


def test_layers_that_compute_with_a_copy_of_their_weights(gpt2, tmp_path):
    def edited(mean):
        layer = keras.layers.Normalization(axis=-1)
        layer.adapt(np.random.default_rng(0).normal(mean, 5, (100, 32)).astype("float32"))
        return bs.operate(gpt2, [bs.Insert("blocks.0", layer)])

    mine, other = edited(3), edited(-4)
    wanted = outputs(mine)
    assert not np.array_equal(outputs(other), wanted)
    bs.save_recipe(mine, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), wanted)
    fresh = edited(-4)
    bs.transfer_weights(fresh, mine)
    np.testing.assert_array_equal(outputs(fresh), wanted)


def test_statistics_of_the_owner_and_of_what_was_compiled_before(tmp_path):
    def model(mean):
        backbone = make_gpt2()
        layer = keras.layers.Normalization(axis=-1, name="nrm")
        layer.adapt(np.random.default_rng(0).normal(mean, 5, (100, 32)).astype("float32"))
        last = backbone.transformer_layers[-1]

        def clone_fn(node, *args, **kwargs):
            return layer(node(*args, **kwargs)) if node is last else node(*args, **kwargs)

        graph = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
        return keras.Model(backbone.input, graph)

    mine, other = model(3), model(-4)
    assert not np.array_equal(outputs(mine), outputs(other))
    bs.transfer_weights(bs.operate(other, [bs.Remove("blocks.1")]), mine)
    np.testing.assert_array_equal(outputs(other), outputs(mine))


# What would come back otherwise than it was


def lora():
    layer = keras.layers.Dense(32)
    layer.build((None, None, 32))
    layer.enable_lora(2, lora_alpha=8)
    return [bs.Insert("blocks.0", layer)]


def shared():
    layer = keras.layers.Dense(32)
    one, two = (keras.Sequential([layer]) for _ in range(2))
    return [bs.Insert("blocks.0", one), bs.Insert("blocks.1", two)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lora, "expected LoRA whose alpha is its rank"),
        (shared, r"'rewrites\.1\.layer': expected layers that share no weights"),
        (lambda: [Own("blocks.0", bs.Control(strength=3.0))], "Control"),
    ],
)
def test_what_a_recipe_cannot_hold_is_refused(gpt2, tmp_path, make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.save_recipe(bs.operate(gpt2, make()), tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_a_layer_that_keras_builds_by_a_call_alone(gpt2, tmp_path):
    layer = keras_hub.layers.TransformerDecoder(16, 2)
    edited = bs.operate(gpt2, [bs.Insert("blocks.0", layer)])
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), outputs(edited))


@pytest.mark.parametrize(
    "make", [lambda x: bs.Reorder(x), lambda x: bs.Ablate("blocks.*.attention", heads=x)]
)
def test_lists_are_copied(gpt2, tmp_path, make):
    given = [1, 0, 1]
    edited = bs.operate(gpt2, [make(given)])
    given[:] = [0, 0, 0]
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), outputs(edited))


@bs.register_rewrite(package="tests")
@dataclass(frozen=True)
class Fresh(bs.SiteRewrite):
    """Put a layer of its own making at some sites."""

    at: str

    def apply(self, x, place, surgery):
        return keras.layers.Dense(32)(x)


def test_names_that_keras_makes_up_do_not_collide(gpt2, tmp_path):
    keras.layers.Dense(1)
    insert = bs.Insert("blocks.0.mlp_output", keras.layers.Dense(32))
    edited = bs.operate(gpt2, [insert, Fresh("blocks.0.mlp_output")])
    wanted = outputs(edited)
    bs.save_recipe(edited, tmp_path / "r")
    keras.utils.clear_session()
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", gpt2)), wanted)


@keras.saving.register_keras_serializable("tests")
class Measured(keras.layers.Layer):
    """A layer with a metric, whose state is none of its weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.auc = keras.metrics.AUC()

    def call(self, x):
        return 2 * x


def test_a_layer_with_a_metric(gpt2, tmp_path):
    edited = bs.operate(gpt2, [Put("blocks.0", Measured())])
    bs.save_recipe(edited, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", gpt2)
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))
