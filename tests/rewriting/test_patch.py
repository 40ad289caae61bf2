"""Patching puts exactly the given values at exactly the given tokens."""

import keras
import numpy as np
import pytest

import backbone_surgery as bs
from tests.caching.test_rewire import left_padded
from tests.helpers import make_deep_gpt2, ragged, relative
from tests.reference import by_hand, run, run_chunks, tokens

EXACT = 1e-5


class PutIn(keras.layers.Layer):
    """Put a constant at one position of one row."""

    def __init__(self, row, position, value):
        super().__init__()
        self.row, self.position, self.value = row, position, value

    def call(self, x):
        rows = keras.ops.arange(keras.ops.shape(x)[0])[:, None, None] == self.row
        here = keras.ops.arange(keras.ops.shape(x)[1])[None, :, None] == self.position
        return keras.ops.where(rows & here, self.value, x)


@pytest.fixture(scope="module")
def backbone():
    return make_deep_gpt2()


@pytest.mark.slow
def test_a_patched_token_has_the_given_value(backbone, rng):
    edited = bs.operate(backbone, [bs.Patch("blocks.0")])
    inputs, value = tokens(rng), rng.normal(size=(2, 2, 32)).astype("float32")
    patch = {
        "patch_positions": np.array([[[-1, 3]], [[0, 8]]]),
        "patch_value_0": value,
    }

    def between(x, blocks):
        x = PutIn(0, 3, value[0, 1])(blocks[0](x))
        x = PutIn(1, 8, value[1, 1])(PutIn(1, 0, value[1, 0])(x))
        for block in blocks[1:]:
            x = block(x)
        return x

    wanted = run(by_hand(backbone, between), inputs)
    got = run(edited, {**inputs, **patch})
    assert relative(got, wanted) <= EXACT
    assert relative(run(backbone, inputs), wanted) > 1e-3
    for chunks in ([9], [4, 1, 4]):
        cached = run_chunks(bs.rewire(edited), inputs, chunks, **patch)[0]
        assert relative(cached, wanted) <= EXACT


@pytest.mark.slow
def test_patching_every_site_with_its_own_value_is_bit_equal(backbone, rng):
    paths = [p for p in bs.sites(bs.open_backbone(backbone)) if "pattern" not in p]
    inputs = left_padded(rng, [9, 6], 9)
    mask = inputs["padding_mask"].astype(bool)
    patches = [bs.Patch(p, name=p.replace(".", "_")) for p in paths]
    edited = bs.operate(backbone, [bs.Capture(*paths), *patches])
    positions = np.stack([np.arange(9), np.where(np.arange(9) < 6, np.arange(9), -1)])
    idle = {f"{p.name}_positions": np.full((2, 1, 9), -1) for p in patches}
    for i, tensor in enumerate(edited.captures[path] for path in paths):
        idle[f"{patches[i].name}_value_0"] = np.zeros((2, 9, *tensor.shape[2:]), "float32")
    plain = edited.predict_on_batch({**inputs, **idle})
    hidden = np.asarray(plain["hidden_states"])[mask]
    assert relative(hidden, run(bs.open_backbone(backbone), inputs)[mask]) <= EXACT
    for path, rewrite in zip(paths, patches, strict=True):
        own = np.asarray(plain["captures"][path])
        value = np.stack([own[0], np.roll(own[1], -3, axis=0)])
        name = rewrite.name
        for change, same in ((0, True), (1, False)):
            patch = {f"{name}_positions": positions[:, None], f"{name}_value_0": value + change}
            got = edited.predict_on_batch({**inputs, **idle, **patch})
            equal = np.array_equal(np.asarray(got["hidden_states"])[mask], hidden)
            assert equal == same, path


@pytest.mark.slow
def test_all_of_a_block_from_another_prompt_gives_the_other_prompts_states(backbone, rng):
    clean, corrupted = tokens(rng, rows=1), tokens(rng, rows=1)
    edited = bs.operate(backbone, [bs.Patch("blocks.1")])
    capturing = bs.operate(backbone, [bs.Capture("blocks.1")])
    value = capturing.predict_on_batch(clean)["captures"]["blocks.1"]
    patch = {"patch_positions": np.arange(9)[None, None], "patch_value_0": value}
    assert relative(run(edited, {**corrupted, **patch}), run(backbone, clean)) <= EXACT
    assert relative(run(edited, corrupted), run(backbone, corrupted)) <= EXACT


