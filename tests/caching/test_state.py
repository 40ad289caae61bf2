"""A user's own stateful layers: pieces equal the whole, in every way of generating."""

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

import backbone_surgery as bs
from backbone_surgery.caching.cache import bytes_per_token
from backbone_surgery.drawing.picture import make_picture
from backbone_surgery.generation import run_batch
from tests.helpers import make_deep_gpt2, make_gemma2, make_gpt2, ragged, relative
from tests.reference import run_chunks

EXACT = 5e-6


@keras.saving.register_keras_serializable("test_state")
class CausalConv(keras.layers.Layer):
    """A depthwise convolution over the last tokens: its state are the inputs before."""

    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def build(self, shape):
        self.kernel = self.add_weight(shape=(self.size, shape[-1]), initializer="random_normal")

    def call(self, x, padding_mask):
        x = x * ops.cast(padding_mask, x.dtype)[..., None]
        return self._convolve(ops.pad(x, ((0, 0), (self.size - 1, 0), (0, 0))), ops.shape(x)[1])

    def state_specs(self, x, padding_mask):
        return [bs.StateSpec("inputs", (None, self.size - 1, x.shape[-1]), self.compute_dtype)]

    def call_with_state(self, x, padding_mask, state):
        x = x * ops.cast(padding_mask, x.dtype)[..., None]
        time = ops.shape(x)[1]
        window = ops.concatenate([state["inputs"], x], axis=1)
        count = ops.max(padding_mask * (ops.arange(time) + 1), axis=1)
        latest = count[:, None] + ops.arange(self.size - 1)
        inputs = ops.take_along_axis(window, latest[..., None], axis=1)
        return self._convolve(window, time), {"inputs": inputs}

    def _convolve(self, window, time):
        parts = [self.kernel[i] * window[:, i : i + time] for i in range(self.size)]
        return window[:, self.size - 1 :] + sum(parts)

    def get_config(self):
        return {**super().get_config(), "size": self.size}


@keras.saving.register_keras_serializable("test_state")
class CumulativeMean(keras.layers.Layer):
    """The mean of the row so far. Its state: a sum in float32, and a count that starts at 1."""

    def call(self, x, padding_mask):
        real = ops.cast(padding_mask, "float32")
        total = ops.cumsum(ops.cast(x, "float32") * real[..., None], axis=1)
        count = 1 + ops.cumsum(real, axis=1)
        return ops.cast(total / count[..., None], x.dtype) + x

    def state_specs(self, x, padding_mask):
        return [
            bs.StateSpec("total", (None, x.shape[-1]), "float32"),
            bs.StateSpec("count", (None,), "int32", initial=1),
        ]

    def call_with_state(self, x, state, positions, cache_mask, cache_update_index):
        time = ops.shape(x)[1]
        real = ops.slice(cache_mask, (0, cache_update_index), (ops.shape(x)[0], time))
        real = ops.cast(real, "float32")
        total = ops.cumsum(ops.cast(x, "float32") * real[..., None], axis=1)
        total = state["total"][:, None] + total
        count = ops.cast(state["count"], "float32")[:, None] + ops.cumsum(real, axis=1)
        updated = {"total": total[:, -1], "count": ops.cast(count[:, -1], "int32")}
        return ops.cast(total / count[..., None], x.dtype) + x, updated


def edit(backbone):
    return bs.operate(
        backbone,
        [
            bs.Insert("blocks.0.mlp_output", CausalConv(4, name="convolution")),
            bs.Insert("blocks.1", CumulativeMean(name="mean")),
        ],
    )


@pytest.fixture(scope="module")
def lm():
    lm = bs.CachedCausalLM(edit(make_deep_gpt2()))
    lm.compile(sampler="greedy")
    return lm


def uncached(lm, rows):
    """Logits after each token of some rows, by a pass without a cache: one program for all."""
    ids = np.zeros((6, 32), "int32")
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    mask = np.arange(32)[None] < np.array([*map(len, rows), *[0] * (6 - len(rows))])[:, None]
    hidden = lm.opened.predict_on_batch({"token_ids": ids, "padding_mask": mask.astype("int32")})
    logits = np.asarray(hidden) @ np.asarray(lm.opened.token_embedding.embeddings).T
    return [logits[i, : len(row)] for i, row in enumerate(rows)]


