"""Whatever is passed, only a `SurgeryError` comes out, before anything is compiled."""

import keras
import keras_hub
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import backbone_surgery as bs
from tests.rubbish import complaints, with_rubbish

IDS = np.array([[1, 2, 3], [4, 5, 0]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])


class NotYet(Exception):
    """A program would have been compiled: everything was accepted."""


@pytest.fixture(scope="module")
def lm():
    backbone = keras_hub.models.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=64)
    model = bs.CachedCausalLM(bs.operate(backbone, [bs.Steer("mood", {0: np.ones(8)})]))
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def writer():
    """A model with a preprocessor, for `stream` and `sweep`."""
    plain = bs.CachedCausalLM.from_preset("tiny_gpt2", load_weights=False)
    steer = bs.Steer("mood", {0: np.ones(plain.backbone.hidden_dim)})
    model = bs.CachedCausalLM(bs.operate(plain.backbone, [steer]), plain.preprocessor)
    model.compile(sampler="greedy")
    return model


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch):
    def prefill(*args, **kwargs):
        raise NotYet

    monkeypatch.setattr("backbone_surgery.generation.programs.Programs.prefill", prefill)


def accepting(function):
    """Return a function that is content where everything was accepted."""

    def call(**arguments):
        try:
            function(**arguments)
        except NotYet:
            pass

    return call


def constant(value):
    return lambda: value


OPTIONS = {
    "max_new_tokens": constant(2),
    "stop_token_ids": constant(None),
    "stop_sequences": constant(None),
    "strip_prompt": constant(False),
    "controls": constant(None),
    "seed": constant(1),
}
LENGTH = {**OPTIONS, "max_length": constant(5)}
del LENGTH["max_new_tokens"]


@pytest.mark.by_default(1)
@pytest.mark.parametrize("options", [OPTIONS, LENGTH], ids=["new tokens", "length"])
def test_generate(lm, options):
    inputs = {"inputs": lambda: {"token_ids": IDS, "padding_mask": MASK}}
    others = {
        "batch_size": constant(None),
        "verbose": constant(0),
        "return_captures": lambda: False,
    }
    calls = with_rubbish(accepting(lm.generate), {**inputs, **options, **others})
    assert complaints(calls) == []


def test_parts_of_the_inputs(lm):
    def generate(**inputs):
        lm.generate(inputs, stop_token_ids=None, max_new_tokens=2)

    parts = {"token_ids": constant(IDS), "padding_mask": constant(MASK)}
    assert complaints(with_rubbish(accepting(generate), parts)) == []

    def within(**parts):
        lm.generate(
            {"token_ids": IDS, "padding_mask": MASK},
            stop_token_ids=[parts["stop_id"]],
            stop_sequences=[[1], parts["sequence"]],
            controls={"mood": parts["mood"]},
            seed=[1, parts["seed"]],
        )

    good = {"stop_id": 1, "sequence": [2, 3], "mood": 0.5, "seed": 3}
    calls = with_rubbish(accepting(within), {k: constant(v) for k, v in good.items()})
    assert complaints(calls) == []


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_text(writer, streamed):
    write = (lambda **kwargs: next(writer.stream(**kwargs))) if streamed else writer.generate
    arguments = {"inputs": constant("Tom"), **OPTIONS}
    if streamed:
        arguments["chunk_size"] = constant(2)
    calls = with_rubbish(accepting(write), arguments)
    for text in (b"\xff", [b"\xff"], "\ud800", ["\ud800"]):
        calls[repr(text)] = lambda text=text: accepting(write)(inputs=text)
    assert complaints(calls) == []


def test_refusals_say_what_is_expected(lm, writer, monkeypatch):
    inputs = {"token_ids": IDS, "padding_mask": MASK}
    with pytest.raises(bs.SurgeryError, match="at 'strip_prompt': expected True or False"):
        lm.generate(inputs, strip_prompt="no")
    with pytest.raises(bs.SurgeryError, match="at text 0: expected text that UTF-8 can hold"):
        writer.generate("\ud800")
    with monkeypatch.context() as broken:
        broken.setattr(writer.preprocessor, "generate_preprocess", None)
        words = "at 'inputs': expected text that the tokenizer can read. Received .* TypeError"
        with pytest.raises(bs.SurgeryError, match=words):
            writer.generate("Tom")
    with pytest.raises(bs.SurgeryError, match="a sampler: expected the name of one, an instance"):
        lm.compile(sampler=3)


