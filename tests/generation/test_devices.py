"""On a GPU or TPU, where there is one: every family gives the text that a CPU gives."""

import jax
import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import ragged, relative

OPTIONS = {"max_new_tokens": 6, "stop_token_ids": None, "seed": 3, "return_captures": True}
DEVICE = jax.devices()[0]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.platform == "cpu", reason="needs a GPU or a TPU"),
]


def make_lm(device, name, weights=None, sampler="greedy", mode=None, **sizes):
    """Return a steered model whose weights lie on a device, and these weights."""
    with jax.default_device(device):
        backbone = ROWS[name].make(**sizes)
        if weights is not None:
            backbone.set_weights(weights)
        direction, vector = np.random.default_rng(3).normal(size=(2, backbone.hidden_dim))
        edits = [
            bs.Condition("asked", direction, threshold=0.1, at="blocks.0"),
            bs.Steer("mood", {1: vector}, when="asked", strength=1.0),
            bs.Capture("blocks.*"),
        ]
        lm = bs.CachedCausalLM(bs.operate(backbone, edits), precision="highest")
        lm.compile(sampler=sampler)
        weights = [np.array(w) for w in backbone.get_weights()]
        if mode:
            lm.quantize(mode)
        return lm, weights


def on_both(name, prompts, **options):
    """Return the tokens and captures of a CPU and of the device, of the same weights."""
    cpu = jax.local_devices(backend="cpu")[0]
    lm, weights = make_lm(cpu, name, **options)
    with jax.default_device(cpu):
        wanted = lm.generate(prompts, **OPTIONS)
    lm, _ = make_lm(DEVICE, name, weights, **options)
    assert lm.programs.platform == DEVICE.platform
    return wanted, lm.generate(prompts, **OPTIONS)


def compare(name, prompts, most=1e-4, **options):
    (wanted, captured), (got, others) = on_both(name, prompts, **options)
    np.testing.assert_array_equal(got["token_ids"], wanted["token_ids"])
    for path, value in captured.values.items():
        assert relative(others.values[path], value) <= most, path


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", list(ROWS))
def test_every_family(name, rows, rng):
    compare(name, ragged(rng, [11, 5][:rows], 11))


@pytest.mark.parametrize("sampler", ["beam", "top_k", "top_p"])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_samplers(name, sampler, rng):
    compare(name, ragged(rng, [11, 5], 11), sampler=sampler)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "llama", "gemma3"])
def test_prompts_in_half_precision(name, rng):
    """Which a GPU runs through cuDNN's attention; of what each has captured of the prompt."""
    prompts = ragged(rng, [48, 29], 48)
    (_, wanted), (_, got) = on_both(name, prompts, dtype="bfloat16")
    mask = prompts["padding_mask"]
    for path, value in wanted.values.items():
        assert relative(got.values[path][:, :48], np.asarray(value)[:, :48], mask) <= 0.05, path


@pytest.mark.parametrize(
    "name", ["gpt2", "gemma2", "gemma4", "gpt_oss", "bloom", "phi3", "mixtral"]
)
def test_one_query_in_half_precision(name, rng):
    """Which a GPU runs by a kernel; of what is captured of a new token that is equal."""
    (tokens, wanted), (others, got) = on_both(name, ragged(rng, [48] * 8, 48), dtype="bfloat16")
    same = tokens["token_ids"][:, 48] == others["token_ids"][:, 48]
    assert same.any()
    for path, value in wanted.values.items():
        assert relative(got.values[path][same, 48], np.asarray(value)[same, 48]) <= 0.05, path


WIDE_HEADS = {"hidden_dim": 256, "head_dim": 128, "num_query_heads": 2}


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", {}), ("gemma2", {}), ("gemma2", WIDE_HEADS), ("llama", {})]
)
def test_four_bits(name, sizes, rng):
    """Which a GPU reads packed, by a kernel, heads of Gemma's kin if they are wide; likewise."""
    prompts = ragged(rng, [48] * 8, 48)
    options = {"mode": "int4", "dtype": "bfloat16", **sizes}
    (tokens, wanted), (others, got) = on_both(name, prompts, **options)
    same = tokens["token_ids"][:, 48] == others["token_ids"][:, 48]
    assert same.any()
    for path, value in wanted.values.items():
        assert relative(got.values[path][same, 48], np.asarray(value)[same, 48]) <= 0.05, path


def test_training(rng):
    cpu = jax.local_devices(backend="cpu")[0]
    inputs = ragged(rng, [11, 5], 11)
    targets = np.roll(inputs["token_ids"], -1, axis=1)
    losses, weights = [], None
    for device in (cpu, DEVICE):
        lm, made = make_lm(device, "gpt2", weights, dropout=0.0)
        weights = made if weights is None else weights
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            lm.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
            history = lm.fit(inputs, targets, epochs=3, shuffle=False, verbose=0).history
            losses.append(history["loss"])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
