"""`quantize` does to an edited model what it does to KerasHub's task, and a recipe keeps it."""

import re
import warnings

import jax
import keras
import numpy as np
import pytest
from keras.src.quantizers import gptq_core

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.opening import quantizing
from backbone_surgery.recipes.quantization import quantization
from backbone_surgery.recipes.store import read_recipe
from tests.families import ROWS
from tests.helpers import FAMILIES, TASKS, VOCABULARY, make_gpt2, ragged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_collecting")]

MODES = ("int8", "int4", "gptq", "awq")
NEW = 12


def config_of(mode, seed=0):
    """What Keras asks for, small enough for a test: of GPTQ and AWQ, groups of 8 weights."""
    texts = [np.random.default_rng(seed).integers(1, VOCABULARY, 200)]
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
    """Weights to the last bit, of blocks that an edit leaves out too; and so is the text.

    Calibrated ones only where Keras is helped to calibrate.
    """
    theirs, ours = FAMILIES[family](num_layers=3), FAMILIES[family](num_layers=3)
    task = TASKS[family](backbone=theirs, preprocessor=None)
    with graph.calibrating():
        task.quantize(mode, config=config_of(mode))
    lm = bs.CachedCausalLM(bs.operate(ours, [bs.Steer("mood", {0: np.ones(32)})]))
    inputs = ragged(rng, (4, 3), 4)
    greedy(lm, inputs, mood=0.0)
    shorter = bs.CachedCausalLM(bs.operate(ours, [bs.Skip("blocks.1")]))
    with warnings.catch_warnings():
        # Of layers that it leaves as they are.
        warnings.filterwarnings("error", "Invalid quantization mode|Layer .* does not have")
        shorter.quantize(mode, config=config_of(mode))
    for a, b in zip(theirs.variables, ours.variables, strict=True):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    assert np.array_equal(greedy(lm, inputs, mood=0.0), upstream(family, theirs, inputs))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_groups_of_one_sign_keep_their_values(mode, sign, symmetric, rng):
    """Keras's zero point of such a group lies outside of uint8, where it is cut or comes round."""
    if mode == "awq" and symmetric:
        pytest.skip("AWQ is never symmetric")
    backbone = make_gpt2(num_layers=1)
    dense = backbone.transformer_layers[0]._feedforward_output_dense
    kernel = sign * rng.uniform(1.0, 1.2, dense.kernel.shape)
    dense.kernel.assign(kernel)
    config = config_of(mode)
    if mode == "gptq":
        config.weight_bits, config.symmetric = 8, symmetric
    bs.CachedCausalLM(backbone).quantize(mode, config=config)
    x = rng.normal(size=(1, 5, kernel.shape[0])).astype("float32")
    wanted = x @ kernel
    off = np.abs(keras.ops.convert_to_numpy(dense(x)) - wanted).max() / np.abs(wanted).max()
    assert off <= (0.03 if mode == "gptq" else 0.2)


def test_calibration_begins_at_the_same_place_in_every_process():
    """Keras takes the place from `hash` of a text, which differs from process to process."""
    ids = [np.arange(1000)]
    with graph.calibrating():
        windows = gptq_core.get_dataloader(None, 10, ids, num_samples=3)
    assert windows[:, 0, 0].tolist() == [984, 323, 653]
    assert not hasattr(gptq_core, "hash")


