"""Families: which backbones they claim, and one brought from outside."""

from dataclasses import replace

import keras
import keras_hub
import numpy as np
import pytest
from keras import layers, ops

import backbone_surgery as bs
from backbone_surgery.families.gpt2 import FAMILY as GPT2
from backbone_surgery.opening import family
from backbone_surgery.opening.open import find_family
from backbone_surgery.opening.site import select
from tests.helpers import make_gemma, make_gpt2, ragged, relative


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Families that a test registers are forgotten after it."""
    monkeypatch.setattr(family, "_families", dict(family._families))


class OwnBlock(layers.Layer):
    """x + attention(x), then x * sigmoid(gate(norm(x))): like no block of KerasHub."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = {
            name: layers.EinsumDense("btd,dhk->bthk", (None, heads, 4), name=name)
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        }
        self.mix = layers.EinsumDense("bthk,hkd->btd", (None, 16), name="mix")
        self.norm = layers.RMSNormalization(name="norm")
        self.gate = layers.Dense(16, activation="sigmoid", name="gate")

    def call(self, stream, keep):
        query, key, value = (self.project[n](stream) for n in ("query", "key", "value"))
        key, value = (ops.repeat(x, 2, axis=2) for x in (key, value))
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key) * 0.3
        time = ops.arange(ops.shape(stream)[1])
        seen = ops.logical_and(
            (time[:, None] >= time[None])[None], ops.cast(keep, "bool")[:, None, :]
        )
        pattern = ops.softmax(ops.where(seen[:, None], scores, -1e9), axis=-1)
        x = stream + self.mix(ops.einsum("bhqk,bkhd->bqhd", pattern, value))
        return x * self.gate(self.norm(x))


def attend(block, hidden_states, padding_mask, positions):
    query, key, value = (
        bs.Site(n)(block.project[n](hidden_states)) for n in ("query", "key", "value")
    )
    x = bs.SelfAttention(4, 2, 4, 0.3, name="self_attention")(query, key, value, padding_mask)
    x = layers.Add(name="attention_residual")(
        [hidden_states, block.mix(bs.Site("head_outputs")(x))]
    )
    return bs.Site("residual_mid")(x)


def open_own(block, hidden_states, padding_mask, positions):
    x = attend(block, hidden_states, padding_mask, positions)
    return layers.Multiply(name="gated")([x, block.gate(block.norm(x))])


OWN = bs.Family("own", OwnBlock, open_own, hidden_states="stream", padding_mask="keep")


def make_own(block=OwnBlock, name="block_{}"):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = keras.Input((None,), dtype="int32", name="padding_mask")
    x = layers.ReversibleEmbedding(60, 16, name="token_embedding")(ids)
    for i in range(2):
        x = block(name=name.format(i))(x, mask)
    model = keras.Model({"token_ids": ids, "padding_mask": mask}, x)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(0, 0.5, variable.shape))
    return model


def test_a_family_from_outside_works_as_those_of_the_package(rng):
    backbone = make_own()
    with pytest.raises(bs.UnknownArchitectureError):
        bs.open_backbone(backbone)
    assert bs.register_family(OWN) is bs.register_family(OWN) is OWN
    assert bs.register_family(replace(OWN)) == OWN  # as when a cell of a notebook is run again
    opened = bs.open_backbone(backbone)
    assert opened.family is OWN
    assert "blocks.1.head_outputs" in bs.sites(opened)
    inputs = ragged(rng, (9, 5), 9)
    inputs["padding_mask"] = inputs["padding_mask"].astype("int32")
    real = inputs["padding_mask"].astype(bool)
    wanted = np.asarray(backbone.predict_on_batch(inputs))
    assert relative(opened.predict_on_batch(inputs), wanted, real) <= 5e-6
    edits = [
        bs.Ablate("blocks.0.head_outputs", heads=[1]),
        bs.Steer("mood", {1: rng.normal(size=16)}),
        bs.Repeat("blocks.1"),
    ]
    assert max(bs.check(bs.operate(backbone, edits[:2])).errors.values()) <= 5e-6
    assert len(bs.rewire(bs.operate(backbone, edits[2:])).output["cache"]) == 3


