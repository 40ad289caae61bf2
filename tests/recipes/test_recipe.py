"""Recipes: what is saved is loaded bit for bit in another process, or refused in words."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.recipes.store import read_recipe
from backbone_surgery.weights.paths import variable_paths
from tests.helpers import FAMILIES, make_deep_gpt2, make_gemma, make_gpt2
from tests.recipes.edits import CASES, INPUTS, Put, fill, make, outputs, rewritten, steering, vector


@pytest.fixture(scope="module")
def shared():
    """A backbone that no test changes."""
    return make_deep_gpt2()


@pytest.fixture
def gpt2():
    return make_deep_gpt2()


@pytest.fixture
def folder(shared, tmp_path):
    bs.save_recipe(bs.operate(shared, steering()), tmp_path / "a.recipe")
    return tmp_path / "a.recipe"


# Bit for bit, in another process


def replay(folder, name, dtype):
    """Load every recipe of a folder and run it: called in a fresh process."""
    backbone = FAMILIES[name](dtype=dtype, num_layers=3)
    before = bs.weights_digest(backbone)
    results = {"plain": outputs(bs.open_backbone(backbone))}
    for case in CASES:
        edited = bs.load_recipe(Path(folder) / case, backbone)
        results[case] = outputs(edited, **INPUTS.get(case, {}))
    assert bs.weights_digest(backbone) == before
    np.savez(Path(folder) / "results.npz", **results)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("gpt2", "float32", marks=pytest.mark.slow),
        pytest.param("gemma2", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_every_rewrite_comes_back_in_a_fresh_process(tmp_path, name, dtype):
    """Vectors, layers and what they have learned, LoRA; the backbone stays as it is."""
    backbone = FAMILIES[name](dtype=dtype, num_layers=3)
    wanted = {}
    for case in CASES:
        edited = make(name, case, dtype, backbone)
        bs.save_recipe(edited, tmp_path / case)
        wanted[case] = outputs(edited, **INPUTS.get(case, {}))
    code = f"from tests.recipes.test_recipe import replay; replay({str(tmp_path)!r}, "
    command = [sys.executable, "-W", "ignore", "-c", f"{code}{name!r}, {dtype!r})"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    results = dict(np.load(tmp_path / "results.npz"))
    for case, value in wanted.items():
        np.testing.assert_array_equal(results[case], value, err_msg=case)
    assert len({value.tobytes() for value in results.values()}) == 1 + len(CASES)


def test_every_rewrite_has_a_case():
    """A rewrite that is added to the package needs one here."""
    tested = {type(r) for case in CASES.values() for r in case("gpt2", "float32")}
    public = [getattr(bs, name) for name in bs.__all__]
    known = {c for c in public if isinstance(c, type) and issubclass(c, bs.Rewrite)}
    assert len(known) > 10
    assert known - {bs.Rewrite, bs.SiteRewrite} <= tested


def test_a_layer_that_two_rewrites_share_stays_shared(shared, tmp_path):
    edited = bs.operate(shared, CASES["layered"]())
    bs.save_recipe(edited, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", shared)
    assert loaded.rewrites[0].layer is loaded.rewrites[2].layer
    assert list(variable_paths(loaded)) == list(variable_paths(edited))


def test_what_is_loaded_can_be_saved_again(shared, folder, tmp_path):
    """Also out of a task, and out of a cached graph."""
    wanted = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert len(wanted) == 2
    edited = bs.load_recipe(folder, shared)
    for i, model in enumerate((edited, bs.CachedCausalLM(edited), bs.rewire(edited))):
        bs.save_recipe(model, tmp_path / str(i))
        assert {p.name: p.read_bytes() for p in (tmp_path / str(i)).iterdir()} == wanted


@pytest.mark.slow
def test_an_edit_of_a_tuned_bundled_model_needs_no_backbone_when_it_is_saved_again(tmp_path):
    backbone = bs.CachedCausalLM.from_preset("tiny_gpt2").backbone
    backbone.enable_lora(2)
    bs.save_recipe(bs.operate(backbone, [bs.Skip("blocks.1", amount=0.5)]), tmp_path / "r")
    bs.save_recipe(bs.load_recipe(tmp_path / "r"), tmp_path / "again")
    loaded = bs.load_recipe(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded), outputs(bs.load_recipe(tmp_path / "r")))


@pytest.mark.slow
def test_an_edit_of_a_bundled_model_needs_no_backbone(tmp_path):
    backbone = bs.CachedCausalLM.from_preset("tiny_gpt2").backbone
    direction = np.random.default_rng(0).normal(0, 1, backbone.hidden_dim)
    edited = bs.operate(backbone, [bs.Steer("mood", {1: direction})])
    bs.save_recipe(edited, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r")), outputs(edited))
    backbone.token_embedding.embeddings.assign(backbone.token_embedding.embeddings + 1)
    bs.save_recipe(edited, tmp_path / "r")
    with pytest.raises(bs.RecipeError, match="with the weights it had then"):
        bs.load_recipe(tmp_path / "r")


@pytest.mark.slow
def test_int8_and_lora_of_the_backbone(tmp_path):
    """Loaded onto the backbone as it was before it was quantised, which stays as it is."""
    edited = bs.operate(make_gpt2(num_layers=1), [bs.Steer("mood", {0: vector()})])
    edited.quantize("int8")
    edited.enable_lora(2)
    fill(edited)
    bs.save_recipe(edited, tmp_path / "r")
    arrays = read_recipe(tmp_path / "r")[1]
    assert any(name.endswith("kernel_scale") for name in arrays)
    assert not any(name.endswith(".kernel") for name in arrays)
    backbone = make_gpt2(num_layers=1)
    before = bs.weights_digest(backbone)
    loaded = bs.load_recipe(tmp_path / "r", backbone)
    assert bs.weights_digest(backbone) == before
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dtype"), [("int8", "float32"), ("int4", "bfloat16")])
def test_onto_the_very_backbone_that_was_quantised(tmp_path, mode, dtype):
    edited = bs.operate(make_gpt2(num_layers=1, dtype=dtype), [bs.Steer("mood", {0: vector()})])
    edited.quantize(mode)
    bs.save_recipe(edited, tmp_path / "r")
    before = bs.weights_digest(edited.owner)
    loaded = bs.load_recipe(tmp_path / "r", edited.owner)
    assert loaded.owner is not edited.owner
    assert loaded.owner.dtype_policy.name == dtype
    assert bs.weights_digest(edited.owner) == before
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


def test_lora_that_a_recipe_cannot_hold(gpt2, tmp_path):
    gpt2.transformer_layers[0]._self_attention_layer.query_dense.enable_lora(2, lora_alpha=4)
    with pytest.raises(bs.SurgeryError, match=r"Received \(rank, alpha\) \[\(2, 4\)\] on 1 layers"):
        bs.save_recipe(bs.operate(gpt2, []), tmp_path / "r")


@keras.saving.register_keras_serializable("tests")
@dataclass(frozen=True)
class Product(bs.SiteRewrite):
    """Put in a layer that is told no dtype and no name."""

    at: str = "blocks.0"

    def apply(self, x, place, surgery):
        return keras.ops.cast(keras.layers.Dense(32, kernel_initializer="ones")(x), x.dtype)


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


def test_layers_that_a_rewrite_makes_keep_the_policy_they_were_made_under(shared, tmp_path, policy):
    policy("mixed_bfloat16")
    edited = bs.operate(shared, [Product()])
    wanted = outputs(edited)
    bs.save_recipe(edited, tmp_path / "r")
    policy("float32")
    loaded = bs.load_recipe(tmp_path / "r", shared)
    assert loaded.made_under == ("mixed_bfloat16",)
    assert keras.config.dtype_policy().name == "float32"
    np.testing.assert_array_equal(outputs(loaded), wanted)
    assert not np.array_equal(outputs(bs.operate(shared, [Product()])), wanted)
    both = bs.operate(loaded, [Product("blocks.1")])
    with pytest.raises(bs.SurgeryError, match=r"one global dtype policy.*_bfloat16, float32\."):
        bs.save_recipe(both, tmp_path / "both")
    assert not (tmp_path / "both").exists()


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


@pytest.mark.slow
def test_layers_made_before_do_not_matter(shared, tmp_path):
    """Neither to a recipe nor to a transfer."""
    edited = unnamed(shared)
    fill(edited)
    bs.save_recipe(edited, tmp_path / "r")
    other = unnamed(make_deep_gpt2(3))
    loaded = bs.load_recipe(tmp_path / "r", shared)
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))
    report = bs.transfer_weights(other, edited)
    extra = [p for p in report.copied if p not in variable_paths(shared)]
    assert len(extra) == 2 * shared.num_layers + 2
    np.testing.assert_array_equal(outputs(other), outputs(edited))


def test_names_that_keras_makes_up_do_not_collide(shared, tmp_path):
    keras.layers.Dense(1)
    insert = bs.Insert("blocks.0.mlp_output", keras.layers.Dense(32))
    edited = bs.operate(shared, [insert, Product("blocks.0.mlp_output")])
    wanted = outputs(edited)
    bs.save_recipe(edited, tmp_path / "r")
    keras.utils.clear_session()
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", shared)), wanted)


def test_layers_that_compute_with_a_copy_of_their_weights(shared, tmp_path):
    def edited(mean):
        layer = keras.layers.Normalization(axis=-1)
        layer.adapt(np.random.default_rng(0).normal(mean, 5, (100, 32)).astype("float32"))
        return bs.operate(shared, [bs.Insert("blocks.0", layer)])

    mine, other = edited(3), edited(-4)
    wanted = outputs(mine)
    assert not np.array_equal(outputs(other), wanted)
    bs.save_recipe(mine, tmp_path / "r")
    np.testing.assert_array_equal(outputs(bs.load_recipe(tmp_path / "r", shared)), wanted)
    bs.transfer_weights(other, mine)
    np.testing.assert_array_equal(outputs(other), wanted)


# The wrong backbone


def changed(gpt2):
    value = np.array(gpt2.token_embedding.embeddings)
    value[0, 0] = np.nextafter(value[0, 0], np.float32(1e9))
    gpt2.token_embedding.embeddings.assign(value)
    return gpt2


def with_lora(gpt2):
    gpt2.enable_lora(2)
    return gpt2


def plain(gpt2):
    return keras.Model(gpt2.input, bs.clone_layer_graph(gpt2.input, gpt2.output))


@pytest.mark.by_default(4)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_gemma, "expected a backbone with family gpt2. Received gemma"),
        (lambda: make_gpt2(num_layers=2), "expected a backbone with num_layers 3. Received 2"),
        (lambda: make_gpt2(dtype="bfloat16"), "with dtype float32. Received bfloat16"),
        (lambda: make_deep_gpt2(seed=1), "expected weights of the digest sha256:"),
        (lambda: changed(make_deep_gpt2()), "expected weights of the digest sha256:"),
        (
            lambda: with_lora(make_deep_gpt2()),
            "expected a backbone without LoRA. Received one with it",
        ),
        (
            lambda: bs.operate(make_deep_gpt2(), []),
            "Received an edited one. Pass its `owner`",
        ),
        (lambda: plain(make_deep_gpt2()), "expected an edit of a keras_hub Backbone"),
        (lambda: 3, "load_recipe: expected a built Keras model"),
        (lambda: "tiny_gpt2", "Received 'tiny_gpt2' .*`CachedCausalLM.from_preset` loads one by"),
        (lambda: None, "expected `backbone`, since the recipe was made on a GPT2Backbone"),
    ],
)
def test_another_backbone_is_refused(folder, make, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.load_recipe(folder, make())


def test_an_edit_of_a_plain_graph_is_refused(gpt2, tmp_path):
    with pytest.raises(bs.SurgeryError, match="expected an edit of a keras_hub Backbone"):
        bs.save_recipe(bs.operate(plain(gpt2), steering()), tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [None, 3, "gpt2", keras.Sequential()])
def test_what_is_no_model(model, tmp_path):
    with pytest.raises(bs.SurgeryError, match="save_recipe: expected a built Keras model"):
        bs.save_recipe(model, tmp_path / "r")


# Other releases


def test_another_keras_is_warned_of(folder, shared):
    rewritten(folder, versions={"keras": "3.99.0", "keras_hub": keras_hub.__version__})
    with pytest.warns(UserWarning, match=r"made with keras 3\.99\.0"):
        bs.load_recipe(folder, shared)


@pytest.mark.parametrize("name", ["edited.x", "owner.x"])
def test_weights_of_another_edit_are_refused(folder, shared, name):
    from backbone_surgery.recipes.store import write_recipe

    document, arrays = read_recipe(folder)
    write_recipe(folder, document, {**arrays, name: np.ones(3)})
    with pytest.raises(bs.RecipeError, match=f"at '{name}': expected no such array"):
        bs.load_recipe(folder, shared)


# The folder


def test_saving_again_replaces_the_recipe(shared, folder):
    bs.save_recipe(bs.operate(shared, [bs.Steer("other", {0: vector()})]), folder)
    assert [r.name for r in bs.load_recipe(folder, shared).rewrites] == ["other"]
    assert len(list(folder.iterdir())) == 2
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_nothing_of_others_is_touched(shared, folder, tmp_path):
    edited = bs.operate(shared, [])
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path, words in ((folder, r"holds \['notes.txt'\]"), (tmp_path / "file", "Received a file")):
        with pytest.raises(bs.SurgeryError, match=words):
            bs.save_recipe(edited, path)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_a_backbone_that_was_quantised_since_is_refused(tmp_path):
    backbone = make_gpt2(num_layers=1)
    bs.save_recipe(bs.operate(backbone, [bs.Skip("blocks.0")]), tmp_path / "it.recipe")
    backbone.quantize("int8")
    with pytest.raises(bs.RecipeError, match=r"that is quantised to None\. Received int8"):
        bs.load_recipe(tmp_path / "it.recipe", backbone)
