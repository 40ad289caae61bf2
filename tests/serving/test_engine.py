"""The engine: the text of a request is what `generate` makes of it alone."""

import contextlib
import functools
import threading
from unittest import mock

import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import backbone_surgery as bs
from backbone_surgery.serving import scheduler as scheduler_module
from tests.helpers import make_gpt2, relative
from tests.serving.traffic import VOCABULARY, Asked, edited, random_gpt2, random_request

PREFIXES = np.random.default_rng(5).integers(0, VOCABULARY, (2, 64)).tolist()


@pytest.fixture(scope="module")
def lm():
    rng = np.random.default_rng(3)
    return edited(rng, random_gpt2(rng))


@pytest.fixture(autouse=True)
def short_caches(monkeypatch):
    """Let caches begin so short that they grow, shrink and shift all the time."""
    monkeypatch.setattr(scheduler_module, "_FIRST_LENGTH", 32)


def make_engine(lm, **settings):
    defaults = {"rows": 3, "length": 112, "prefill_chunk": 16, "chunk_size": 4}
    return bs.Engine(lm, **{**defaults, **settings})


def ask(prompt, captures=False, **settings):
    return Asked(prompt, captures, stop_token_ids=None, **settings)


def assert_as_alone(lm, asked, request):
    wanted, captures = asked.alone(lm)
    np.testing.assert_array_equal(request.result(), wanted, err_msg=repr(asked))
    if asked.captures:
        for path, values in captures.values.items():
            assert relative(request.captures[path], values) <= 1e-5, f"{path}: {asked}"


@pytest.mark.slow
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32 - 1))
def test_a_request_gives_what_generate_gives_for_it_alone(lm, seed):
    run_traffic(lm, seed, count=10)


@functools.cache
def bundled(name):
    backbone = bs.CachedCausalLM.from_preset(name).backbone
    return edited(np.random.default_rng(4), backbone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_gemma"])
@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_request_to_a_bundled_model_gives_what_generate_gives(name, seed):
    run_traffic(bundled(name), seed, 8, blocks=6, heads=4, size=128, vocabulary=800, least_k=1)


def run_traffic(lm, seed, count, **sizes):
    """Send random requests at random times, cancel some, and compare the others."""
    lm = bs.CachedCausalLM(lm.backbone)  # of its own, so that its many programs go with it
    lm.compile(sampler="greedy")
    rng = np.random.default_rng(seed)
    cache = int(rng.choice([0, 20_000, 2**28]))
    engine = make_engine(lm, rows=int(rng.choice([1, 3])), prefix_cache=cache)
    sent = []
    for _ in range(count):
        asked = random_request(rng, PREFIXES, **sizes)
        sent.append((asked, asked.submit(engine)))
        for _ in range(rng.integers(0, 5)):
            engine.step()
        if rng.random() < 0.15:
            sent[rng.integers(len(sent))][1].cancel()
    while engine.step():
        pass
    assert engine.stats.running == engine.stats.waiting == 0
    for asked, request in sent:
        if request.finish_reason != "cancelled":
            assert_as_alone(lm, asked, request)


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 40])
def test_captures_of_one_new_token_beside_others(lm, length):
    """Its row has no steps to come, and others take the room that it had."""
    engine = make_engine(lm, prefill_chunk=32)
    first = ask(PREFIXES[0][:30], captures=True, max_new_tokens=1)
    second = ask(PREFIXES[1][:length], captures=length == 40, max_new_tokens=20)
    sent = [(asked, asked.submit(engine)) for asked in (first, second)]
    for asked, request in sent:
        assert_as_alone(lm, asked, request)


@pytest.mark.slow
@pytest.mark.parametrize("drive", ["steps", "waits for another request"])
def test_a_listener_may_drive_the_engine(lm, drive):
    """A step is done when it is called, so nothing is lost, read twice or noted too late."""
    engine = make_engine(lm, chunk_size=3)
    asked = ask([1, 2, 3], max_new_tokens=20), ask([4, 5, 6, 7], max_new_tokens=23)
    wanted = [engine.submit(a.inputs, **a.settings, logprobs=True) for a in asked]
    for request in wanted:
        request.result()
    first, second = (engine.submit(a.inputs, **a.settings, logprobs=True) for a in asked)
    counts, inside, begun = [], [], []

    def listener():
        counts.append(len(first.token_ids))
        begun.append(len(inside))
        inside.append(1)
        if drive == "steps":
            engine.step()
        elif not first.finish_reason:
            second.result()
        inside.pop()

    first.listen(listener)
    for a, request, like in zip(asked, (first, second), wanted, strict=True):
        assert_as_alone(lm, a, request)
        np.testing.assert_array_equal(request.logprobs.logprobs, like.logprobs.logprobs)
    assert counts == sorted(counts)
    assert not any(begun)  # it would be as deep as there are steps
    assert engine.stats.running == engine.stats.waiting == 0
    assert engine.stats.new_tokens == 2 * (20 + 23)


