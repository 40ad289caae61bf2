"""Names of bundled models come before paths, and loading writes nothing."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph, presets
from backbone_surgery.bundled import bundled_models, models_folder
from backbone_surgery.presets import preset_of
from tests.helpers import make_gpt2

ROOT = Path(__file__).parents[1]


def snapshot(folder):
    return {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.slow
def test_bundled_names_come_before_paths_and_loading_never_writes(tmp_path, monkeypatch):
    """Neither a folder of that name, nor one set aside under it, takes the place of the model."""
    edited = bs.operate(make_gpt2(), [bs.Steer("mood", {1: np.ones(32)})])
    for name in ("tiny_gpt2", ".tiny_gpt2.old"):
        bs.CachedCausalLM(edited).save_to_preset(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    assert lm.opened.rewrites == ()
    assert preset_of(lm.backbone) == "tiny_gpt2"
    config = (bundled_models()["tiny_gpt2"] / "config.json").read_text()
    assert f'"hidden_dim": {lm.backbone.hidden_dim}' in config
    shutil.rmtree("tiny_gpt2")
    bs.CachedCausalLM.from_preset("tiny_gpt2")
    assert snapshot(tmp_path) == {p: b for p, b in before.items() if "tiny_gpt2" not in p.parts}


@pytest.mark.by_default(1)
@pytest.mark.parametrize("path", ["./tiny_gpt2", "tiny_gpt2/", Path("tiny_gpt2").absolute])
def test_a_path_is_the_folder_and_not_the_bundled_model(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    backbone = make_gpt2()
    edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(32)})])
    bs.CachedCausalLM(edited).save_to_preset(tmp_path / "tiny_gpt2")
    lm = bs.CachedCausalLM.from_preset(path() if callable(path) else path)
    assert [r.name for r in lm.opened.rewrites] == ["mood"]
    assert bs.weights_digest(lm) == bs.weights_digest(backbone)


def test_a_folder_that_is_not_there_is_not_made(tmp_path, monkeypatch):
    (tmp_path / ".r.old").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bs.RecipeError, match="expected a regular file"):
        bs.load_recipe("r", make_gpt2())
    with pytest.raises(bs.SurgeryError, match="expected a folder that exists"):
        bs.CachedCausalLM.from_preset("./r")
    assert [p.name for p in tmp_path.iterdir()] == [".r.old"]


def load_mood(preset):
    return bs.ControlVector.from_preset(preset, "mood")


@pytest.mark.parametrize("load", [bs.CachedCausalLM.from_preset, bs.plan, load_mood])
def test_names_of_no_preset(load):
    with pytest.raises(bs.SurgeryError, match=r"from_preset at 'tiny_gp2': .*mean tiny_gpt2"):
        load("tiny_gp2")
    with pytest.raises(bs.SurgeryError, match=r"Did you mean gemma_2b_en .*Bundled models: tiny"):
        load("gema_2b_en")
    with pytest.raises(bs.SurgeryError, match=r"preset of KerasHub.*Check it\. Bundled"):
        load("no/such/folder-at-all")


@pytest.mark.parametrize("folder", ["/", "..", "."])
def test_folders_without_a_preset(tmp_path, monkeypatch, folder):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(bs.SurgeryError, match=r"one without `config\.json`"):
        bs.CachedCausalLM.from_preset(folder)


# Where bundled models are


def model(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("project", "wanted"),
    [
        (None, None),
        ('[project]\nname = "backbone-surgery"', "models"),
        ('[project]\nname = "another"', None),
        ('[tool.poetry]\nname = "backbone-surgery"', None),
        ("not toml at all [", None),
        ('project = "backbone-surgery"', None),
    ],
)
def test_models_beside_the_package_count_in_a_checkout_alone(tmp_path, project, wanted):
    (tmp_path / "backbone_surgery").mkdir()
    model(tmp_path / "models", "stranger")
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    found = models_folder(tmp_path / "backbone_surgery")
    assert found == (tmp_path / wanted if wanted else None)
    model(tmp_path / "backbone_surgery" / "models", "tiny")
    assert models_folder(tmp_path / "backbone_surgery") == tmp_path / "backbone_surgery" / "models"


def test_this_is_a_checkout():
    assert models_folder(Path(presets.__file__).parent) == ROOT / "models"


@pytest.mark.slow
def test_a_wheel_has_its_own_models_and_no_others(tmp_path):
    """Installed beside a folder `models` of somebody else, as a package of that name would be."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "-q"]
    subprocess.run([*command, "--no-build-isolation", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site-packages"
    shutil.unpack_archive(wheel, site, "zip")
    model(site / "models", "stranger")
    code = "from backbone_surgery.bundled import bundled_models as b; print(*b().values())"
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "", "KERAS_BACKEND": "jax", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    inside = site / "backbone_surgery" / "models"
    assert out.stdout.split() == [str(inside / "tiny_gemma"), str(inside / "tiny_gpt2")]


def test_a_folder_without_the_tokenizer_files_that_keras_hub_reads(tmp_path):
    for name in ("config.json", "model.safetensors", "vocab.json"):
        shutil.copy(ROOT / "tests" / "fixtures" / "hf_gpt2" / name, tmp_path)
    words = r"expected the tokenizer files .*`merges.txt` doesn't exist.*copied from the original"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.CachedCausalLM.from_preset(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "initializer"),
    [
        ("tiny_gpt2", keras.initializers.RandomNormal),
        ("tiny_gemma", keras.initializers.VarianceScaling),
    ],
)
def test_weights_are_not_made_up_before_they_are_read(name, initializer, monkeypatch):
    """Initial values are computed for tracing alone, and all weights are those of KerasHub."""
    wanted = keras_hub.models.Backbone.from_preset(str(bundled_models()[name]))
    made, original = [], initializer.__call__

    def watched(self, shape, dtype=None, **kwargs):
        value = original(self, shape, dtype, **kwargs)
        made.append(isinstance(value, jax.core.Tracer))
        return value

    monkeypatch.setattr(initializer, "__call__", watched)
    loaded = presets.load_backbone(name)
    assert all(made)
    assert len(loaded.variables) == len(wanted.variables)
    for ours, theirs in zip(loaded.variables, wanted.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    presets.load_backbone(name, load_weights=False)
    assert not all(made)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_folder_of_a_quantised_model(tmp_path, mode, no_collecting):
    """As KerasHub's task loads it, which reads the dtypes of its layers by itself."""
    saved = make_gpt2(num_layers=1)
    saved.quantize(mode)
    keras_hub.models.GPT2CausalLM(saved, None).save_to_preset(tmp_path)
    wanted = keras_hub.models.CausalLM.from_preset(str(tmp_path), preprocessor=None).backbone
    lm = bs.CachedCausalLM.from_preset(str(tmp_path))
    assert lm.backbone.token_embedding.quantization_mode == mode
    for ours, theirs in zip(lm.backbone.variables, wanted.variables, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert max(bs.check(lm.backbone).errors.values()) <= 1e-5


def test_variables_that_are_assigned_nothing_get_their_initial_value():
    inner = keras.layers.Dense(2, kernel_initializer="ones", bias_initializer="ones")
    with contextlib.suppress(KeyError), graph.values_as_assigned():
        inner.build((None, 3))
        inner.kernel.assign(np.full((3, 2), 5.0))
        raise KeyError
    with graph.values_as_assigned():
        outer = keras.layers.Dense(2, kernel_initializer="ones", bias_initializer="ones")
        outer.build((None, 3))
        outer.kernel.assign(np.full((3, 2), 5.0))
        outer.kernel.assign_add(np.ones((3, 2)))
    outer.kernel.assign_add(np.ones((3, 2)))
    np.testing.assert_array_equal(outer.kernel.numpy(), np.full((3, 2), 7.0))
    np.testing.assert_array_equal(outer.bias.numpy(), np.ones(2))
    after = keras.layers.Dense(2)
    after.build((None, 3))
    assert after.kernel.numpy().shape == (3, 2)


@pytest.mark.slow
def test_a_vector_that_does_not_come_with_a_model():
    with pytest.raises(
        bs.SurgeryError, match=r"expected one of the vectors that come with .*'mood'"
    ):
        presets.find_vector("tiny_gpt2", "moot")