@pytest.mark.slow
def test_patching_in_generation_counts_tokens_of_each_row(rng):
    edited = bs.operate(
        make_deep_gpt2(), [bs.Patch("blocks.*.mlp_output"), bs.Capture("blocks.*.*")]
    )
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    inputs = ragged(rng, (3, 6), 6)
    options = {"max_new_tokens": 6, "stop_token_ids": None, "return_captures": True}
    value = rng.normal(0, 3, (2, 32))
    values = {f"blocks.{i}.mlp_output": value for i in range(3)}
    positions = np.array([[[-1, -1], [1, 4], [-1, -1]], [[-1, -1], [-1, -1], [7, -1]]])
    patch = {"patch": {"positions": positions, "values": values}}
    _, captures = lm.generate(inputs, controls=patch, **options)
    _, plain = lm.generate(inputs, **options)
    seen = captures["blocks.1.mlp_output"]
    assert np.array_equal(seen[0, [1, 4]], value.astype("float32"))
    assert np.array_equal(captures["blocks.2.mlp_output"][1, 7], value[0].astype("float32"))
    assert np.array_equal(seen[0, 0], plain["blocks.1.mlp_output"][0, 0])
    assert np.array_equal(seen[1, :8], plain["blocks.1.mlp_output"][1, :8])
    assert lm.programs.compilations["decode"] == 2


@pytest.mark.slow
def test_some_heads_are_patched_and_the_others_stay(rng):
    """Which heads, a call says row by row; without a word those that the rewrite names."""
    patch = bs.Patch("blocks.*.head_outputs", heads=[1, 3])
    lm = bs.CachedCausalLM(
        bs.operate(make_deep_gpt2(), [patch, bs.Capture("blocks.*.head_outputs")])
    )
    lm.compile(sampler="greedy")
    inputs, sites = ragged(rng, (3, 6), 6), [f"blocks.{i}.head_outputs" for i in range(3)]
    options = {"max_new_tokens": 5, "stop_token_ids": None, "return_captures": True}
    given = {
        "positions": [[2, 5], [4, -1]],
        "values": {path: rng.normal(0, 3, (2, 4, 8)).astype("float32") for path in sites},
    }
    mask = np.zeros((2, 3, 4))
    mask[0, 0, 2], mask[1, 2, [0, 1]] = 1, 1
    _, plain = lm.generate(inputs, controls={"patch": {**given, "heads": 0}}, **options)
    compiled = dict(lm.programs.compilations)
    for heads, wanted in (
        (mask, mask),
        ([1, 0], np.array([[[0, 1, 0, 1]] * 3, [[0] * 4] * 3])),
        (None, np.array([[[0, 1, 0, 1]] * 3] * 2)),
    ):
        patch = given if heads is None else {**given, "heads": heads}
        text, captures = lm.generate(inputs, controls={"patch": patch}, **options)
        for s, path in enumerate(sites):
            for row, position, entry in ((0, 2, 0), (0, 5, 1), (1, 4, 0)):
                now, is_patched = captures[path][row, position], wanted[row, s] == 1
                value = given["values"][path][entry]
                assert np.array_equal(now[is_patched], value[is_patched])
                assert not (now[~is_patched] == value[~is_patched]).any()
        first = sites[0]
        assert np.array_equal(captures[first][0, 2][[0]], plain[first][0, 2][[0]])
        lengths = np.array([3, 6])
        mask_of_text = np.arange(text["token_ids"].shape[1]) < lengths[:, None] + 5
        logits = np.asarray(
            lm.score(text["token_ids"], mask_of_text, controls={"patch": patch})
        ).argmax(-1)
        for row, n in enumerate(lengths):
            new = text["token_ids"][row, n : n + 5]
            assert np.array_equal(logits[row, n - 1 : n + 4], new)
    assert lm.programs.compilations == compiled
    words = r"'patch', 'heads' \(a mask\): expected .* \[3, 4\] \(for all rows\) or \[2, 3, 4\]"
    with pytest.raises(bs.SurgeryError, match=words):
        lm.generate(inputs, controls={"patch": {**given, "heads": [1, 3, 0]}}, **options)


