"""Bad input is an error that says what was expected, before anything is compiled."""

import keras
import keras_hub
import numpy as np
import pytest
from keras_hub.src.utils.keras_utils import gelu_approximate

import backbone_surgery as bs
from tests.helpers import make_gemma, make_gpt2, ragged


@pytest.fixture(scope="module")
def lm():
    model = bs.CachedCausalLM(make_gpt2(max_sequence_length=24))
    model.compile(sampler="greedy")
    return model


@pytest.fixture
def prompt(rng):
    return ragged(rng, (3, 5), 8)


NO_STOP = {"stop_token_ids": None}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 9, "max_new_tokens": 3, **NO_STOP}, "Received both, 9 and 3"),
        ({"max_length": 4, **NO_STOP}, "expected a prompt of at most 4 tokens"),
        ({"max_length": 0, **NO_STOP}, "'max_length': expected an int of at least 1"),
        ({"max_new_tokens": -1, **NO_STOP}, "'max_new_tokens': expected an int of at least 0"),
        ({"max_new_tokens": 2.5, **NO_STOP}, "'max_new_tokens': expected an int"),
        ({"max_new_tokens": 20, **NO_STOP}, "at most 24 tokens in a row"),
        ({"max_length": 25, **NO_STOP}, "has learned no more positions"),
        ({}, "Received 'auto' with preprocessor None"),
        ({"stop_token_ids": "end"}, "expected 'auto' with a preprocessor"),
        ({"stop_token_ids": (1.5,)}, "'stop_token_ids': expected token ids"),
        ({"seed": [1, 2, 3], **NO_STOP}, "a list of 2, one for each row"),
        ({"seed": -1, **NO_STOP}, "expected an int from 0"),
        ({"seed": "x", **NO_STOP}, "'seed': expected an int"),
        ({"stop_sequences": ["text"], **NO_STOP}, "non-empty strings .with a preprocessor"),
        ({"stop_sequences": [[]], **NO_STOP}, "sequences of token ids"),
        ({"controls": {"mood": 1.0}, **NO_STOP}, "'mood': expected a control of this model"),
        ({"batch_size": 0, **NO_STOP}, "'batch_size': expected a positive int"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_generate_options(lm, prompt, options, words):
    with pytest.raises(bs.SurgeryError, match=words):
        lm.generate(prompt, **options)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("a string", "expected a dict of arrays"),
        ({"token_ids": np.ones((1, 3), int)}, "`token_ids` and `padding_mask`"),
        (
            {"token_ids": np.ones((1, 3)), "padding_mask": np.ones((1, 3))},
            "expected int.batch, length.",
        ),
        (
            {"token_ids": np.ones(3, int), "padding_mask": np.ones(3)},
            r"Received int64\[3\]",
        ),
        (
            {"token_ids": np.ones((1, 3), int), "padding_mask": np.ones((1, 4))},
            "of the same shape",
        ),
        (
            {"token_ids": np.ones((1, 3), int), "padding_mask": np.array([[1, 0, 1]])},
            "padding between tokens in row 0",
        ),
        (
            {
                "token_ids": np.ones((1, 3), int),
                "padding_mask": np.ones((1, 3)),
                "images": np.zeros((1, 1, 4, 4, 3)),  # a black one
                "vision_mask": np.zeros((1, 3)),
            },
            r"the model takes text alone. Received \['images'\] too",
        ),
        (
            {
                "token_ids": np.ones((1, 3), int),
                "padding_mask": np.ones((1, 3)),
                "position_ids": np.array([[1, 2, 3]]),
            },
            r"Received \['position_ids'\] too. Leave them out",
        ),
        (
            {"token_ids": np.ones((2, 3), int), "padding_mask": np.array([[1, 1, 0], [0, 0, 0]])},
            "at row 1: expected at least one token",
        ),
        (
            {"token_ids": np.ones((0, 3), int), "padding_mask": np.ones((0, 3))},
            "Received an empty batch",
        ),
        (
            {"token_ids": np.full((1, 3), 60), "padding_mask": np.ones((1, 3))},
            "expected token ids from 0 to 59",
        ),
    ],
    ids=str,
)
def test_generate_inputs(lm, inputs, words):
    with pytest.raises(bs.SurgeryError, match=words):
        lm.generate(inputs, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}


