"""In half precision and int8 `check` allows for what rounding does; it still sees what is wrong."""

import keras
import numpy as np
import pytest
from keras import ops

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.caching import check, choices
from backbone_surgery.rewriting.autoencoder_layers import Encoder
from tests.autoencoders import arrays, save
from tests.families import ROWS
from tests.helpers import make_gpt2

CHOSEN = 2
"""How many experts a token of the model is given."""


@pytest.fixture(scope="module")
def backbone():
    """A mixture in half precision."""
    return ROWS["qwen3_moe"].make(dtype="bfloat16")


class BreaksTies(keras.layers.Layer):
    """Tie the last expert that a token is given with the next; what runs at once breaks the tie."""

    def call(self, x):
        sign = 1 if ops.shape(x)[1] > 1 else -1
        logits = np.zeros(x.shape[-1])
        logits[: CHOSEN - 1] = 2
        logits[CHOSEN - 1 : CHOSEN + 1] = 1 + sign / 128, 1 - sign / 128
        return ops.zeros_like(x) + ops.cast(logits, x.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.slow
def test_check_does_not_count_experts_that_rounding_chose(backbone, monkeypatch):
    edited = bs.operate(backbone, [bs.Insert("blocks.*.router", BreaksTies(dtype="bfloat16"))])
    assert max(bs.check(edited).errors.values()) < 0.02
    models = check._models
    monkeypatch.setattr(check, "_models", lambda opened, is_half: models(opened, False))
    with pytest.raises(bs.CacheMismatchError, match="expected cached and uncached"):
        bs.check(edited)


@pytest.mark.slow
def test_check_takes_experts_that_are_ablated(backbone):
    edited = bs.operate(backbone, [bs.Ablate("blocks.*.router", experts=[1])])
    assert max(bs.check(edited).errors.values()) < 0.02


class RoundsOtherwise(keras.layers.Layer):
    """Stand for rounding that is not the same for one token and for several at once."""

    def call(self, x):
        signs = np.resize([1, -1], x.shape[-1]) * (1 if ops.shape(x)[1] > 1 else -1)
        return x * ops.cast(1 + signs / 128, x.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.slow
def test_check_does_not_count_features_that_rounding_kept(tmp_path, monkeypatch):
    backbone = make_gpt2(num_layers=2, dtype="bfloat16")
    tensors = arrays(np.random.default_rng(0), "topk", backbone.hidden_dim)
    save(tmp_path, tensors, "topk")
    edits = [
        bs.Insert("blocks.1", RoundsOtherwise(dtype="bfloat16")),
        bs.SparseAutoencoder("blocks.1", str(tmp_path)),
    ]
    edited = bs.operate(backbone, edits)
    assert max(bs.check(edited).errors.values()) < 0.06
    models = check._models
    monkeypatch.setattr(check, "_models", lambda opened, is_half: models(opened, False))
    with pytest.raises(bs.CacheMismatchError, match="expected cached and uncached"):
        bs.check(edited)


@pytest.mark.parametrize("architecture", ["topk", "jumprelu"])
def test_features_are_kept_by_scores_that_are_given(tmp_path, architecture, rng):
    weights = arrays(rng, architecture, 32)
    save(tmp_path, weights, architecture)
    opened = bs.operate(make_gpt2(), [bs.SparseAutoencoder("blocks.1", str(tmp_path))])
    [encoder] = {n.operation for n in graph.all_nodes(opened) if isinstance(n.operation, Encoder)}
    x, other = rng.normal(size=(2, 2, 5, 32)).astype("float32")
    chosen = np.asarray(encoder(other)) > 0
    own = np.maximum(np.asarray(encoder.score(x)), 0)
    kept = choices.Kept(encoder)(encoder.score(x), encoder.score(other))
    np.testing.assert_array_equal(kept, np.where(chosen, own, 0))
    assert not np.array_equal(kept, encoder(x))


class MixesTokens(keras.layers.Layer):
    """Give each token the sum of all tokens until then."""

    def call(self, x):
        return ops.cumsum(x, axis=1)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["router", "expert_weights", "mlp_output"])
def test_check_sees_what_mixes_tokens(backbone, role):
    layer = MixesTokens(dtype="bfloat16")
    edited = bs.operate(backbone, [bs.Insert(f"blocks.1.{role}", layer)])
    with pytest.raises(bs.CacheMismatchError, match="look at 'mixes_tokens'"):
        bs.check(edited)


@pytest.mark.slow
@pytest.mark.usefixtures("no_collecting")
def test_check_allows_for_inputs_that_int8_rounds():
    backbone = bs.CachedCausalLM.from_preset("tiny_gemma").backbone
    backbone.quantize("int8")
    for seed in range(2):
        assert max(bs.check(backbone, seed=seed).errors.values()) < 0.03
    edited = bs.operate(backbone, [bs.Insert("blocks.1.mlp_output", MixesTokens())])
    with pytest.raises(bs.CacheMismatchError, match="look at 'mixes_tokens'"):
        bs.check(edited)
