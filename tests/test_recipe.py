"""Recipes: what is saved is loaded bit for bit in another process, or refused in words."""

import json
from dataclasses import dataclass
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.weights.arrays import held
from backbone_surgery.weights.paths import variable_paths
from backbone_surgery.weights.store import read_recipe, write_recipe
from tests.conftest import FAMILIES, TASKS, make_gemma, make_gpt2

TOKENS = {"token_ids": np.arange(1, 13).reshape(2, 6), "padding_mask": np.ones((2, 6), "int32")}


@bs.register_rewrite(package="tests")
@dataclass(frozen=True)
class Put(bs.SiteRewrite):
    """Put a layer of the rewrite's own at some sites."""

    at: str
    layer: Any

    def apply(self, x, place, surgery):
        return self.layer(x)


@keras.saving.register_keras_serializable("tests")
class Bias(keras.layers.Layer):
    def build(self, shape):
        self.bias = self.add_weight(shape=(shape[-1],), initializer="ones", name="vector")

    def call(self, x):
        return x + self.bias


@bs.register_rewrite(package="tests")
@dataclass(frozen=True)
class Own(bs.SiteRewrite):
    """Put a new layer at each of some sites, and hold values of every kind."""

    at: str
    values: Any = ()

    def apply(self, x, place, surgery):
        return Bias(dtype=x.dtype)(x)


