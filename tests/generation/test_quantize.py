"""`quantize` does to an edited model what it does to KerasHub's task, and a recipe keeps it."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.recipes.quantization import quantization
from backbone_surgery.recipes.store import read_recipe
from tests.helpers import FAMILIES, TASKS, VOCABULARY, make_gpt2, ragged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_collecting")]

MODES = ("int8", "int4", "gptq", "awq")
NEW = 12


def config_of(mode):
    """What Keras asks for, small enough for a test: of GPTQ and AWQ, groups of 8 weights."""
    texts = [np.random.default_rng(0).integers(1, VOCABULARY, 200)]
    settings = {"num_samples": 4, "sequence_length": 16, "group_size": 8}
    if mode == "gptq":
        return keras.quantizers.GPTQConfig(texts, lambda x: x, **settings)
    if mode == "awq":
        return keras.quantizers.AWQConfig(texts, lambda x: x, num_grid_points=4, **settings)
    return None


def upstream(family, backbone, inputs):
    """Generate by KerasHub's own task."""
    task = TASKS[family](backbone=backbone, preprocessor=None)
    task.compile(sampler="greedy")
    padded = {k: np.pad(v, ((0, 0), (0, NEW))) for k, v in inputs.items()}
    return np.asarray(task.generate(padded, stop_token_ids=None)["token_ids"])


def greedy(lm, inputs, **controls):
    lm.compile(sampler="greedy")
    width = inputs["token_ids"].shape[1] + NEW
    options = {"max_length": width, "stop_token_ids": None, "controls": controls or None}
    return lm.generate(inputs, **options)["token_ids"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_an_edited_model_is_quantised_as_kerashub_quantises_its_task(family, mode, rng):
    """Weights to the last bit, of blocks that an edit leaves out too; and so is the text."""
    theirs, ours = FAMILIES[family](num_layers=3), FAMILIES[family](num_layers=3)
    task = TASKS[family](backbone=theirs, preprocessor=None)
    task.quantize(mode, config=config_of(mode))
    lm = bs.CachedCausalLM(bs.operate(ours, [bs.Steer("mood", {0: np.ones(32)})]))
    inputs = ragged(rng, (4, 3), 4)
    greedy(lm, inputs, mood=0.0)
    shorter = bs.CachedCausalLM(bs.operate(ours, [bs.Skip("blocks.1")]))
    shorter.quantize(mode, config=config_of(mode))
    for a, b in zip(theirs.variables, ours.variables, strict=True):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    assert np.array_equal(greedy(lm, inputs, mood=0.0), upstream(family, theirs, inputs))


@pytest.mark.parametrize("mode", MODES)
def test_a_recipe_keeps_it(mode, tmp_path, rng):
    edited = bs.operate(make_gpt2(num_layers=2), [bs.Steer("mood", {0: np.ones(32)})])
    edited.quantize(mode, config=config_of(mode))
    bs.save_recipe(edited, tmp_path / "r")
    backbone = make_gpt2(num_layers=2)
    before = bs.weights_digest(backbone)
    loaded = bs.load_recipe(tmp_path / "r", backbone)
    assert bs.weights_digest(backbone) == before
    assert quantization(loaded.owner) == quantization(edited.owner)
    assert bs.weights_digest(loaded.owner) == bs.weights_digest(edited.owner)
    inputs = ragged(rng, (4, 3), 4)
    texts = [greedy(bs.CachedCausalLM(x), inputs) for x in (edited, loaded)]
    assert np.array_equal(*texts)
    kernels = [name for name in read_recipe(tmp_path / "r")[1] if name.endswith(".kernel")]
    assert bool(kernels) == (mode in ("gptq", "awq"))
    again = bs.load_recipe(tmp_path / "r", edited.owner)  # as it is quantised already
    assert bs.weights_digest(again.owner) == bs.weights_digest(edited.owner)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_saved_whole_or_not_at_all(mode, tmp_path):
    lm, other = (bs.CachedCausalLM(make_gpt2(seed, num_layers=2)) for seed in (1, 2))
    for x in (lm, other):
        x.quantize(mode, config=config_of(mode))
    path = str(tmp_path / "a.weights.h5")
    if mode in ("int8", "int4"):
        lm.save_weights(path)
        other.load_weights(path)
        assert bs.weights_digest(lm.backbone) == bs.weights_digest(other.backbone)
        return
    lm.backbone.save_weights(path)
    with pytest.raises(bs.WeightMismatchError, match=r"with no more where the model has int\["):
        other.load_weights(path)
    for save in (lm.save_weights, lm.opened.save_weights):
        with pytest.raises(bs.SurgeryError, match="leaves out the zero points"):
            save(path)


def test_a_part_that_is_quantised_comes_back_alone(tmp_path):
    edited = bs.operate(make_gpt2(num_layers=2), [])
    config = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    edited.quantize(config=config, filters="feedforward")
    bs.save_recipe(edited, tmp_path / "r")
    loaded = bs.load_recipe(tmp_path / "r", make_gpt2(num_layers=2))
    described = quantization(loaded.owner)
    assert len(described["layers"]) == 4
    assert described == quantization(edited.owner)
    assert bs.weights_digest(loaded.owner) == bs.weights_digest(edited.owner)


def test_what_a_recipe_cannot_hold(tmp_path):
    backbone = make_gpt2(num_layers=2)
    backbone.quantize("int8", filters="feedforward")
    backbone.quantize("int4", filters="attention")
    with pytest.raises(bs.SurgeryError, match=r"to int4/128, int8, in several ways"):
        bs.save_recipe(bs.operate(backbone, []), tmp_path / "r")
    backbone = make_gpt2(num_layers=1)
    backbone.quantize("float8")
    with pytest.raises(bs.SurgeryError, match=r"to float8, in one way"):
        bs.save_recipe(bs.operate(backbone, []), tmp_path / "r")


def test_blocks_that_nobody_names():
    backbone = make_gpt2(num_layers=1)
    plain = keras.Model(backbone.input, bs.clone_layer_graph(backbone.input, backbone.output))
    edited = bs.operate(plain, [])
    with pytest.raises(bs.SurgeryError, match="blocks KerasHub can calibrate one by one"):
        edited.quantize("gptq", config=config_of("gptq"))
