"""Text in, text out, with the bundled models: as KerasHub does it, and streamed."""

import time
from concurrent.futures import ThreadPoolExecutor

import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.generation.prompts import read_prompts

PROMPTS = ["Once upon a time there was a girl named Lily.", "Tom had a red ball. It was"]
BUNDLED = ["tiny_gpt2", "tiny_gemma"]


@pytest.fixture(scope="module", params=BUNDLED)
def lm(request):
    model = bs.CachedCausalLM.from_preset(request.param)
    model.compile(sampler="greedy")
    return model


@pytest.fixture(scope="module")
def upstream(lm):
    task = {"gpt2": keras_hub.models.GPT2CausalLM, "gemma": keras_hub.models.GemmaCausalLM}
    task = task[lm.opened.family.name](backbone=lm.backbone, preprocessor=lm.preprocessor)
    task.compile(sampler="greedy")
    return task


@pytest.mark.slow
def test_greedy_text_equals_kerashub(lm, upstream):
    assert lm.generate(PROMPTS, max_length=96) == upstream.generate(PROMPTS, max_length=96)
    one = lm.generate(PROMPTS[0], max_length=96)
    assert one == lm.generate(PROMPTS, max_length=96)[0]
    stripped = upstream.generate(PROMPTS, max_length=96, strip_prompt=True)
    assert lm.generate(PROMPTS, max_length=96, strip_prompt=True) == stripped


@pytest.mark.slow
def test_parity_of_a_bundled_model(lm, upstream):
    report = bs.check(lm.backbone)
    assert max(report.errors.values()) <= 5e-6
    inputs = lm.preprocessor.generate_preprocess(PROMPTS, sequence_length=24)
    wanted, got = np.asarray(upstream(inputs)), np.asarray(lm(inputs))
    assert np.abs(got - wanted).max() <= 5e-6 * np.abs(wanted).max()
    assert np.array_equal(got.argmax(-1), wanted.argmax(-1))


@pytest.mark.slow
def test_a_whole_story_ends_by_itself(lm):
    text = lm.generate(PROMPTS[0])
    assert text.startswith(PROMPTS[0])
    assert 200 < len(text) < 1500
    assert text.rstrip().endswith(".")


@pytest.mark.slow
def test_arrays_give_texts_where_there_is_a_preprocessor(lm):
    inputs = lm.preprocessor.generate_preprocess(PROMPTS, sequence_length=24)
    assert lm.generate(inputs, max_new_tokens=4) == lm.generate(PROMPTS, max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("strip_prompt", [False, True])
@pytest.mark.parametrize("stop", [None, ["."], ["and", " the"]], ids=str)
def test_stream_joins_to_what_generate_returns(lm, strip_prompt, stop):
    options = {"max_new_tokens": 40, "strip_prompt": strip_prompt, "stop_sequences": stop}
    whole = lm.generate(PROMPTS[0], **options)
    pieces = list(lm.stream(PROMPTS[0], chunk_size=3, **options))
    assert "".join(pieces) == whole
    assert len(pieces) > 1 or stop
    lists = list(lm.stream(PROMPTS, **options))
    joined = ["".join(parts) for parts in zip(*lists, strict=True)]
    assert joined == lm.generate(PROMPTS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [pytest.param(np.array("Once"), marks=pytest.mark.slow), np.array(b"Once", object)],
    ids=["str", "bytes"],
)
def test_an_array_of_no_axes_is_one_string(one):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    wanted = lm.generate("Once", max_new_tokens=1)
    assert lm.generate(one, max_new_tokens=1) == wanted
    assert "".join(lm.stream(one, max_new_tokens=1)) == wanted
    assert lm.generate(one.reshape(1), max_new_tokens=1) == [wanted]


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [PROMPTS[0], PROMPTS], ids=["one", "two"])
def test_the_first_token_is_shown_before_the_next_are_compiled(inputs):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    stream = lm.stream(inputs, max_new_tokens=12)
    first = next(stream)
    assert lm.programs.compilations == {"prefill": 1, "decode": 0}
    lists = [first, *stream]
    assert lm.programs.compilations == {"prefill": 1, "decode": 1}
    assert first == lm.generate(inputs, max_new_tokens=1)
    is_text = isinstance(inputs, str)
    joined = "".join(lists) if is_text else ["".join(x) for x in zip(*lists, strict=True)]
    assert joined == lm.generate(inputs, max_new_tokens=12)


@pytest.mark.slow
def test_a_stream_of_one_token_needs_no_second_program():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm.compile(sampler="greedy")
    assert len(list(lm.stream(PROMPTS[0], max_new_tokens=1))) == 1
    assert lm.programs.compilations == {"prefill": 1, "decode": 0}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("controls", {"mod": 1}), ("max_length", 1), ("max_new_tokens", -1), ("seed", -1)],
        *[("stop_token_ids", "a"), ("stop_sequences", 1.5), ("lookup", 0)],
    ],
)
def test_errors_name_what_was_called(lm, option, value):
    for called in (lm.generate, lm.stream):
        with pytest.raises(bs.SurgeryError, match=f"^{called.__name__} at "):
            called(PROMPTS[0], **{option: value})


