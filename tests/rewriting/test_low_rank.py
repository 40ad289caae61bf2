"""Low-rank adapters equal the merged weights, and are all that `fit` trains."""

import hashlib

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.rewriting.low_rank import Adapter
from tests.helpers import FAMILIES, make_deep_gpt2, make_gpt2, ragged, relative
from tests.reference import run, run_chunks, tokens

EXACT = 1e-5


def attention_of(backbone, index):
    layer = backbone.transformer_layers[index]
    return getattr(layer, "attention", None) or layer._self_attention_layer


def merge(backbone, edited, role, scale):
    """Add the adapters to the kernels of another backbone of the same weights."""
    for path, adapter in edited.rewrites[0].adapters.items():
        attention = attention_of(backbone, int(path.split(".")[1]))
        dense = getattr(attention, f"{role}_dense")
        down, up = adapter.get_weights()
        kernel = np.asarray(dense.kernel)
        heads_first = hasattr(attention, "rope_layer")  # Gemma: [heads, hidden, head]
        heads, size = (kernel.shape[0] if heads_first else kernel.shape[1]), kernel.shape[2]
        change = scale * (down @ up).reshape(-1, heads, size)
        dense.kernel.assign(kernel + (np.moveaxis(change, 1, 0) if heads_first else change))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_adapters_equal_merged_weights(name, rng):
    backbone, merged = FAMILIES[name](num_layers=3), FAMILIES[name](num_layers=3)
    edited = bs.operate(backbone, [bs.LowRank("blocks.*.value", rank=3, alpha=6)])
    inputs = tokens(rng)
    assert np.array_equal(run(edited, inputs), run(bs.open_backbone(backbone), inputs))
    for variable in edited.trainable_variables:
        variable.assign(rng.normal(0, 0.3, variable.shape))
    merge(merged, edited, "value", scale=2.0)
    wanted = run(merged, inputs)
    assert relative(run(edited, inputs), wanted) <= EXACT
    assert relative(run(backbone, inputs), wanted) > 1e-3
    for chunks in ([9], [4, 1, 4]):
        assert relative(run_chunks(bs.rewire(edited), inputs, chunks)[0], wanted) <= EXACT


def digest(backbone):
    weights = b"".join(np.asarray(v).tobytes() for v in backbone.variables)
    return hashlib.sha256(weights).hexdigest()


