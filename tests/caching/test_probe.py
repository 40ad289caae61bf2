"""Layers that hide a look at other tokens or rows are refused by name, and others are not."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import layers, ops

import backbone_surgery as bs
from backbone_surgery.caching import probe
from tests.helpers import make_gpt2


@pytest.fixture(scope="module")
def gpt2():
    return make_gpt2(num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=16)


def after(name, make):
    """Return a clone_fn that puts `make(x)` after one layer of the backbone."""

    def clone_fn(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return make(result) if layer.name == name else result

    return clone_fn


def edited(gpt2, make):
    return bs.operate(gpt2, [after("transformer_layer_0", make)])


class Function(layers.Layer):
    """A layer of the user's that runs a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Around(layers.Layer):
    """A layer that runs other layers, one after the other."""

    def __init__(self, *inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = list(inner)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


class ZeroMix(layers.Layer):
    """Attention whose output projection begins at zero, as adapters do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 8)
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.scale * self.attention(x, x, use_causal_mask=True)


class CallsItself(keras.Model):
    """A Functional model that does something else than its graph."""

    def call(self, x):
        return x - ops.mean(x, axis=1, keepdims=True)


def functional(kind):
    x = keras.Input((None, 16))
    return kind(x, layers.Dense(16)(x), name="odd")


def delayed(x, by=100):
    """Look 100 tokens back, and at nothing nearer."""
    return x + ops.pad(x, ((0, 0), (by, 0), (0, 0)))[:, : ops.shape(x)[1]]


def numbered(x):
    return x * ops.cast(ops.arange(ops.shape(x)[1]) + 1, x.dtype)[None, :, None]


TOKENS, ROWS = "what depends on other tokens", "what depends on other rows"
MIXING = {
    "decoder block": (lambda: Around(keras_hub.layers.TransformerDecoder(16, 2)), TOKENS),
    "Fourier": (lambda: keras_hub.layers.FNetEncoder(16), TOKENS),
    "zero attention": (ZeroMix, TOKENS),
    "arange": (lambda: layers.Lambda(numbered), TOKENS),
    "convolution": (lambda: layers.Conv1D(16, 3, padding="causal"), TOKENS),
    "recurrence": (lambda: layers.GRU(16, return_sequences=True), TOKENS),
    "far back": (lambda: Function(delayed), TOKENS),
    "mean of the row": (lambda: Function(lambda x: x - ops.mean(x, 1, keepdims=True)), TOKENS),
    "last token": (lambda: Function(lambda x: x + x[:, -1:]), TOKENS),
    "reversed": (lambda: Function(lambda x: x + ops.flip(x, 1)), TOKENS),
    "mean of the rows": (lambda: Function(lambda x: x + ops.mean(x, 0, keepdims=True)), ROWS),
    "rows turned": (lambda: Function(lambda x: x + ops.roll(x, 1, 0)), ROWS),
    "batch norm over rows": (lambda: Function(lambda x: x / ops.std(x, (0, 1))), ROWS),
    "an activation": (
        lambda: layers.Dense(16, activation=lambda x: x - ops.max(x, 1, keepdims=True)),
        TOKENS,
    ),
    "a layer as activation": (
        lambda: layers.Dense(16, activation=layers.Softmax(axis=1)),
        TOKENS,
    ),
    "an operation as activation": (lambda: layers.Activation(ops.flip), ROWS),
    "nested model": (lambda: functional(CallsItself), TOKENS),
    "inside another": (lambda: Around(layers.Dense(16), ZeroMix()), TOKENS),
    "half": (
        lambda: Function(lambda x: x - ops.mean(x, 1, keepdims=True), dtype="bfloat16"),
        TOKENS,
    ),
    "saturated": (
        lambda: Function(lambda x: ops.tanh(50 * (x - ops.mean(x, 1, keepdims=True)))),
        TOKENS,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] if "block" in x or x == "Fourier" else [])
        for x in MIXING
    ],
)
def test_a_layer_that_mixes_is_refused_by_name(gpt2, name):
    make, fault = MIXING[name]
    layer = make()
    with pytest.raises(bs.SurgeryError) as caught:
        bs.rewire(edited(gpt2, layer))
    message = str(caught.value)
    assert f"rewire at '{layer.name}'" in message
    assert fault in message
    for way_out in ("backbone_surgery.Family", "docs/state.md", f"trust=['{layer.name}']"):
        assert way_out in message


def turned(layer):
    """Run a layer of Keras along the tokens."""
    return lambda x: ops.transpose(layer(ops.transpose(x, (0, 2, 1))), (0, 2, 1))


OPERATIONS = {
    "activation along the tokens": turned(layers.Activation("softmax")),
    "norm along the tokens": turned(layers.LayerNormalization(center=False, scale=False)),
    "weights of the tokens": lambda x: x * layers.Activation("softmax")(x[..., 0])[..., None],
    "mean": lambda x: x + ops.mean(x, axis=1, keepdims=True),
    "item": lambda x: x + x[:, :1],
    "cumsum": lambda x: ops.cumsum(x, axis=1),
    "rows": lambda x: x - ops.max(x, axis=0, keepdims=True),
    "softmax": lambda x: ops.softmax(x, axis=1),
    "scores": lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x, (0, 2, 1)))), x),
}


@pytest.mark.by_default(1)
@pytest.mark.parametrize("name", OPERATIONS)
def test_plain_operations_in_the_graph_are_refused_too(gpt2, name):
    with pytest.raises(bs.SurgeryError, match=r"rewire at '\w+' .*what depends on other"):
        bs.rewire(edited(gpt2, OPERATIONS[name]))


class TwoInTwoOut(layers.Layer):
    def call(self, pair, training=None):
        a, b = pair["a"], pair["b"]
        return {"sum": a + b, "product": a * b}


def two_in_two_out(x):
    both = TwoInTwoOut(name="both")({"a": x, "b": layers.Dense(16)(x)})
    return both["sum"] + both["product"]


class Routed(layers.Layer):
    """A mixture of experts: each token goes to the one that suits it best."""

    def build(self, shape):
        self.router = self.add_weight(shape=(shape[-1], 4))
        self.experts = self.add_weight(shape=(4, shape[-1], shape[-1]))

    def call(self, x):
        chosen = ops.one_hot(ops.argmax(x @ self.router, axis=-1), 4, dtype=x.dtype)
        return ops.einsum("bte,edf,btd->btf", chosen, self.experts, x)


RIGHT = {
    "function": lambda: Function(lambda x: ops.tanh(x) * 3),
    "lambda": lambda: layers.Lambda(lambda x: x**2),
    "layers": lambda: Around(layers.Dense(16), layers.LayerNormalization(), layers.Dropout(0.5)),
    "batch normalization": lambda: layers.BatchNormalization(),
    "time distributed": lambda: layers.TimeDistributed(layers.Dense(16)),
    "two in, two out": lambda: two_in_two_out,
    "experts": Routed,
    "experts in half precision": lambda: Routed(dtype="bfloat16"),
    "nested model": lambda: functional(keras.Model),
    "gelu": lambda: layers.Dense(16, activation=lambda x: keras.activations.gelu(x)),
    "operations": lambda: lambda x: x[..., :8].__matmul__(np.ones((8, 16), "float32")) + 1,
    "noise": lambda: layers.GaussianNoise(1.0),
    "regularized": lambda: layers.Dense(16, activity_regularizer="l2"),
}


@pytest.mark.by_default(3)
@pytest.mark.parametrize("name", RIGHT)
def test_a_layer_that_works_on_each_token_alone_is_not(gpt2, name):
    bs.rewire(edited(gpt2, RIGHT[name]()))


def test_wrappers_are_probed_without_their_block(gpt2):
    class Wrapped(layers.Layer):
        def __init__(self, block, mix):
            super().__init__(name=f"wrapped_{mix}")
            self.block, self.mix = block, mix

        def call(self, x):
            y = self.block(x)
            return y + ops.mean(x, axis=1, keepdims=True) if self.mix else 2 * y

    right = bs.operate(gpt2, [bs.Wrap("blocks.*", lambda block: Wrapped(block, False))])
    assert len(bs.rewire(right).output["cache"]) == 2
    wrong = bs.operate(gpt2, [bs.Wrap("blocks.0", lambda block: Wrapped(block, True))])
    with pytest.raises(bs.SurgeryError, match=r"rewire at 'wrapped_True_after'.*other tokens"):
        bs.rewire(wrong)
    bs.rewire(wrong, trust=["wrapped_True"])


def test_layers_rewritten_inside_are_probed(gpt2):
    layer = Around(layers.Dense(16, name="inner"), name="outer")
    right = edited(gpt2, layer)
    bs.rewire(right)
    wrong = bs.rewrite_nested(
        right, "outer.inner", lambda inner, x: inner(x) - ops.mean(x, axis=1, keepdims=True)
    )
    with pytest.raises(bs.SurgeryError, match=r"rewire at 'outer'.*other tokens"):
        bs.rewire(wrong)


def pattern_edit(layer):
    return [bs.Insert("blocks.0.attention_pattern", layer)]


def without_slot(slot):
    """Return what nobody looks at a slot by: in rows that are padded it is another token."""
    return lambda p: ops.where(ops.arange(ops.shape(p)[-1]) == slot, 0.0, p)


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p: p * p, None),
        (lambda p: p / (ops.sum(p, axis=-1, keepdims=True) + 1e-9), None),
        (lambda p: p / ops.sum(p, axis=-1, keepdims=True), "NaN .* for a padded token, whose"),
        (lambda p: p + 0.01, "depends on tokens after it"),
        (lambda p: ops.flip(p, axis=-1), "depends on tokens after it"),
        (lambda p: p - ops.mean(p, axis=2, keepdims=True), "depends on other tokens"),
        (lambda p: p * ops.cast(ops.shape(p)[-1], p.dtype), "changes with the number of slots"),
        (without_slot(3), "or with which of them a token is in"),
        (without_slot(0), "or with which of them a token is in"),
    ],
)
def test_layers_on_the_attention_pattern(gpt2, function, words):
    model = bs.operate(gpt2, pattern_edit(Function(function, name="on_pattern")))
    if words is None:
        bs.rewire(model)
        return
    with pytest.raises(bs.SurgeryError, match=f"rewire at 'on_pattern'.*{words}"):
        bs.rewire(model)


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "relu"])
def test_activations_of_keras_on_the_attention_pattern(gpt2, name):
    model = bs.operate(gpt2, pattern_edit(layers.Activation(name, name="on_pattern")))
    if name == "relu":
        bs.rewire(model)
        return
    with pytest.raises(
        bs.SurgeryError, match=r"rewire at 'on_pattern'.*depends on tokens after it"
    ):
        bs.rewire(model)


def test_what_fails_on_random_input_is_refused_with_the_reason(gpt2):
    def function(x):
        if not isinstance(x.shape[0], int) or x.shape[1] is None:
            return x
        raise RuntimeError("no random input, please")

    layer = Function(function, name="picky")
    layer.compute_output_spec = lambda x: keras.KerasTensor(x.shape, x.dtype)
    with pytest.raises(
        bs.SurgeryError, match=r"(?s)cannot be probed, .* RuntimeError.*no random input"
    ):
        bs.rewire(edited(gpt2, layer))
    bs.rewire(edited(gpt2, layer), trust=layer)
    nowhere = Function(lambda x: x * np.nan, name="nowhere")
    with pytest.raises(bs.SurgeryError, match="cannot be probed, since it gives no finite number"):
        bs.rewire(edited(gpt2, nowhere))


@pytest.mark.slow
def test_trust_is_by_layer_or_name_and_never_a_no_op(gpt2):
    layer = Function(lambda x: x + x[:, -1:], name="mine")
    model = edited(gpt2, layer)
    for trust in ([layer], layer, ["mine"], "mine"):
        bs.rewire(model, trust=trust)
    assert bs.CachedCausalLM(model, trust=["mine"]).opened is model
    with pytest.raises(bs.SurgeryError, match="rewire at trust='yours': expected a layer of the"):
        bs.rewire(model, trust=["mine", "yours"])
    for trust in (None, 3, keras.Input((2,))):
        with pytest.raises(bs.SurgeryError, match="rewire at 'trust': expected layers of"):
            bs.rewire(model, trust=trust)
    with pytest.raises(bs.SurgeryError, match="rewire at 'mine'"):
        bs.CachedCausalLM(model)
    with pytest.raises(bs.CacheMismatchError):
        bs.check(model)  # measures, whatever is trusted


@pytest.mark.slow
def test_check_finds_rows_that_are_mixed(gpt2):
    mixed = edited(gpt2, Function(lambda x: x + ops.mean(x, axis=0, keepdims=True)))
    with pytest.raises(bs.CacheMismatchError, match="Some layer mixes rows, or lets padding count"):
        bs.check(mixed)


def test_a_layer_is_probed_once_and_nothing_of_it_changes(gpt2, monkeypatch):
    inner = [
        layers.Dense(16, activity_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dropout(0.5, seed=3),
    ]
    layer = Around(*inner)
    model = edited(gpt2, layer)
    before = [np.asarray(v) for v in layer.variables]
    trials = []
    original = probe._Trial
    monkeypatch.setattr(probe, "_Trial", lambda *args: trials.append(args) or original(*args))
    bs.rewire(model)
    assert len(trials) == 1
    bs.rewire(model)
    bs.rewire(bs.operate(model, [bs.Steer("mood", {0: np.ones(16)})]))
    assert len(trials) == 1
    assert all(np.array_equal(a, v) for a, v in zip(before, layer.variables, strict=True))
    assert not layer.losses


def test_backbones_and_rewrites_need_no_probe(gpt2, monkeypatch):
    monkeypatch.setattr(probe, "_Trial", None)
    rewrites = [
        bs.Condition("topic", np.ones(16), 0.1, at="blocks.0"),
        bs.Steer("mood", {1: np.ones(16)}, when="topic"),
        bs.Ablate("blocks.0.head_outputs", heads=[0]),
        bs.LowRank("blocks.*.query", rank=2),
        bs.Reft("tone", rank=2, at="blocks.*"),
        bs.ProjectOut("none", np.ones(16)),
        bs.Skip("blocks.1"),
        bs.Capture("blocks.*.attention_pattern"),
        bs.Insert("blocks.0.mlp_output", layers.Dense(16)),
    ]
    bs.rewire(bs.operate(gpt2, rewrites))


def test_arithmetic_with_numbers_needs_no_probe(gpt2, monkeypatch):
    model = edited(gpt2, lambda x: ((2 - x) * ops.sqrt(16.0) + 1) / np.float32(3))
    monkeypatch.setattr(probe, "_Trial", None)
    bs.rewire(model)
    with pytest.raises(bs.SurgeryError, match="cannot be probed"):
        bs.rewire(edited(gpt2, lambda x: x * np.ones(16, "float32")))