@pytest.mark.slow
def test_a_listener_may_wait_in_the_thread_of_the_engine(lm):
    asked = ask([1, 2, 3], max_new_tokens=5), ask([4, 5, 6, 7], max_new_tokens=30)
    with make_engine(lm) as engine:
        first, second = (a.submit(engine) for a in asked)
        first.listen(lambda: first.finish_reason and second.result())
        for a, request in zip(asked, (first, second), strict=True):
            assert_as_alone(lm, a, request)


@pytest.mark.slow
def test_another_thread_may_step_while_a_listener_runs(lm):
    engine, asked = make_engine(lm), ask([1, 2, 3], max_new_tokens=20)
    request, stuck = asked.submit(engine), []

    def listener():
        if not stuck:
            thread = threading.Thread(target=engine.step, daemon=True)
            thread.start()
            thread.join(20)
            stuck.append(thread.is_alive())

    request.listen(listener)
    assert_as_alone(lm, asked, request)
    assert stuck == [False]


@pytest.mark.slow
def test_all_listeners_are_told_though_one_interrupts(lm):
    engine, seen = make_engine(lm), []
    first, second = (ask([i, 2, 3], max_new_tokens=2).submit(engine) for i in (1, 4))
    first.listen(mock.Mock(side_effect=KeyboardInterrupt))
    second.listen(lambda: seen.append(len(second.token_ids)))
    for _ in range(9):
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert first.finish_reason == second.finish_reason == "length"
    assert seen[-1] == 2


@pytest.mark.slow
def test_tokens_are_counted_as_they_are_handed_out(lm):
    engine = make_engine(lm)
    for i, budget in enumerate((1, 0, 5), 1):
        ask([i, 2, 3], max_new_tokens=budget).submit(engine).result()
    assert engine.stats.new_tokens == 6


def test_a_listener_is_called_while_no_lock_is_held(lm):
    """Else two threads could wait for each other, one of them in a listener."""
    request = ask([1, 2, 3], max_new_tokens=3).submit(make_engine(lm))
    read = threading.Event()

    def another_thread_reads():
        threading.Thread(target=lambda: request._job.snapshot() and read.set()).start()
        assert read.wait(20)

    request.listen(another_thread_reads)
    request.cancel()
    assert read.is_set()


@pytest.mark.slow
def test_a_model_that_was_quantised_since_is_refused():
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.compile(sampler="greedy")
    engine, asked = bs.Engine(lm, rows=2, length=24), ask([1, 2, 3], max_new_tokens=3)
    asked.submit(engine).result()
    before = engine.stats.compilations
    lm.quantize("int8")
    assert engine.stats.compilations == before
    with pytest.raises(bs.SurgeryError, match=r"quantised since\. Make another engine"):
        asked.submit(engine)
    with pytest.raises(bs.SurgeryError, match="warm_up: expected the model as it was"):
        engine.warm_up()


@pytest.mark.slow
def test_a_listener_that_raises_is_logged_and_harms_nobody(lm, caplog):
    calls = []

    def fails():
        calls.append(1)
        raise LookupError("of one user")

    with make_engine(lm) as engine:
        one = ask([1, 2], max_new_tokens=30).submit(engine)
        one.listen(fails)
        other = ask([3, 4], max_new_tokens=9)
        assert_as_alone(lm, other, other.submit(engine))
        assert len(one.result()) == 32
    assert len(calls) == 1
    assert "of one user" in caplog.text


@pytest.mark.slow
def test_captured_patterns(rng):
    backbone = random_gpt2(rng)
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Capture("blocks.*.attention_pattern")]))
    lm.compile(sampler="greedy")
    engine = make_engine(lm, rows=2, prefix_cache=2**20)
    sent = []
    for length in (40, 3, 20, 33):
        asked = ask(PREFIXES[0][:length], captures=True, max_new_tokens=20)
        sent.append((asked, asked.submit(engine)))
    for asked, request in sent:
        assert_as_alone(lm, asked, request)


@pytest.mark.slow
def test_a_thread_of_its_own_serves_many_threads(lm):
    rng = np.random.default_rng(1)
    asked = [random_request(rng, PREFIXES) for _ in range(12)]
    requests = [None] * len(asked)

    def client(i):
        requests[i] = asked[i].submit(engine)
        requests[i].result()

    with make_engine(lm) as engine:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one, request in zip(asked, requests, strict=True):
        assert_as_alone(lm, one, request)