def greedy_by_hand(lm, rows, steps):
    rows = [[int(i) for i in row] for row in rows]
    for _ in range(steps):
        for row, logits in zip(rows, uncached(lm, rows), strict=True):
            row.append(int(logits[-1].argmax()))
    return rows


def test_states_are_listed_in_the_order_in_which_the_layers_run(lm):
    model = lm.backbone_with_cache
    names = [list(entry) for entry in model.states]
    pair = ["key", "value"]
    assert names == [pair, ["inputs"], pair, ["total", "count"], pair]
    assert [list(entry) for entry in model.input["cache"]] == names
    cache = bs.new_cache(model, 2, 11)
    assert cache[1]["inputs"].shape == (2, 3, 32)
    assert (cache[3]["total"].shape, cache[3]["count"].shape) == ((2, 32), (2,))
    assert np.array_equal(cache[3]["count"], [1, 1])
    assert bytes_per_token(model) == 3 * 2 * 32 * 4  # of what grows
    packed = lm.programs.packing.new_cache(1, 11)
    shapes = [[x.shape for x in entry.values()] for entry in packed]
    assert shapes[1] + shapes[3] == [(3, 32), (32,), ()]


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_gpt2, make_gemma2])
def test_check_passes(make):
    report = bs.check(edit(make()))
    assert max(report.errors.values()) <= EXACT


@pytest.mark.slow
def test_check_runs_past_the_window_that_a_layer_tells():
    class LooksFar(CausalConv):
        sliding_window_size = 20

    report = bs.check(bs.operate(make_deep_gpt2(), [bs.Insert("blocks.1", LooksFar(3))]))
    assert report.tokens == 24


@pytest.mark.slow
def test_check_passes_in_half_precision():
    layers = [CausalConv(4, dtype="bfloat16"), CumulativeMean(name="mean", dtype="bfloat16")]
    edited = bs.operate(
        make_gpt2(dtype="bfloat16"), [bs.Insert("blocks.1", layer) for layer in layers]
    )
    model = bs.rewire(edited)
    assert [spec.dtype for entry in model.states[2:4] for spec in entry.values()] == [
        "bfloat16",
        "float32",
        "int32",
    ]
    bs.check(edited)


@pytest.mark.slow
def test_left_padded_rows_equal_each_row_alone(lm, rng):
    ids = rng.integers(1, 60, (3, 14)).astype("int32")
    lengths = [14, 9, 2]
    mask = np.arange(14)[None] >= 14 - np.array(lengths)[:, None]
    inputs = {"token_ids": ids, "padding_mask": mask.astype("int32")}
    wanted = uncached(lm, [ids[i, 14 - length :] for i, length in enumerate(lengths)])
    for chunks in ([14], [3, 1, 3, 1, 3, 3]):
        hidden, _ = run_chunks(lm.backbone_with_cache, inputs, chunks)
        logits = np.asarray(hidden) @ np.asarray(lm.opened.token_embedding.embeddings).T
        for i, length in enumerate(lengths):
            assert relative(logits[i, 14 - length :], wanted[i]) <= EXACT


@pytest.mark.slow
def test_call_with_cache_equals_uncached_in_pieces(lm, rng):
    ids = rng.integers(1, 60, (2, 9)).astype("int32")
    cache, pieces = bs.new_cache(lm.backbone_with_cache, 2, 12), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        logits, _, cache = lm.call_with_cache(ids[:, start:end], cache, start)
        pieces.append(np.asarray(logits))
    assert relative(np.concatenate(pieces, axis=1), np.stack(uncached(lm, ids))) <= EXACT
    cache[1]["inputs"] = cache[1]["inputs"][:1]
    with pytest.raises(bs.SurgeryError, match=r"call_with_cache at 'cache\[1\]\['inputs'\]'"):
        lm.call_with_cache(ids, cache, 0)