@pytest.mark.slow
def test_one_head_at_every_token_gives_the_cell_of_a_grid(rng):
    lm = bs.CachedCausalLM(make_deep_gpt2())
    clean, corrupted = rng.integers(1, 60, (2, 7))
    site = "blocks.*.head_outputs"
    grid = bs.patch_grid(lm, clean, corrupted, metric=(3, 9), at=site, by_head=True)
    reader = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Capture(site)]))
    reader.compile(sampler="greedy")
    row = {"token_ids": clean[None], "padding_mask": np.ones((1, 7))}
    seen = reader.generate(row, max_new_tokens=1, stop_token_ids=None, return_captures=True)[1]
    patched = bs.CachedCausalLM(bs.operate(lm.backbone, [bs.Patch(site)]))
    given = {"positions": np.arange(7), "values": {path: seen[path][0] for path in seen}}
    for s, h in np.ndindex(3, 4):
        mask = np.zeros((3, 4))
        mask[s, h] = 1
        controls = {"patch": {**given, "heads": mask}}
        logits = np.asarray(patched.score(corrupted[None], controls=controls))[0, -1]
        assert abs(logits[3] - logits[9] - grid.values[s, h]) < 1e-4


@pytest.mark.slow
def test_fixed_positions_take_values_alone(rng):
    lm = bs.CachedCausalLM(bs.operate(make_deep_gpt2(), [bs.Patch("blocks.0", positions=(1,))]))
    lm.compile(sampler="greedy")
    inputs, options = ragged(rng, (4, 4), 4), {"max_new_tokens": 5, "stop_token_ids": None}
    value = 9 * np.ones((1, 32))
    got = lm.generate(inputs, controls={"patch": {"values": value}}, **options)["token_ids"]
    free = bs.CachedCausalLM(bs.operate(lm.backbone.owner, [bs.Patch("blocks.0")]))
    free.compile(sampler="greedy")
    patch = {"positions": [1], "values": {"blocks.0": value}}
    wanted = free.generate(inputs, controls={"patch": patch}, **options)["token_ids"]
    assert np.array_equal(got, wanted)
    assert not np.array_equal(lm.generate(inputs, **options)["token_ids"], got)


@pytest.mark.slow
def test_fixed_positions_patch_in_one_pass_and_cached(backbone, rng):
    inputs, value = tokens(rng), rng.normal(size=(2, 2, 32)).astype("float32")
    fixed = bs.operate(backbone, [bs.Patch("blocks.0", positions=(1, 4))])
    free = bs.operate(backbone, [bs.Patch("blocks.0")])
    positions = np.tile(np.array([1, 4]), (2, 1, 1))
    wanted = run(free, {**inputs, "patch_positions": positions, "patch_value_0": value})
    plain = run(backbone, inputs)
    assert relative(run(fixed, {**inputs, "patch_value_0": value}), wanted) <= EXACT
    assert relative(run(fixed, inputs), plain) <= EXACT < 1e-3 < relative(wanted, plain)
    cached = bs.rewire(fixed)
    assert relative(run_chunks(cached, inputs, [9], patch_value_0=value)[0], wanted) <= EXACT
    assert relative(run_chunks(cached, inputs, [9])[0], plain) <= EXACT


