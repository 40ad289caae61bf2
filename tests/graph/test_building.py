"""Graphs can be built over the same layers from several threads at once.

Each thread builds what one thread alone builds, and what it built computes the same numbers.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import graph
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.graph.shared_nodes import SharedNodes
from tests.helpers import make_gemma, make_gpt2

THREADS = 4
BUILDS = 2
INPUTS = {
    "token_ids": np.array([[5, 6, 7, 8], [0, 9, 10, 11]], "int32"),
    "padding_mask": np.array([[1, 1, 1, 1], [0, 1, 1, 1]], "int32"),
}


def at_once(build):
    """Run `build` in each of several threads, several times over, all at once."""
    start = Barrier(THREADS)

    def run(_):
        start.wait()
        return [build() for _ in range(BUILDS)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return [built for thread in pool.map(run, range(THREADS)) for built in thread]
    finally:
        sys.setswitchinterval(before)


def double_norms(layer, *args, **kwargs):
    """Put a product, which Keras names by itself, after each layer whose name speaks of a norm."""
    result = layer(*args, **kwargs)
    return result * 2.0 if "norm" in layer.name else result


def edit(backbone):
    rewrites = [double_norms, bs.Steer("mood", {1: np.ones(32)}, strength=0.5), double_norms]
    return bs.operate(backbone, rewrites)


def numbers(model, inputs=INPUTS):
    return np.asarray(keras.ops.convert_to_numpy(model(inputs)), "float32")


@pytest.mark.slow
def test_edits_built_at_once_compute_what_one_built_alone_does():
    backbone = make_gemma()
    expected = numbers(edit(backbone))
    for edited in at_once(lambda: edit(backbone)):
        np.testing.assert_array_equal(numbers(edited), expected)
    np.testing.assert_array_equal(numbers(edit(backbone)), expected)


def test_plain_clones_built_at_once_compute_what_the_source_does(monkeypatch):
    x = keras.Input((3,))
    shared, inner = keras.layers.Dense(3), keras.Sequential([keras.layers.Dense(3)])
    source = keras.Model(x, inner(shared(inner(shared(x)))))
    y = source.output
    append = SharedNodes.append

    def slow_append(nodes, node):
        # Keras takes the number of a node from the length of the list, but not at once.
        append(nodes, node)
        time.sleep(1e-3)

    monkeypatch.setattr(SharedNodes, "append", slow_append)

    def call(layer, *args, **kwargs):
        return layer(*args, **kwargs)

    value = np.ones((2, 3), "float32")
    clones = at_once(lambda: keras.Model(x, bs.clone_layer_graph(x, y, call)))
    for clone in clones:
        np.testing.assert_array_equal(numbers(clone, value), numbers(source, value))


@pytest.mark.slow
def test_all_else_that_builds_can_be_done_at_once():
    backbone = make_gpt2(num_layers=2)
    expected = bs.CachedCausalLM(edit(backbone))

    def build():
        lm = bs.CachedCausalLM(edit(backbone))
        nested = bs.rewrite_nested(backbone, "token_embedding", lambda layer, x: layer(x))
        return lm, bs.rewire(backbone), bs.sites(backbone), make_picture(lm.opened, True), nested

    for lm, cached, sites, picture, nested in at_once(build):
        np.testing.assert_array_equal(numbers(lm), numbers(expected))
        assert len(cached.output["cache"]) == 2
        assert sites == bs.sites(backbone)
        assert len(picture.frames) == 2
        np.testing.assert_array_equal(numbers(nested), numbers(backbone))
    results = at_once(lambda: generate(expected))
    assert all(result == generate(expected) for result in results)


def test_a_task_is_not_begun_while_another_is_made():
    """Keras changes the bases of the class of a task while it makes one."""
    with ThreadPoolExecutor(1) as pool:
        with graph.building():
            begun = pool.submit(bs.CachedCausalLM.__new__, bs.CachedCausalLM)
            assert not wait([begun], timeout=0.2).done
        assert isinstance(begun.result(timeout=10), bs.CachedCausalLM)


def generate(lm):
    out = lm.generate(INPUTS, max_new_tokens=3, stop_token_ids=None, seed=1)
    return out["token_ids"].tolist()


def test_a_name_made_up_in_another_thread_or_session_is_not_made_up_again():
    x = keras.Input((3,))
    source = keras.Model(x, (x * 2.0) * 3.0)
    names = [op.name for op in source.operations]
    keras.utils.clear_session(free_memory=False)

    def twice(layer, *args, **kwargs):
        return layer(*args, **kwargs) * 2.0

    clone = keras.Model(x, bs.clone_layer_graph(x, source.output, twice))
    assert len(clone.operations) == 5
    assert set(names) < {op.name for op in clone.operations}
    assert numbers(clone, np.ones((1, 3), "float32"))[0, 0] == 24
