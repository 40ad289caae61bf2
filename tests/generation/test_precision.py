"""Products of float32 are as precise as was asked for."""

import numpy as np
import pytest

import backbone_surgery as bs
from backbone_surgery import target
from tests.helpers import FAMILIES, make_gpt2

INPUTS = {"token_ids": np.array([[1, 2, 3]]), "padding_mask": np.ones((1, 3), bool)}


@pytest.mark.by_default(1)
@pytest.mark.parametrize("precision", [None, "highest"])
def test_it_is_asked_for_in_the_programs(monkeypatch, precision):
    import jax

    texts = []
    compile_it = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda x, options: texts.append(x.as_text()) or compile_it(x, options),
    )
    lm = bs.CachedCausalLM(make_gpt2(num_layers=1), precision=precision)
    lm.compile(sampler="greedy")
    lm.generate(INPUTS, max_new_tokens=2, stop_token_ids=None)
    assert len(texts) == 2
    for text in texts:
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert len(products) > 4
        assert all(("HIGHEST" in line) == (precision == "highest") for line in products)


def test_none_is_what_jax_is_set_to_at_the_call():
    import jax

    lm = bs.CachedCausalLM(make_gpt2(num_layers=1))
    lm.compile(sampler="greedy")
    for count, precision in enumerate((None, "highest", None), 1):
        with jax.default_matmul_precision(precision):
            lm.generate(INPUTS, max_new_tokens=2, stop_token_ids=None)
        assert lm.programs.compilations["decode"] == min(count, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_jax_set_to_64_bits_changes_nothing(name):
    """KerasHub's own `generate` fails there: indices of its caches have two dtypes."""
    import jax

    backbone = FAMILIES[name](num_layers=2)
    edit = bs.Steer("mood", {1: np.ones(backbone.hidden_dim)})
    texts = []
    for bits in (False, True):
        with jax.enable_x64(bits):
            lm = bs.CachedCausalLM(bs.operate(backbone, [edit, bs.Capture("blocks.0")]))
            for sampler, options in (("greedy", {"lookup": 2}), ("beam", {})):
                lm.compile(sampler=sampler)
                options |= {"controls": {"mood": 0.5}, "stop_token_ids": None}
                new = lm.generate(INPUTS, max_new_tokens=4, **options)
                texts.append(np.asarray(new["token_ids"]).tolist())
    assert texts[:2] == texts[2:]


@pytest.mark.slow
def test_check_and_analyses_where_jax_is_set_to_64_bits():
    import jax

    lm = bs.CachedCausalLM(make_gpt2(num_layers=2))
    wanted = bs.patch_grid(lm, [1, 2, 3], [1, 4, 3], metric=(5, 6)).values
    shares = bs.attribution(lm, [1, 2, 3], (5, 6)).values
    with jax.enable_x64(True):
        other = bs.CachedCausalLM(lm.backbone)
        bs.check(lm.backbone)
        got = bs.patch_grid(other, [1, 2, 3], [1, 4, 3], metric=(5, 6)).values
        assert np.abs(got - wanted).max() <= 1e-5
        assert np.abs(bs.attribution(other, [1, 2, 3], (5, 6)).values - shares).max() <= 1e-5
        assert bs.logit_lens(other, [1, 2, 3]).token_ids.shape == (2, 3)


@pytest.mark.slow
def test_check_asks_for_the_highest(monkeypatch):
    import jax

    seen = set()
    predict = bs.caching.check.predict
    monkeypatch.setattr(
        bs.caching.check,
        "predict",
        lambda *args: seen.add(jax.config.jax_default_matmul_precision) or predict(*args),
    )
    bs.check(make_gpt2(num_layers=1))
    assert seen == {"highest"}


def test_what_is_none_is_refused():
    with pytest.raises(bs.SurgeryError, match="expected 'default', 'high', 'highest' or None"):
        bs.CachedCausalLM(make_gpt2(num_layers=1), precision="double")
    with pytest.raises(bs.SurgeryError, match="Received 3"), target.precision(3):
        pass
