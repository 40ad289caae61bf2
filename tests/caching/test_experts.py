"""While few tokens are run at a time, the chosen experts alone are read, and nothing changes."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import backbone_surgery as bs
from backbone_surgery import target
from backbone_surgery.caching import experts
from backbone_surgery.caching.experts import ChosenExperts, choice_of
from backbone_surgery.kernels import gpu
from backbone_surgery.opening.experts import MixedExperts, TopExperts, largest
from tests.families import ROWS
from tests.helpers import relative
from tests.reference import run_chunks, tokens

EXPERTS, HIDDEN, INNER = 8, 12, 20


class Bank(keras.layers.Layer):
    """Kernels of experts, and a bias."""

    def build(self, _):
        shapes = {"up": (HIDDEN, INNER), "down": (INNER, HIDDEN), "bias": (HIDDEN,)}
        for name, shape in shapes.items():
            setattr(self, name, self.add_weight(shape=(EXPERTS, *shape), name=name))

    def call(self, x):
        return x


def expert(x, bank):
    return bank.project(ops.tanh(bank.project(x, "up")), "down") + bank.vector("bias")


@pytest.fixture
def mixed(rng):
    bank = Bank()
    bank.build(None)
    for variable in bank.weights:
        variable.assign(rng.normal(size=variable.shape))
    return MixedExperts(bank, expert, {"up": 2, "down": 1})


def inputs_of(rng, rows, time=1, top_k=2):
    x = rng.normal(size=(rows, time, HIDDEN)).astype("float32")
    logits = rng.normal(size=(rows, time, EXPERTS)).astype("float32")
    return x, np.array(TopExperts(top_k)(logits))


@pytest.mark.by_default(1)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("piece_bytes", [1, 500, 2**22])
@pytest.mark.parametrize(("rows", "time"), [(1, 1), (3, 1), (1, 2), (2, 2), (4, 5)])
def test_it_equals_all_experts(rng, mixed, monkeypatch, rows, time, piece_bytes, platform):
    monkeypatch.setattr(experts, "_PIECE_BYTES", piece_bytes)
    x, weights = inputs_of(rng, rows, time)
    kernels = [np.asarray(w) for w in mixed.bank.weights]
    made = [np.tanh(x @ up) @ down + bias for up, down, bias in zip(*kernels, strict=True)]
    wanted = np.einsum("ebth,bte->bth", made, weights)
    assert relative(mixed(x, weights), wanted) <= 1e-6
    with target.made_for(platform):
        assert relative(ChosenExperts(mixed, 2)(x, weights), wanted) <= 1e-6


@pytest.mark.by_default(1)
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_it_reads_the_chosen_experts_alone(rng, mixed, platform):
    """An expert of NaNs shows where it is read, though its weight be zero."""
    x, weights = inputs_of(rng, 3)
    weights[..., 5] = 0
    for variable in mixed.bank.weights:
        value = np.array(variable)
        value[5] = np.nan
        variable.assign(value)
    chosen = ChosenExperts(mixed, 2)
    assert np.isnan(mixed(x, weights)).all()
    with target.made_for(platform):
        assert np.isfinite(chosen(x, weights)).all()
        more = inputs_of(rng, 4)  # as many choices as experts
        assert np.isnan(chosen(*more)).all()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_gpu_needs_a_kernel_for_it(rng, mixed, monkeypatch, has_kernels):
    """Without one it runs all."""
    monkeypatch.setattr(gpu, "available", lambda: has_kernels)
    x, weights = inputs_of(rng, 1)
    mixed(x, weights)
    for variable in mixed.bank.weights:
        value = np.array(variable)
        value[~weights[0, 0].astype(bool)] = np.nan
        variable.assign(value)
    with target.made_for("gpu"):
        assert np.isfinite(ChosenExperts(mixed, 2)(x, weights)).all() == has_kernels


@pytest.mark.by_default(2)
@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize(("rows", "time"), [(3, 1), (1, 2)])
def test_a_tpu_runs_what_any_token_weighs(rng, mixed, monkeypatch, rows, time, edited):
    """An expert that is in the bank alone is not read; on a mesh all are."""
    x, _ = inputs_of(rng, rows, time)
    logits = rng.normal(size=(rows, time, EXPERTS)).astype("float32")
    logits[..., 5] = -30.0
    chooser = TopExperts(2)
    weights = chooser(logits)
    wanted = np.array(mixed(x, weights))
    for variable in mixed.bank.weights:
        value = np.array(variable)
        value[5] = np.nan
        variable.assign(value)
    layer = ChosenExperts(mixed, 2) if edited else ChosenExperts(mixed, 2, chooser)
    run = jax.jit(lambda: layer(x, weights if edited else logits))
    with target.made_for("tpu"):
        assert relative(np.array(run()), wanted) <= 1e-6
    with target.made_for("tpu", placement=object()):
        assert np.isnan(layer(x, weights if edited else logits)).all()
    for name in ("_MOST_SHARE", "_MOST_MADE"):
        with monkeypatch.context() as patch, target.made_for("tpu"):
            patch.setattr(experts, name, 0.1)
            assert np.isnan(layer(x, weights if edited else logits)).all()


def test_a_tpu_runs_all_experts_where_it_is_not_told_what_their_kernels_are(rng, mixed):
    x, weights = inputs_of(rng, 2)
    untold = MixedExperts(mixed.bank, expert)
    wanted = untold(x, weights)
    with target.made_for("tpu"):
        assert relative(ChosenExperts(untold, 2)(x, weights), wanted) <= 1e-6


@pytest.mark.by_default(1)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(("rows", "time"), [(1, 1), (2, 1), (1, 3)])
def test_what_a_row_of_no_use_weighs_is_not_read(rng, mixed, platform, rows, time):
    """Of twice as many rows the first half is of use: beams, each with an empty row."""
    x, weights = inputs_of(rng, 2 * rows, time)
    unused = [i for i in range(EXPERTS) if not weights[:rows, ..., i].any()]
    weights[rows:] = 0
    weights[rows:, :, unused[:2]] = 0.5
    wanted = np.array(mixed(x, weights))[:rows]
    for variable in mixed.bank.weights:
        value = np.array(variable)
        value[unused] = np.nan
        variable.assign(value)
    chosen = ChosenExperts(mixed, 2)
    assert np.isnan(chosen(x, weights)[rows:]).any()
    with target.made_for(platform), target.one_row_of(2):
        got = np.array(chosen(x, weights))
    assert got.shape == x.shape
    assert np.isfinite(got).all()
    assert relative(got[:rows], wanted) <= 1e-6


@pytest.mark.by_default(2)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("chosen_first", [True, False])
@pytest.mark.parametrize(("rows", "platform"), [(2, "cpu"), (6, "cpu"), (6, "tpu")])
def test_experts_are_chosen_by_logits_as_by_weights(
    rng, mixed, rows, platform, normalize, chosen_first
):
    """A row whose logits are all minus infinity has no expert."""
    chooser = TopExperts(2, normalize=normalize, chosen_first=chosen_first)
    x = rng.normal(size=(rows, 1, HIDDEN)).astype("float32")
    logits = rng.normal(size=(rows, 1, EXPERTS)).astype("float32")
    logits[1] = -np.inf
    wanted = np.array(mixed(x, chooser(logits)))
    with target.made_for(platform):
        got = np.array(ChosenExperts(mixed, 2, chooser)(x, logits))
    assert relative(got, wanted) <= 1e-6
    assert not wanted[1].any()
    assert wanted[0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_mesh_of_gpus_the_largest_are_found_by_sorting(rng, dtype):
    x = ops.cast(rng.integers(-4, 4, size=(3, 1, 9)), dtype)  # some are equal
    x = ops.where(ops.equal(x, -4.0), -np.inf, x)
    x = ops.where(ops.equal(x, 3.0) & (np.arange(9) % 2 == 0), np.nan, x)
    wanted = ops.top_k(x, 4)
    with target.made_for("gpu", placement=object()):
        text = jax.jit(lambda x: largest(x, 4)).lower(x).as_text()
        got = largest(x, 4)
    assert "sort" in text
    assert "top_k" not in text
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.array(one, "float32"), np.array(other, "float32"))


def compiled(layer, x, weights):
    """Compile one call of a layer, with the weights of its bank as arguments."""
    variables = layer.mixed.bank.weights

    def call(values, x, weights):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return layer(x, weights)

    values = [v.value for v in variables]
    return jax.jit(call).lower(values, x, weights).compile()


@pytest.mark.by_default(1)
@pytest.mark.parametrize("piece_bytes", [80, 2**22])
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "mixed_bfloat16"])
def test_the_bank_is_not_cast_as_a_whole(rng, monkeypatch, policy, piece_bytes):
    monkeypatch.setattr(experts, "_PIECE_BYTES", piece_bytes)
    bank = Bank(dtype=policy)
    bank.build(None)
    stored = sum(v.value.nbytes for v in bank.weights)
    mixed = MixedExperts(bank, expert, dtype=policy)
    x, weights = (ops.cast(a, mixed.compute_dtype) for a in inputs_of(rng, 1, top_k=1))
    wanted = mixed(x, weights)
    chosen = ChosenExperts(mixed, 1)
    program = compiled(chosen, x, weights)
    # One expert of eight, in float32.
    assert program.memory_analysis().temp_size_in_bytes < 0.6 * stored
    assert relative(chosen(x, weights), wanted) <= (2e-2 if "b" in policy else 1e-6)


VECTOR = np.ones(6, "float32")
EDITS = {
    "nothing": (None, "logits"),
    "capture": (bs.Capture("blocks.0.expert_weights"), "logits"),
    "steered router": (bs.Steer("mood", {0: VECTOR}, "blocks.*.router"), "logits"),
    "steered weights": (bs.Steer("mood", {0: VECTOR}, "blocks.*.expert_weights"), None),
    "patched": (bs.Patch("blocks.0.expert_weights"), None),
    "repeated": (bs.Repeat("blocks.0", times=2), "logits"),
    "ablated": (bs.Ablate("blocks.0.expert_weights"), "weights"),
    "mean": (
        bs.Ablate("blocks.0.expert_weights", to="mean", values={"blocks.0.expert_weights": VECTOR}),
        None,
    ),
}


@pytest.mark.slow
def test_a_block_that_runs_twice_may_be_edited_once(rng):
    twice = bs.operate(ROWS["mixtral"].make(num_layers=1), [bs.Repeat("blocks.0", times=2)])
    model = bs.operate(twice, [bs.Ablate("blocks.1.expert_weights", experts=[2])])
    cached = bs.rewire(model)
    chosen = [x for x in cached._flatten_layers() if isinstance(x, ChosenExperts)]
    assert [x.chooser is None for x in chosen] == [False, True]
    inputs = tokens(rng, 2, 6)
    wanted = model.predict_on_batch(inputs)
    assert relative(run_chunks(cached, inputs, [3, 1, 1, 1])[0], wanted) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 3])
def test_on_a_tpu_a_row_of_nans_is_lost_alone(rng, mixed, lost):
    x = rng.normal(size=(3, 1, HIDDEN)).astype("float32")
    logits = rng.normal(size=(3, 1, EXPERTS)).astype("float32")
    logits[:lost] = np.nan
    chooser = TopExperts(2)
    wanted = np.array(mixed(x, chooser(logits)))
    layer = ChosenExperts(mixed, 2, chooser)
    assert np.isnan(wanted[:lost]).all()
    for run in (layer, jax.jit(layer)):
        with target.made_for("tpu"):
            got = np.array(run(x, logits))
        assert np.isnan(got[:lost]).all()
        np.testing.assert_allclose(got[lost:], wanted[lost:], rtol=1e-4, atol=1e-5)


def test_weights_that_are_an_input_may_be_any():
    assert choice_of(keras.Input((3, 8)), "float32") is None


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_what_gives_weight_to_more_experts_has_all_of_them_run(rng, edit):
    rewrite, chosen_by = EDITS[edit]
    backbone = ROWS["mixtral"].make(num_layers=1, num_experts=6)
    model = bs.operate(backbone, [rewrite] if rewrite else [])
    cached = bs.rewire(model)
    chosen = [x for x in cached._flatten_layers() if isinstance(x, ChosenExperts)]
    kinds = ["weights" if x.chooser is None else "logits" for x in chosen]
    assert kinds == ([] if chosen_by is None else [chosen_by])
    inputs = tokens(rng, 2, 6)
    wanted = model.predict_on_batch(inputs)
    wanted = wanted["hidden_states"] if isinstance(wanted, dict) else wanted
    assert relative(run_chunks(cached, inputs, [3, 1, 1, 1])[0], wanted) <= 1e-5