def test_an_adapter_of_a_family_from_outside(tmp_path):
    """It has names in `transformers` where the family says which model there it is."""
    backbone = make_own()
    bs.register_family(OWN)
    edited = bs.operate(backbone, [bs.Lora("tuned", rank=2, target_modules=["query", "mix"])])
    layers = {path.split(".")[2] for path in edited.rewrites[0].adapters}
    assert layers == {"query", "mix"}
    with pytest.raises(bs.SurgeryError, match=r"that `transformers` has too. .* family 'own' with"):
        bs.save_peft(edited, "tuned", tmp_path / "adapter")
    family._families.pop("own")
    bs.register_family(replace(OWN, model_types=("llama",)))
    edited = bs.operate(make_own(), [bs.Lora("tuned", rank=2, target_modules="query")])
    bs.save_peft(edited, "tuned", tmp_path / "adapter")
    assert (
        "model.layers.1.self_attn.q_proj" in (tmp_path / "adapter/adapter_config.json").read_text()
    )


def test_check_finds_a_family_that_leaves_something_out():
    class Gated(OwnBlock):
        pass

    bs.register_family(bs.Family("gated", Gated, attend, "stream", "keep"))  # without its gate
    with pytest.raises(bs.CacheMismatchError, match="The family 'gated' leaves something of the"):
        bs.check(make_own(Gated))


@pytest.mark.slow
def test_layers_of_positions_are_a_list_or_have_no_last_one():
    class Sine(OwnBlock):
        pass

    listed = [keras_hub.layers.SinePositionEncoding]
    bs.register_family(bs.Family("sine", Sine, open_own, "stream", "keep", position_layers=listed))
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    mask = keras.Input((None,), dtype="int32", name="padding_mask")
    x = layers.ReversibleEmbedding(60, 16, name="token_embedding")(ids)
    x = layers.Add()([x, listed[0]()(x)])
    backbone = keras.Model({"token_ids": ids, "padding_mask": mask}, Sine(name="block_0")(x, mask))
    assert bs.open_backbone(backbone).max_positions is None
    assert "opened" in bs.check(backbone).errors


def with_positions(block, name):
    """A backbone whose positions its family does not list."""
    backbone = make_own(block)
    x = backbone.get_layer("token_embedding").output
    number = keras_hub.layers.PositionEmbedding(20, name=name)
    x = layers.Add()([x, number(x)])
    x = backbone.get_layer("block_0")(x, backbone.input["padding_mask"])
    return keras.Model(backbone.input, x)


@pytest.mark.slow
def test_positions_that_a_family_does_not_list_are_told_of():
    class Learned(OwnBlock):
        pass

    bs.register_family(bs.Family("learned", Learned, open_own, "stream", "keep"))
    model = with_positions(Learned, "number")
    with pytest.raises(bs.SurgeryError, match=r"'number' .*by the family's `position_layers`"):
        bs.rewire(model)
    with pytest.raises(bs.CacheMismatchError, match="look at the layer that `rewire` names"):
        bs.check(model)
    with pytest.raises(bs.SurgeryError, match=r"other names .* Received 'positions'. Rename"):
        bs.open_backbone(with_positions(Learned, "positions"))


def test_a_limit_of_positions_that_is_no_number_is_refused():
    class Limited(OwnBlock):
        pass

    limits = {"most_positions": lambda block: "many"}
    bs.register_family(bs.Family("limited", Limited, open_own, "stream", "keep", **limits))
    with pytest.raises(bs.SurgeryError, match="`most_positions` to return an int or None"):
        bs.open_backbone(make_own(Limited))


@pytest.mark.slow
def test_generation_with_a_family_from_outside_equals_uncached(rng):
    bs.register_family(OWN)
    backbone = make_own()
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (6, 3), 6)
    got = lm.generate(inputs, max_new_tokens=6, stop_token_ids=None)["token_ids"]
    table = np.asarray(lm.opened.token_embedding.embeddings)
    for i, length in enumerate((6, 3)):
        ids = np.zeros((1, 12), "int32")
        ids[0, :length] = inputs["token_ids"][i, :length]
        for end in range(length, length + 6):
            mask = (np.arange(12)[None] < end).astype("int32")
            hidden = backbone.predict_on_batch({"token_ids": ids, "padding_mask": mask})
            ids[0, end] = (np.asarray(hidden)[0, end - 1] @ table.T).argmax()
        assert np.array_equal(got[i, : length + 6], ids[0, : length + 6])


@pytest.mark.slow
def test_blocks_of_one_class_are_told_apart_by_their_activation():
    opt = keras_hub.models.OPTBackbone(50, 1, 2, 8, 16)
    assert type(opt.transformer_layers[0]) is GPT2.block
    assert find_family(opt).name == "opt"
    inputs = keras.Input((None, 8)), keras.Input((None,), dtype="int32")
    block = GPT2.block(16, 2, activation="silu", normalize_first=True)
    with pytest.raises(bs.UnknownArchitectureError, match="with layers InputLayer, TransformerDec"):
        find_family(keras.Model(inputs, block(inputs[0], decoder_padding_mask=inputs[1])))


