"""Layers inserted at sites, put in place of computations, or wrapped around blocks."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_deep_gpt2, make_gpt2, relative
from tests.reference import by_hand, run, run_chunks, stream_of, tokens

EXACT = 1e-5


@pytest.fixture(scope="module")
def gpt2():
    """One backbone for all tests that change nothing of it."""
    return make_gpt2()


def rest(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def assert_is(edited, wanted, inputs, caches):
    """The edited graph computes what the hand-written model does, in one pass and in chunks."""
    expected = run(wanted, inputs)
    assert relative(run(edited, inputs), expected) <= EXACT
    cached = bs.rewire(edited)
    assert len(cached.output["cache"]) == caches
    assert relative(run_chunks(cached, inputs, [4, 1, 4])[0], expected) <= EXACT


def test_inserted_layer_acts_on_what_stands_at_the_site(gpt2, rng):
    dense = keras.layers.Dense(32, kernel_initializer="orthogonal")
    edited = bs.operate(gpt2, [bs.Insert("blocks.0", dense)])
    wanted = by_hand(gpt2, lambda x, b: rest(dense(b[0](x)), b[1:]))
    assert_is(edited, wanted, tokens(rng), len(gpt2.transformer_layers))


@pytest.mark.slow
def test_a_whole_block_replaced_has_no_cache(gpt2, rng):
    dense = keras.layers.Dense(32, kernel_initializer="orthogonal")
    edited = bs.operate(gpt2, [bs.Replace("blocks.1", dense)])
    assert "blocks.1.query" not in bs.sites(edited)
    wanted = by_hand(gpt2, lambda x, b: rest(dense(b[0](x)), b[2:]))
    assert_is(edited, wanted, tokens(rng), len(gpt2.transformer_layers) - 1)


@pytest.mark.slow
def test_a_replaced_computation_gets_what_the_old_one_got(gpt2, rng):
    captures = bs.Capture("blocks.1.*")
    inputs = tokens(rng)
    plain = bs.operate(gpt2, [captures])
    wanted = plain.predict_on_batch(inputs)["captures"]
    sources = {
        "query": "attention_norm",
        "attention_output": "head_outputs",
        "mlp_norm": "residual_mid",
        "mlp_hidden": "mlp_norm",
        "mlp_output": "mlp_hidden",
    }
    for role, source in sources.items():
        shape = np.shape(wanted[f"blocks.1.{role}"])
        edited = bs.operate(gpt2, [bs.Replace(f"blocks.1.{role}", Flat(shape[2:])), captures])
        got = edited.predict_on_batch(inputs)["captures"]
        given = np.asarray(got[f"blocks.1.{source}"])
        assert relative(given, wanted[f"blocks.1.{source}"]) <= EXACT, role
        mean = given.reshape(2, 9, -1).mean(-1)
        made = np.broadcast_to(mean.reshape(2, 9, *[1] * (len(shape) - 2)), shape)
        assert relative(got[f"blocks.1.{role}"], made) <= EXACT, role


class Flat(keras.layers.Layer):
    """Fill a shape with the mean of each token."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.size = tuple(shape), int(np.prod(shape))

    def call(self, x):
        batch, time = keras.ops.shape(x)[:2]
        mean = keras.ops.mean(keras.ops.reshape(x, (batch, time, -1)), axis=-1, keepdims=True)
        flat = keras.ops.repeat(mean, self.size, axis=-1)
        return keras.ops.reshape(flat, (batch, time, *self.shape))

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:2], *self.shape), x.dtype)