def test_samplers(lm):
    with pytest.raises(
        bs.SurgeryError, match=r"'gready': expected the name.*Did you mean 'greedy'"
    ):
        lm.compile(sampler="gready")
    with pytest.raises(bs.SurgeryError, match="sampler ContrastiveSampler: expected one of greedy"):
        lm.compile(sampler=keras_hub.samplers.ContrastiveSampler())
    with pytest.raises(bs.SurgeryError, match="'speculative': expected the name of a sampler"):
        lm.compile(sampler="speculative")
    with pytest.raises(bs.SurgeryError, match=r"sampler BeamSampler.return_all_beams=True"):
        lm.compile(sampler=keras_hub.samplers.BeamSampler(return_all_beams=True))
    with pytest.raises(bs.SurgeryError, match="sampler GreedySampler"):
        lm.compile(sampler=keras_hub.samplers.GreedySampler)

    class OwnLoop(keras_hub.samplers.Sampler):
        def __call__(self, *args, **kwargs):
            return args[0]

    with pytest.raises(bs.SurgeryError, match=r"OwnLoop.*overrides `get_next_token` alone"):
        lm.compile(sampler=OwnLoop())


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda s: s.RandomSampler(temperature=0.0), r"temperature to be a number from.* 0\.0"),
        (lambda s: s.RandomSampler(temperature=None), r"temperature to be a number from.* None"),
        (lambda s: s.RandomSampler(temperature=10**400), "temperature to be a number from"),
        (lambda s: s.GreedySampler(temperature=-1.0), "temperature to be a number from 1e-06 to"),
        (lambda s: s.BeamSampler(temperature=1e-40), "temperature to be a number from 1e-06 to"),
        (lambda s: s.TopPSampler(p=1.5), "expected p to be a number from 0 to 1. Received 1.5"),
        (lambda s: s.TopPSampler(p=None), "expected p to be a number from 0 to 1. Received None"),
        (lambda s: s.TopKSampler(k=0), "expected k to be a whole number from 1. Received 0"),
        (lambda s: s.TopKSampler(k=5.0), "expected k to be a whole number from 1. Received 5.0"),
        (lambda s: s.TopKSampler(k=None), "expected k to be a whole number from 1. Received None"),
        (lambda s: s.BeamSampler(num_beams=True), "expected num_beams to be a whole number"),
    ],
)
def test_settings_of_samplers(lm, sampler, words):
    sampler = sampler(keras_hub.samplers)
    with pytest.raises(bs.SurgeryError, match=words):
        lm.compile(sampler=sampler)


def test_more_tokens_to_draw_from_than_there_are(lm, prompt):
    lm.compile(sampler=keras_hub.samplers.TopKSampler(k=10**6))
    with pytest.raises(bs.SurgeryError, match=r"k to be at most the size of the vocabulary, \d+\."):
        lm.generate(prompt, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}
    lm.compile(sampler="greedy")


def test_a_sampler_of_ones_own_means_what_it_likes(lm):
    class Own(keras_hub.samplers.Sampler):
        k = 0

        def get_next_token(self, probabilities):
            return keras.ops.argmax(probabilities, axis=-1)

    lm.compile(sampler=Own())
    lm.compile(sampler="greedy")


def test_stream_needs_text(lm, prompt):
    with pytest.raises(bs.SurgeryError, match="stream: expected a preprocessor"):
        lm.stream(prompt)


def test_unknown_architecture():
    x = keras.Input((None,), dtype="int32", name="token_ids")
    y = keras.layers.Embedding(10, 4)(x)
    model = keras.Model(x, y, name="mine")
    with pytest.raises(bs.UnknownArchitectureError) as caught:
        bs.open_backbone(model)
    message = str(caught.value)
    for word in ("'mine'", "gpt2 (TransformerDecoder)", "gemma (GemmaDecoderBlock)", "Embedding"):
        assert word in message
    assert "backbone_surgery.register_family" in message


def test_what_is_no_backbone():
    backbone = make_gpt2()
    task = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    with pytest.raises(bs.SurgeryError, match=r"Pass its `.backbone`"):
        bs.open_backbone(task)
    with pytest.raises(bs.SurgeryError, match="expected a backbone or another Functional model"):
        bs.rewire("gpt2")
    several = keras.Model(backbone.input, [backbone.output, backbone.output * 2])
    with pytest.raises(bs.SurgeryError, match="expected one output, the hidden states"):
        bs.open_backbone(several)
    post_norm = keras.Input((None, 8), name="x")
    mask = keras.Input((None,), dtype="int32", name="padding_mask")
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    block = keras_hub.layers.TransformerDecoder(16, 2, activation=gelu_approximate)
    y = block(post_norm, decoder_padding_mask=mask)
    model = keras.Model([ids, mask, post_norm], y)
    with pytest.raises(bs.SurgeryError, match=r"pre-norm block.*normalize_first=False"):
        bs.open_backbone(model)