class Around(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return x + self.block(x)


@dataclass(frozen=True)
class Unknown(bs.SiteRewrite):
    at: str = "blocks.0"

    def apply(self, x, place, surgery):
        return x + x


def vector(seed=0):
    return np.random.default_rng(seed).normal(0, 1, 32)


def steering(dtype):
    return [
        bs.Steer("mood", {0: vector(), 1: vector(1)}, strength=0.7),
        bs.Steer("tone", {1: vector(2)}, "blocks.*.mlp_output", (1, 4), "ablate", True),
    ]


def layered(dtype):
    shared = keras.layers.Dense(32, activation="gelu", dtype=dtype, name="shared")
    inner = [keras.layers.Dense(8, dtype=dtype), keras.layers.Dense(32, dtype=dtype)]
    return [
        Put("blocks.0.mlp_output", shared),
        Own("blocks.*.attention_output", {"a": [1, 2.5, None], 3: (True, np.float32(2))}),
        Put("blocks.1", shared),
        Put("blocks.-1", keras.Sequential(inner)),
    ]


def build(name, case, dtype="float32"):
    """Make an edited model with weights of its own."""
    backbone = FAMILIES[name](dtype=dtype)
    edited = bs.operate(backbone, CASES[case](dtype))
    if case == "lora":
        backbone.enable_lora(2)
    fill(edited)
    return edited


CASES = {"steering": steering, "layered": layered, "lora": steering}


def fill(edited):
    """Give the weights that an edit added, LoRA included, values of their own."""
    owned = variable_paths(edited.owner)
    rng = np.random.default_rng(5)
    for path, variable in variable_paths(edited).items():
        if "lora" in path or path not in owned:
            variable.assign(rng.normal(0, 0.3, variable.shape))


def outputs(model, **inputs):
    """Return the bytes of all that a model gives."""
    found = model.predict_on_batch({**TOKENS, **inputs})
    return np.concatenate([np.asarray(x).ravel().view("uint8") for x in keras.tree.flatten(found)])


@pytest.fixture
def gpt2():
    return make_gpt2()


@pytest.fixture
def folder(gpt2, tmp_path):
    bs.save_recipe(bs.operate(gpt2, steering("float32")), tmp_path / "a.recipe")
    return tmp_path / "a.recipe"


def test_values_of_every_kind_come_back(gpt2, tmp_path):
    values = {
        "a": [1, 2.5, None, True, "text", -0.0, 1e-300, 2**60],
        3: ((), [], {}, (1, [2, (3,)])),
        -1: np.arange(6, dtype="int8").reshape(2, 3),
        "b": np.zeros((0, 4), "bool"),
        "c": np.float64(0.1),
        "d": bs.Steer("inner", {0: vector()}),
        np.int64(7): "a key that is no int",
    }
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", values)]), tmp_path / "r")
    found = bs.load_recipe(tmp_path / "r", make_gpt2()).rewrites[0].values
    assert repr({k: found[k] for k in ("a", 3)}) == repr({k: values[k] for k in ("a", 3)})
    for key in (-1, "b", "c"):
        assert type(found[key]) is type(values[key])
        assert found[key].dtype == values[key].dtype
        np.testing.assert_array_equal(found[key], values[key])
    np.testing.assert_array_equal(found["d"].vector[0], values["d"].vector[0])
    assert found[7] == "a key that is no int"


def test_a_vector_object_is_kept_as_its_directions(gpt2, tmp_path):
    wanted = bs.ControlVector({1: vector()})
    bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", wanted)]), tmp_path / "r")
    found = bs.load_recipe(tmp_path / "r", make_gpt2()).rewrites[0].values
    np.testing.assert_array_equal(found[1], wanted.directions[1])


def test_a_layer_that_two_rewrites_share_stays_shared(gpt2, tmp_path):
    edited = bs.operate(gpt2, layered("float32"))
    bs.save_recipe(edited, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", make_gpt2())
    assert loaded.rewrites[0].layer is loaded.rewrites[2].layer
    assert list(variable_paths(loaded)) == list(variable_paths(edited))


def test_what_is_loaded_can_be_saved_again(gpt2, folder, tmp_path):
    bs.save_recipe(bs.load_recipe(folder, gpt2), tmp_path / "again")
    for name in ("recipe.json", "deltas.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_task_and_a_cached_graph_are_saved_too(gpt2, folder, tmp_path):
    edited = bs.load_recipe(folder, gpt2)
    for i, model in enumerate((bs.CachedCausalLM(edited), bs.rewire(edited))):
        bs.save_recipe(model, tmp_path / str(i))
        assert (tmp_path / str(i) / "recipe.json").read_text() == (
            folder / "recipe.json"
        ).read_text()


def test_an_edit_of_a_bundled_model_needs_no_backbone(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    direction = np.random.default_rng(0).normal(0, 1, lm.backbone.hidden_dim)
    edited = bs.operate(lm.backbone, [bs.Steer("mood", {1: direction})])
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r")), outputs(edited))
    lm.backbone.token_embedding.embeddings.assign(lm.backbone.token_embedding.embeddings + 1)
    bs.save_recipe(edited, tmp_path / "r")
    with pytest.raises(bs.RecipeError, match="with the weights it had then"):
        bs.load_recipe(tmp_path / "r")


@pytest.mark.slow
@pytest.mark.parametrize("with_lora", [False, True])
def test_int8(with_lora, tmp_path):
    """Loaded onto the backbone as it was before it was quantised, which stays as it is."""
    edited = bs.operate(make_gpt2(num_layers=1), [bs.Steer("mood", {0: vector()})])
    edited.quantize("int8")
    if with_lora:
        edited.enable_lora(2)
        for path, variable in variable_paths(edited).items():
            if "lora" in path:
                variable.assign(np.random.default_rng(1).normal(0, 0.3, variable.shape))
    bs.save_recipe(edited, tmp_path / "r")
    arrays = read_recipe(tmp_path / "r")[1]
    assert any(name.endswith("kernel_scale") for name in arrays)
    assert not any(name.endswith(".kernel") for name in arrays)
    backbone = make_gpt2(num_layers=1)
    before = bs.weights_digest(backbone)
    loaded = bs.load_recipe(tmp_path / "r", backbone)
    assert bs.weights_digest(backbone) == before
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


# What has no description


def clone_fn(layer, *args, **kwargs):
    x = layer(*args, **kwargs)
    return keras.layers.Dense(32)(x) if layer.name == "transformer_layer_0" else x


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: clone_fn, r"Received the function 'clone_fn', .* Use Insert, Replace or Wrap"),
        (lambda b: Unknown(), "Received a Unknown. Decorate the class with `register_rewrite`"),
        (lambda b: Own("blocks.0", np.sin), r"'rewrites\.0\.values': .* Received 'sin'"),
        (lambda b: Own("blocks.0", {(1, 2): 3}), "has no description"),
        (lambda b: Own("blocks.0", [object()]), r"'rewrites\.0\.values\.0': expected numbers"),
        (lambda b: Own("blocks.0", float("inf")), "expected a finite number. Received inf"),
        (lambda b: Own("blocks.0", np.array([1, np.nan])), "Received NaN or infinity"),
        (lambda b: Own("blocks.0", np.array(["a"])), "has no description"),
        (lambda b: Own("blocks.0", np.array([1j])), "has no description"),
        (
            lambda b: bs.Wrap("blocks.0", lambda block: Around(block)),
            r"'<lambda>' of type function",
        ),
        (lambda b: bs.Wrap("blocks.0", Around), "registered by `keras.saving.register_keras_seri"),
        (lambda b: Put("blocks.0", keras.layers.Lambda(lambda x: x * 2)), "Received 'Lambda'"),
        (lambda b: Put("blocks.0", b.get_layer("layer_norm")), "a layer of the backbone"),
    ],
)
def test_what_has_no_description_is_refused_by_name(gpt2, tmp_path, make, words):
    edited = bs.operate(gpt2, [make(gpt2)])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.save_recipe(edited, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_a_layer_that_is_not_registered_is_refused(gpt2, tmp_path):
    class Loose(keras.layers.Layer):
        def call(self, x):
            return x * 2

    edited = bs.operate(gpt2, [Put("blocks.0", Loose())])
    with pytest.raises(bs.SurgeryError, match="or registered in this process"):
        bs.save_recipe(edited, tmp_path / "r")


@pytest.mark.parametrize("cls", [int, object(), Put.__mro__[1]])
def test_only_rewrites_can_be_registered(cls):
    with pytest.raises(bs.SurgeryError, match="expected a `Rewrite` that is a frozen dataclass"):
        bs.register_rewrite(cls)


def test_lora_that_a_recipe_cannot_hold(gpt2, tmp_path):
    gpt2.transformer_layers[0]._self_attention_layer.query_dense.enable_lora(2, lora_alpha=4)
    with pytest.raises(bs.SurgeryError, match=r"Received \(rank, alpha\) \[\(2, 4\)\] on 1 layers"):
        bs.save_recipe(bs.operate(gpt2, []), tmp_path / "r")


# The wrong backbone


def changed(gpt2):
    value = np.array(gpt2.token_embedding.embeddings)
    value[0, 0] = np.nextafter(value[0, 0], np.float32(1e9))
    gpt2.token_embedding.embeddings.assign(value)
    return gpt2


def with_lora(gpt2):
    gpt2.enable_lora(2)
    return gpt2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_gemma, "expected a backbone of family gpt2. Received gemma"),
        (lambda: make_gpt2(num_layers=2), "expected a backbone with num_layers 3. Received 2"),
        (lambda: make_gpt2(dtype="bfloat16"), "of dtype float32. Received bfloat16"),
        (lambda: make_gpt2(seed=1), "expected weights of the digest sha256:"),
        (lambda: changed(make_gpt2()), "expected weights of the digest sha256:"),
        (lambda: with_lora(make_gpt2()), "expected a backbone without LoRA. Received one with it"),
        (lambda: bs.operate(make_gpt2(), []), "Received an edited one. Pass its `owner`"),
        (lambda: 3, "expected a built Keras model"),
        (lambda: None, "expected `backbone`, since the recipe was made on a GPT2Backbone"),
    ],
)
def test_another_backbone_is_refused(folder, make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.load_recipe(folder, make())


# Other releases


def rewritten(folder, **parts):
    """Write a recipe again, with other parts and right digests."""
    document, arrays = read_recipe(folder)
    kept = {k: document[k] for k in ("versions", "base", "dtype_policy", "layers", "rewrites")}
    write_recipe(folder, {**kept, **parts}, arrays)


def test_an_unknown_rewrite_is_refused(folder, gpt2):
    rewritten(folder, rewrites=[{"type": "backbone_surgery>Ster", "fields": {}}])
    with pytest.raises(bs.RecipeError, match=r"Did you mean 'backbone_surgery>Steer'"):
        bs.load_recipe(folder, gpt2)


def test_other_fields_are_refused(folder, gpt2):
    rewritten(folder, rewrites=[{"type": "backbone_surgery>Steer", "fields": {"old": 1}}])
    with pytest.raises(bs.RecipeError, match=r"expected fields of backbone_surgery>Steer: name, "):
        bs.load_recipe(folder, gpt2)


def test_a_class_that_is_not_registered_here_is_refused(folder, gpt2):
    fields = {"at": "blocks.0", "make_layer": {"registered": "builtins>eval"}}
    rewritten(folder, rewrites=[{"type": "backbone_surgery>Wrap", "fields": fields}])
    with pytest.raises(bs.RecipeError, match=r"registered. Received 'builtins>eval'. Import the"):
        bs.load_recipe(folder, gpt2)


def test_a_path_is_refused(folder, gpt2, tmp_path):
    """A recipe reads no file but its own, whatever a rewrite in it would read."""
    fields = {"at": "blocks.0", "path": str(tmp_path)}
    rewritten(folder, rewrites=[{"type": "backbone_surgery>SparseAutoencoder", "fields": fields}])
    with pytest.raises(bs.RecipeError, match="expected no path in the field 'path'"):
        bs.load_recipe(folder, gpt2)
    values = [bs.SparseAutoencoder("blocks.0", str(tmp_path))]
    with pytest.raises(bs.SurgeryError, match=r"'rewrites\.0\.values\.0': expected no path in"):
        bs.save_recipe(bs.operate(gpt2, [Own("blocks.0", values)]), tmp_path / "r")


def test_fields_that_the_class_refuses(folder, gpt2):
    fields = {"name": "a", "vector": {"dict": [[0, "text"]]}}
    rewritten(folder, rewrites=[{"type": "backbone_surgery>Steer", "fields": fields}])
    with pytest.raises(bs.SurgeryError):
        bs.load_recipe(folder, gpt2)


def test_a_newer_version_says_what_can_read_it(folder, gpt2):
    path = folder / "recipe.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "version": 2, "readable_by": "0.9.0"}))
    with pytest.raises(bs.RecipeError, match=r"can be read by backbone-surgery 0\.9\.0 or newer"):
        bs.load_recipe(folder, gpt2)


def test_another_keras_is_warned_of(folder, gpt2):
    rewritten(folder, versions={"keras": "3.99.0", "keras_hub": keras_hub.__version__})
    with pytest.warns(UserWarning, match=r"made with keras 3\.99\.0"):
        bs.load_recipe(folder, gpt2)


def test_arrays_that_nobody_asks_for_are_refused(folder, gpt2):
    document, arrays = read_recipe(folder)
    kept = {k: document[k] for k in ("versions", "base", "dtype_policy", "layers", "rewrites")}
    for name, words in (
        ("rewrites.9.x", "that a rewrite asks for"),
        ("edited.x", "expected no such array"),
        ("owner.x", "expected no such array"),
    ):
        write_recipe(folder, kept, {**arrays, name: held(np.ones(3))})
        with pytest.raises(bs.RecipeError, match=words):
            bs.load_recipe(folder, gpt2)


# Folders and presets


def test_saving_again_replaces_the_recipe(gpt2, folder):
    edited = bs.operate(gpt2, [bs.Steer("other", {0: vector()})])
    bs.save_recipe(edited, folder)
    assert [r.name for r in bs.load_recipe(folder, gpt2).rewrites] == ["other"]
    assert {p.name for p in folder.iterdir()} == {"recipe.json", "deltas.safetensors"}
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_nothing_of_others_is_replaced(gpt2, folder, tmp_path):
    edited = bs.operate(gpt2, [])
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for path, words in (
        (folder, r"holds \['notes.txt'\], which would be lost"),
        (tmp_path / "file", "Received a file"),
        (tmp_path / "link", "Received a link"),
        (tmp_path / "no" / "r", "whose parent does not exist"),
    ):
        with pytest.raises(bs.SurgeryError, match=words):
            bs.save_recipe(edited, path)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("case", ["steering", "layered", "lora"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_preset_holds_base_and_edit(name, case, tmp_path):
    edited = build(name, case)
    lm = bs.CachedCausalLM(edited)
    lm.save_to_preset(tmp_path / "preset")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "preset"))
    np.testing.assert_array_equal(outputs(loaded.opened), outputs(edited))
    task = TASKS[name].from_preset(str(tmp_path / "preset"), preprocessor=None)
    base = FAMILIES[name]()
    for a, b in zip(task.backbone.weights, base.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(bs.SurgeryError, match="expected `load_weights=True`"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "preset"), load_weights=False)


def test_a_preset_with_text(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    direction = np.random.default_rng(0).normal(0, 1, lm.backbone.hidden_dim)
    edited = bs.operate(lm.backbone, [bs.Steer("mood", {1: direction})])
    steered = bs.CachedCausalLM(edited, lm.preprocessor)
    steered.save_to_preset(tmp_path / "preset")
    steered.save_to_preset(tmp_path / "preset")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "preset"))
    texts = []
    for model in (steered, loaded):
        model.compile(sampler="greedy")
        texts.append(model.generate("Once upon a time", max_new_tokens=8))
    assert texts[0] == texts[1]
    task = keras_hub.models.CausalLM.from_preset(str(tmp_path / "preset"))
    assert type(task).__name__ == "GPT2CausalLM"