def batch(rng):
    ids = rng.integers(1, 60, (4, 10))
    return {"token_ids": ids[:, :-1], "padding_mask": np.ones((4, 9), "int32")}, ids[:, 1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_fit_trains_the_adapters_alone(name, rng):
    backbone = FAMILIES[name](num_layers=3)
    before, trainable = digest(backbone), len(backbone.trainable_variables)
    edited = bs.operate(backbone, [bs.LowRank("blocks.*.mlp_output", rank=2)])
    lm = bs.CachedCausalLM(edited)
    adapters = list(edited.rewrites[0].adapters.values())
    own = [v for adapter in adapters for v in adapter.variables]
    for model in (edited, lm):
        assert {id(v) for v in model.trainable_variables} == {id(v) for v in own}
        split = [*model.trainable_variables, *model.non_trainable_variables]
        assert {id(v) for v in split} == {id(v) for v in model.variables}
        assert len(model.trainable_weights) == len(own)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.Adam(0.2))
    inputs, options = ragged(rng, (4, 4), 4), {"max_new_tokens": 8, "stop_token_ids": None}
    text = lm.generate(inputs, **options)["token_ids"]
    x, y = batch(rng)
    history = lm.fit(x, y, epochs=4, batch_size=4, shuffle=False, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert all(np.abs(np.asarray(adapter.up)).max() > 0 for adapter in adapters)
    assert digest(backbone) == before
    assert len(backbone.trainable_variables) == trainable
    assert all(v.trainable for v in backbone.trainable_variables)
    after = lm.generate(inputs, **options)["token_ids"]
    assert not np.array_equal(after, text)
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    again = bs.CachedCausalLM(bs.operate(backbone, edited.rewrites))
    again.compile(sampler="greedy")
    assert np.array_equal(again.generate(inputs, **options)["token_ids"], after)


@pytest.mark.slow
def test_other_models_of_the_backbone_train_as_before(rng):
    backbone = make_deep_gpt2()
    bs.operate(backbone, [bs.LowRank("blocks.*.query", rank=2)])
    plain = bs.CachedCausalLM(backbone)
    assert len(plain.trainable_variables) == len(backbone.trainable_variables) > 0
    x, y = batch(rng)
    plain.compile(sampler="greedy", optimizer=keras.optimizers.SGD(0.1))
    before = digest(backbone)
    plain.fit(x, y, epochs=1, shuffle=False, verbose=0)
    assert digest(backbone) != before


@pytest.mark.slow
def test_a_direction_learned_by_gradient(rng):
    """A layer with one vector, inserted: the vector is all that trains."""

    class Direction(keras.layers.Layer):
        def build(self, shape):
            self.vector = self.add_weight(shape=(shape[-1],), initializer="zeros")

        def call(self, x):
            return x + self.vector

    backbone, direction = make_deep_gpt2(), Direction()
    before = digest(backbone)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Insert("blocks.1", direction)]))
    lm.compile(sampler="greedy", optimizer=keras.optimizers.SGD(1.0))
    x, y = batch(rng)
    lm.fit(x, y, epochs=1, batch_size=4, shuffle=False, verbose=0)
    assert [v.path for v in lm.trainable_variables] == [direction.vector.path]
    assert digest(backbone) == before
    after_block_1 = keras.Model(backbone.input, backbone.transformer_layers[1].output)
    states = np.asarray(after_block_1.predict_on_batch(x))

    def loss(vector):
        hidden = backbone.layer_norm(backbone.transformer_layers[2](states + vector))
        logits = backbone.token_embedding(hidden, reverse=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.mean(losses)

    import jax

    wanted = -jax.jit(jax.grad(loss))(np.zeros(32, "float32"))
    assert relative(direction.vector, wanted) <= 1e-4


@pytest.mark.slow
def test_low_rank_beside_lora_and_in_bfloat16(rng):
    backbone = make_gpt2(dtype="bfloat16")
    backbone.enable_lora(2)
    lora = len(backbone.trainable_variables)
    edited = bs.operate(backbone, [bs.LowRank("blocks.0.mlp_output", rank=2)])
    assert len(edited.trainable_variables) == 2
    assert len(backbone.trainable_variables) == lora
    inputs = tokens(rng)
    assert np.array_equal(run(edited, inputs), run(bs.open_backbone(backbone), inputs))
    edited.trainable_variables[1].assign(rng.normal(0, 1, (2, 32)))
    assert {v.dtype for v in edited.trainable_variables} == {"float32"}
    assert edited.output.dtype == "bfloat16"
    assert relative(run_chunks(bs.rewire(edited), inputs, [4, 5])[0], run(edited, inputs)) <= 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_small_steps_of_an_optimizer_are_not_lost_in_half_precision(dtype, rng):
    edited = bs.operate(make_gpt2(dtype=dtype), [bs.LowRank("blocks.*.mlp_output", rank=2)])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy", optimizer=keras.optimizers.Adam(1e-3))
    before = [np.asarray(v) for v in edited.trainable_variables]
    x, y = batch(rng)
    lm.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0)
    for variable, value in zip(edited.trainable_variables, before, strict=True):
        assert np.abs(np.asarray(variable) - value).max() > 1e-4, variable.path


def test_errors():
    backbone = make_deep_gpt2()
    with pytest.raises(bs.SurgeryError, match=r"`rank` to be an integer of 1 or more"):
        bs.LowRank("blocks.0.query", rank=True)
    with pytest.raises(bs.SurgeryError, match="expected a rank of 1 or more and a finite scale"):
        Adapter(2, float("nan"))
    with pytest.raises(bs.SurgeryError, match=r"expected a rank from 1 to 32, .* Received 33"):
        bs.operate(backbone, [bs.LowRank("blocks.0.query", rank=np.int64(33))])
    with pytest.raises(bs.SurgeryError, match=r"`adapters` to be {site path: adapter}"):
        bs.LowRank("blocks.0.query", 2, adapters={"blocks.0.query": keras.layers.Dense(3)})
    with pytest.raises(bs.SurgeryError, match="`name` to be a name of layers, without '/'"):
        bs.LowRank("blocks.0.query", 2, name="a/b")
    with pytest.raises(bs.SurgeryError, match="`name` to be a name of letters, digits and"):
        bs.LowRank("blocks.0.query", 2, name="my lora", strength=1.0)
    with pytest.raises(
        bs.SurgeryError, match=r"LowRank at 'blocks.0.head_outputs': expected a site"
    ):
        bs.operate(backbone, [bs.LowRank("blocks.0.head_outputs", rank=2)])
    rewrite = bs.operate(backbone, [bs.LowRank("blocks.*.query", rank=2)]).rewrites[0]
    with pytest.raises(bs.SurgeryError, match="expected an adapter for exactly the selected"):
        bs.operate(make_gpt2(num_layers=2), [rewrite])
    with pytest.raises(bs.SurgeryError, match=r"expected an adapter from \(16,\) to \(4, 4\)"):
        bs.operate(make_deep_gpt2(hidden_dim=16), [rewrite])
