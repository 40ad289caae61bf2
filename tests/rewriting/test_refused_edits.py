"""Edits that would be silently wrong are refused, in words."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.opening.site import is_block, stream_index
from backbone_surgery.rewriting import Rows
from tests.helpers import make_deep_gpt2, make_gpt2


@pytest.fixture(scope="module")
def backbone():
    return make_deep_gpt2()


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "later",
    [
        bs.Skip("blocks.1", name="a", amount=0.0),
        bs.Ablate("blocks.1", name="a"),
        bs.Patch("blocks.1", name="a"),
    ],
)
def test_two_rewrites_of_one_control_are_refused(backbone, later):
    steer = bs.Steer("a", {0: np.ones(32)})
    words = f"control 'a': .* {type(later).__name__} and Steer .*Give the rewrite another name"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(backbone, [steer, later])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(bs.operate(backbone, [steer]), [later])


class Scaled(keras.layers.Layer):
    def __init__(self, block):
        super().__init__(name="scaled")
        self.block, self.scale = block, self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x + self.scale * self.block(x)


def dense(units):
    return keras.layers.Dense(units, name="brought")


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("rewrites", "name"),
    [
        (lambda: [bs.LowRank("blocks.1.query", 2), bs.Remove("blocks.1")], "low_rank_blocks_1"),
        (
            lambda: [
                bs.Insert("blocks.1.mlp_output", dense(32)),
                bs.Replace("blocks.1", keras.layers.Identity()),
            ],
            "brought",
        ),
        (
            lambda: [
                bs.LowRank("blocks.1.mlp_hidden", 2),
                bs.Replace("blocks.1.mlp_hidden", dense(64)),
            ],
            "low_rank_blocks_1_mlp_hidden",
        ),
        (lambda: [bs.Wrap("blocks.1", Scaled), bs.Reorder([0, 2])], "scaled"),
        (lambda: [bs.Insert("blocks.1", dense(32)), without_brought], "brought"),
    ],
)
def test_what_trains_is_not_cut_out(backbone, rewrites, name):
    with pytest.raises(bs.SurgeryError, match=f"nothing uses {name}.* apply it later"):
        bs.operate(backbone, rewrites())


def without_brought(layer, *args, **kwargs):
    return args[0] if layer.name == "brought" else layer(*args, **kwargs)


def test_what_trains_and_stays_is_not_refused(backbone):
    """In nested blocks, inside a wrapper, without weights, and where only some uses go."""
    layer = dense(32)
    edited = bs.operate(
        backbone,
        [
            bs.Wrap("blocks.1", Scaled),
            bs.LowRank("blocks.1.query", 2),
            bs.Insert("blocks.1:", layer),
            bs.Insert("blocks.2.query", keras.layers.Dropout(0.5)),
            bs.Remove("blocks.2"),
        ],
    )
    assert len(edited.trainable_variables) == 5


@pytest.mark.parametrize("name", ["warm_strength", "a_strength"])
def test_inputs_that_the_model_has_not_are_refused(backbone, name):
    """One that sorts before `token_ids` would move the others, too."""
    edited = bs.operate(backbone, [bs.Steer("mood", {0: np.ones(32)})])
    ids = np.ones((1, 3), "int32")
    inputs = {"token_ids": ids, "padding_mask": ids, name: np.ones((1, 1))}
    words = f"input '{name}': expected inputs .*Did you mean 'mood_strength'"
    for call in (edited, edited.predict_on_batch):
        with pytest.raises(bs.SurgeryError, match=words):
            call(inputs)
    cached = bs.rewire(edited)
    whole = {
        "token_ids": ids,
        "cache": bs.new_cache(cached, 1, 3),
        "cache_update_index": np.int32(0),
        "positions": np.arange(3)[None],
        "cache_mask": np.ones((1, 3), bool),
    }
    with pytest.raises(bs.SurgeryError, match=words):
        cached({**whole, name: np.ones((1, 1))})


def test_two_low_rank_maps_at_one_site_have_names_of_their_own(backbone):
    one = bs.LowRank("blocks.1.query", 2)
    with pytest.raises(bs.SurgeryError, match=r"named 'low_rank_blocks_1_query'.*another `name`"):
        bs.operate(backbone, [one, bs.LowRank("blocks.1.query", 4)])
    edited = bs.operate(backbone, [one, bs.LowRank("blocks.1.query", 4, name="other")])
    assert [v.shape[-1] for v in edited.trainable_variables] == [2, 32, 4, 32]


def test_sites_share_an_adapter(backbone):
    first = bs.operate(backbone, [bs.LowRank("blocks.0.query", 2)]).rewrites[0]
    adapter = first.adapters["blocks.0.query"]
    adapters = {"blocks.0.query": adapter, "blocks.1.query": adapter}
    edited = bs.operate(backbone, [bs.LowRank("blocks.:2.query", 2, adapters=adapters)])
    assert edited.rewrites[0].adapters == adapters
    assert [id(v) for v in edited.trainable_variables] == [id(v) for v in adapter.weights]


def test_malformed_selectors_are_refused(backbone):
    large = "blocks." + "9" * 5000
    for selector in ("blocks.-:3", "blocks.:-", "blocks.--1", "blocks.1:2:3", large):
        with pytest.raises(bs.SelectorError, match="expected a selector that matches a site"):
            bs.operate(backbone, [bs.Capture(selector)])


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (bs.Capture("blocks.7"), r"'blocks.7'.*The blocks are blocks.0 ... blocks.2\."),
        (bs.Capture("blocks.3:.query"), r"The blocks are blocks.0 ... blocks.2\."),
        (bs.Capture("blocks.0.qery"), r"Did you mean 'blocks.\*.query'"),
        (
            bs.Ablate("blocks.1", heads=[0]),
            "with heads are .*blocks.1.query.*1.head_outputs",
        ),
        (bs.LowRank("blocks.1.head_outputs", 2), "Here these are .*blocks.1.query.*, blocks.1.mlp"),
        (bs.Reorder([3]), "Reorder at 'blocks.*': expected numbers from 0 to 2.* Received .3,"),
    ],
)
def test_errors_name_what_there_is(backbone, rewrite, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(backbone, [rewrite])


@pytest.mark.parametrize(
    "rewrite",
    [
        bs.Steer("a", {1: np.ones(32)}, "blocks.*.query"),
        bs.Condition("c", np.ones(32), 0.1, "blocks.1.query"),
    ],
)
def test_a_vector_of_another_size_names_the_sites_that_would_fit(rewrite):
    words = r"'blocks\.1\.query'.*Sites of \[32\] here are blocks\.1\.attention_norm, .*blocks\.1\."
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(make_gpt2(), [rewrite])


class WithoutBlocks(bs.Rewrite):
    """Leaves all blocks out."""

    whole_blocks = True

    def visitor(self, surgery):
        def visit(layer, *args, **kwargs):
            if not is_block(layer):
                return graph.KEEP
            surgery.fired.append(layer.name)
            return keras.tree.flatten(args)[stream_index(layer)]

        return visit


class FromPositions(bs.SiteRewrite):
    """Lets attention in a block attend to positions in place of hidden states."""

    at = "blocks.0.attention_norm"

    def apply(self, x, place, surgery):
        positions = keras.ops.cast(surgery.positions, x.dtype)[..., None]
        return keras.ops.repeat(positions, x.shape[-1], axis=-1)


def without_input(b):
    """Block 0 computes something, of its padding mask alone."""
    residuals = iter(["first"])

    def attention_alone(layer, *args, **kwargs):
        if layer.name == "attention_residual" and next(residuals, None):
            return args[0][0]
        return layer(*args, **kwargs)

    return bs.operate(b, [FromPositions(), attention_alone])


class Declares(FromPositions):
    """Declares an input of some name."""

    def __init__(self, name):
        self.name = name

    def visitor(self, surgery):
        surgery.control(self.name, np.float32(0))
        return super().visitor(surgery)


class Nothing(bs.Rewrite):
    """Changes nothing."""

    def visitor(self, surgery):
        return lambda layer, *args, **kwargs: graph.KEEP


def emitting(layer, *args, **kwargs):
    result = layer(*args, **kwargs)
    if layer.name == "transformer_layer_0":
        bs.emit("x", result)
    return result


def failing(block):
    raise ValueError("no such block")


ROWS = Rows(np.array([3, 4]))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda b: bs.operate(b, [Nothing()]), "Received one that fired nowhere"),
        (lambda b: bs.operate(b, [emitting]), r"Received one that emits \['x'\]"),
        (lambda b: bs.operate(b, [Declares("a b")]), "control 'a b': expected a name of letters"),
        (
            lambda b: bs.operate(b, [Declares("token_ids")]),
            "control 'token_ids': expected a name that no other rewrite declares. Received a graph",
        ),
        (lambda b: bs.Capture("blocks.0").bind(1, ROWS), "Capture: .* that declares a control"),
        (
            lambda b: bs.Condition("c", np.ones(32), 0.1, "blocks.0").bind(2, ROWS),
            "'c': expected thresholds from -1 to 1",
        ),
        (
            lambda b: bs.Control(directions="up"),
            "Control: expected directions as a control vector, finite float",
        ),
        (
            lambda b: bs.operate(without_input(b), [bs.Reorder([0, 2, 1])]),
            "blocks nested in another model, or without hidden states",
        ),
        (
            lambda b: bs.operate(without_input(b), [bs.Wrap("blocks.0", Scaled)]),
            "Received a block that does not use its input",
        ),
        (lambda b: bs.Wrap("blocks.0", 3), "`make_layer` to be a function of a block"),
        (
            lambda b: bs.operate(b, [bs.Wrap("blocks.0", failing)]),
            "Received a function that fails with: no such block",
        ),
        (
            lambda b: bs.operate(b, [bs.Wrap("blocks.0", lambda block: block(1))]),
            "the block to be called inside its wrapper's `call`. Received a call outside of it",
        ),
        (lambda b: bs.operate(bs.rewire(b), []), "Received a cached graph, .* Edit its `.source`"),
        (
            lambda b: bs.Condition("c", np.zeros(32), 0.1, "blocks.0"),
            "a direction other than zero",
        ),
        (
            lambda b: bs.operate(
                b, [bs.Condition("c", {0: np.zeros(32), 1: np.ones(32)}, 0.1, "blocks.0")]
            ),
            "a direction other than zero",
        ),
        (
            lambda b: bs.operate(
                b, [bs.Ablate("blocks.0", to="mean", values={"blocks.1": np.ones(32)})]
            ),
            r"values for each site that 'blocks.0' selects. Received some for \['blocks.1'\]",
        ),
        (
            lambda b: bs.rewire(bs.operate(b, [WithoutBlocks()])),
            "expected a graph with attention in it, or with another layer that keeps state",
        ),
    ],
)
def test_refusals_say_what_is_expected(backbone, edit, words):
    with pytest.raises(bs.SurgeryError, match=words):
        edit(backbone)


@pytest.mark.parametrize(
    ("rewrites", "name"),
    [
        (lambda: [bs.Wrap("blocks.1", Scaled), bs.Wrap("blocks.1", Scaled)], "scaled_before"),
        (lambda: [bs.Insert("blocks.1.mlp_output", dense(32)) for _ in range(2)], "brought"),
        (lambda: [bs.Insert("final_norm", keras.layers.Identity(name="layer_norm"))], "layer_norm"),
    ],
)
def test_two_layers_of_one_name_in_one_block_are_refused(backbone, rewrites, name):
    words = f"operate at layer '{name}': expected layers of different names.*`name` of its own"
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(backbone, rewrites())


def test_layers_of_one_name_in_different_blocks(backbone):
    assert len(bs.operate(backbone, [bs.Wrap("blocks.1:", Scaled)]).trainable_variables) == 2