def test_sweep(writer):
    arguments = {
        "lm": constant(writer),
        "prompts": constant("Tom"),
        "control": constant("mood"),
        "strengths": lambda: [0.0, 1.0],
        "score": constant(None),
        "controls": constant(None),
        "seed": constant(1),
    }
    assert complaints(with_rubbish(accepting(bs.sweep), arguments)) == []
    for name in ("strip_prompt", "return_captures"):
        with pytest.raises(bs.SurgeryError, match=f"sweep at '{name}'"):
            bs.sweep(writer, "Tom", "mood", [1.0], **{name: True})


@pytest.mark.parametrize("name", ["greedy", "random", "top_k", "top_p", "beam"])
def test_samplers(lm, name):
    kinds = {
        "greedy": keras_hub.samplers.GreedySampler,
        "random": keras_hub.samplers.RandomSampler,
        "top_k": keras_hub.samplers.TopKSampler,
        "top_p": keras_hub.samplers.TopPSampler,
        "beam": keras_hub.samplers.BeamSampler,
    }
    sampler = kinds[name]()
    good = {k: constant(v) for k, v in sampler.get_config().items() if k != "seed"}

    def compile_and_generate(**settings):
        sampler = kinds[name]()
        vars(sampler).update(settings)
        lm.compile(sampler=sampler)
        lm.generate({"token_ids": IDS, "padding_mask": MASK}, stop_token_ids=None)

    calls = with_rubbish(accepting(compile_and_generate), good)
    calls.update(with_rubbish(accepting(lm.compile), {"sampler": constant(name)}))
    assert complaints(calls) == []
    lm.compile(sampler="greedy")


@pytest.mark.slow
def test_call_with_cache(lm):
    arguments = {
        "token_ids": constant(IDS),
        "cache": lambda: bs.new_cache(lm.backbone_with_cache, 2, 4),
        "cache_update_index": constant(0),
        "positions": lambda: np.array([[0, 1, 2], [0, 1, 2]]),
        "cache_mask": lambda: np.ones((2, 4), bool),
        "controls": constant(None),
    }
    calls = with_rubbish(lm.call_with_cache, arguments)

    def control(mood_strength):
        values = {k: v() for k, v in arguments.items()}
        lm.call_with_cache(**{**values, "controls": {"mood_strength": mood_strength}})

    calls.update(with_rubbish(control, {"mood_strength": lambda: np.ones((2, 1), "float32")}))

    def entry(key):
        cache = arguments["cache"]()
        cache[1]["key"] = key
        lm.call_with_cache(IDS, cache, 0)

    calls.update(with_rubbish(entry, {"key": lambda: arguments["cache"]()[1]["key"]}))
    assert complaints(calls) == []


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([2**31, 2**32 + 5, -(2**40), np.int64(2**40), np.float16(2)])
    | arrays.arrays(st.sampled_from(["int64", "uint8", "float32", "bool", "object"]), (2, 3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@pytest.mark.slow
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    option=st.sampled_from([*OPTIONS, "max_length", "batch_size", "inputs"]),
    value=ANYTHING,
    part=st.sampled_from([None, "token_ids", "padding_mask", "mood"]),
)
def test_generate_with_anything(lm, option, value, part):
    inputs = {"token_ids": IDS, "padding_mask": MASK}
    options = {"stop_token_ids": None}
    if part == "mood":
        options["controls"] = {"mood": value}
    elif part is not None:
        inputs[part] = value
    else:
        options[option] = value
    try:
        lm.generate(**{"inputs": inputs, **options})
    except (NotYet, bs.SurgeryError):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("integer", [int, np.int32, np.int64, np.uint8])
def test_integers_of_python_and_numpy_are_taken_alike(lm, integer):
    with pytest.raises(NotYet):
        lm.generate(
            {"token_ids": IDS, "padding_mask": MASK},
            max_new_tokens=integer(2),
            stop_token_ids=[integer(3)],
            stop_sequences=[[integer(3)]],
            seed=[integer(1), 2],
            batch_size=integer(1),
        )
    cache = bs.new_cache(lm.backbone_with_cache, integer(2), integer(4))
    lm.call_with_cache(IDS, cache, integer(1))


TOO_LARGE = 2**32 + 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop_token_ids": [TOO_LARGE]}, "stop_token_ids': expected token ids from 0 to 19"),
        ({"stop_token_ids": np.array([TOO_LARGE])}, "'stop_token_ids': expected token ids"),
        ({"stop_sequences": [[TOO_LARGE]]}, "'stop_sequences': expected .* from 0 to 19"),
        ({"seed": TOO_LARGE}, "'seed': expected an int from 0"),
        ({"max_length": TOO_LARGE}, "'max_length': expected an int"),
        ({"max_new_tokens": 2**40}, "'max_new_tokens': expected an int"),
        ({"inputs": {"token_ids": IDS + 2**32, "padding_mask": MASK}}, "ids from 429496"),
        ({"inputs": {"token_ids": IDS, "padding_mask": MASK * 2}}, "mask': expected bool"),
        (
            {"inputs": {"token_ids": IDS, "padding_mask": MASK * 0.5}},
            "'padding_mask': expected bool",
        ),
    ],
)
def test_no_integer_wraps(lm, options, words):
    inputs = {"token_ids": IDS, "padding_mask": MASK}
    with pytest.raises(bs.SurgeryError, match=words):
        lm.generate(**{"inputs": inputs, "stop_token_ids": None, **options})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token_ids": IDS + 2**32}, r"'token_ids': expected int.batch, time. from 0 to 19"),
        ({"positions": IDS + 2**32}, r"'positions': expected int.batch, time. from 0 to 63"),
        ({"positions": IDS * 32}, r"'positions': expected int.batch, time. from 0 to 63"),
        ({"cache_update_index": np.array(2)}, "slot 2: expected room for 3 tokens. Received a"),
        ({"cache_update_index": keras.ops.array(2)}, "at slot 2: expected room for 3 tokens"),
        ({"cache_update_index": -1}, "at slot -1: expected room for 3 tokens"),
        ({"cache_update_index": 1.0}, "'cache_update_index': expected an int"),
        ({"cache_update_index": True}, "'cache_update_index': expected an int"),
        ({"cache": []}, "'cache': expected a list of dicts with the arrays"),
        ({"token_ids": IDS[:1]}, r"'cache.0...key..': expected shape"),
        ({"cache_mask": np.ones((2, 3), bool)}, "'cache_mask': expected shape"),
        ({"cache_mask": np.full((2, 4), 2)}, r"'cache_mask': expected bool.batch, length"),
        ({"controls": {"cache": []}}, "call_with_cache at control 'cache': expected a control"),
        ({"controls": {"mood_strength": np.ones(2)}}, r"'mood_strength': expected float32.2, 1"),
        ({"controls": [1]}, "call_with_cache at 'controls': expected a dict"),
    ],
)
def test_what_does_not_fit_a_cache(lm, changed, words):
    arguments = {"token_ids": IDS, "cache": bs.new_cache(lm.backbone_with_cache, 2, 4)}
    with pytest.raises(bs.SurgeryError, match=words):
        lm.call_with_cache(**{**arguments, "cache_update_index": 0, **changed})


