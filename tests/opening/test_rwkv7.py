"""RWKV-7: its recurrence against NumPy, its task against KerasHub's, what its blocks hand on."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.opening.generalized_delta_rule import GeneralizedDeltaRule, TokenShift
from tests.families import ROWS
from tests.helpers import ragged, relative
from tests.opening.rules import check_gradients, run_pieces
from tests.reference import run_chunks, tokens

EXACT = 3e-6
slow = pytest.mark.slow
NAMES = ("query", "key", "value", "decay", "removed_key", "write_strength", "padding_mask")


def by_hand(query, key, value, decay, removed_key, write_strength, padding_mask):
    """Token by token, in NumPy: what each token reads, and the state after it."""
    state = np.zeros((*value.shape[::2], key.shape[3], value.shape[3]))
    read, states = [], []
    for t in range(value.shape[1]):
        out = np.einsum("bhkv,bhk->bhv", state, removed_key[:, t])
        taken = np.einsum("bhk,bhv->bhkv", write_strength[:, t] * removed_key[:, t], out)
        written = np.einsum("bhk,bhv->bhkv", key[:, t], value[:, t])
        new = state * decay[:, t, ..., None] - taken + written
        state = np.where(padding_mask[:, t, None, None, None], new, state)
        read.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
        states.append(state)
    return np.stack(read, 1), np.stack(states, 1)


def make_arguments(rng, time, padding=0):
    made = {name: rng.normal(size=(2, time, 3, 6)).astype("float32") for name in NAMES[:2]}
    made["value"] = rng.normal(size=(2, time, 3, 5)).astype("float32")
    # Some channels remember for long, others forget within a token.
    made["decay"] = np.exp(-np.exp(rng.normal(-2, 2, (2, time, 3, 6)))).astype("float32")
    removed = rng.normal(size=(2, time, 3, 6))
    made["removed_key"] = removed / np.linalg.norm(removed, axis=-1, keepdims=True)
    made["write_strength"] = rng.uniform(size=(2, time, 3, 6))
    made["padding_mask"] = np.ones((2, time), "int32")
    made["padding_mask"][1, :padding] = 0
    return {k: v.astype("int32" if k == "padding_mask" else "float32") for k, v in made.items()}


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=slow)])
def platform(request):
    """What the rule is for: a CPU runs one token after the other, a GPU and a TPU many at once."""
    with target.made_for(request.param):
        yield request.param


@slow
def test_gradients_of_one_token_after_the_other_are_those_of_many_at_once(rng):
    check_gradients(GeneralizedDeltaRule(name="rule"), make_arguments(rng, 50, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "padding"), [(19, 3), *(pytest.param(n, n // 2, marks=slow) for n in (1, 16, 50))]
)
def test_the_rule_in_chunks_is_that_of_each_token(time, padding, rng, platform):
    arguments = make_arguments(rng, time, padding)
    wanted, states = by_hand(*arguments.values())
    rule = GeneralizedDeltaRule(name="rule")
    assert relative(rule(**arguments), wanted) <= EXACT
    read, state = run_pieces(rule, arguments, (2, 3, 6, 5))
    assert relative(read, wanted) <= EXACT
    assert relative(state, states[:, -1]) <= EXACT


def test_padding_leaves_the_state_bit_equal(rng):
    arguments = make_arguments(rng, 9)
    arguments["padding_mask"][:] = 0
    state = rng.normal(size=(2, 3, 6, 5)).astype("float32")
    pieces = {k: ops.convert_to_tensor(v) for k, v in arguments.items()}
    rule = GeneralizedDeltaRule(name="rule")
    _, after = rule.call_with_state(**pieces, state={"state": state})
    assert np.array_equal(after["state"], state)

    x = ops.convert_to_tensor(rng.normal(size=(2, 9, 4)).astype("float32"))
    before = ops.convert_to_tensor(rng.normal(size=(2, 1, 4)).astype("float32"))
    mask = np.ones((2, 9), "int32")
    mask[0, 6:], mask[1] = 0, 0
    shifted, after = TokenShift(name="shift").call_with_state(x, mask, {"inputs": before})
    assert np.array_equal(after["inputs"], [x[0, 5:6], before[1]])
    assert np.array_equal(shifted[0, :6], np.concatenate([before[0], x[0, :5]]))


@pytest.fixture(scope="module")
def backbone():
    return ROWS["rwkv7"].make(num_layers=3)


@slow
def test_the_site_of_the_state_holds_it_and_is_edited(backbone, rng):
    inputs, path = tokens(rng, 2, 19), "blocks.1.state"
    model = bs.operate(backbone, [bs.Patch(path, positions=(4,)), bs.Capture("blocks.1.*")])
    value = rng.normal(size=(2, 1, 4, 8, 8)).astype("float32")
    edit = {**inputs, "patch_value_0": value}
    got = model.predict_on_batch(edit)
    plain = bs.operate(backbone, [bs.Capture("blocks.1.*")]).predict_on_batch(inputs)["captures"]
    site = {k.split(".")[-1]: np.asarray(v) for k, v in plain.items()}
    layer = backbone.rwkv_layers[1].att
    scaled = site["key"] * np.asarray(layer.k_k).reshape(4, 8)
    removed = scaled / np.sqrt(np.square(scaled).sum(-1, keepdims=True) + 1e-12)
    share = np.asarray(layer.k_a).reshape(4, 8)
    key = site["key"] * (1 + (site["write_strength"] - 1) * share)
    arguments = site["query"], key, site["value"], site["decay"], removed, site["write_strength"]
    _, states = by_hand(*arguments, inputs["padding_mask"])
    assert relative(site["state"], states) <= EXACT
    assert np.array_equal(got["captures"][path][:, 4], value[:, 0])
    changed = np.abs(got["captures"]["blocks.1.head_outputs"] - site["head_outputs"]) > 1e-4
    assert np.array_equal(np.flatnonzero(changed.any(axis=(0, 2, 3))), [4])
    hidden, captures = run_chunks(bs.rewire(model), inputs, [3, 1, 15], patch_value_0=value)
    assert relative(hidden, got["hidden_states"]) <= 1e-5
    assert relative(captures[path], got["captures"][path]) <= 1e-5


@slow
def test_later_blocks_mix_in_the_values_of_the_first(backbone, rng):
    inputs = tokens(rng, 2, 6)
    model = bs.operate(backbone, [bs.Ablate("blocks.0.value", heads=[0]), bs.Capture("blocks.1.*")])
    got = model.predict_on_batch(inputs)["captures"]
    gate = np.asarray(got["blocks.1.value_gate"]).reshape(2, 6, 4, 8)
    layer = backbone.rwkv_layers[1].att
    x = np.asarray(got["blocks.1.attention_norm"])
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
    own = np.asarray(layer.value(x + (before - x) * np.asarray(layer.x_v))).reshape(2, 6, 4, 8)
    # What they are given of the first head is nothing now.
    wanted = own[:, :, 0] * (1 - gate[:, :, 0])
    assert relative(np.asarray(got["blocks.1.value"])[:, :, 0], wanted) <= EXACT
    for rewrite in (bs.Remove("blocks.0"), bs.Reorder([1, 0, 2])):
        with pytest.raises(bs.SurgeryError, match="Received block 1 without block 0 before it"):
            bs.operate(backbone, [rewrite])
    removed = bs.operate(backbone, [bs.Remove("blocks.1")])
    assert max(bs.check(removed).errors.values()) <= 3e-5


WORDS = ["Once", " upon", " a", " time", "\n\n", "é"]


@pytest.fixture(scope="module")
def with_text():
    lines = [f"{i + 1} {bytes([i])!r} 1\n" for i in range(256)]
    lines += [f"{257 + i} {word!r} {len(word.encode())}\n" for i, word in enumerate(WORDS)]
    tokenizer = keras_hub.models.RWKVTokenizer(lines)
    preprocessor = keras_hub.models.RWKV7CausalLMPreprocessor(tokenizer, sequence_length=12)
    return ROWS["rwkv7"].make(vocabulary_size=263), preprocessor


PROMPTS = ["Once upon a time", " a", " time upon Once a"]


@slow
@pytest.mark.parametrize("stop", [False, True])
def test_texts_are_those_of_kerashub(with_text, stop):
    """Its task is given prompts in two parts, and gives padding, prompts and new tokens."""
    backbone, preprocessor = with_text
    lm = bs.CachedCausalLM(backbone, preprocessor)
    lm.compile(sampler="greedy")
    upstream = keras_hub.models.RWKV7CausalLM(backbone, None)
    upstream.compile(sampler="greedy")
    plain = bs.CachedCausalLM(backbone)
    plain.compile(sampler="greedy")
    rows = [np.asarray(preprocessor.tokenizer(text)) for text in PROMPTS]
    ids = {
        "token_ids": np.stack([np.pad(row, (0, 12 - len(row))) for row in rows]),
        "padding_mask": np.stack([np.arange(12) < len(row) for row in rows]),
    }
    free = plain.generate(ids, max_new_tokens=10, stop_token_ids=None)["token_ids"]
    stops = (int(free[0, len(rows[0]) + 3]),) if stop else None
    made = preprocessor.generate_preprocess(PROMPTS, sequence_length=10)
    made = {name: np.array(value) for name, value in made.items()}
    # Of a prompt of one token KerasHub runs a zero before it.
    made["input_padding_mask"][1] = 0
    wanted = upstream.generate(made, stop_token_ids=stops)
    got = plain.generate(ids, max_new_tokens=10, stop_token_ids=stops)
    for i, row in enumerate(rows):
        own = np.asarray(wanted["token_ids"])[i, 13:]
        ended = np.flatnonzero(np.isin(own, stops or ()))
        own = own[: ended[0] + 1] if len(ended) else own
        mine = np.asarray(got["token_ids"])[i][np.asarray(got["padding_mask"], bool)[i]]
        assert np.array_equal(mine, [*row, *own])
    texts = lm.generate(PROMPTS, max_new_tokens=10, stop_token_ids=stops)
    kept = [np.asarray(got["padding_mask"], bool)[i] for i in range(3)]
    raw = preprocessor.tokenizer.id_to_token
    for i, text in enumerate(texts):
        new = [int(t) for t in np.asarray(got["token_ids"])[i][kept[i]] if t]
        assert text == b"".join(map(raw, new)).decode(errors="replace")


@slow
def test_texts_that_end_within_a_character(with_text):
    backbone, preprocessor = with_text
    lm = bs.CachedCausalLM(backbone, preprocessor)
    lm.compile(sampler="random")
    (texts,) = ([t] for t in [lm.generate("Once", max_new_tokens=30, seed=4)])
    assert "\N{REPLACEMENT CHARACTER}" in texts[0]
    assert "".join(lm.stream("Once", max_new_tokens=30, seed=4)) == texts[0]
    long = "Once upon a time" * 4  # more than the preprocessor has room for
    assert lm.generate(long, max_new_tokens=2).startswith(long)


@slow
def test_a_preset_is_saved_and_loaded(with_text, tmp_path):
    lm = bs.CachedCausalLM(*with_text)
    lm.compile(sampler="greedy")
    lm.save_to_preset(tmp_path / "model")
    again = bs.CachedCausalLM.from_preset(tmp_path / "model")
    again.compile(sampler="greedy")
    assert again.generate(PROMPTS, max_new_tokens=6) == lm.generate(PROMPTS, max_new_tokens=6)
    for i, texts in enumerate(["", ["Once", ""]]):
        with pytest.raises(bs.SurgeryError, match=f"at row {i}: expected at least one token"):
            lm.generate(texts)


@slow
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantised_and_served(mode, rng):
    backbone = ROWS["rwkv7"].make(hidden_size=64, head_size=16, intermediate_dim=64)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {1: rng.normal(size=64)})]))
    lm.compile(sampler="greedy")
    lm.quantize(mode)
    assert lm.opened.token_embedding.head.quantization_mode == mode
    assert max(bs.check(lm.opened).errors.values()) <= 1e-3
    prompts = ragged(rng, (4, 9), 9)
    options = {"max_new_tokens": 8, "stop_token_ids": None}
    wanted = lm.generate(prompts, controls={"mood": [1.0, -1.0]}, **options)["token_ids"]
    for i, length in enumerate((4, 9)):
        ids = np.asarray(wanted)[i, : length + 8]
        opened = lm.opened
        states = opened(
            {
                "token_ids": ids[None],
                "padding_mask": np.ones((1, len(ids))),
                "mood_strength": np.array([[1.0, -1.0][i]])[:, None],
            }
        )
        logits = np.asarray(opened.token_embedding(states, reverse=True))[0, length - 1 : -1]
        assert np.array_equal(logits.argmax(-1), ids[length:])
    with bs.Engine(lm, rows=2, length=64) as engine:
        asked = []
        for i, (length, strength) in enumerate(((4, 1.0), (9, -1.0))):
            row = {name: np.asarray(x)[i : i + 1, :length] for name, x in prompts.items()}
            asked.append(engine.submit(row, controls={"mood": strength}, **options))
        for i, request in enumerate(asked):
            row = np.asarray(wanted)[i][: (4, 9)[i] + 8]
            assert list(request.result()) == list(row)


@pytest.mark.slow
def test_there_are_no_patterns_to_edit(backbone):
    with pytest.raises(
        bs.SelectorError, match=r"sites\. The model has no attention, and so no pat"
    ):
        bs.operate(backbone, [bs.Knockout("cut")])


@pytest.mark.slow
def test_what_is_refused():
    backbone = ROWS["rwkv7"].make()
    lm = bs.CachedCausalLM(backbone)
    config = keras.quantizers.GPTQConfig(dataset=["a"], tokenizer=None)
    with pytest.raises(bs.SurgeryError, match="blocks of rwkv7, which can take v_first too"):
        lm.quantize("gptq", config=config)
    for output in (ops.tanh(backbone.output), backbone.get_layer("output_norm").output):
        with pytest.raises(bs.SurgeryError, match=r"ends in 'head', the .* Received one that ends"):
            bs.open_backbone(keras.Model(backbone.input, output))
    table = keras.layers.Embedding(60, 32, name="mine")

    def renamed(layer, *args, **kwargs):
        return table(*args) if layer.name == "token_embedding" else layer(*args, **kwargs)

    outputs = bs.clone_layer_graph(backbone.input, backbone.output, renamed)
    with pytest.raises(bs.SurgeryError, match="layers 'token_embedding' and 'head' in the"):
        bs.CachedCausalLM(keras.Model(backbone.input, outputs))


@slow
def test_training_on_padded_texts_is_kerashubs(with_text):
    """Its preprocessor pads on the left, and weighs what the last padding predicts."""
    backbone, preprocessor = with_text
    x, _, weights = preprocessor(["Once upon a time", "a time"], sequence_length=8)
    assert (np.asarray(weights) * (1 - np.asarray(x["padding_mask"]))).any()
    lm = bs.CachedCausalLM(backbone)
    wanted, got = (np.asarray(model(x)) for model in (backbone, lm))
    assert relative(got, wanted) <= 1e-5  # at padding too


@slow
def test_what_a_user_makes_of_the_first_values(backbone, rng):
    inputs = tokens(rng, 2, 6)

    def scale(layer, *args, **kwargs):
        x, first = layer(*args, **kwargs)
        return (x, 2.0 * first) if layer.name == "rwkv_layer_0" else (x, first)

    scaled = bs.clone_layer_graph(
        backbone.input,
        backbone.output,
        lambda layer, *a, **k: (
            scale(layer, *a, **k) if layer.name.startswith("rwkv_layer") else layer(*a, **k)
        ),
    )
    model = keras.Model(backbone.input, scaled)
    opened = bs.open_backbone(model)
    got = opened.token_embedding(opened(inputs), reverse=True)
    assert relative(got, model(inputs)) <= 1e-5
    assert relative(got, backbone(inputs)) > 1e-3
