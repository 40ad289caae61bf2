"""The prefix cache: warm equals cold in bits, and nothing else is ever taken for the same."""

import jax
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.serving.job import Job
from backbone_surgery.serving.prefill import Prefill
from backbone_surgery.serving.prefix_cache import PrefixCache
from tests.serving.traffic import VOCABULARY, Asked, edited, random_controls, random_gpt2

CHUNK = 16
PROMPT = np.random.default_rng(9).integers(0, VOCABULARY, 80).astype("int32")


@pytest.fixture(scope="module")
def lm():
    rng = np.random.default_rng(3)
    return edited(rng, random_gpt2(rng))


@pytest.fixture
def engine(lm):
    return bs.Engine(lm, rows=2, length=112, prefill_chunk=CHUNK, prefix_cache=2**24)


def reused(engine, prompt=PROMPT[:50], captures=False, **settings):
    """Run a request to its end, and return how many tokens of its prompt were reused."""
    defaults = {"max_new_tokens": 3, "stop_token_ids": None, "controls": {"mood": 1.0}}
    request = Asked(prompt, captures, **{**defaults, **settings}).submit(engine)
    request.result()
    return request.reused_tokens


def prefilled(engine, controls, captures, kept, prompt):
    """Run the prompt by itself, with a prefix cache."""
    seeds = np.zeros((1, 2), "uint32")
    bound = bs.generation.controls.bind_controls(engine.lm.opened, controls, [len(prompt)])
    job = Job(prompt, 1, None, seeds, bound, None, captures)
    prefill = Prefill(engine._scheduler.programs, job, CHUNK, engine._scheduler.lengths, kept)
    with prefill.programs.weights_of_now():
        while not prefill.done:
            prefill.step()
    return prefill


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_warm_equals_cold_in_bits(lm, engine, seed):
    rng = np.random.default_rng(seed)
    length, captures = int(rng.integers(17, 80)), bool(seed % 2)
    controls = random_controls(rng, 16, blocks=2, heads=2)
    kept = PrefixCache(2**24)
    cold = prefilled(engine, controls, captures, kept, PROMPT[:length])
    warm = prefilled(engine, controls, captures, kept, PROMPT[:length])
    assert (cold.reused, warm.reused) == (0, (length - 1) // CHUNK * CHUNK)
    arrays = [
        jax.tree.map(np.asarray, (prefill.staging, prefill.logits)) for prefill in (cold, warm)
    ]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


@pytest.mark.slow
def test_warm_equals_cold_with_state_that_has_no_slots():
    from tests.families import ROWS

    row = ROWS["qwen3_5"]
    lm = bs.CachedCausalLM(row.make())
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=CHUNK)
    kept = PrefixCache(2**24)
    prompt = PROMPT[:37] % lm.programs.head.input_dim
    cold, warm = (prefilled(engine, {}, False, kept, prompt) for _ in range(2))
    assert warm.reused == 32
    arrays = [jax.tree.map(np.asarray, (x.staging, x.logits)) for x in (cold, warm)]
    jax.tree.map(np.testing.assert_array_equal, *arrays)


@pytest.mark.slow
def test_whole_chunks_are_reused_but_for_the_last_token(engine):
    assert reused(engine) == 0
    assert reused(engine) == 48
    assert reused(engine, PROMPT[:48]) == 32
    assert reused(engine, PROMPT[:80]) == 48
    assert reused(engine, [*PROMPT[:20], *PROMPT[:30]]) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "controls",
    [
        {"mood": 1.5},
        {"mood": bs.Control(1.0, directions=bs.ControlVector({1: np.ones(16)}))},
        {"mood": bs.Control(1.0, tokens=(0, 5))},
        {"mood": 1.0, "asked": 0.0},
        {"mood": 1.0, "style": 1.0},
        {"mood": 1.0, "heads": 0},
        {"mood": 1.0, "patch": {"positions": [2], "values": np.ones((1, 16), "float32")}},
    ],
)
def test_other_controls_never_hit(engine, controls):
    reused(engine)
    assert reused(engine, controls=controls) == 0
    assert reused(engine, controls=controls) == 48
    assert reused(engine) == 48


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controls", "first"),
    [
        (bs.Control(1.0, tokens="generated"), 0.0),
        (bs.Schedule([1.0, 2.0], prompt=0.5), 0.5),
        (bs.Control(1.0, tokens=(0, 100)), 1.0),
    ],
)
def test_controls_that_act_alike_on_the_prompt_hit(engine, controls, first):
    reused(engine, controls={"mood": first})
    assert reused(engine, controls={"mood": controls}) == 48


@pytest.mark.slow
def test_a_prefix_is_of_the_directions_that_were_taken_out(rng):
    lm = bs.CachedCausalLM(bs.operate(random_gpt2(rng), [bs.ProjectOut("none", np.ones(16))]))
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=CHUNK)
    other = rng.normal(size=16)
    for strength, tokens in ((1.0, 0), (0.0, 16)):
        reused(engine, PROMPT[:24], controls={"none": strength})
        control = bs.Control(strength, directions=other)
        assert reused(engine, PROMPT[:30], controls={"none": control}) == tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "tokens"),
    [
        (None, None, 16),  # a longer prompt, on the same first tokens
        (0.0, bs.Control(1.0, tokens="generated"), 16),
        (None, bs.Control(1.0, tokens=(20, None)), 0),
        (1.0, 0.5, 0),
    ],
)
def test_controls_of_interventions(rng, first, then, tokens):
    lm = bs.CachedCausalLM(bs.operate(random_gpt2(rng), [bs.Reft("mood", 2, "blocks.1")]))
    engine = bs.Engine(lm, rows=2, length=64, prefill_chunk=CHUNK)
    reused(engine, PROMPT[:24], controls={"mood": first})
    assert reused(engine, PROMPT[:30], controls={"mood": then}) == tokens