@pytest.mark.parametrize("family", ["bloom", "smollm3"])
def test_a_backbone_that_was_never_called_is_quantised_too(family, rng):
    """Keras stops midway at layers without weights that have not been built."""
    theirs, ours = ROWS[family].make(), ROWS[family].make()
    inputs = ragged(rng, (4, 3), 4)
    with pytest.raises(ValueError, match="isn't yet built"):
        ROWS[family].make().quantize("int8")
    theirs.quantize("int8", filters="embedding|dense|proj")
    lm = bs.CachedCausalLM(ours)
    lm.quantize("int8")
    for a, b in zip(theirs.variables, ours.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.array_equal(greedy(lm, inputs), greedy(bs.CachedCausalLM(theirs), inputs))


@pytest.mark.parametrize("family", sorted({*ROWS} - {"gemma3n", "gemma4", "rwkv7"}))
def test_blocks_are_calibrated_on_what_they_are_given_in_the_model(family):
    """KerasHub leaves out positions of OPT, a norm of BLOOM and a scale of Gemma 3."""
    backbone = ROWS[family].make()
    edited = bs.operate(backbone, [bs.Capture("embeddings", "blocks.*")])
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (1, 12))
    wanted = edited({"token_ids": ids, "padding_mask": np.ones_like(ids)})["captures"]
    structure = quantizing._structure(backbone, edited.family, "gptq")
    x = ids
    for layer in structure["pre_block_layers"]:
        x = layer(x)
    np.testing.assert_allclose(x, wanted["embeddings"], rtol=1e-5, atol=1e-6)
    for i, block in enumerate(structure["sequential_blocks"]):
        x = block(x)[0][None]  # as Keras takes it
        np.testing.assert_allclose(x, wanted[f"blocks.{i}"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_texts_longer_than_the_positions_of_the_model(family):
    lm = bs.CachedCausalLM(ROWS[family].make(max_sequence_length=8))
    before = bs.weights_digest(lm.backbone)
    words = "at most 8 tokens, .* Received sequence_length=16. Make the config with .*=8"
    with pytest.raises(bs.SurgeryError, match=words):
        lm.quantize("gptq", config=config_of("gptq"))
    assert bs.weights_digest(lm.backbone) == before
    assert quantization(lm.backbone) is None


@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_blocks_that_are_given_more_than_hidden_states(mode):
    lm = bs.CachedCausalLM(ROWS["gemma4"].make())
    before = bs.weights_digest(lm.backbone)
    words = f"quantize to {mode}: .* of gemma4, which can take per_layer_input and shared_kv too"
    with pytest.raises(bs.SurgeryError, match=words):
        lm.quantize(mode, config=config_of(mode))
    assert bs.weights_digest(lm.backbone) == before


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


def test_a_mode_that_is_not_for_generation():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    words = r"quantize at .*one of int8, int4, gptq, awq\. Received 'float8'"
    for settings in ({"mode": "float8"}, {"config": keras.quantizers.Float8QuantizationConfig()}):
        with pytest.raises(bs.SurgeryError, match=words):
            lm.quantize(**settings)
    assert not {x.quantization_mode for x in lm.backbone._flatten_layers()} - {None}


def test_blocks_that_nobody_names():
    backbone = make_gpt2(num_layers=1)
    plain = keras.Model(backbone.input, bs.clone_layer_graph(backbone.input, backbone.output))
    edited = bs.operate(plain, [])
    with pytest.raises(bs.SurgeryError, match="blocks KerasHub can calibrate one by one"):
        edited.quantize("gptq", config=config_of("gptq"))


@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_other_texts_calibrate_other_weights(mode):
    """With Keras alone all texts give the same."""

    def digest(seed, *modes):
        model = bs.operate(make_gpt2(num_layers=1), [])
        model.quantize(*modes, config=config_of(mode, seed))
        return bs.weights_digest(model.owner)

    assert digest(0, mode) == digest(0)
    assert digest(0, mode) != digest(1, mode)


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt2", {}), ("gemma2", {}), ("qwen2", {"tie_word_embeddings": False})],
    ids=["gpt2", "gemma2 with a soft cap", "qwen2, untied"],
)
def test_gradients_of_int8_are_those_of_the_float_model(family, options):
    """By attribution and by `score`."""
    ids, targets = np.array([[3, 14, 15, 9]]), np.array([[14, 15, 9, 2]])
    found = []
    for mode in (None, "int8"):
        backbone = ROWS[family].make(num_layers=2, **options)
        edit = bs.Steer("mood", {1: np.ones(backbone.hidden_dim) * 0.1}, trainable=True)
        lm = bs.CachedCausalLM(bs.operate(backbone, [edit]))
        if mode is not None:
            lm.quantize(mode)
        (learned,) = lm.trainable_variables

        def loss(value, lm=lm, learned=learned):
            with keras.StatelessScope(state_mapping=[(learned, value)]):
                return lm.score(ids, scoring_mode="loss", target_ids=targets).mean()

        values = bs.attribution(lm, ids[0], target=7).values
        found.append((values, np.asarray(jax.grad(loss)(learned.value))))
    for plain, narrow in zip(*found, strict=True):
        assert np.corrcoef(plain.ravel(), narrow.ravel())[0, 1] > 0.98
        assert 0.8 < np.linalg.norm(narrow) / np.linalg.norm(plain) < 1.25


def test_fit_learns_in_int8_what_it_learns_in_float(rng):
    ids = rng.integers(1, VOCABULARY, (4, 8))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    losses = []
    for mode in (None, "int8"):
        lm = bs.CachedCausalLM(
            bs.operate(make_gpt2(num_layers=2), [bs.LowRank("blocks.*.value", rank=4)])
        )
        if mode is not None:
            lm.quantize(mode)
        lm.compile(optimizer=keras.optimizers.Adam(0.01))
        options = {"epochs": 30, "shuffle": False, "verbose": 0}
        losses.append(lm.fit(inputs, np.roll(ids, -1, 1), **options).history["loss"])
    assert losses[0][-1] < losses[0][0] - 0.5
    assert abs(losses[1][-1] - losses[0][-1]) < 0.2


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_task_of_what_is_quantised_already_predicts_and_learns(mode, rng):
    backbone = make_gpt2(num_layers=1)
    backbone.quantize(mode)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.LowRank("blocks.*.value", rank=4)]))
    lm.compile(optimizer=keras.optimizers.Adam(0.01))
    ids = rng.integers(1, VOCABULARY, (4, 8))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    found = lm.predict(inputs, verbose=0)
    np.testing.assert_allclose(found, lm.score(ids), rtol=1e-4, atol=1e-4)
    options = {"epochs": 20, "shuffle": False, "verbose": 0}
    losses = lm.fit(inputs, np.roll(ids, -1, 1), **options).history["loss"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ("nothing", "'nothing', which chooses none"),
        ("gpt2_backbone", "which chooses none"),
        (3, "it is a int"),
        ("(", "unterminated"),
        (lambda layer: layer.depth > 2, "a function that tells of each layer"),
        (lambda layer: 1 / 0, "fails at layer 'token_embedding' with ZeroDivisionError"),
    ],
)
def test_filters_that_choose_nothing(filters, words):
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    before = bs.weights_digest(lm.backbone)
    with pytest.raises(bs.SurgeryError, match=re.escape(words)):
        lm.quantize("int8", filters=filters)
    assert bs.weights_digest(lm.backbone) == before