def test_pictures_show_the_state(lm):
    picture = make_picture(lm.backbone_with_cache, True)
    names = [node.name for node in picture.nodes]
    for layer, entry, arrays in (("convolution", 1, "inputs"), ("mean", 3, "total, count")):
        node = names.index(f"cached_{layer}")
        before, after = names.index(f"cache_{entry}"), names.index(f"cache_{entry}_updated")
        assert {(before, node), (node, after)} <= set(picture.edges)
        assert picture.nodes[before].description == picture.nodes[after].description == arrays
        assert picture.nodes[before].kind == "cache"
    assert picture.nodes[names.index("cached_convolution")].description == "CausalConv"


@pytest.mark.slow
def test_greedy_equals_uncached_in_a_growing_cache(lm, rng, monkeypatch):
    monkeypatch.setattr(run_batch, "_GROWS_FROM", 16)
    inputs = ragged(rng, (9, 3, 6), 9)
    got = lm.generate(inputs, max_new_tokens=20, stop_token_ids=None)["token_ids"]
    rows = [inputs["token_ids"][i, :length] for i, length in enumerate((9, 3, 6))]
    for row, wanted in zip(got, greedy_by_hand(lm, rows, 20), strict=True):
        assert np.array_equal(row[: len(wanted)], wanted)


def beams_by_hand(lm, prompt, steps, width):
    """The best of `width` beams, each run uncached."""
    beams = [(0.0, [int(i) for i in prompt])]
    for _ in range(steps):
        grown = []
        for (score, ids), logits in zip(beams, uncached(lm, [b[1] for b in beams]), strict=True):
            last = logits[-1].astype("float64")
            log_probs = last - last.max() - np.log(np.exp(last - last.max()).sum())
            grown += [(score + p, [*ids, token]) for token, p in enumerate(log_probs)]
        beams = sorted(grown, reverse=True)[:width]
    return beams[0][1]


@pytest.mark.slow
def test_beams_repeat_and_reorder_the_state(lm, rng):
    inputs = ragged(rng, (4, 7), 7)
    lm.compile(sampler=keras_hub.samplers.BeamSampler(num_beams=3))
    try:
        got = lm.generate(inputs, max_new_tokens=8, stop_token_ids=None)["token_ids"]
        alone = {k: v[:1, :4] for k, v in inputs.items()}
        one = lm.generate(alone, max_new_tokens=8, stop_token_ids=None)["token_ids"]
    finally:
        lm.compile(sampler="greedy")
    for i, length in enumerate((4, 7)):
        wanted = beams_by_hand(lm, inputs["token_ids"][i, :length], 8, 3)
        assert np.array_equal(got[i, : length + 8], wanted)
    assert np.array_equal(one[0], got[0, :12])


@pytest.mark.slow
def test_streamed_text_joins_to_what_is_generated():
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    layer = CausalConv(3)
    lm = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Insert("blocks.0", layer)]), lm.preprocessor)
    lm.compile(sampler="greedy")
    prompt = "Once upon a time"
    pieces = list(lm.stream(prompt, max_new_tokens=10, chunk_size=3))
    assert len(pieces) > 2
    assert "".join(pieces) == lm.generate(prompt, max_new_tokens=10)


@pytest.mark.slow
def test_recipe_brings_the_state_back(tmp_path, rng):
    backbone = make_deep_gpt2()
    edited = edit(backbone)
    bs.save_recipe(edited, tmp_path / "it.recipe")
    again = bs.load_recipe(tmp_path / "it.recipe", backbone)
    inputs = {"token_ids": rng.integers(1, 60, (2, 6)), "padding_mask": np.ones((2, 6))}
    results = [run_chunks(bs.rewire(m), inputs, [2, 4])[0] for m in (edited, again)]
    assert np.array_equal(*results)


def stateful(**methods):
    """A layer that passes its input on, with wrong methods of the protocol."""

    def state_specs(self, x):
        return [bs.StateSpec("last", (None, x.shape[-1]), "float32")]

    def call_with_state(self, x, state):
        return x, {"last": x[:, -1]}

    members = {"state_specs": state_specs, "call_with_state": call_with_state, **methods}
    return type("Wrong", (keras.layers.Layer,), {"call": lambda self, x: x, **members})(name="odd")


