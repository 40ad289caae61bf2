"""Whatever is passed to an analysis or to `rewrite_nested` is used or refused in words."""

import keras
import keras_hub
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import make_gpt2
from tests.rubbish import complaints, with_rubbish


@pytest.fixture(scope="module")
def lm():
    backbone = keras_hub.models.GPT2Backbone(20, 2, 2, 8, 16, max_sequence_length=16)
    return bs.CachedCausalLM(backbone)


def without_used(calls, *used):
    """Leave out what is meant to run: it compiles, and other tests compare what comes out."""
    return {name: f for name, f in calls.items() if not name.startswith(used)}


@pytest.mark.slow
def test_patch_grid(lm):
    arguments = {
        "lm": lambda: lm,
        "clean": lambda: [1, 2],
        "corrupted": lambda: [1, 3],
        "metric": lambda: 7,
        "at": lambda: "blocks.0",
        "batch_size": lambda: 2,
        "by_head": lambda: False,
    }
    calls = with_rubbish(bs.patch_grid, arguments)
    used = ("metric=0", "clean=dict of mixed", "corrupted=dict of mixed")
    assert not complaints(without_used(calls, *used))


@pytest.mark.slow
def test_logit_lens_and_attribution(lm):
    texts = {"lm": lambda: lm, "text": lambda: [1, 2], "at": lambda: "blocks.0"}
    lens = with_rubbish(bs.logit_lens, texts)
    attribution = with_rubbish(bs.attribution, {**texts, "target": lambda: 7})
    assert not complaints(without_used(lens, "text=0", "text=range", "text=dict of mixed"))
    used = ("text=0", "text=range", "text=dict of mixed", "target=0")
    assert not complaints(without_used(attribution, *used))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (int, "Received one that fails with"),
        (lambda logits: logits["text"], "Received one that fails with"),
        (lambda logits: logits[:, 0] > 0, r"Received bool of shape \[1\]"),
        (lambda logits: None, "fails with"),
    ],
)
def test_metrics_that_give_no_number_are_refused(lm, metric, words):
    for call in (
        lambda: bs.patch_grid(lm, [1, 2], [1, 3], metric),
        lambda: bs.attribution(lm, [1, 2], metric),
    ):
        with pytest.raises(bs.SurgeryError, match=f"at '(metric|target)': expected .*{words}"):
            call()
    with pytest.raises(bs.SurgeryError, match=r"expected a function that returns floats"):
        bs.attribution(lm, [1, 2], lambda logits: keras.ops.argmax(logits, axis=-1))


@pytest.mark.slow
def test_a_metric_that_divides_by_zero_is_not_taken_for_a_broken_model(lm):
    texts = lm, [1, 2, 3], [1, 4, 3]
    for call in (bs.patch_grid, bs.edge_attribution, bs.edge_patching):
        with pytest.raises(
            bs.SurgeryError, match=r"at 'metric': .* finite values\. Received NaN or Inf"
        ):
            call(*texts, lambda logits: 0 * logits[:, 0] / (logits[:, 0] - logits[:, 0]))
        with pytest.raises(bs.SurgeryError, match=r"finite values\. Received NaN or Inf"):
            call(*texts, lambda logits: keras.ops.log(0 * logits[:, 0]))
    with pytest.raises(
        bs.SurgeryError, match=r"at 'metric': .* finite gradients\. Received NaN or Inf"
    ):
        bs.edge_attribution(*texts, lambda logits: keras.ops.sqrt(0 * logits[:, 0]))
    with pytest.raises(
        bs.SurgeryError, match=r"Received NaN or Inf, of the metric or of a model that"
    ):
        bs.attribution(lm, [1, 2], lambda logits: keras.ops.sqrt(0 * logits[:, 0]))
    with pytest.raises(
        bs.SurgeryError, match=r"Received NaN or Inf, of the metric or of a model that"
    ):
        bs.attribution(lm, [1, 2], lambda logits: 0 * logits[:, 0] - np.inf)


@pytest.mark.slow
def test_a_model_past_the_range_of_float16_is_told_of():
    backbone = make_gpt2(num_layers=2, dtype="float16")
    backbone.transformer_layers[0]._feedforward_output_dense.bias.assign(np.full(32, 6e4))
    backbone.transformer_layers[1]._feedforward_output_dense.bias.assign(np.full(32, 6e4))
    lm = bs.CachedCausalLM(backbone)
    calls = [
        lambda: bs.logit_lens(lm, [1, 2, 3]),
        lambda: bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6)),
        lambda: bs.attribution(lm, [1, 2, 3], (5, 6)),
    ]
    for call in calls:
        with pytest.raises(
            bs.SurgeryError,
            match=r"expected finite numbers\. Received NaN or Inf, of a model.* bfloat16",
        ):
            call()
    with pytest.raises(bs.SurgeryError, match=r"check at .* expected finite hidden states\."):
        bs.check(backbone)


def test_errors_name_the_function_and_its_argument(lm):
    grid, lens, attribution = bs.patch_grid, bs.logit_lens, bs.attribution
    for words, call in {
        "attribution at 'target': expected one": lambda: attribution(lm, [1, 2], 99),
        "attribution at 'target': expected a token": lambda: attribution(lm, [1, 2], (1, 2, 3)),
        "attribution at 'target': expected a func": lambda: attribution(lm, [1, 2], bs.Site("x")),
        "attribution at 'at': .*Received 3": lambda: attribution(lm, [1, 2], 7, at=3),
        "logit_lens at 'at': .*Received 3": lambda: lens(lm, [1, 2], at=3),
        "patch_grid at 'at': .*Received 3": lambda: grid(lm, [1, 2], [1, 3], 7, at=3),
        "patch_grid at 'metric': expected one": lambda: grid(lm, [1, 2], [1, 3], "a"),
    }.items():
        with pytest.raises(bs.SurgeryError, match=f"^{words}"):
            call()


@pytest.mark.parametrize("ids", [[1, 2**32 + 5], [1, True], [1, 2.0], [[1], [2, 3]], [1, -1], []])
def test_token_ids_are_neither_wrapped_nor_guessed(lm, ids):
    for call in (
        lambda: bs.logit_lens(lm, ids),
        lambda: bs.ControlVector.train(lm, [(ids, [1])], "mean_diff", verbose=0),
    ):
        with pytest.raises(bs.SurgeryError, match=r"expected (token ids|two texts)"):
            call()


def test_rewrite_nested():
    x = keras.Input((4,))
    dense = keras.layers.Dense(4, name="dense")
    model = keras.Model(x, dense(x))
    arguments = {
        "model": lambda: model,
        "path": lambda: "dense",
        "clone_fn": lambda: lambda layer, *args, **kwargs: layer(*args, **kwargs),
    }
    calls = with_rubbish(bs.rewrite_nested, arguments)
    del calls["clone_fn=function"]  # One that returns no tensors: a `TypeError`, as upstream.
    assert not complaints(calls)


def test_a_batch_size_of_numpy_is_that_of_python(lm):
    grids = [
        bs.patch_grid(lm, [1, 2], [1, 3], 7, at="blocks.0", batch_size=size)
        for size in (2, np.int64(2))
    ]
    assert np.array_equal(grids[0].values, grids[1].values)