def without_positions(layer, *args, **kwargs):
    return args[0] if layer.name == "position_embedding" else layer(*args, **kwargs)


def with_a_layer_between(layer, *args, **kwargs):
    result = layer(*args, **kwargs)
    return layers.Dropout(0.1)(result) if layer.name == "transformer_layer_0" else result


@pytest.mark.parametrize("clone_fn", [None, without_positions, with_a_layer_between])
def test_gpt2_is_known_however_it_was_cloned(clone_fn):
    backbone = make_gpt2(num_layers=2)
    outputs = bs.clone_layer_graph(backbone.input, backbone.output, clone_fn)
    clone = keras.Model(backbone.input, outputs)
    assert find_family(clone) is find_family(backbone) is GPT2


def test_a_block_with_a_call_of_its_own_is_another_block():
    bs.register_family(OWN)

    class Noisy(OwnBlock):
        def call(self, stream, keep):
            return super().call(stream, keep) + 1

    class Named(OwnBlock):
        pass

    assert find_family(make_own(Named)) is OWN
    with pytest.raises(bs.UnknownArchitectureError, match="Noisy"):
        bs.open_backbone(make_own(Noisy))


def test_two_families_that_claim_one_graph_are_refused():
    bs.register_family(replace(GPT2, name="other", claims=lambda block: True))
    with pytest.raises(bs.SurgeryError, match="blocks that gpt2 and other claim"):
        bs.open_backbone(make_gpt2(num_layers=1))
    assert find_family(make_gemma(num_layers=1)).name == "gemma"


def test_what_cannot_be_registered():
    with pytest.raises(bs.SurgeryError, match=r"expected a `backbone_surgery.Family`. Received 3"):
        bs.register_family(3)
    with pytest.raises(bs.SurgeryError, match=r"a name that no other family has.*TransformerDecod"):
        bs.register_family(replace(OWN, name="gpt2"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "my family"}, "a name that is an identifier"),
        ({"block": OwnBlock()}, "`block` to be a class of Keras layers"),
        ({"block": int}, "`block` to be a class of Keras layers"),
        ({"position_layers": ["PositionEmbedding"]}, "`position_layers` to be classes of Keras"),
        ({"pointwise_layers": (3,)}, "`pointwise_layers` to be classes of Keras layers"),
        ({"open_block": None}, "`open_block` to be a function"),
        ({"images": 3}, "`images` to be a class of Keras layers. Received 3"),
        ({"beside": "other"}, "`beside` to be one of `further`, of a family with `spelled_out`"),
        ({"ends_in": "head"}, "a `head` beside `ends_in`. Received 'head' alone"),
        ({"head": 3}, "`head` to be a function. Received 3"),
        ({"spelled_out": [OwnBlock]}, "`spelled_out` to be functions by classes of layers"),
        ({"spelled_out": {OwnBlock: 3}}, "`spelled_out` to be functions by classes of layers"),
        ({"sampler": None}, "`sampler` to be a string. Received None"),
        ({"stop_tokens": ["</s>", 3]}, "`stop_tokens` to be strings"),
        ({"model_types": ("",)}, "`model_types` to be strings"),
        ({"further": "other"}, "the names of arguments of the block. Received 'other'"),
        ({"ignored": ("mask",)}, "the names of arguments of the block. Received 'mask'"),
        ({"claims": True}, "`claims` to be a function"),
        ({"hidden_states": "x"}, "arguments of the block. Received 'x', where `call` takes stream"),
        ({"padding_mask": "mask"}, "the names of arguments of the block. Received 'mask'"),
    ],
)
def test_wrong_fields_of_a_family(fields, words):
    with pytest.raises(bs.SurgeryError, match=f"Family at .*expected .*{words}"):
        replace(OWN, **fields)


def test_a_string_is_one_name():
    family = replace(OWN, stop_tokens="</s>", model_types=["own"], ignored="keep")
    assert (family.stop_tokens, family.model_types) == (("</s>",), ("own",))
    assert family.ignored == ("keep",)


def of_heads(**settings):
    def open_block(block, hidden_states, padding_mask, positions):
        query, key, value = (block.project[n](hidden_states) for n in block.project)
        attention = bs.SelfAttention(**{**HEADS, **settings})
        return hidden_states + block.mix(attention(query, key, value, padding_mask))

    return open_block


