"""A rewired model called directly refuses what does not fit its cache, before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2

BATCH, TIME, LENGTH = 2, 3, 8


@pytest.fixture(scope="module")
def model():
    return bs.rewire(make_gpt2(num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=16))


def inputs_of(model, **changes):
    inputs = {
        "token_ids": np.ones((BATCH, TIME), "int32"),
        "cache": bs.new_cache(model, BATCH, LENGTH),
        "cache_update_index": np.int32(0),
        "positions": np.broadcast_to(np.arange(TIME, dtype="int32"), (BATCH, TIME)),
        "cache_mask": np.ones((BATCH, LENGTH), bool),
    }
    return {k: v for k, v in {**inputs, **changes}.items() if v is not None}


INDICES = [int, np.int64, np.array, jnp.int32]


@pytest.mark.slow
@pytest.mark.parametrize("kind", INDICES)
def test_the_last_slot_that_has_room_is_taken(model, kind):
    last = LENGTH - TIME
    result = model(inputs_of(model, cache_update_index=kind(last)))
    written = np.asarray(result["cache"][0]["key"]).any(axis=(0, 2, 3))
    assert np.array_equal(written, np.arange(LENGTH) >= last)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("slot", [LENGTH - TIME + 1, LENGTH, 10**6, -1])
def test_a_slot_without_room_is_refused(model, kind, slot):
    words = rf"call of 'backbone_with_cache' at slot {slot}: expected room for 3 tokens. Received a"
    for run in (model, model.predict_on_batch):
        with pytest.raises(bs.SurgeryError, match=words):
            run(inputs_of(model, cache_update_index=kind(slot)))


@pytest.mark.parametrize(
    "index",
    [0.0, np.float32(1), jnp.float32(1), True, np.array(True), "0", None, [0], np.zeros(1, int)],
)
def test_an_index_that_is_no_integer_is_refused(model, index):
    inputs = inputs_of(model)
    inputs["cache_update_index"] = index
    with pytest.raises(bs.SurgeryError, match=r"at 'cache_update_index': expected an int"):
        model(inputs)


def test_an_index_in_a_compiled_function_has_no_value_to_check(model):
    """As documented: it is on the caller there."""

    @jax.jit
    def run(index, cache):
        return model(inputs_of(model, cache=cache, cache_update_index=index))["hidden_states"]

    assert run(jnp.int32(LENGTH), bs.new_cache(model, BATCH, LENGTH)).shape == (BATCH, TIME, 16)
    with pytest.raises(bs.SurgeryError, match="expected an int"):
        run(jnp.float32(0), bs.new_cache(model, BATCH, LENGTH))


def cut(array, axis, size):
    return array[(slice(None),) * axis + (slice(size),)]


WRONG = {
    "no entries": (lambda c: {"cache": []}, "'cache': expected a list of dicts with the arrays"),
    "one entry": (lambda c: {"cache": c[:1]}, "'cache': expected a list of dicts .* Received"),
    "three entries": (lambda c: {"cache": [*c, c[0]]}, "'cache': expected a list of dicts"),
    "an array": (lambda c: {"cache": c[0]["key"]}, "'cache': expected a list of dicts"),
    "no value": (lambda c: {"cache": [{"key": c[0]["key"]}, c[1]]}, r"Received \[\['key'\], \['k"),
    "rows of the cache": (
        lambda c: {"cache": [{k: x[:1] for k, x in entry.items()} for entry in c]},
        r"'cache\[0\]\['key'\]': expected shape \(2, 8, 2, 8\). Received shape \(1, 8, 2, 8\)",
    ),
    "slots of one array": (
        lambda c: {"cache": [c[0], {**c[1], "value": cut(c[1]["value"], 1, 5)}]},
        r"'cache\[1\]\['value'\]': expected shape \(2, 8, 2, 8\). Received shape \(2, 5, 2, 8\)",
    ),
    "heads": (
        lambda c: {"cache": [{**c[0], "key": cut(c[0]["key"], 2, 1)}, c[1]]},
        r"'cache\[0\]\['key'\]': expected shape",
    ),
    "rows of tokens": (
        lambda c: {"token_ids": np.ones((3, TIME), "int32")},
        r"expected shape \(3,",
    ),
    "a flat row": (lambda c: {"token_ids": np.ones(3, "int32")}, r"'token_ids': expected int\[b"),
    "positions": (
        lambda c: {"positions": np.zeros((2, 4), "int32")},
        r"'positions': expected shape \(2, 3\). Received shape \(2, 4\)",
    ),
    "mask of the tokens": (
        lambda c: {"cache_mask": np.ones((2, TIME), bool)},
        r"'cache_mask': expected shape \(2, 8\). Received shape \(2, 3\)",
    ),
    "no mask": (lambda c: {"cache_mask": None}, "expected a dict of inputs .* name cache_mask"),
    "no positions": (lambda c: {"positions": None}, "none of the name positions"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused(model, name):
    change, words = WRONG[name]
    inputs = inputs_of(model)
    changed = {**inputs, **change(inputs["cache"])}
    for run in (model, model.predict_on_batch):
        with pytest.raises(bs.SurgeryError, match=f"(?s)call of 'backbone_with_cache'.*{words}"):
            run({k: v for k, v in changed.items() if v is not None})


def test_inputs_that_are_no_dict_are_refused(model):
    with pytest.raises(bs.SurgeryError, match="expected a dict of inputs with token_ids, cache"):
        model(np.ones((2, 3)))


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "3", None, np.float32(2), 2**40, 2**70])
def test_sizes_of_a_new_cache(model, size):
    with pytest.raises(bs.SurgeryError, match="'batch_size': expected a positive int"):
        bs.new_cache(model, size, 4)
    with pytest.raises(bs.SurgeryError, match="'length': expected a positive int"):
        bs.new_cache(model, 2, size)


def test_numpy_sizes_of_a_new_cache(model):
    assert bs.new_cache(model, np.int64(2), np.uint8(5))[0]["key"].shape == (2, 5, 2, 8)
