"""Generation with kernels: the same texts, and caches that are written in place."""

import re

import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.kernels import calls
from tests.family_row import make_gemma2, make_gpt2
from tests.generation.test_memory import aliased_parameters
from tests.helpers import ragged

pytestmark = pytest.mark.skipif(not calls.available(), reason="no kernels on this machine")

SIZES = {"num_layers": 2, "hidden_dim": 64, "intermediate_dim": 128}
MODELS = {
    "gpt2": lambda **kw: make_gpt2(**SIZES, num_heads=4, vocabulary_size=96, **kw),
    "gemma2": lambda **kw: make_gemma2(
        **SIZES,
        **kw,
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window_size=4,
        vocabulary_size=96,
    ),
}
SAMPLERS = {
    "greedy": lambda: "greedy",
    "top_p": lambda: keras_hub.samplers.TopPSampler(0.9, k=20),
    "beam": lambda: keras_hub.samplers.BeamSampler(num_beams=3),
}


def generated(backbone, sampler, **options):
    """Generate from ragged prompts under an edit; return tokens and what was captured."""
    rng = np.random.default_rng(1)
    rows = options.pop("rows", (7, 3))
    steer = bs.Steer("mood", {0: rng.standard_normal(64)})
    edited = bs.operate(backbone, [steer, bs.Capture("blocks.1")])
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler=sampler())
    strengths = np.linspace(-1, 1, len(rows)).tolist()
    captures = "lookup" not in options
    result = lm.generate(
        ragged(rng, rows, max(rows), 96),
        max_new_tokens=20,
        stop_token_ids=[5],
        controls={"mood": strengths},
        seed=3,
        return_captures=captures,
        **options,
    )
    tokens, activations = result if captures else (result, None)
    found = [] if activations is None else [np.asarray(x) for x in activations.values.values()]
    return [np.asarray(tokens[k]) for k in ("token_ids", "padding_mask")], found, lm


@pytest.fixture
def everywhere(monkeypatch):
    """Use kernels for whatever can be, and count them."""
    made = []
    for name in ("product", "scores", "mix"):
        own = getattr(calls, name)

        def counted(*args, own=own, name=name):
            result = own(*args)
            if result is not None:
                made.append(name)
            return result

        monkeypatch.setattr(calls, name, counted)

    def switch(on):
        for name in ("_LEAST", "_LEAST_OF_CACHE"):
            monkeypatch.setattr(calls, name, 0 if on else 1 << 60)

    switch.made = made
    return switch


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["greedy", "top_p", "beam"])
@pytest.mark.parametrize("name", MODELS)
def test_texts_and_captures_are_those_of_xla(everywhere, name, sampler):
    backbone = MODELS[name]()
    everywhere(False)
    wanted, captured, _ = generated(backbone, SAMPLERS[sampler])
    assert not everywhere.made
    everywhere(True)
    received, own, _ = generated(backbone, SAMPLERS[sampler])
    assert {"product", "scores", "mix"} <= set(everywhere.made)
    for a, b in zip(received, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(own, captured, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_guesses_run_together_are_those_of_xla(everywhere, name):
    backbone = MODELS[name]()
    everywhere(False)
    wanted, _, _ = generated(backbone, SAMPLERS["greedy"], rows=(7,))
    everywhere(True)
    received, _, _ = generated(backbone, SAMPLERS["greedy"], rows=(7,), lookup=4)
    for a, b in zip(received, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_check_runs_what_generation_runs(everywhere, name):
    everywhere(True)
    bs.check(MODELS[name]())
    assert {"product", "scores", "mix"} <= set(everywhere.made)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_copies_no_cache(everywhere, name):
    """No kernel is given a cache that was turned for it."""
    everywhere(True)
    backbone = MODELS[name](dtype="bfloat16")
    _, _, lm = generated(backbone, SAMPLERS["greedy"], rows=(7,))
    text = lm.programs.compiled("decode")[-1].as_text()
    given = re.findall(r'"backbone_surgery[^"]*", operand_layout_constraints=\{(.*?)\}, api', text)
    (_, state, *_), _ = lm.programs.compiled("decode")[-1].args_info
    slots = state["cache"][0]["key"].shape[0]
    assert len(given) > 5
    assert [shapes for shapes in given if f"bf16[{slots}," in shapes]
    assert not [shapes for shapes in given if f",{slots}," in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(7,), (7, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_caches_are_written_in_place(everywhere, name, rows):
    everywhere(True)
    _, _, lm = generated(MODELS[name](), SAMPLERS["greedy"], rows=rows)
    text = lm.programs.compiled("decode")[-1].as_text()
    caches = re.findall(r"%state__cache\S* = (f32\[[\d,]+\])\S* parameter\((\d+)\)", text)
    assert len(caches) == 4
    assert {int(number) for _, number in caches} <= aliased_parameters(text)
    shapes = {shape for shape, _ in caches}
    copies = [line for line in text.splitlines() if " copy(" in line]
    assert not [line for line in copies if any(f"= {shape}" in line for shape in shapes)]
