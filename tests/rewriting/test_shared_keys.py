"""Blocks that attend to the keys and values of another one, edited.

Gemma 4 with four blocks: block 2 borrows from block 0, and block 3 from block 1.
"""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.edits import Scaled
from tests.families import ROWS
from tests.helpers import relative
from tests.recording import patched
from tests.reference import run_chunks, tokens

SHAPE = ROWS["gemma4"].shapes[0]
EXACT = 5e-6
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def backbone():
    return ROWS["gemma4"].make(**SHAPE)


def run_in_order(backbone, order, inputs):
    """Run KerasHub's own blocks in an order; one that borrows does so from the last run."""
    blocks = backbone.transformer_layers
    calls = [block._inbound_nodes[0].arguments for block in blocks]
    wanted = [calls[0].args[0], *(call.kwargs["per_layer_input"] for call in calls)]
    positions = np.cumsum(inputs["padding_mask"], axis=1) - 1
    x, *per_layer = keras.Model(backbone.input, wanted)({**inputs, "position_ids": positions})
    lent = {}
    for i in order:
        x, lent[i] = blocks[i](
            x,
            padding_mask=inputs["padding_mask"],
            per_layer_input=per_layer[i],
            shared_kv=lent.get(blocks[i].kv_shared_layer_index),
            positions=positions,
        )
    return backbone.layer_norm(x)


def assert_equal(model, wanted, inputs):
    assert relative(model.predict_on_batch(inputs), wanted) <= EXACT
    cached = bs.rewire(model)
    assert relative(run_chunks(cached, inputs, [4, 1, 4])[0], wanted) <= EXACT
    return cached


@pytest.mark.slow
def test_blocks_that_borrow_keep_nothing(backbone, rng):
    inputs = tokens(rng)
    cached = assert_equal(
        bs.open_backbone(backbone), run_in_order(backbone, range(4), inputs), inputs
    )
    assert [list(entry) for entry in cached.input["cache"]] == [["key", "value"]] * 2
    with pytest.raises(bs.SelectorError, match=r"at 'blocks.2.key': .* matches nothing"):
        bs.operate(backbone, [bs.Ablate("blocks.2.key")])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewrite", "order"),
    [
        pytest.param(bs.Remove("blocks.2"), [0, 1, 3], marks=slow),
        pytest.param(bs.Repeat("blocks.2:4"), [0, 1, 2, 3, 2, 3], marks=slow),
        pytest.param(bs.Repeat("blocks.0:2"), [0, 1, 0, 1, 2, 3], marks=slow),
        pytest.param(bs.Reorder([1, 0, 3, 2]), [1, 0, 3, 2], marks=slow),
        (bs.Reorder([1, 3]), [1, 3]),
    ],
)
def test_what_is_borrowed_follows_the_order_of_the_blocks(backbone, rng, rewrite, order):
    inputs = tokens(rng)
    model = bs.operate(backbone, [rewrite])
    cached = assert_equal(model, run_in_order(backbone, order, inputs), inputs)
    assert len(cached.input["cache"]) == sum(i < 2 for i in order)


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (bs.Remove("blocks.0"), "Remove at 'blocks.0': .* Received block 2 without block 0 before"),
        (bs.Reorder([0, 3, 1]), "Reorder at .* Keep block 1 before it, or leave block 3 out too"),
    ],
)
def test_a_block_that_lends_may_not_go(backbone, rewrite, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(backbone, [rewrite])


@slow
def test_a_change_of_keys_reaches_those_who_borrow_them(backbone, rng):
    inputs = tokens(rng)
    model = bs.operate(backbone, [bs.Ablate("blocks.1.key")])
    layer = backbone.transformer_layers[1].attention.key_dense
    with patched(layer, lambda x: 0 * x):
        wanted = run_in_order(backbone, range(4), inputs)
    assert relative(wanted, run_in_order(backbone, range(4), inputs)) > 1e-3
    assert_equal(model, wanted, inputs)


@slow
def test_edits_of_blocks_that_share(backbone, rng):
    """Patterns split, blocks wrapped and skipped, on both sides: cached as uncached."""
    edits = [
        bs.Capture("blocks.*.attention_pattern"),
        bs.Ablate("blocks.*.attention_pattern", heads=[1]),
        bs.Wrap("blocks.*", Scaled),
        bs.Skip("blocks.0:3", amount=0.25),
    ]
    inputs = tokens(rng)
    model = bs.operate(backbone, edits)
    wanted = model.predict_on_batch(inputs)
    assert relative(wanted["hidden_states"], run_in_order(backbone, range(4), inputs)) > 1e-3
    hidden, captures = run_chunks(bs.rewire(model), inputs, [4, 1, 4])
    assert relative(hidden, wanted["hidden_states"]) <= EXACT
    for path, value in captures.items():
        assert relative(value, wanted["captures"][path]) <= 3e-5, path