def test_stop_sequence_ends_the_text_exactly(lm):
    free = lm.generate(PROMPTS[0], max_new_tokens=60, strip_prompt=True)
    stop = free[len(free) // 3 : len(free) // 3 + 5]
    stops = [stop, "never ever"]
    got = lm.generate(PROMPTS[0], max_new_tokens=60, stop_sequences=stops)
    assert got == lm.generate(PROMPTS[0], max_new_tokens=60, stop_sequences=np.array(stops))
    whole = lm.generate(PROMPTS[0], max_new_tokens=60)
    assert got == whole[: whole.index(stop, len(PROMPTS[0])) + len(stop)]


@pytest.mark.slow
def test_stream_holds_back_unfinished_characters():
    """Random weights write bytes that are no text: what is shown must never be taken back."""
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2", load_weights=False)
    lm.compile(sampler="random")
    for seed in range(3):
        options = {"max_new_tokens": 40, "seed": seed, "stop_token_ids": None}
        whole = lm.generate("Zoë", **options)
        assert "".join(lm.stream("Zoë", chunk_size=1, **options)) == whole


@pytest.mark.slow
def test_empty_prompt_starts_from_the_start_token(lm, upstream):
    assert lm.generate("", max_length=20) == upstream.generate("", max_length=20)


def test_threads_may_bring_the_first_texts_at_once(lm):
    """As when a server that has just begun is asked for three columns."""
    preprocessor = type(lm.preprocessor)(lm.preprocessor.tokenizer, sequence_length=32)
    build = preprocessor.build

    def slowly(shape):
        time.sleep(0.05)
        build(shape)

    preprocessor.build = slowly
    with ThreadPoolExecutor(4) as threads:
        read = [
            threads.submit(read_prompts, text, preprocessor, 2**20, "x") for text in PROMPTS * 2
        ]
    alone = read_prompts(PROMPTS, lm.preprocessor, 2**20, "x").rows
    for prompts, row in zip(read, alone * 2, strict=True):
        np.testing.assert_array_equal(prompts.result().rows[0], row)


def test_bad_prompts(lm):
    for inputs, words in (([], "an empty batch"), (3, "a string or a list"), ([3], "a string or")):
        with pytest.raises(bs.SurgeryError, match=words):
            lm.generate(inputs)
    with pytest.raises(bs.SurgeryError, match="at text 1: expected text that UTF-8 can hold"):
        lm.generate(["größe", "a\ud800b"])
    with pytest.raises(bs.SurgeryError, match="expected a prompt of at most 8 tokens"):
        lm.generate(PROMPTS[0], max_length=8)


def test_empty_prompt_without_a_start_token():
    """A preprocessor that adds no start token leaves nothing to start from."""

    class NoStart(keras_hub.models.GPT2CausalLMPreprocessor):
        def generate_preprocess(self, x, sequence_length=None):
            packed = super().generate_preprocess(x, sequence_length=sequence_length)
            return {name: value[:, 1:] for name, value in packed.items()}

    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    lm = bs.CachedCausalLM(lm.backbone, NoStart(lm.preprocessor.tokenizer))
    with pytest.raises(bs.SurgeryError, match="at row 1: expected at least one token to start"):
        lm.generate(["Tom", ""])


@pytest.mark.slow
def test_steering_changes_text_by_a_run_time_strength(lm):
    width = lm.backbone.hidden_dim
    vector = {2: np.random.default_rng(0).normal(size=width) * 3}
    steered = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Steer("s", vector)]), lm.preprocessor)
    steered.compile(sampler="greedy")
    options = {"max_new_tokens": 24}
    plain = lm.generate(PROMPTS, **options)
    assert steered.generate(PROMPTS, controls={"s": 0}, **options) == plain
    both = steered.generate(PROMPTS, controls={"s": [0.0, 4.0]}, **options)
    assert both[0] == plain[0]
    assert both[1] != plain[1]
    alone = steered.generate(PROMPTS[1], controls={"s": 4.0}, **options)
    assert alone == both[1]
    before = dict(steered.programs.compilations)
    steered.generate(PROMPTS, controls={"s": -2.5}, **options)
    assert steered.programs.compilations == before


def test_the_bundled_names():
    from backbone_surgery.bundled import bundled_models

    assert set(bundled_models()) == set(BUNDLED)
    with pytest.raises(bs.SurgeryError, match="Bundled models: tiny_gemma, tiny_gpt2"):
        bs.CachedCausalLM.from_preset("./nowhere")