class Scaled(keras.layers.Layer):
    """What keras-hub pull request 1598 discusses: a layer around a decoder block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal")
        self.dense = keras.layers.Dense(shape[-1], name=f"{self.block.name}_dense")

    def call(self, x):
        return self.dense(2.0 * x + self.scale * self.block(x * 0.5))


def test_wrapped_blocks_compute_and_cache(gpt2, rng):
    made = []

    def make_layer(block):
        made.append(Scaled(block))
        return made[-1]

    edited = bs.operate(gpt2, [bs.Wrap("blocks.0:2", make_layer)])
    assert edited.report[0].sites == ("blocks.0", "blocks.1")
    assert bs.sites(edited) == bs.sites(gpt2)

    def between(x, blocks):
        for layer, block in zip(made, blocks, strict=False):
            x = layer.dense(2.0 * x + Times(layer)(block(x * 0.5)))
        return rest(x, blocks[2:])

    assert_is(edited, by_hand(gpt2, between), tokens(rng), len(gpt2.transformer_layers))
    own = {id(v) for layer in made for v in layer.trainable_variables}
    assert len(own) == 6
    assert {id(v) for v in edited.trainable_variables} == own


class Times(keras.layers.Layer):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def call(self, x):
        return self.owner.scale * x


@pytest.mark.slow
def test_a_wrapped_block_stays_open(rng):
    backbone = make_gpt2()
    rewrites = [
        bs.Steer("inside", {0: np.ones(32)}, at="blocks.0.mlp_output"),
        bs.Capture("blocks.0", name="block"),
        bs.Wrap("blocks.0", Scaled),
        bs.Wrap("blocks.0", Scaled),
        bs.Capture("blocks.0", "blocks.0.mlp_output"),
        bs.Skip("blocks.0"),
    ]
    edited = bs.operate(backbone, rewrites)
    inputs = tokens(rng)
    amount = {"skip_amount": np.array([[0], [1]], "float32")}
    got = edited.predict_on_batch({**inputs, **amount})
    layers = {}
    for op in edited.get_layer("transformer_layer_0").operations:
        if op.name.endswith("_before"):
            layers[op.name] = op.wrapper
    outer, inner = list(layers.values())
    block = np.asarray(got["captures"]["block/blocks.0"])
    x = np.asarray(keras.Model(backbone.input, stream_of(backbone)).predict_on_batch(inputs))

    def dense(layer, x):
        kernel, bias = layer.dense.get_weights()
        return x @ kernel + bias

    half = dense(inner, 2 * (x / 2) + np.asarray(inner.scale) * block)
    wanted = dense(outer, 2 * x + np.asarray(outer.scale) * half)
    assert relative(got["captures"]["blocks.0"], wanted) <= EXACT
    cached, captures = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], **amount)
    assert relative(cached, got["hidden_states"]) <= EXACT
    assert relative(captures["blocks.0"], wanted) <= EXACT


@pytest.mark.slow
def test_bfloat16_keeps_its_dtype(rng):
    backbone = make_gpt2(dtype="bfloat16")
    rewrites = [
        bs.Wrap("blocks.0", Scaled),
        bs.Insert("blocks.1.mlp_output", keras.layers.Dense(32, dtype="float32")),
    ]
    edited = bs.operate(backbone, rewrites)
    assert {t.dtype for pair in bs.rewire(edited).input["cache"] for t in pair.values()} == {
        "bfloat16"
    }
    inputs = tokens(rng)
    cached = run_chunks(bs.rewire(edited), inputs, [4, 5])[0]
    assert edited.output.dtype == "bfloat16"
    assert relative(cached, run(edited, inputs)) <= 2e-2


def wraps(call):
    return type("Odd", (Scaled,), {"call": call})


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (lambda: bs.Insert("blocks.1", abs), r"Insert at 'blocks.1': expected a `keras.layers"),
        (lambda: bs.Replace("blocks.1", Scaled), r"Replace at 'blocks.1': expected a `keras"),
        (lambda: bs.Insert("blocks.1", keras.layers.Dense(5)), r"'blocks.1': expected a tensor"),
        (
            lambda: bs.Insert("blocks.1", keras.layers.Concatenate()),
            "Insert at 'blocks.1': expected a layer that takes one tensor",
        ),
        (
            lambda: bs.Replace("blocks.1.head_outputs", keras.layers.Identity()),
            "computed from key and query and value",
        ),
        (
            lambda: bs.Replace("blocks.1.residual_mid", keras.layers.Identity()),
            "'blocks.1.residual_mid': expected a site computed from one other",
        ),
        (lambda: bs.Replace("embeddings", keras.layers.Identity()), "computed from no site"),
        (
            lambda: bs.Replace("blocks.0.attention_pattern", keras.layers.Identity()),
            "'blocks.0.attention_pattern': expected a site computed from one",
        ),
        (lambda: bs.Wrap("blocks.1.query", Scaled), "Wrap at 'blocks.1.query': expected a selec"),
        (lambda: bs.Wrap("blocks.1", lambda block: block), "Wrap at 'blocks.1': .* Received <"),
        (
            lambda: bs.Wrap("blocks.1", wraps(lambda self, x: x)),
            "Received one that calls it 0 times",
        ),
        (
            lambda: bs.Wrap("blocks.1", wraps(lambda self, x: self.block(self.block(x)))),
            "Received one that calls it 2 times",
        ),
        (
            lambda: bs.Wrap("blocks.1", wraps(lambda self, x: self.block(x)[:, :1])),
            "Received one that makes",
        ),
        (
            lambda: bs.Wrap("blocks.1", wraps(lambda self, x: np.tanh(self.block(x)))),
            r"^[^\x1b]*which fails with[^\x1b]*$",
        ),
    ],
)
def test_errors(gpt2, rewrite, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(gpt2, [rewrite()])


@pytest.mark.slow
def test_a_layer_that_mixes_tokens_is_found_by_check(rng):
    class Average(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.mean(x, axis=1, keepdims=True)

    edited = bs.operate(make_gpt2(), [bs.Insert("blocks.0", Average(name="average"))])
    with pytest.raises(bs.CacheMismatchError, match="look at 'average'"):
        bs.check(edited)


class Ordinary(keras.layers.Layer):
    """Written as most people would: layers made in `__init__`, no `build`."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.before = keras.layers.Dropout(0.5, seed=1)
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.dense = keras.layers.Dense(32)

    def call(self, x, training=None):
        made = self.norm(self.block(self.before(x, training=training)), training=training)
        self.add_loss(keras.ops.mean(keras.ops.square(made)))
        return x + self.dense(made)