@pytest.mark.slow
def test_leaving_finishes_what_was_asked_for_and_an_error_cancels_it(lm):
    with make_engine(lm) as engine:
        request = ask([1, 2, 3], max_new_tokens=20).submit(engine)
    assert request.finish_reason == "length"
    assert len(request.token_ids) == 20
    with pytest.raises(bs.SurgeryError, match="expected an engine that is open"):
        ask([1], max_new_tokens=1).submit(engine)
    try:
        with engine:
            request = ask([1, 2, 3], max_new_tokens=100).submit(engine)
            raise KeyError
    except KeyError:
        pass
    assert request.finish_reason == "cancelled"


@pytest.mark.slow
def test_generate_takes_many_prompts_with_settings_for_each(lm):
    ids = np.array([PREFIXES[0][:9], PREFIXES[1][:9]] * 3)
    prompts = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    settings = {"max_new_tokens": 7, "stop_token_ids": None}
    mood = [-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    got = make_engine(lm).generate(prompts, controls={"mood": mood}, **settings)
    lm.compile(sampler="greedy")
    want = lm.generate(prompts, controls={"mood": mood}, **settings)["token_ids"]
    np.testing.assert_array_equal(np.stack(got), want)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_mixed_requests_compile_nothing_after_the_warm_up(lm, monkeypatch, platform):
    """Nor on an accelerator, where it matters which arrays come from the host."""
    monkeypatch.setattr(lm.programs, "platform", platform)
    rng = np.random.default_rng(2)
    engine = make_engine(lm)
    engine.warm_up(captures=True)
    before = engine.stats.compilations
    requests = [random_request(rng, PREFIXES).submit(engine) for _ in range(300)]
    for steps in (112, 300):  # as many as a job can have tokens, and more
        controls = {"mood": bs.Schedule(np.linspace(0, 1, steps))}
        asked = ask(PREFIXES[0], controls=controls, max_new_tokens=3)
        requests.append(asked.submit(engine))
    while engine.step():
        pass
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    assert engine.stats.compilations == before


@pytest.mark.slow
def test_a_graph_with_an_input_of_its_own_is_warmed_up():
    backbone = make_gpt2(num_layers=1)
    scale = keras.Input((1,), name="scale")
    model = keras.Model({**backbone.input, "scale": scale}, backbone.output * scale[:, None])
    lm = bs.CachedCausalLM(bs.operate(model, [bs.Steer("mood", {0: np.ones(32)})]))
    lm.compile(sampler="greedy")
    engine = make_engine(lm, length=32)
    engine.warm_up()
    before = engine.stats.compilations
    controls = {"scale": np.array([[2.0]], "float32")}
    request = ask([1, 2, 3], controls=controls, max_new_tokens=3).submit(engine)
    while engine.step():
        pass
    assert request.finish_reason == "length"
    assert engine.stats.compilations == before


def test_pieces_join_to_the_result(lm):
    engine = make_engine(lm)
    request = ask(PREFIXES[0][:20], max_new_tokens=30).submit(engine)
    pieces = list(request)
    assert len(pieces) > 5
    np.testing.assert_array_equal(np.concatenate(pieces), request.token_ids)


def test_the_first_token_comes_before_the_first_chunk_has_run(lm):
    engine = make_engine(lm)
    request = ask(PREFIXES[0][:20], max_new_tokens=30).submit(engine)
    assert next(len(piece) for piece in request) == 1


@pytest.mark.slow
def test_what_nobody_wants_frees_its_row(lm):
    engine = make_engine(lm, rows=1)
    first = ask([1, 2], max_new_tokens=100).submit(engine)
    second = ask([3, 4], max_new_tokens=2).submit(engine)
    pieces = iter(first)
    next(pieces)
    pieces.close()
    assert first.finish_reason == "cancelled"
    third = ask([5, 6], max_new_tokens=100).submit(engine)
    engine.step()
    del third
    assert len(second.result()) == 4
    while engine.step():
        pass
    assert engine.stats.running == engine.stats.waiting == 0


@pytest.mark.slow
def test_a_long_prompt_stalls_running_rows_for_one_chunk_of_it(lm):
    engine = make_engine(lm)
    running = ask([1, 2], max_new_tokens=80).submit(engine)
    engine.step()
    long = ask(PREFIXES[0], max_new_tokens=4).submit(engine)
    lengths = []
    while not len(long.token_ids):
        engine.step()
        lengths.append(len(running.token_ids))
    assert len(lengths) >= 64 // 16
    assert (np.diff(lengths) > 0).all()


@pytest.mark.slow
def test_first_come_first_served(lm):
    engine = make_engine(lm, rows=1)
    requests = [ask([i + 1], max_new_tokens=3).submit(engine) for i in range(5)]
    ended = []
    while len(ended) < 5:
        engine.step()
        ended += [i for i, r in enumerate(requests) if r.finish_reason and i not in ended]
    assert ended == [0, 1, 2, 3, 4]


def test_a_request_is_one_prompt(lm):
    prompts = {"token_ids": np.ones((2, 3), "int32"), "padding_mask": np.ones((2, 3), "int32")}
    with pytest.raises(bs.SurgeryError, match=r"expected one prompt\. Received 2\. Use `generate`"):
        make_engine(lm).submit(prompts, max_new_tokens=1, stop_token_ids=None)


def test_the_queue_is_bounded(lm):
    engine = make_engine(lm, max_waiting=2)
    kept = [ask([1], max_new_tokens=1).submit(engine) for _ in range(2)]
    with pytest.raises(bs.QueueFullError, match="expected at most 2 requests to wait"):
        ask([1], max_new_tokens=1).submit(engine)
    kept.pop()  # nobody wants it any more
    ask([1], max_new_tokens=1).submit(engine)


@pytest.mark.slow
def test_logits_that_are_no_numbers_fail_one_request_alone(lm):
    engine = make_engine(lm)
    bad = ask([1, 2, 3], max_new_tokens=9, controls={"mood": 3e38}).submit(engine)
    good = ask([1, 2, 3], max_new_tokens=9)
    request = good.submit(engine)
    assert_as_alone(lm, good, request)
    with pytest.raises(bs.SurgeryError, match="expected logits to choose a token by"):
        bad.result()
    again = good.submit(engine)
    assert_as_alone(lm, good, again)


@pytest.mark.parametrize("donated", [False, True])
def test_an_error_is_told_to_all_that_wait_and_the_engine_goes_on(lm, monkeypatch, donated):
    """Also if the arrays of the engine were given to a program that did not end."""
    engine = make_engine(lm)
    assert len(ask([4, 5], max_new_tokens=3).submit(engine).result()) == 5
    request = ask([1, 2, 3], max_new_tokens=9).submit(engine)
    insert = engine._scheduler.programs.insert

    def fails(*args):
        if donated:
            insert(*args)
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(engine._scheduler.programs, "insert", fails)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    with pytest.raises(ZeroDivisionError):
        request.result()
    good = ask([1, 2, 3], max_new_tokens=9)
    assert_as_alone(lm, good, good.submit(engine))


def test_who_is_told_of_an_error_may_ask_again(lm, monkeypatch):
    engine, again = make_engine(lm), []
    asked = ask([1, 2, 3], max_new_tokens=3)
    request = asked.submit(engine)
    request.listen(lambda: again.append(asked.submit(engine)))
    with monkeypatch.context() as broken:
        broken.setattr(engine._scheduler.programs, "insert", None)
        with pytest.raises(TypeError):
            engine.step()
    assert request.finish_reason == "error"
    assert engine.stats.waiting == len(again) == 1
    assert_as_alone(lm, asked, again[0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1}, "'temperature': expected 0"),
        ({"top_k": 1.5}, "'top_k': expected a whole number from 0 to 2147483647"),
        ({"top_p": 2}, "'top_p': expected a number from 0 to 1"),
        ({"max_new_tokens": 200}, "expected at most 128 tokens in a row"),
        ({"max_new_tokens": 111}, "expected a prompt and new tokens of at most 112 together"),
        ({"controls": {"mod": 1.0}}, "Did you mean 'mood'"),
        ({"stop_token_ids": tuple(range(16))}, "expected fewer than 16"),
        ({"seed": [1, 2]}, "expected an int from 0"),
    ],
)
def test_bad_requests_are_refused_at_once(lm, settings, words):
    engine = make_engine(lm)
    with pytest.raises(bs.SurgeryError, match=words):
        Asked([1, 2], False, **{"stop_token_ids": None, **settings}).submit(engine)
    assert not engine.step()


def test_bad_settings_of_an_engine(lm):
    with pytest.raises(bs.SurgeryError, match="expected a CachedCausalLM"):
        bs.Engine(lm.backbone)
    with pytest.raises(bs.SurgeryError, match="'rows': expected a positive int"):
        bs.Engine(lm, rows=0)
    with pytest.raises(bs.SurgeryError, match="'prefix_cache': expected a number of bytes"):
        bs.Engine(lm, prefix_cache=-1)


def test_a_sampler_that_rows_cannot_share(lm):
    engine = make_engine(lm)
    lm.compile(sampler="beam")
    with pytest.raises(bs.SurgeryError, match="sampler BeamSampler: expected a model that is"):
        ask([1], max_new_tokens=1).submit(engine)
    assert ask([1], max_new_tokens=1, temperature=0).submit(engine).result().shape == (2,)
    lm.compile(sampler="greedy")