def test_a_preset_of_an_unedited_model_has_no_recipe(gpt2, tmp_path):
    bs.CachedCausalLM(gpt2).save_to_preset(tmp_path / "preset")
    assert not (tmp_path / "preset" / "recipe").exists()
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "preset"))
    assert bs.weights_digest(loaded) == bs.weights_digest(gpt2)


def test_presets_that_cannot_be_saved_or_loaded(gpt2, tmp_path):
    with pytest.raises(bs.SurgeryError, match="Received the function 'clone_fn'"):
        bs.CachedCausalLM(bs.operate(gpt2, [clone_fn])).save_to_preset(tmp_path / "a")
    plain = keras.Model(gpt2.input, bs.clone_layer_graph(gpt2.input, gpt2.output, clone_fn))
    with pytest.raises(bs.SurgeryError, match="over a keras_hub Backbone"):
        bs.CachedCausalLM(plain).save_to_preset(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    bs.CachedCausalLM(gpt2).save_to_preset(tmp_path / "a")
    (tmp_path / "a" / "recipe").symlink_to(tmp_path)
    with pytest.raises(bs.RecipeError, match="Received a link"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "a"))


# Names that Keras counts for the whole process


@keras.saving.register_keras_serializable("tests")
class Unnamed(keras.layers.Layer):
    """A wrapper, or a layer to put in, whose name and whose weights' names Keras makes up."""

    def __init__(self, block=None, **kwargs):
        super().__init__(**kwargs)
        self.block = block
        self.first = self.add_weight(shape=(), initializer="ones")
        self.second = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        y = self.block(x) if self.block else x
        return x + self.first * y + self.second