def test_a_cache_of_another_dtype(lm):
    cache = bs.new_cache(lm.backbone_with_cache, 2, 4)
    cache[1]["value"] = np.asarray(cache[1]["value"], "float16")
    with pytest.raises(
        bs.SurgeryError, match=r"cache\[1\]\['value'\]': expected an array of float32"
    ):
        lm.call_with_cache(IDS, cache, 0)


@pytest.mark.slow
def test_positions_that_were_not_learned(lm):
    cache = bs.new_cache(lm.backbone_with_cache, 2, 80)
    with pytest.raises(bs.SurgeryError, match="at slot 62: expected at most 64 positions"):
        lm.call_with_cache(IDS, cache, 62)
    lm.call_with_cache(IDS, cache, 62, positions=np.array([[0, 1, 2]] * 2))


@pytest.mark.parametrize("shape", [(None, None, 8), (), (3, 8)], ids=str)
def test_run_time_inputs_of_open_length_are_refused_with_the_task(shape):
    backbone = keras_hub.models.GPT2Backbone(20, 1, 2, 8, 16)
    added = keras.Input(batch_shape=shape, name="added")

    def add(layer, *args, **kwargs):
        result = layer(*args, **kwargs)
        return result + keras.ops.sum(added) if layer.name == "transformer_layer_0" else result

    outputs = bs.clone_layer_graph({**backbone.input, "added": added}, backbone.output, add)
    model = keras.Model({**backbone.input, "added": added}, outputs)
    with pytest.raises(
        bs.SurgeryError, match=r"CachedCausalLM at input 'added': expected run-time"
    ):
        bs.CachedCausalLM(model)