def test_errors(rng):
    backbone = make_deep_gpt2()
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1.attention_pattern': expected sites with"):
        bs.operate(backbone, [bs.Patch("blocks.1.*")])
    with pytest.raises(bs.SurgeryError, match="expected positions"):
        bs.Patch("blocks.1", positions=(2, 2))
    with pytest.raises(bs.SurgeryError, match=r"expected positions.*Received 'all'"):
        bs.Patch("blocks.1", positions="all")
    with pytest.raises(bs.SurgeryError, match=r"from 0 on.*Received \(2, -1\).* -1 for none goes"):
        bs.Patch("blocks.1", positions=(2, -1))
    with pytest.raises(bs.SurgeryError, match=r"0 to 63, as many as the model has learned.*64"):
        bs.operate(backbone, [bs.Patch("blocks.1", positions=(63, 64))])
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1': expected no heads.*blocks.1.query"):
        bs.operate(backbone, [bs.Patch("blocks.1", heads=[0])])
    with pytest.raises(bs.SurgeryError, match=r"heads from 0 to 3. Received \[4\]"):
        bs.operate(backbone, [bs.Patch("blocks.1.query", heads=4)])
    with pytest.raises(
        bs.SurgeryError, match=r"as many heads each.*'blocks.1.mlp_output': 'none'.*one rewrite for"
    ):
        bs.operate(backbone, [bs.Patch("blocks.1.*_output*", heads=[0])])
    with pytest.raises(bs.SurgeryError, match="`heads`, or `directions` in the whole site"):
        bs.Patch("blocks.1.query", heads=[0], directions=np.ones(8))
    lm = bs.CachedCausalLM(bs.operate(backbone, [bs.Patch("blocks.0:2")]))
    lm.compile(sampler="greedy")
    value = np.zeros((1, 32))
    values = {"blocks.0": value, "blocks.1": value}
    for patch, words in (
        ({"positions": [1]}, "expected a dict of positions and values"),
        (
            {"positions": [1], "values": values, "heads": [1]},
            "There is no `heads`, unless all sites have as many",
        ),
        ({"positions": [1.5], "values": values}, "expected positions"),
        ({"positions": [-2], "values": values}, "expected positions"),
        ({"positions": [64], "values": values}, r"expected positions.* to 63 or -1 for none"),
        ({"positions": [2**32], "values": values}, r"expected positions.* Received \[4294967296\]"),
        ({"positions": [True], "values": values}, "expected positions"),
        ({"positions": [1], "values": {**values, 3: value}}, "3 is no patched site"),
        ({"positions": [1], "values": {**values, "blocks.0": value + np.nan}}, "finite values"),
        ({"positions": [[1], [2], [3]], "values": values}, "expected positions"),
        ({"positions": [1], "values": {"blocks.0": value}}, "'blocks.1' is missing. Pass"),
        (
            {"positions": [1], "values": {**values, "blocks.2": value}},
            "'blocks.2' is no patched site. Did you mean",
        ),
        ({"positions": [1, 2], "values": values}, r"expected an array of shape \[1, 2, 32\]"),
    ):
        with pytest.raises(bs.SurgeryError, match=f"'patch'.*{words}"):
            lm.generate(ragged(rng, (3,), 3), controls={"patch": patch}, stop_token_ids=None)
    assert lm.programs.compilations == {"prefill": 0, "decode": 0}


@pytest.mark.slow
def test_positions_that_a_text_does_not_have_are_refused(rng):
    """They would patch nothing. The last new token is chosen, and not run."""
    lm = bs.CachedCausalLM(bs.operate(make_deep_gpt2(), [bs.Patch("blocks.0")]))
    lm.compile(sampler="greedy")
    value = rng.normal(size=(1, 32)).astype("float32")
    ids = np.array([[3, 4, 5, 6, 7]])

    def patch(*positions):
        return {"patch": {"positions": [[p] for p in positions], "values": value}}

    assert not np.array_equal(lm.score(ids, controls=patch(4)), lm.score(ids))
    with pytest.raises(bs.SurgeryError, match=r"run, 5 in row 0, the last one at 4. Received 5"):
        lm.score(ids, controls=patch(5))
    with pytest.raises(bs.SurgeryError, match="Received 5"):
        bs.logit_lens(lm, [3, 4, 5, 6, 7], controls=patch(5))
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    prompts = {"token_ids": np.repeat(ids, 2, 0), "padding_mask": mask}
    options = {"max_new_tokens": 3, "stop_token_ids": None}
    lm.generate(prompts, controls=patch(4, 6), **options)
    with pytest.raises(bs.SurgeryError, match=r"5 in row 0, the last one at 4. Received 5. Pass"):
        lm.generate(prompts, controls=patch(5, 6), **options)
    with pytest.raises(bs.SurgeryError, match=r"7 in row 1, the last one at 6. Received 7"):
        lm.generate(prompts, controls=patch(-1, 7), **options)