def unnamed(backbone):
    """An edit made after other layers of the same classes, with weights of its own."""
    for _ in range(11):
        Unnamed()
    rewrites = [bs.Wrap("blocks.*", Unnamed), Put("blocks.1.mlp_output", Unnamed())]
    return bs.operate(backbone, rewrites)


def test_layers_made_before_do_not_matter_to_a_recipe(gpt2, tmp_path):
    edited = unnamed(gpt2)
    fill(edited)
    bs.save_recipe(edited, tmp_path / "a.recipe")
    unnamed(make_gpt2())
    loaded = bs.load_recipe(tmp_path / "a.recipe", gpt2)
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


def test_layers_made_before_do_not_matter_to_a_transfer(gpt2):
    edited, other = unnamed(gpt2), unnamed(make_gpt2(3))
    fill(edited)
    report = bs.transfer_weights(other, edited)
    extra = [p for p in report.copied if p not in variable_paths(gpt2)]
    assert len(extra) == 2 * gpt2.num_layers + 2
    np.testing.assert_array_equal(outputs(other), outputs(edited))


# Plain graphs


def graph_like(kind, seed=0):
    """A plain graph over a GPT-2: none of these differ in their weights."""
    backbone = make_gpt2(seed)
    first, *_, last = backbone.transformer_layers

    def clone_fn(layer, *args, **kwargs):
        if kind == "swapped" and layer in (first, last):
            layer = last if layer is first else first
        x = layer(*args, **kwargs)
        if kind == "repeated" and layer is first:
            return layer(x, **kwargs)
        if layer is last and kind != "plain":
            x = keras.layers.Activation("gelu" if kind == "activated" else "relu")(x)
            x = x - 1.0 if kind == "subtracted" else 1.0 - x
            x = keras.ops.cast(
                keras.ops.cast(x, "float16" if kind == "cast" else "bfloat16"), x.dtype
            )
            return x * np.full(32, 3.0 if kind == "tripled" else 2.0, "float32")
        return x

    outputs = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    return keras.Model(backbone.input, outputs)


@pytest.mark.parametrize(
    "other", ["plain", "swapped", "repeated", "tripled", "activated", "subtracted", "cast"]
)
def test_another_plain_graph_is_refused(other, tmp_path):
    graph = graph_like("doubled")
    edited = bs.operate(graph, steering("float32"))
    bs.save_recipe(edited, tmp_path / "a.recipe")
    loaded = bs.load_recipe(tmp_path / "a.recipe", graph_like("doubled"))
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))
    assert bs.weights_digest(graph_like(other)) == bs.weights_digest(graph)
    with pytest.raises(bs.RecipeError, match=r"expected a backbone with node 00\d\d \['?"):
        bs.load_recipe(tmp_path / "a.recipe", graph_like(other))