@pytest.mark.slow
def test_states_and_losses_of_a_wrapper_change_once(rng):
    """Of what the block gave, and not of what it was given; with one draw of the dropout."""
    backbone, made = make_gpt2(), []

    def make_layer(block):
        made.append(Ordinary(block))
        return made[-1]

    edited = bs.operate(backbone, [bs.Wrap("blocks.1", make_layer), bs.Capture("blocks.1.*")])
    inputs = tokens(rng)
    first = keras.Model(backbone.input, backbone.transformer_layers[0].output)
    x = np.asarray(first.predict_on_batch(inputs))
    wrapper = made[0]
    draw = keras.layers.Dropout(0.5, seed=1)
    outputs = edited(inputs, training=True)
    norm = np.asarray(outputs["captures"]["blocks.1.attention_norm"])
    layer = backbone.transformer_layers[1]
    dropped = np.asarray(draw(x, training=True))
    assert relative(norm, layer._self_attention_layer_norm(dropped)) <= EXACT
    given = np.asarray(outputs["captures"]["blocks.1.residual_mid"])
    block = given + np.asarray(outputs["captures"]["blocks.1.mlp_output"])
    assert relative(wrapper.norm.moving_mean, 0.5 * block.mean((0, 1))) <= EXACT
    wanted = np.mean(np.square((block - block.mean((0, 1))) / np.sqrt(block.var((0, 1)) + 1e-3)))
    assert len(edited.losses) == 1
    assert relative(edited.losses[0], wanted) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 1])
def test_a_replaced_block_can_be_edited_further(block, rng):
    backbone = make_deep_gpt2()
    dense = keras.layers.Dense(32)
    replaced = bs.Replace(f"blocks.{block}", dense)
    inputs = tokens(rng)

    def wanted(then):
        return by_hand(backbone, lambda x, b: rest(then(x, b), b[block + 1 :]))

    def before(x, b):
        return rest(x, b[:block])

    cases = {
        "skip": (
            bs.Skip(f"blocks.{block}", amount=0.25),
            lambda x, b: 0.75 * dense(before(x, b)) + 0.25 * before(x, b),
        ),
        "repeat": (
            bs.Repeat(f"blocks.{block}"),
            lambda x, b: dense(dense(before(x, b))),
        ),
        "wrap": (
            bs.Wrap(f"blocks.{block}", Doubled),
            lambda x, b: 2.0 * dense(before(x, b)),
        ),
    }
    for name, (later, then) in cases.items():
        edited = bs.operate(backbone, [replaced, later])
        assert relative(run(edited, inputs), run(wanted(then), inputs)) <= EXACT, name
        caches = len(bs.rewire(edited).output["cache"])
        assert caches == 2, name


class Doubled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def call(self, x):
        return 2.0 * self.block(x)


def fit_in_bfloat16(layer, optimizer, enable_lora=False):
    """Fit a model with a layer inserted, and return whether any of its weights moved."""
    backbone = make_gpt2(num_layers=2, dtype="bfloat16")
    if enable_lora:
        backbone.enable_lora(2)
    edits = [] if layer is None else [bs.Insert("blocks.1.mlp_output", layer)]
    lm = bs.CachedCausalLM(bs.operate(backbone, edits) if edits else bs.open_backbone(backbone))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    lm.compile(optimizer=optimizer, loss=loss)
    before = [keras.ops.convert_to_numpy(v) for v in lm.trainable_variables]
    ids = np.random.default_rng(0).integers(1, 60, (4, 9))
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1])}
    lm.fit(x, ids[:, 1:], verbose=0, shuffle=False)
    after = [keras.ops.convert_to_numpy(v) for v in lm.trainable_variables]
    return any((a != b).any() for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_adam_without_steps_is_refused():
    """Keras takes the decay to the dtype of the weights, and 0.999 in bfloat16 is 1."""
    narrow, wide = (keras.layers.Dense(32, dtype=dtype) for dtype in ("bfloat16", "float32"))
    with pytest.raises(bs.SurgeryError, match=r"2 of 2 in bfloat16, .* beta_2=0.999 is 1, and"):
        fit_in_bfloat16(narrow, keras.optimizers.Adam(1e-2))
    assert fit_in_bfloat16(narrow, keras.optimizers.Adam(1e-2, beta_2=0.99))
    assert fit_in_bfloat16(narrow, keras.optimizers.SGD(1e-1))
    assert fit_in_bfloat16(wide, keras.optimizers.Adam(1e-2))


@pytest.mark.slow
def test_weights_without_steps_are_told_of_where_lora_learns():
    with pytest.warns(UserWarning, match=r"Received \d+ of \d+ in bfloat16"):
        assert fit_in_bfloat16(None, keras.optimizers.Adam(1e-2), enable_lora=True)