@pytest.mark.slow
def test_a_range_that_begins_later_forks_the_prefix_there(engine):
    reused(engine, controls={"mood": 0.0})
    assert reused(engine, controls={"mood": bs.Control(1.0, tokens=(20, None))}) == 16


@pytest.mark.slow
def test_captures_that_were_not_kept_are_run(engine):
    assert reused(engine) == 0
    assert reused(engine, captures=True) == 0
    assert reused(engine, captures=True) == 48
    assert reused(engine) == 48


@pytest.mark.slow
def test_new_weights_empty_it(rng):
    lm = edited(rng, random_gpt2(rng))
    engine = bs.Engine(lm, rows=2, length=112, prefill_chunk=CHUNK)
    reused(engine)
    assert reused(engine) == 48
    variable = lm.backbone.trainable_variables[-1]
    variable.assign(variable * 1.5)
    assert reused(engine) == 0
    assert reused(engine) == 48
    lm.backbone.enable_lora(2)
    assert reused(engine) == 0
    engine.clear()
    assert reused(engine) == 0
    assert engine.stats.prefix_cache_bytes > 0


@pytest.fixture
def with_lora(rng):
    """Return a task whose LoRA counts, and a layer that has it."""
    backbone = random_gpt2(rng)
    backbone.enable_lora(2)
    lm = bs.CachedCausalLM(backbone)
    lm.compile(sampler="greedy")
    layer = backbone.transformer_layers[0]._self_attention_layer._value_dense
    layer.lora_kernel_b.assign(rng.normal(0, 4, layer.lora_kernel_b.shape))
    return lm, layer


@pytest.mark.slow
@pytest.mark.parametrize("change", ["a weight", "lora_alpha"])
def test_other_weights_for_a_while(change, with_lora):
    """Nothing is kept of a prompt of which a part ran meanwhile."""
    lm, layer = with_lora
    own = {"a weight": (layer.lora_kernel_b, "value"), "lora_alpha": (layer, "lora_alpha")}
    holder, name = own[change]
    before = getattr(holder, name)

    def put(value):
        holder.assign(value) if name == "value" else setattr(holder, name, value)

    engine = bs.Engine(lm, rows=2, length=112, prefill_chunk=CHUNK, chunk_size=2)

    def submit(prompt=PROMPT, tokens=8):
        defaults = {"max_new_tokens": tokens, "stop_token_ids": None, "logprobs": True}
        return Asked(prompt, False, **defaults).submit(engine)

    def chances():
        request = submit()
        request.result()
        return request.logprobs.logprobs

    wanted = chances()
    engine.clear()
    submit(PROMPT[:4], 60)
    engine.step()
    begun = submit()
    engine.step()
    put(before * 7)
    engine.step()
    put(before)
    begun.result()
    assert np.array_equal(chances(), wanted)
    put(before * 7)
    others = chances()
    assert np.array_equal(chances(), others)
    assert not np.array_equal(others, wanted)


@pytest.mark.slow
def test_lora_set_by_another_thread_within_a_step(with_lora, monkeypatch):
    lm, layer = with_lora
    engine = bs.Engine(lm, rows=2, length=112, prefill_chunk=CHUNK, chunk_size=2)

    def chances():
        options = {"max_new_tokens": 8, "stop_token_ids": None, "logprobs": True}
        request = Asked(PROMPT, False, **options).submit(engine)
        request.result()
        return request.logprobs.logprobs

    wanted = chances()
    engine.clear()
    own, programs = layer.lora_alpha, engine._scheduler.programs

    def run_under(name, alpha):
        run = getattr(programs, name)

        def set_and_run(*args):
            layer.lora_alpha = alpha
            return run(*args)

        monkeypatch.setattr(programs, name, set_and_run)

    run_under("extend", own * 7)
    run_under("decode", own)
    assert not np.array_equal(chances(), wanted)
    monkeypatch.undo()
    assert np.array_equal(chances(), wanted)


def test_the_least_recently_used_is_let_go():
    kept = PrefixCache(250)
    for name in (b"a", b"b"):
        kept.put(name, {"cache": [np.zeros(100, "int8")]})
    assert kept.get(b"a", False) is not None
    kept.put(b"c", {"cache": [np.zeros(100, "int8")]})
    assert kept.get(b"b", False) is None
    assert kept.get(b"a", False) is not None
    kept.put(b"large", {"cache": [np.zeros(300, "int8")]})
    assert (len(kept), kept.nbytes) == (2, 200)


@pytest.mark.slow
def test_without_one_nothing_is_reused(lm):
    engine = bs.Engine(lm, rows=2, length=112, prefill_chunk=CHUNK, prefix_cache=0)
    assert [reused(engine), reused(engine)] == [0, 0]


@pytest.mark.slow
def test_a_model_whose_controls_grow(lm, engine):
    reused(engine)
    two = {"positions": [2, 30], "values": np.ones((2, 16), "float32")}
    assert reused(engine, controls={"patch": two}) == 0
    assert reused(engine) == 0
    assert reused(engine) == 48