@pytest.mark.parametrize("again", ["int8", "int4"])
def test_what_is_quantised_in_part_is_not_quantised_half_again(again):
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.quantize("int8", filters="feedforward")
    before = bs.weights_digest(lm.backbone)
    with pytest.raises(bs.SurgeryError, match=r"'feedforward_.*' among others, which is"):
        lm.quantize(again)
    assert bs.weights_digest(lm.backbone) == before
    lm.quantize("int8", filters="^(query|key|value)")
    assert len(quantization(lm.backbone)["layers"]) == 5


def test_a_table_in_eight_bits_is_not_calibrated_beside():
    """GPTQ leaves tables alone, but the two could not be saved together."""
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.quantize("int8", filters="embedding")
    with pytest.raises(bs.SurgeryError, match=r"'token_embedding' among others, which is"):
        lm.quantize("gptq", config=config_of("gptq"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_half_precision_are_not_calibrated_half_by_gptq(dtype):
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1, dtype=dtype))
    words = f"in float32, .* by gptq. Received some in {dtype}. .* mixed_{dtype}, or take awq"
    with pytest.raises(bs.SurgeryError, match=words):
        lm.quantize("gptq", config=config_of("gptq"))
    assert quantization(lm.backbone) is None
    lm.quantize("int4")


@pytest.mark.parametrize("mode", ["gptq", "awq"])
def test_lora_and_calibrated_weights_refuse_each_other(mode, tmp_path):
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.backbone.enable_lora(2)
    with pytest.raises(bs.SurgeryError, match=f"without LoRA, which {mode} does not know"):
        lm.quantize(mode, config=config_of(mode))
    assert quantization(lm.backbone) is None
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.quantize(mode, config=config_of(mode))
    before = [v.path for v in lm.backbone.variables]
    with pytest.raises(bs.SurgeryError, match=f"^enable_lora .* for LoRA. Received one in {mode}"):
        lm.opened.enable_lora(2)
    assert [v.path for v in lm.backbone.variables] == before
    bs.save_recipe(bs.operate(lm.backbone, []), tmp_path / "r")