def test_sites():
    backbone = make_gpt2()
    direction = {0: np.ones(32)}
    with pytest.raises(
        bs.SelectorError, match=r"'blocks.\*.atention'.*Did you mean 'blocks.\*.att"
    ):
        bs.operate(backbone, [bs.Steer("s", direction, at="blocks.*.atention")])
    with pytest.raises(bs.SelectorError, match="matches nothing"):
        bs.operate(backbone, [bs.Steer("s", {7: np.ones(32)}, at="blocks.7")])
    with pytest.raises(bs.SurgeryError, match=r"Received directions for blocks \[7\] too"):
        bs.operate(backbone, [bs.Steer("s", {7: np.ones(32)})])
    with pytest.raises(bs.SurgeryError, match="Received directions of size 31"):
        bs.operate(backbone, [bs.Steer("s", {0: np.ones(31)})])
    with pytest.raises(bs.SurgeryError, match="no other rewrite declares"):
        bs.operate(backbone, [bs.Steer("s", direction), bs.Steer("s", direction)])
    with pytest.raises(bs.SurgeryError, match="expected one site in each block"):
        bs.operate(backbone, [bs.Steer("s", direction, at="blocks.*.*_output")])
    with pytest.raises(bs.SurgeryError, match="a name of letters"):
        bs.operate(backbone, [bs.Steer("my/mood", direction)])
    with pytest.raises(bs.SelectorError, match="expected a site selector such as"):
        bs.operate(backbone, [bs.Steer("s", direction, at=3)])


def test_rewrites():
    backbone = make_gpt2()
    with pytest.raises(bs.SurgeryError, match="expected a list of rewrites"):
        bs.operate(backbone, bs.Steer("s", {0: np.ones(32)}))
    with pytest.raises(bs.SurgeryError, match="expected each rewrite to be"):
        bs.operate(backbone, ["steer"])
    with pytest.raises(bs.SurgeryError, match="expected each rewrite to be"):
        bs.operate(backbone, [bs.Steer])
    with pytest.raises(bs.SurgeryError, match="expected mode 'add' or 'ablate'"):
        bs.Steer("s", {0: np.ones(32)}, mode="push")
    with pytest.raises(bs.SurgeryError, match="expected tokens 'all', 'prompt', 'generated'"):
        bs.Steer("s", {0: np.ones(32)}, tokens="some")
    with pytest.raises(bs.SurgeryError, match="all of one size"):
        bs.Steer("s", {0: np.ones(32), 1: np.ones(31)})
    with pytest.raises(bs.SurgeryError, match="expected a vector that maps blocks"):
        bs.Steer("s", {})
    with pytest.warns(UserWarning, match="left every layer as it was"):
        bs.operate(backbone, [lambda layer, *a, **k: layer(*a, **k)])


@pytest.mark.parametrize("extra", ["attention_mask", "position_ids"])
def test_inputs_of_a_call_are_the_models(lm, prompt, extra):
    """Keras would take them in the order of their names, and mix them up."""
    inputs = {**prompt, extra: np.ones_like(prompt["token_ids"])}
    for run in (lm, lm.predict_on_batch):
        with pytest.raises(bs.SurgeryError, match=f"'{extra}': expected inputs of the model"):
            run(inputs)
        with pytest.raises(bs.SurgeryError, match="'padding_mask': expected a value"):
            run({"token_ids": prompt["token_ids"]})
        with pytest.raises(bs.SurgeryError, match=r"a dict of inputs, \['padding_mask', 'token_"):
            run([prompt["token_ids"], prompt["padding_mask"]])
    with pytest.raises(bs.SurgeryError, match=f"'{extra}': expected inputs of the model"):
        lm.fit(inputs, prompt["token_ids"], verbose=0, shuffle=False)


