"""Generating needs the weights, one cache and small change: read off the compiled program."""

import gc
import re
import weakref

import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gemma, make_gpt2, ragged

SLOTS = 256


SIZES = {"num_layers": 4, "hidden_dim": 128, "intermediate_dim": 512}
HEADS = {"num_query_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
MODELS = {
    "gpt2": lambda: make_gpt2(**SIZES, max_sequence_length=SLOTS),
    "gemma": lambda: make_gemma(**SIZES, **HEADS),
    "gemma, one head of keys": lambda: make_gemma(**SIZES, **{**HEADS, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=MODELS)
def compiled(request):
    """The programs of a model whose weights and cache are much larger than one step's work."""
    lm = bs.CachedCausalLM(MODELS[request.param]())
    lm.compile(sampler="greedy")
    inputs = ragged(np.random.default_rng(0), (5, 4), 5)
    lm.generate(inputs, max_length=SLOTS - 16, stop_token_ids=None)
    programs = {kind: lm.programs.compiled(kind)[-1] for kind in ("prefill", "decode")}
    weights = sum(np.asarray(w).nbytes for w in lm.programs.weights())
    caches = lm.programs.packing.new_cache(2, SLOTS)
    leaves = [np.asarray(x) for pair in caches for x in pair.values()]
    return programs, weights, leaves


def aliased_parameters(text):
    """Return the parameters of a program that share memory with an output, from its header."""
    header = text.split("\n", 1)[0]
    return {int(i) for i in re.findall(r"\((\d+), \{[^}]*\}, (?:may|must)-alias\)", header)}


def parameters_of_shape(text, shape):
    """Return the parameters of the entry computation that have a shape, such as `f32[2,3]`."""
    entry = text[text.index("ENTRY ") :]
    found = re.findall(rf"= {re.escape(shape)}\S* parameter\((\d+)\)", entry)
    return {int(i) for i in found}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_every_array_of_the_cache_is_updated_in_place(compiled, kind):
    programs, _, caches = compiled
    text = programs[kind].as_text()
    shape = f"f32[{','.join(map(str, caches[0].shape))}]"
    parameters = parameters_of_shape(text, shape)
    assert len(parameters) == len(caches)
    assert parameters <= aliased_parameters(text)


def test_no_second_copy_of_weights_or_cache(compiled):
    programs, weights, caches = compiled
    cache = sum(x.nbytes for x in caches)
    memory = programs["decode"].memory_analysis()
    assert memory.argument_size_in_bytes >= weights + cache
    new = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    one_block = sum(x.nbytes for x in caches[:2])  # what attention may lay out anew, block by block
    assert new < 1.1 * one_block < 0.3 * min(weights, cache)


def test_weights_are_no_constants(compiled):
    programs, weights, _ = compiled
    text = programs["decode"].as_text()
    sizes = [
        np.prod([int(n) for n in shape.split(",") if n] or [1])
        for shape in re.findall(r"f32\[([\d,]*)\]\S* constant\(", text)
    ]
    assert sum(sizes) * 4 < 0.01 * weights


def test_weights_that_were_replaced_are_not_kept(rng):
    lm = bs.CachedCausalLM(make_gpt2())
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (5,), 5)
    lm.generate(inputs, max_new_tokens=2, stop_token_ids=None)
    variable = lm.backbone.trainable_variables[0]
    before = weakref.ref(variable.value)
    variable.assign(np.zeros(variable.shape))
    gc.collect()
    assert before() is None
    assert not np.asarray(lm.programs.weights()[0]).any()
