"""Presets hold base and edit: KerasHub loads the one, this library both; a save is whole."""

import shutil
from pathlib import Path

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import FAMILIES, TASKS, make_gpt2
from tests.recipes.edits import make, outputs


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2()


@pytest.fixture(scope="module")
def preset(gpt2, tmp_path_factory):
    """The folder of a steered model that no test changes."""
    path = tmp_path_factory.mktemp("preset") / "p"
    edited = bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)})])
    bs.CachedCausalLM(edited).save_to_preset(path)
    return path


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        ("gpt2", "layered", "float32"),
        pytest.param("gpt2", "lora", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gemma2", "layered", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gemma2", "lora", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_preset_holds_base_and_edit(name, case, dtype, tmp_path, monkeypatch):
    """In its own dtype, and also from inside of its folder, whose name is then a dot."""
    edited = make(name, case, dtype)
    bs.CachedCausalLM(edited).save_to_preset(tmp_path / "p")
    monkeypatch.chdir(tmp_path / "p")
    before = files(tmp_path)
    loaded = bs.CachedCausalLM.from_preset(".").backbone
    assert loaded.owner.dtype_policy.name == dtype
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))
    task = TASKS[name].from_preset(".", preprocessor=None, dtype=dtype)
    for a, b in zip(
        task.backbone.weights, FAMILIES[name](dtype=dtype, num_layers=3).weights, strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert files(tmp_path) == before


@pytest.mark.slow
def test_a_base_whose_layers_have_dtypes_of_their_own(tmp_path):
    dtypes = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    dtypes["token_embedding"] = keras.dtype_policies.DTypePolicy("bfloat16")
    backbone = make_gpt2(dtype=dtypes)
    backbone.enable_lora(2)
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(32)})])
    bs.CachedCausalLM(edited).save_to_preset(tmp_path / "p")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "p")).backbone
    assert [v.dtype for v in loaded.owner.weights] == [v.dtype for v in backbone.weights]
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


@pytest.mark.slow
@pytest.mark.parametrize("way", [1, -1])
def test_a_recipe_of_a_quantised_model_and_of_its_folder(tmp_path, no_collecting, way):
    """The one is loaded onto the other; a folder of KerasHub does not say the quantizers."""
    backbone = make_gpt2(num_layers=1)
    backbone.quantize("int8")
    backbone.save_to_preset(tmp_path / "base")
    both = backbone, bs.CachedCausalLM.from_preset(str(tmp_path / "base")).backbone
    source, other = both[::way]
    edited = bs.operate(source, [bs.Steer("mood", {0: np.ones(32)})])
    bs.save_recipe(edited, tmp_path / "edit")
    loaded = bs.load_recipe(tmp_path / "edit", other)
    np.testing.assert_array_equal(outputs(loaded), outputs(edited))


def test_what_a_preset_is_loaded_with_must_fit_its_edit(preset):
    with pytest.raises(bs.SurgeryError, match="expected `load_weights=True`"):
        bs.CachedCausalLM.from_preset(str(preset), load_weights=False)
    with pytest.raises(bs.SurgeryError, match=r"expected float32, the dtype .* dtype 'bfloat16'"):
        bs.CachedCausalLM.from_preset(str(preset), dtype="bfloat16")
    policy = keras.DTypePolicy("float32")
    assert bs.CachedCausalLM.from_preset(str(preset), dtype=policy).opened.rewrites


@pytest.mark.slow
def test_a_preset_with_text(tmp_path):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    direction = np.random.default_rng(0).normal(0, 1, lm.backbone.hidden_dim)
    edited = bs.operate(lm.backbone, [bs.Steer("mood", {1: direction})])
    for _ in range(2):
        bs.CachedCausalLM(edited, lm.preprocessor).save_to_preset(tmp_path / "p")
    loaded = bs.CachedCausalLM.from_preset(tmp_path / "p")
    np.testing.assert_array_equal(outputs(loaded.opened), outputs(edited))
    text = "Once upon a time"
    tokens = loaded.preprocessor.generate_preprocess(text)["token_ids"]
    np.testing.assert_array_equal(tokens, lm.preprocessor.generate_preprocess(text)["token_ids"])
    task = keras_hub.models.CausalLM.from_preset(str(tmp_path / "p"))
    assert type(task).__name__ == "GPT2CausalLM"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_gemma"])
def test_a_preset_with_a_tokenizer_is_replaced(tmp_path, name):
    lm = bs.CachedCausalLM.from_preset(name)
    for _ in range(2):
        lm.save_to_preset(tmp_path / "p", max_shard_size=5e-4)
    assert bs.CachedCausalLM.from_preset(str(tmp_path / "p")).preprocessor is not None


def test_a_preset_of_an_unedited_model_has_no_recipe(gpt2, tmp_path):
    bs.CachedCausalLM(gpt2).save_to_preset(tmp_path / "p")
    assert not (tmp_path / "p" / "recipe").exists()
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "p"))
    assert bs.weights_digest(loaded) == bs.weights_digest(gpt2)


@pytest.mark.slow
def test_a_preset_says_what_a_config_leaves_out(tmp_path):
    """KerasHub's `LlamaBackbone.get_config` does not say that the head is tied."""
    backbone = ROWS["llama"].make(num_layers=1, tie_word_embeddings=True)
    edited = bs.operate(backbone, [bs.Steer("mood", {0: np.ones(32)})])
    bs.CachedCausalLM(edited).save_to_preset(tmp_path / "p")
    loaded = bs.CachedCausalLM.from_preset(str(tmp_path / "p"))
    np.testing.assert_array_equal(outputs(loaded.backbone), outputs(edited))
    theirs = keras_hub.models.Backbone.from_preset(str(tmp_path / "p"))
    assert theirs.tie_word_embeddings
    assert bs.weights_digest(theirs) == bs.weights_digest(backbone)