def test_controls_of_a_call_of_the_task(prompt):
    lm = bs.CachedCausalLM(bs.operate(make_gpt2(), [bs.Steer("mood", {0: np.ones(32)})]))
    for name in ("mood", "mood_strength"):
        with pytest.raises(bs.SurgeryError, match=rf"'{name}'.*a control.*`score\(token_ids, con"):
            lm({**prompt, name: np.ones((2, 1))})


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mood_strength", np.ones(2), r"float32\[2, 1\]. Received float32\[2\]"),
        ("mood_strength", np.ones((3, 1)), r"float32\[2, 1\]. Received float32\[3, 1\]"),
        ("mood_strength", [[np.nan], [1.0]], "expected finite numbers"),
        ("mood_strength", "high", "expected finite numbers. Received 'high'"),
        ("token_ids", np.array([[1, 2, 60], [1, 2, 3]]), "ids from 0 to 59 .* from 1 to 60"),
    ],
)
def test_what_an_edited_model_is_called_on(name, value, words):
    edited = bs.operate(make_gpt2(), [bs.Steer("mood", {0: np.ones(32)})])
    inputs = {"token_ids": np.ones((2, 3), "int32"), "padding_mask": np.ones((2, 3), "int32")}
    with pytest.raises(bs.SurgeryError, match=f"'{name}': .*{words}"):
        edited({**inputs, name: value})
    ids = np.array([[1, 2, -1], [1, 2, 3]])  # one of them is padding
    edited({"token_ids": ids, "padding_mask": (ids > 0).astype("int32")})


def test_controls(prompt):
    backbone = make_gemma()
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {0: np.ones(32)})]))
    for strength in ([1.0, 2.0, 3.0], np.ones((2, 2)), np.nan):
        with pytest.raises(bs.SurgeryError, match="'mood': expected finite numbers"):
            lm.generate(prompt, controls={"mood": strength}, stop_token_ids=None)
    with pytest.raises(bs.SurgeryError, match=r"'moot'.*Did you mean 'mood'"):
        lm.generate(prompt, controls={"moot": 1.0}, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}


@pytest.mark.slow
def test_layer_that_mixes_positions_is_found(rng):
    class Mean(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.mean(x, axis=1, keepdims=True)

    backbone = make_gpt2()

    def mix(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return Mean(name="mean_of_all")(result) if layer.name == "transformer_layer_1" else result

    with pytest.raises(bs.CacheMismatchError, match=r"(?s)mixes tokens.*'mean_of_all'"):
        bs.check(bs.operate(backbone, [mix]))


def test_a_cache_is_made_for_a_cached_graph_alone():
    with pytest.raises(bs.SurgeryError, match=r"a backbone_with_cache\. Received 3"):
        bs.new_cache(3, 1, 8)


@pytest.mark.slow
def test_check_takes_inputs_and_outputs_of_any_structure(backbone):
    inputs, output = backbone.input, backbone.output
    for model in (
        keras.Model(inputs, {"sequence_output": output}),
        keras.Model([inputs["padding_mask"], inputs["token_ids"]], [output]),
    ):
        assert bs.check(model).errors["opened"] <= 5e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"controls": [1]},
            r"'controls': expected \{input name: array of one row\}. Received \[1\]",
        ),
        (
            {"controls": {"mood": 1.0}},
            "'mood': expected inputs of the graph.*Known: mood_directions",
        ),
        ({"controls": {"mood_strength": [[1.0]]}}, r"float32\[1\], one row. Received \[\[1.0\]\]"),
        ({"controls": {"mood_strength": "x"}}, r"float32\[1\], one row. Received 'x'"),
        ({"seed": "a"}, "'seed': expected an int from 0. Received 'a'"),
        ({"seed": -1}, "'seed': expected an int from 0. Received -1"),
    ],
)
def test_what_check_is_given(options, words):
    edited = bs.operate(make_gpt2(), [bs.Steer("mood", {0: np.ones(32)})])
    with pytest.raises(bs.SurgeryError, match=words):
        bs.check(edited, **options)


def test_check_reports_what_it_measured(family, backbone):
    report = bs.check(backbone)
    ways = {"opened", "one pass", "token by token", "uneven chunks", "a row alone"}
    assert set(report.errors) == ways
    assert max(report.errors.values()) <= 5e-6
    assert report.caches == backbone.num_layers
    assert report.tokens > getattr(backbone, "sliding_window_size", 0) or family != "gemma2"
    assert "cached = uncached over" in str(report)


@pytest.mark.parametrize("preprocessor", [3, "tiny_gpt2", keras.layers.Dense(2)])
def test_what_is_no_preprocessor(lm, preprocessor):
    with pytest.raises(bs.SurgeryError, match="expected a `CausalLMPreprocessor`, or None"):
        bs.CachedCausalLM(lm.backbone, preprocessor)
