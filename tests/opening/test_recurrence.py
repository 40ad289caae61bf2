"""Linear attention: the delta rule in chunks against token by token, its sites, and its padding."""

import keras
import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.qwen3_5.qwen3_5_vision_encoder import Qwen3_5VisionEncoder

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.opening.recurrence import CausalConvolution, DeltaRule
from backbone_surgery.opening.site import places
from tests.families import ROWS
from tests.helpers import relative
from tests.opening.rules import check_gradients, run_pieces
from tests.recording import recorded
from tests.reference import run_chunks, tokens

EXACT = 3e-6
slow = pytest.mark.slow


GATES = ["query", "key", "value", "decay", "write_strength"]


def unit(x):
    x = x.astype("float64")
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6)


def by_hand(query, key, value, decay, strength, padding_mask):
    """Token by token, in NumPy: what each token reads, and the state after it."""
    groups = value.shape[2] // key.shape[2]
    query, key = (np.repeat(unit(x), groups, axis=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state, read, states = np.zeros((*value.shape[::2], key.shape[3], value.shape[3])), [], []
    for t in range(value.shape[1]):
        new = state * decay[:, t, :, None, None]
        error = value[:, t] - np.einsum("bhkv,bhk->bhv", new, key[:, t])
        new = new + np.einsum("bhk,bhv->bhkv", key[:, t], strength[:, t, :, None] * error)
        state = np.where(padding_mask[:, t, None, None, None], new, state)
        read.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
        states.append(state)
    return np.stack(read, 1), np.stack(states, 1)


def make_arguments(rng, time, padding=0):
    shapes = {"query": (2, 6), "key": (2, 6), "value": (4, 5)}
    made = {k: rng.normal(size=(2, time, *s)).astype("float32") for k, s in shapes.items()}
    # Some heads remember for long, others forget within a token.
    rate = np.exp(rng.normal(-2, 2, (2, time, 4)))
    mask = np.ones((2, time), "int32")
    mask[1, :padding] = 0
    return {
        **made,
        "decay": np.exp(-rate).astype("float32"),
        "write_strength": rng.uniform(size=(2, time, 4)).astype("float32"),
        "padding_mask": mask,
    }


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    """What the rule is for: a CPU runs one token after the other, a GPU and a TPU many at once."""
    with target.made_for(request.param):
        yield request.param


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "padding"), [(7, 3), *(pytest.param(n, n // 2, marks=slow) for n in (1, 64, 150))]
)
def test_the_delta_rule_in_chunks_is_that_of_each_token(time, padding, rng, platform):
    arguments = make_arguments(rng, time, padding)
    wanted, _ = by_hand(*arguments.values())
    rule = DeltaRule(name="rule")
    assert relative(rule(**arguments), wanted) <= EXACT
    read, state = run_pieces(rule, arguments, (2, 4, 6, 5))
    assert relative(read, wanted) <= EXACT
    assert relative(state, by_hand(*arguments.values())[1][:, -1]) <= EXACT


@pytest.mark.slow
def test_gradients_of_one_token_after_the_other_are_those_of_many_at_once(rng):
    check_gradients(DeltaRule(name="rule"), make_arguments(rng, 150, 20))


@pytest.mark.slow
def test_padding_leaves_the_state_bit_equal(rng):
    arguments = make_arguments(rng, 9)
    arguments["padding_mask"][:] = 0
    state = rng.normal(size=(2, 4, 6, 5)).astype("float32")
    pieces = {k: ops.convert_to_tensor(v) for k, v in arguments.items()}
    _, after = DeltaRule(name="rule").call_with_state(**pieces, state={"state": state})
    assert np.array_equal(after["state"], state)

    kernel = keras.Variable(np.ones((5, 4), "float32"))
    convolution = CausalConvolution(kernel, name="convolution")
    x = ops.convert_to_tensor(rng.normal(size=(2, 9, 5)).astype("float32"))
    zeros = ops.zeros((2, 3, 5))
    _, after = convolution.call_with_state(x, pieces["padding_mask"], {"inputs": zeros})
    assert not np.asarray(after["inputs"]).any()


@pytest.fixture(scope="module")
def backbone():
    return ROWS["qwen3_5"].make()


def captured(model, *paths, inputs):
    edited = bs.operate(model, [bs.Capture(*paths)])
    captures = edited.predict_on_batch(inputs)["captures"]
    return {path.split(".")[-1]: np.asarray(value) for path, value in captures.items()}


@slow
def test_sites_of_linear_attention_hold_what_is_computed_there(backbone, rng):
    inputs = tokens(rng, 2, 12)
    got = captured(backbone, "blocks.0.*", inputs=inputs)
    read, states = by_hand(*(got[name] for name in GATES), inputs["padding_mask"])
    assert relative(got["state"], states) <= EXACT
    layer = backbone.transformer_layers[0]._linear_attn
    names = ("in_proj_a", "in_proj_b", "in_proj_z", "norm", "out_proj")
    own = recorded(backbone, inputs, {name: getattr(layer, name) for name in names})
    rate = np.exp(np.asarray(layer.A_log)) * np.logaddexp(0, own["in_proj_a"] + layer.dt_bias)
    assert relative(got["decay"], np.exp(-rate)) <= EXACT
    assert relative(got["write_strength"], 1 / (1 + np.exp(-own["in_proj_b"]))) <= EXACT
    gate = own["in_proj_z"] / (1 + np.exp(-own["in_proj_z"]))
    assert relative(got["output_gate"], gate.reshape(got["output_gate"].shape)) <= EXACT
    normed = own["norm"].reshape(read.shape)
    assert relative(got["head_outputs"], normed * got["output_gate"]) <= EXACT
    size = np.sqrt(np.square(read).mean(-1, keepdims=True) + 1e-6)
    assert relative(read / size * np.asarray(layer.norm.scale), normed) <= 1e-5
    assert relative(got["attention_output"], own["out_proj"]) <= EXACT


@slow
def test_the_state_at_the_last_token_is_what_the_cache_keeps(backbone, rng):
    inputs = tokens(rng, 2, 9)
    states = captured(backbone, "blocks.0.state", inputs=inputs)["state"]
    lm = bs.CachedCausalLM(backbone)
    _, _, cache = lm.call_with_cache(
        inputs["token_ids"], bs.new_cache(lm.backbone_with_cache, 2, 9), 0
    )
    assert [list(entry) for entry in cache] == [["inputs"], ["state"], ["key", "value"]]
    assert relative(cache[1]["state"], states[:, -1]) <= EXACT


@pytest.mark.slow
def test_an_edit_of_the_state_changes_what_its_token_reads_alone(backbone, rng):
    inputs, path = tokens(rng, 2, 9), "blocks.0.state"
    value = rng.normal(size=(2, 1, 4, 6, 10)).astype("float32")
    rewrites = [bs.Patch(path, positions=(4,)), bs.Capture("blocks.0.head_outputs", path)]
    model = bs.operate(backbone, rewrites)
    edit = {"patch_value_0": value}
    got = model.predict_on_batch({**inputs, **edit})
    plain = captured(backbone, "blocks.0.head_outputs", path, inputs=inputs)
    assert np.array_equal(got["captures"][path][:, 4], value[:, 0])
    changed = np.abs(got["captures"]["blocks.0.head_outputs"] - plain["head_outputs"]) > 1e-4
    assert np.array_equal(np.flatnonzero(changed.any(axis=(0, 2, 3))), [4])
    hidden, captures = run_chunks(bs.rewire(model), inputs, [3, 1, 5], **edit)
    assert relative(hidden, got["hidden_states"]) <= EXACT
    assert relative(captures[path], got["captures"][path]) <= EXACT


@slow
def test_heads_of_the_state_and_of_what_is_read_are_ablated_alike(backbone, rng):
    inputs = tokens(rng, 2, 9)
    of_state, of_outputs = (
        bs.operate(backbone, [bs.Ablate(f"blocks.0.{role}", heads=[1, 3])]).predict_on_batch(inputs)
        for role in ("state", "head_outputs")
    )
    assert relative(of_state, of_outputs) <= EXACT
    assert relative(run(backbone, inputs), of_state) > 1e-2


def run(backbone, inputs):
    return np.asarray(backbone.predict_on_batch(inputs))


@slow
def test_a_head_without_decay_forgets_all_but_its_token(backbone, rng):
    inputs = tokens(rng, 2, 70)
    rewrites = [bs.Ablate("blocks.0.decay", heads=[0, 2]), bs.Capture("blocks.0.*")]
    model = bs.operate(backbone, rewrites)
    wanted = model.predict_on_batch(inputs)
    got = {k.split(".")[-1]: np.asarray(v) for k, v in wanted["captures"].items()}
    key = np.repeat(unit(got["key"]), 2, axis=2)
    written = np.einsum("bthk,bthv->bthkv", key, got["write_strength"][..., None] * got["value"])
    assert relative(got["state"][:, :, ::2], written[:, :, ::2]) <= EXACT
    assert relative(got["state"][:, :, 1::2], written[:, :, 1::2]) > 1e-2
    hidden, _ = run_chunks(bs.rewire(model), inputs, [66, 1, 3])
    assert relative(hidden, wanted["hidden_states"]) <= 3e-5


@pytest.mark.slow
def test_the_state_is_made_for_each_token_only_where_it_is_asked_for(backbone):
    opened = bs.open_backbone(backbone)
    assert "blocks.0.state" in bs.sites(opened)
    shapes = {place.path: place.shape for place in places(opened)}
    assert shapes["blocks.0.state"] == (None, None, 4, 6, 10)
    assert shapes["blocks.1.attention_pattern"] == (None, 4, None, None)
    largest = max(
        len(t.shape)
        for block in opened.layers
        if hasattr(block, "operations")
        for op in block.operations
        for node in op._inbound_nodes
        for t in node.outputs
    )
    assert largest == 4


@slow
def test_long_texts_are_those_of_the_backbone(backbone, rng):
    """Of many tokens some head reads little, and its norm makes rounding larger."""
    inputs = tokens(rng, 2, 150)
    inputs["padding_mask"][1, :20] = 0
    real = inputs["padding_mask"].astype(bool)
    opened = bs.open_backbone(backbone)
    got = opened.predict_on_batch(inputs)
    assert relative(got[:1], run(backbone, {k: v[:1] for k, v in inputs.items()})) <= 5e-5
    alone = run(backbone, {k: v[1:, 20:] for k, v in inputs.items()})
    assert relative(got[1:, 20:], alone) <= 5e-5
    hidden, _ = run_chunks(bs.rewire(opened), inputs, [100, 1, 1, 1, 47])
    assert relative(hidden, got, real) <= 5e-5


@slow
def test_a_backbone_with_images_opens_for_text_alone(rng):
    encoder = Qwen3_5VisionEncoder(1, 16, 2, 16, patch_size=4, out_hidden_size=32)
    backbone = ROWS["qwen3_5"].make(vision_encoder=encoder, mrope_section=[2, 1, 1])
    inputs = tokens(rng, 2, 12)
    wanted = backbone({k: ops.convert_to_tensor(v) for k, v in inputs.items()})
    opened = bs.open_backbone(backbone)
    assert set(opened.input) == {"token_ids", "padding_mask"}
    assert bs.sites(opened) == bs.sites(ROWS["qwen3_5"].make())
    assert relative(opened.predict_on_batch(inputs), wanted) <= 5e-6
    assert max(bs.check(opened).errors.values()) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (
            bs.Steer("mood", {0: np.ones(10)}, "blocks.0.state"),
            r"stands there, \(4, 6, 10\)\. Received directions of size 10\. .* by `Insert`",
        ),
        (bs.LowRank("blocks.0.state", rank=2), "expected a site computed from one other site"),
    ],
)
def test_what_acts_on_vectors_is_refused_at_the_state(rewrite, words):
    with pytest.raises(bs.SurgeryError, match=words):
        bs.operate(ROWS["qwen3_5"].make(), [rewrite])