WRONG = {
    "no `state`": {"call_with_state": lambda self, x: (x, {})},
    "one with 'slots'": {"call_with_state": lambda self, x, state, slots: (x, state)},
    r"returns the state \['last'\]. Received one that returns \['first'\]": {
        "call_with_state": lambda self, x, state: (x, {"first": x[:, -1]})
    },
    "returns the state .* Received one that returns tuple": {
        "call_with_state": lambda self, x, state: (x, ())
    },
    r"keeps 'last' as .*\(.*32\), 'float32'.* one that makes it .*'float16'": {
        "call_with_state": lambda self, x, state: (x, {"last": ops.cast(x[:, -1], "float16")})
    },
    "gives what `call` gives. Received one that gives shapes": {
        "call_with_state": lambda self, x, state: (x[..., :3], state)
    },
    "runs. Received one that fails with KeyError": {
        "call_with_state": lambda self, x, state: (x, state["other"])
    },
    "expected `state_specs` to return a list of": {"state_specs": lambda self, x: ["last"]},
    "of different names": {
        "state_specs": lambda self, x: [bs.StateSpec("a", (None,), "int32")] * 2
    },
}


@pytest.mark.by_default(3)
@pytest.mark.parametrize("words", WRONG)
def test_wrong_methods_are_refused_when_rewired(words):
    edited = bs.operate(make_deep_gpt2(), [bs.Insert("blocks.0", stateful(**WRONG[words]))])
    with pytest.raises(bs.SurgeryError, match=f"rewire at 'odd'.*{words}"):
        bs.rewire(edited)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "no name"}, "a name that is an identifier"),
        ({"shape": (None, 3.5)}, "a shape of ints"),
        ({"shape": (None, True)}, "a shape of ints"),
        ({"shape": (2, 3)}, "`None` at axis 0, for the rows"),
        ({"shape": (None, None)}, "`None` at axis 0, for the rows, and at `slot_axis` alone"),
        ({"shape": (None, 3), "slot_axis": 1}, "`None` at axis 0.* and at `slot_axis` alone"),
        ({"shape": (None, 3), "slot_axis": 0}, "`None` at axis 0.* and at `slot_axis` alone"),
        ({"shape": (None, 3), "head_axis": 2}, "`head_axis` to be an axis of fixed size"),
        ({"shape": (None, 3), "head_axis": 0}, "`head_axis` to be an axis of fixed size"),
        ({"shape": None}, "a shape of ints"),
        ({"slot_axis": [1]}, "`slot_axis` to be an axis or `None`"),
        ({"head_axis": True}, "`head_axis` to be an axis or `None`"),
        ({"dtype": "float33"}, "the name of a dtype"),
        ({"dtype": ["float32"]}, "the name of a dtype"),
        ({"initial": "zero"}, "`initial` to be a number"),
    ],
)
def test_wrong_specs_are_refused(arguments, words):
    right = {"name": "last", "shape": (None, 3), "dtype": "float32"}
    with pytest.raises(bs.SurgeryError, match=f"StateSpec at .*expected {words}"):
        bs.StateSpec(**{**right, **arguments})


class KeepsPadding(CausalConv):
    """A convolution that keeps the last inputs, whether they are padding or not."""

    def call_with_state(self, x, padding_mask, state):
        x = x * ops.cast(padding_mask, x.dtype)[..., None]
        window = ops.concatenate([state["inputs"], x], axis=1)
        return self._convolve(window, ops.shape(x)[1]), {"inputs": window[:, ops.shape(x)[1] :]}


@pytest.mark.slow
def test_check_finds_state_that_padding_after_a_chunk_changes():
    conv = KeepsPadding(4, name="convolution")
    edited = bs.operate(make_gpt2(), [bs.Insert("blocks.0", conv)])
    with pytest.raises(bs.CacheMismatchError, match=r"padding after chunks: [1-9]"):
        bs.check(edited)