HEADS = {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "scale": 0.3}


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("open_block", "words"),
    [
        (lambda block, x, mask, positions: None, "alone. Received None"),
        (lambda block, x, mask, positions: np.ones(16), "a symbolic tensor .*Received an array"),
        (lambda block, x, mask, positions: [x, x], r"alone. Received \[None, None, 16\], "),
        (lambda block, x, mask, positions: layers.Dense(7)(x), r"16\] alone. Received .* 7\]"),
        (of_heads(num_key_value_heads=4), r"SelfAttention at .*\(4, 4\)\].*Received .*\(2, 4\)"),
        (of_heads(num_heads=2), r"\[\(2, 4\), .*Received \[\(4, 4\), "),
        (of_heads(head_dim=8), r"\[\(4, 8\), .*Received \[\(4, 4\), "),
    ],
)
def test_what_open_block_must_do(open_block, words):
    class Block(OwnBlock):
        pass

    bs.register_family(bs.Family("wrong", Block, open_block, "stream", "keep"))
    with pytest.raises(bs.SurgeryError, match=words):
        bs.open_backbone(make_own(Block))


@pytest.mark.slow
def test_a_clone_computes_in_the_dtype_of_its_blocks():
    """Keras gives the policy of the process to a model that is built by hand."""
    backbone = keras_hub.models.GPT2Backbone(50, 1, 2, 8, 16, dtype="bfloat16")
    clone = keras.Model(backbone.input, bs.clone_layer_graph(backbone.input, backbone.output))
    assert bs.open_backbone(clone).dtype_policy.name == "bfloat16"
    assert bs.check(clone).tolerance == bs.check(backbone).tolerance > 1e-2
    edited = bs.operate(clone, [bs.LowRank("blocks.0.query", rank=2)])
    (adapter,) = edited.rewrites[0].adapters.values()
    assert adapter.dtype_policy.name == "bfloat16"


def one_block(embedding=layers.ReversibleEmbedding, name="token_ids", masked=True):
    """A graph with one block of GPT-2, and something about it that opening cannot use."""
    ids = keras.Input((None,), dtype="int32", name=name)
    mask = keras.Input((None,), dtype="int32", name="padding_mask")
    block = make_gpt2(num_layers=1).transformer_layers[0]
    x = embedding(60, 32)(ids)
    x = block(x, decoder_padding_mask=mask) if masked else block(x)
    return keras.Model([ids, mask], x)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "ids"}, "expected inputs named `token_ids` and `padding_mask`. Received .*'ids'"),
        ({"masked": False}, "hidden states and `decoder_padding_mask` alone. Received no mask"),
        ({"embedding": layers.Embedding}, "one `keras.layers.ReversibleEmbedding`.*Received 0"),
    ],
)
def test_graphs_that_cannot_be_opened(changed, words):
    with pytest.raises(bs.SurgeryError, match=f"open at .*{words}"):
        bs.CachedCausalLM(one_block(**changed))


def test_lora_is_of_a_backbone_of_keras_hub():
    with pytest.raises(bs.SurgeryError, match="expected the owner of the weights to be a"):
        bs.open_backbone(one_block()).enable_lora(2)


def test_a_selector_is_a_string():
    with pytest.raises(bs.SelectorError, match=r"select: expected a site selector .* of type int"):
        select(3, ["blocks.0"])


@pytest.mark.parametrize("role", [3, "", "mlp.output", "a b", None])
def test_a_role_is_a_part_of_a_path(role):
    with pytest.raises(bs.SurgeryError, match=r"Site at 'role': expected a name of letters"):
        bs.Site(role)


def test_options_that_a_block_is_called_with_are_not_ignored():
    """Unless the family says so, as that of SmolLM3 does."""

    class WithOptions(layers.Layer):
        def call(self, x, padding_mask, **kwargs):
            return x * kwargs.get("factor", 1)

        def compute_output_spec(self, x, padding_mask, **kwargs):
            return x

    block, x, mask = WithOptions(), keras.Input((None, 4)), keras.Input((None,))
    known = bs.Family("own", WithOptions, open_own, hidden_states="x", padding_mask="padding_mask")
    assert known.arguments(block, (x, mask), {}) == (x, mask, {})
    with pytest.raises(bs.SurgeryError, match=r"a call with hidden states .* Received kwargs"):
        known.arguments(block, (x, mask), {"factor": 2})
    lenient = replace(known, ignored=("kwargs",))
    assert lenient.arguments(block, (x, mask), {"factor": 2}) == (x, mask, {})