def test_a_recipe_of_lora_that_was_calibrated_is_refused(tmp_path):
    """KerasHub's own task lets both be made, and nothing could load it."""
    backbone = make_gpt2(num_layers=1)
    backbone.enable_lora(2)
    TASKS["gpt2"](backbone=backbone, preprocessor=None).quantize("awq", config=config_of("awq"))
    with pytest.raises(bs.SurgeryError, match=r"^save_recipe .* for LoRA. Received one in awq"):
        bs.save_recipe(bs.operate(backbone, []), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def load(folder):
    """Load the backbone of a preset as `from_preset` does."""
    return bs.CachedCausalLM.from_preset(str(folder), preprocessor=None).opened.owner


@pytest.mark.parametrize("mode", ["int8", "int4"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_what_kerashub_saved_generates(family, mode, tmp_path, rng):
    backbone = FAMILIES[family]()
    backbone.quantize(mode)
    backbone.save_to_preset(str(tmp_path / "preset"))
    loaded, inputs = load(tmp_path / "preset"), ragged(rng, (4, 3), 4)
    text = greedy(bs.CachedCausalLM(loaded), inputs)
    assert np.array_equal(text, upstream(family, loaded, inputs))


def test_what_kerashub_saved_in_int4_learns(tmp_path, rng):
    backbone = make_gpt2(num_layers=1)
    backbone.quantize("int4")
    backbone.save_to_preset(str(tmp_path / "preset"))
    low_rank = bs.LowRank("blocks.*.value", rank=4)
    lm = bs.CachedCausalLM(bs.operate(load(tmp_path / "preset"), [low_rank]))
    lm.compile(optimizer=keras.optimizers.Adam(0.01))
    ids = rng.integers(1, VOCABULARY, (4, 8))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    options = {"epochs": 20, "shuffle": False, "verbose": 0}
    losses = lm.fit(inputs, np.roll(ids, -1, 1), **options).history["loss"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_recipe_of_what_kerashub_saved_has_the_same_bits(mode, tmp_path):
    """Its token embedding rounds its inputs, also where the model that was saved did not."""
    backbone = make_gpt2(num_layers=1)
    backbone.quantize(mode)
    backbone.save_to_preset(str(tmp_path / "preset"))
    edited = bs.operate(load(tmp_path / "preset"), [bs.Steer("mood", {0: np.ones(32)})])
    bs.save_recipe(edited, tmp_path / "r")
    wanted = np.asarray(bs.CachedCausalLM(edited).score(np.array([[3, 1, 4]])))
    for other in (edited.owner, load(tmp_path / "preset"), make_gpt2(num_layers=1)):
        loaded = bs.load_recipe(tmp_path / "r", other)
        got = np.asarray(bs.CachedCausalLM(loaded).score(np.array([[3, 1, 4]])))
        assert np.array_equal(got, wanted)


def test_a_recipe_tells_quantised_inputs_from_others(tmp_path):
    backbone = make_gpt2(num_layers=1)
    backbone.quantize(config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))
    backbone.save_to_preset(str(tmp_path / "preset"))
    bs.save_recipe(bs.operate(backbone, []), tmp_path / "r")
    other = load(tmp_path / "preset")
    with pytest.raises(bs.RecipeError, match=r"int8, inputs of 0 layers.*of 7 layers"):
        bs.load_recipe(tmp_path / "r", other)


CONFIGS = {"gptq": keras.quantizers.GPTQConfig, "awq": keras.quantizers.AWQConfig}
SIZES = {"num_samples": 4, "sequence_length": 8, "group_size": 8}


class Failing:
    """A tokenizer that fails at its third text."""

    def __init__(self):
        self.calls = 0

    def tokenize(self, text):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the tokenizer failed")
        return [1, 2, 3]


@pytest.mark.by_default(4)
@pytest.mark.parametrize("mode", CONFIGS)
@pytest.mark.parametrize(
    ("texts", "tokenizer", "words"),
    [
        ([[1, 2], [3, 60]], None, r"text 1: expected token ids from 0 to 59. .*from 3 to 60"),
        ([[1, -3]], None, "token ids from 0 to 59"),
        ([[1.5, 2]], None, "token ids from 0 to 59"),
        ([], None, "a dataset of texts"),
        ("a text", None, "a dataset of texts, or of token ids. Received 'a text'"),
        (["a text"], None, "a tokenizer with a method `tokenize`"),
        (["a text"] * 4, Failing(), "the tokenizer failed"),
    ],
)
def test_texts_are_read_before_a_layer_is_touched(mode, texts, tokenizer, words, tmp_path):
    backbone = make_gpt2()
    lm = bs.CachedCausalLM(backbone)
    if tokenizer is not None:
        tokenizer = type(tokenizer)()
    with pytest.raises((bs.SurgeryError, RuntimeError), match=words):
        lm.quantize(mode, config=CONFIGS[mode](texts, tokenizer, **SIZES))
    assert not any(x.quantization_mode for x in backbone._flatten_layers())
    backbone.save_weights(tmp_path / "whole.weights.h5")


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONFIGS)
def test_token_ids_need_no_tokenizer(mode):
    """They give what they give Keras with one that hands them on."""
    ids = np.random.default_rng(2).integers(1, 60, (3, 20))
    kernels = []
    for texts, tokenizer in ((ids, None), ([*ids], lambda x: x), (iter(ids.tolist()), None)):
        lm = bs.CachedCausalLM(make_gpt2())
        lm.quantize(mode, config=CONFIGS[mode](texts, tokenizer, **SIZES))
        kernels.append(weight_arrays(lm.backbone))
    for other in kernels[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(kernels[0], other, strict=True))


def weight_arrays(backbone):
    return [np.asarray(v) for v in backbone.variables]


def test_a_calibration_that_is_cut_off_is_told_of_and_kept_in_no_recipe(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    lm, recipe = bs.CachedCausalLM(make_gpt2()), tmp_path / "edit.recipe"
    bs.save_recipe(lm.opened, recipe)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.setattr("keras.src.quantizers.gptq_core.apply_gptq_layerwise", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        lm.quantize("gptq", config=CONFIGS["gptq"]([[1, 2, 3]], None, **SIZES))
    assert "quantised in part now. Load the model anew" in caught.value.__notes__[0]
    with pytest.raises(bs.SurgeryError, match="expected layers that are calibrated"):
        bs.save_recipe(lm.opened, recipe)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