def clone_fn(layer, *args, **kwargs):
    x = layer(*args, **kwargs)
    return keras.layers.Dense(32)(x) if layer.name == "transformer_layer_0" else x


def quantised():
    backbone = make_gpt2(num_layers=1)
    edited = bs.operate(backbone, [])
    backbone.quantize("int8")
    return edited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b: bs.operate(b, [clone_fn]), "Received the function 'clone_fn'"),
        (
            lambda b: keras.Model(b.input, bs.clone_layer_graph(b.input, b.output, clone_fn)),
            "expected an edit of a keras_hub Backbone",
        ),
        (lambda b: quantised(), r"quantised to int8\. Use `save_recipe`"),
    ],
)
def test_presets_that_cannot_be_saved(gpt2, tmp_path, make, words):
    lm = bs.CachedCausalLM(make(gpt2))
    with pytest.raises(bs.SurgeryError, match=words):
        lm.save_to_preset(tmp_path / "p")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, ""])
def test_paths_that_are_none(gpt2, path):
    with pytest.raises(bs.SurgeryError, match="save_to_preset: expected a path"):
        bs.CachedCausalLM(gpt2).save_to_preset(path)
    with pytest.raises(bs.SurgeryError, match="from_preset: expected a path"):
        bs.CachedCausalLM.from_preset(path)


def test_a_link_in_place_of_the_recipe(gpt2, preset, tmp_path):
    bs.CachedCausalLM(gpt2).save_to_preset(tmp_path / "p")
    (tmp_path / "p" / "recipe").symlink_to(preset / "recipe")
    with pytest.raises(bs.RecipeError, match="Received a link"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "p"))


def test_what_is_no_part_of_a_preset_is_never_replaced(gpt2, tmp_path):
    lm = bs.CachedCausalLM(bs.operate(gpt2, [bs.Steer("mood", {1: np.ones(32)})]))
    lm.save_to_preset(tmp_path / "p")
    for name in ("package.json", "assets/mine.png", "recipe/notes.txt", "assets/empty/", "a.h5"):
        file = tmp_path / "p" / name
        file.parent.mkdir(exist_ok=True)
        file.mkdir(parents=True) if name.endswith("/") else file.write_text("mine")
        with pytest.raises(bs.SurgeryError, match=rf"holds \['{name.rstrip('/')}'\], which would"):
            lm.save_to_preset(tmp_path / "p")
        file.rmdir() if name.endswith("/") else file.unlink()
        if name.startswith("assets"):
            (tmp_path / "p" / "assets").rmdir()


@pytest.mark.parametrize(
    "names", [["config.json"], ["config.json", "metadata.json"], ["task.json"]]
)
def test_a_folder_that_only_looks_like_a_preset_is_never_replaced(gpt2, tmp_path, names):
    for name in names:
        Path(tmp_path, name).write_text("{}")
    with pytest.raises(bs.SurgeryError, match="which would be lost"):
        bs.CachedCausalLM(gpt2).save_to_preset(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_an_error_while_it_saves_leaves_the_old_one(gpt2, tmp_path, monkeypatch):
    lm = bs.CachedCausalLM(gpt2)
    lm.save_to_preset(tmp_path / "p")
    before = files(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(type(gpt2), "save_weights", fail)
    with pytest.raises(bs.SurgeryError, match=r"expected a place that can .*: no space left"):
        lm.save_to_preset(tmp_path / "p")
    assert files(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def _cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def _fewer_blocks(file):
    config = file.with_name("config.json")
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 1'))


def _another_size(file):
    config = file.with_name("config.json")
    config.write_text(config.read_text().replace('"hidden_dim": 32', '"hidden_dim": 36'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "Received 'model.weights.h5', at which it stopped .OSError.*truncated file"),
        (lambda file: file.write_bytes(b""), "Received 'model.weights.h5', at which it stopped"),
        (
            Path.unlink,
            "expected weights, in model.weights.h5 or model.weights.json with its shards",
        ),
        (
            _fewer_blocks,
            "expected the weights of the model that its config describes, with 4 layers",
        ),
        (_another_size, "expected weights that KerasHub loads into the model that `config.json`"),
    ],
)
@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_that_are_damaged_or_of_another_model(gpt2, tmp_path, damage, words):
    gpt2.save_to_preset(str(tmp_path / "p"))
    whole = bs.CachedCausalLM.from_preset(tmp_path / "p").backbone
    assert len(whole.weights) == len(gpt2.weights)
    damage(tmp_path / "p" / "model.weights.h5")
    with pytest.raises(bs.SurgeryError, match=words):
        bs.CachedCausalLM.from_preset(tmp_path / "p")


@pytest.mark.parametrize("name", ["config.json", "task.json"])
@pytest.mark.parametrize("content", [b'{"a":', b"\xff"])
def test_damaged_json_of_a_preset_is_named(preset, tmp_path, name, content):
    shutil.copytree(preset, tmp_path / "p")
    (tmp_path / "p" / name).write_bytes(content)
    with pytest.raises(bs.SurgeryError, match="expected files and arguments that KerasHub takes"):
        bs.CachedCausalLM.from_preset(str(tmp_path / "p"))
