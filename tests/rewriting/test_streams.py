"""Blocks between which several streams of hidden states go, edited as whole blocks.

Gemma 3n with five blocks and three streams, of which the first is the active one: block 3 borrows
keys and values from block 1, and block 4 from block 2. KerasHub's own loop runs other lists of
blocks here.
"""

import types

import keras
import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.gemma3n.gemma3n_text_model import Gemma3nTextModel

import backbone_surgery as bs
from tests.edits import Scaled
from tests.families import ROWS
from tests.helpers import relative
from tests.reference import run_chunks, tokens

pytestmark = pytest.mark.slow

ACTIVE = 0
SHAPE = {**ROWS["gemma3n"].shapes[0], "altup_num_inputs": 3}
EXACT = 3e-5


@pytest.fixture(scope="module")
def backbone():
    return ROWS["gemma3n"].make(**SHAPE)


def run_blocks(backbone, inputs, order, changed=None):
    """Run KerasHub's loop over its own blocks in an order.

    Args:
        backbone: their owner.
        inputs: the text.
        order: numbers of blocks, those that borrow last.
        changed: `{number: function}`, each of a block and what it is called on: what it gives.
    """
    model = backbone.language_model
    embedded, per_layer = backbone.embedding_processor({"token_ids": inputs["token_ids"]})

    def running(i):
        def run(given, cache=None):
            made, lent = block(given, cache=cache)
            return (changed[i](block, given, made) if i in (changed or {}) else made), lent

        block = model.transformer_layers[i]
        return run

    view = types.SimpleNamespace(
        altup_projections=model.altup_projections,
        altup_unembed_projections=model.altup_unembed_projections,
        final_normalization=model.final_normalization,
        transformer_layers=[running(i) for i in order],
        layer_types=[model.layer_types[i] for i in order],
        first_kv_shared_layer_idx=sum(i < 3 for i in order),
    )
    per_layer = ops.take(per_layer, list(order), axis=2)
    mask = ops.cast(inputs["padding_mask"], "bool")
    return Gemma3nTextModel.call(view, inputs["token_ids"], mask, embedded, per_layer)


def assert_equal(model, wanted, inputs, **controls):
    got = model.predict_on_batch({**inputs, **controls})
    assert relative(got, wanted) <= EXACT
    cached = bs.rewire(model)
    assert relative(run_chunks(cached, inputs, [4, 1, 4], **controls)[0], wanted) <= EXACT


ORDERS = {
    "remove": (bs.Remove("blocks.0"), [1, 2, 3, 4]),
    "remove the last": (bs.Remove("blocks.3:"), [0, 1, 2]),
    "repeat": (bs.Repeat("blocks.0:2", times=2), [0, 1, 0, 1, 2, 3, 4]),
    "reorder": (bs.Reorder([0, 2, 1, 2, 4, 3, 4]), [0, 2, 1, 2, 4, 3, 4]),
}


@pytest.mark.parametrize(("edit", "order"), ORDERS.values(), ids=ORDERS)
def test_blocks_in_another_order(backbone, rng, edit, order):
    """All streams go from each block to the one that comes after it now."""
    inputs = tokens(rng)
    plain = run_blocks(backbone, inputs, range(5))
    assert relative(bs.open_backbone(backbone).predict_on_batch(inputs), plain) <= EXACT
    wanted = run_blocks(backbone, inputs, order)
    assert relative(plain, wanted) > 1e-3
    assert_equal(bs.operate(backbone, [edit]), wanted, inputs)


def test_skip_takes_all_streams(backbone, rng):
    """A block that is skipped hands on all that came in, in part or as a whole, row by row."""
    inputs, amounts = tokens(rng, 3), np.array([[1.0, 0.0], [0.25, 1.0], [0.0, 0.0]], "float32")

    def skipped(column):
        share = amounts[None, :, column, None, None]
        return lambda block, given, made: made + share * (given[0] - made)

    model = bs.operate(backbone, [bs.Skip("blocks.1:3")])
    assert model.report[0].sites == ("blocks.1", "blocks.2")
    wanted = run_blocks(backbone, inputs, range(5), {1: skipped(0), 2: skipped(1)})
    assert_equal(model, wanted, inputs, skip_amount=amounts)
    got = model({**inputs, "skip_amount": np.zeros((3, 2), "float32")})
    assert np.array_equal(got, bs.open_backbone(backbone)(inputs))
    removed = bs.operate(backbone, [bs.Remove("blocks.0")]).predict_on_batch(inputs)
    skips = bs.operate(backbone, [bs.Skip("blocks.0")]).predict_on_batch(inputs)
    assert relative(skips, removed) <= EXACT


def test_a_wrapper_is_around_the_active_stream(backbone, rng):
    inputs = tokens(rng)

    def wrapped(block, given, _):
        streams = [*given[0]]
        x = streams[ACTIVE]
        streams[ACTIVE] = 0.5 * x
        made, _ = block((ops.stack(streams), *given[1:]))
        made = [*made]
        made[ACTIVE] = x + ops.tanh(made[ACTIVE])
        return ops.stack(made)

    model = bs.operate(backbone, [bs.Wrap("blocks.0", Scaled)])
    assert_equal(model, run_blocks(backbone, inputs, range(5), {0: wrapped}), inputs)


def test_a_block_replaced_hands_the_other_streams_on(backbone, rng):
    inputs, dense = tokens(rng), keras.layers.Dense(32)

    def replaced(_, given, __):
        return ops.stack([dense(x) if i == ACTIVE else x for i, x in enumerate(given[0])])

    model = bs.operate(backbone, [bs.Replace("blocks.0", dense)])
    assert "blocks.0.query" not in bs.sites(model)
    assert_equal(model, run_blocks(backbone, inputs, range(5), {0: replaced}), inputs)
    assert len(bs.rewire(model).output["cache"]) == 2


def test_the_other_streams_are_a_site(backbone, rng):
    inputs, seen = tokens(rng), []

    def changed(_, __, made):
        seen.append(made)
        return ops.stack([x if i == ACTIVE else 0 * x for i, x in enumerate(made)])

    edits = [bs.Capture("blocks.0", "blocks.0.other_streams"), bs.Ablate("blocks.0.other_streams")]
    model = bs.operate(backbone, edits)
    outputs = model.predict_on_batch(inputs)
    wanted = run_blocks(backbone, inputs, range(5), {0: changed})
    assert relative(outputs["hidden_states"], wanted) <= EXACT
    captures, streams = outputs["captures"], np.asarray(seen[0])
    assert relative(captures["blocks.0"], streams[ACTIVE]) <= EXACT
    others = np.stack([streams[1], streams[2]], axis=2)
    assert relative(captures["blocks.0.other_streams"], others) <= EXACT
