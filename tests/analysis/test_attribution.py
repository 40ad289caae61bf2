"""Attribution against a corrupted text, and by feature, equals slopes of NumPy's own runs."""

from unittest import mock

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery.analysis import gradients
from tests.autoencoders import arrays, decode, encode, save
from tests.helpers import FAMILIES, make_gpt2
from tests.numpy_models import Model, weights_of

CLEAN, CORRUPTED = [3, 14, 15, 9, 2], [3, 14, 26, 9, 2]
STEP = 1e-4


@pytest.fixture(scope="module", params=["gpt2", "gemma2"])
def lm(request):
    return bs.CachedCausalLM(FAMILIES[request.param](num_layers=2))


def metric(lm, model, ids):
    logits = model(np.array([ids]))[0, -1] @ weights_of(lm.backbone.token_embedding)[0].T
    cap = getattr(lm.backbone, "final_logit_soft_cap", None)
    logits = np.tanh(logits / cap) * cap if cap else logits
    return logits[7] - logits[8]


def slope(lm, ids, block, role, move):
    """Return by how much the metric changes for each unit of a change at one site."""
    values = []
    for step in (STEP, -STEP):
        model = Model(lm.backbone)
        model.blocks[block].at(role, lambda x, _, step=step: x + step * move(x))
        values.append(metric(lm, model, ids))
    return (values[0] - values[1]) / (2 * STEP)


def only(x, index):
    """Return x at an index, and zeros elsewhere."""
    kept = np.zeros_like(x)
    kept[index] = x[index]
    return kept


CASES = {
    "block": ((0, 2), {}),
    "head_outputs": ((0, slice(None), 1), {"by_head": True}),
    "mlp_hidden": ((0, slice(None), 5), {"by_feature": True}),
}
"""By role: the cell of one column, tokens, heads or features, and how they are asked for."""


@pytest.mark.by_default(1)
@pytest.mark.parametrize("role", CASES)
def test_changes_are_slopes_towards_the_clean_text(lm, role):
    index, options = CASES[role]
    at = "blocks.*" if role == "block" else f"blocks.*.{role}"
    got = bs.attribution(lm, CLEAN, (7, 8), at, corrupted=CORRUPTED, **options)
    reference = Model(lm.backbone)
    assert abs(got.corrupted - metric(lm, reference, CORRUPTED)) <= 1e-4
    assert abs(got.metric - metric(lm, reference, CLEAN)) <= 1e-4
    states, site = reference.captures(), got.sites[0]
    wanted = slope(lm, CORRUPTED, 0, role, lambda x: only(states[site] - x, index))
    assert abs(got.values[0, index[-1]] - wanted) <= 1e-3 * max(abs(wanted), 0.1)
    assert abs(wanted) > 1e-3


def test_it_is_what_a_grid_measures_where_the_model_is_linear():
    """From the last norm on, a logit of GPT-2 is a sum."""
    lm = bs.CachedCausalLM(FAMILIES["gpt2"](num_layers=2))
    grid = bs.patch_grid(lm, CLEAN, CORRUPTED, (7, 8), at="final_norm")
    got = bs.attribution(lm, CLEAN, (7, 8), "final_norm", corrupted=CORRUPTED)
    assert np.abs(got.corrupted + got.values - grid.values).max() <= 1e-4
    assert abs(grid.clean - grid.corrupted) > 1e-2


def test_both_texts_share_one_program(lm):
    """Also for a function, whose program is not kept."""

    def metric(logits):
        return logits[:, 7] - logits[:, 8]

    with mock.patch.object(gradients, "_step", wraps=gradients._step) as made:
        got = bs.attribution(lm, CLEAN, metric, corrupted=CORRUPTED)
    assert made.call_count == 1
    wanted = bs.attribution(lm, CLEAN, (7, 8), corrupted=CORRUPTED)
    np.testing.assert_allclose(got.values, wanted.values, rtol=1e-4, atol=1e-5)


def test_neurons_are_slopes(lm):
    got = bs.attribution(lm, CLEAN, (7, 8), "blocks.*.mlp_hidden", by_feature=True)
    assert got.columns == [str(i) for i in range(got.values.shape[1])]
    assert repr(got).startswith(f"Attribution(2 sites x {len(got.columns)} features; metric")
    for site, neuron, value in got.top(3):
        block = got.sites.index(site)
        wanted = slope(
            lm, CLEAN, block, "mlp_hidden", lambda x, n=neuron: only(x, (0, slice(None), n))
        )
        assert abs(value - wanted) <= 1e-3 * max(abs(wanted), 0.1)
    assert [abs(value) for *_, value in got.top(3)] == sorted(np.abs(got.values).flat)[:-4:-1]


def test_features_of_an_autoencoder(tmp_path, rng):
    w = arrays(rng, "standard")
    autoencoder = bs.SparseAutoencoder("blocks.0", save(tmp_path, w, "standard"))
    backbone = make_gpt2(num_layers=2)
    lm = bs.CachedCausalLM(bs.operate(backbone, [autoencoder]))
    at = "blocks.0.sae_latents"
    got = bs.attribution(lm, CLEAN, (7, 8), at, by_feature=True, corrupted=CORRUPTED)
    reference = Model(backbone)
    reference(np.array([CLEAN]))
    clean = encode(reference.captures()["blocks.0"], w, "standard")
    for _, feature, value in got.top(4):
        values = []
        for step in (STEP, -STEP):

            def put(x, _, step=step, feature=feature):
                features = encode(x, w, "standard")
                move = only(clean - features, (0, slice(None), feature))
                return decode(x, features + step * move, w)

            model = Model(backbone)
            model.blocks[0].at("block", put)
            values.append(metric(lm, model, CORRUPTED))
        wanted = (values[0] - values[1]) / (2 * STEP)
        assert abs(value - wanted) <= 1e-3 * max(abs(wanted), 0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"by_feature": "yes"}, "at 'by_feature': expected True or False"),
        ({"by_feature": True, "by_head": True}, "expected `by_head` or `by_feature`"),
        ({"by_feature": True, "at": "blocks.0.query"}, r"sites of one size.*\[4, 8\]"),
        ({"by_feature": True, "at": "blocks.0.mlp_*"}, "sites of one size"),
        ({"corrupted": CLEAN}, "two different texts"),
        ({"corrupted": [1, 2]}, "two different texts of as many tokens"),
    ],
)
def test_what_is_refused(lm, options, words):
    with pytest.raises(bs.SurgeryError, match=f"^attribution.*{words}"):
        bs.attribution(lm, CLEAN, 7, **options)


def test_features_are_listed_and_not_drawn(lm):
    got = bs.attribution(lm, CLEAN, 7, "blocks.*.mlp_hidden", by_feature=True)
    with pytest.raises(bs.SurgeryError, match=r"too many columns to draw\. List"):
        bs.plot_grid(got)
    with pytest.raises(bs.SurgeryError, match=r"Attribution.top at 'count'"):
        got.top(0)
    ax = bs.plot_grid(bs.attribution(lm, CLEAN, 7, corrupted=CORRUPTED))
    assert ax.figure.axes[1].get_ylabel() == "change of the metric, to first order"
