"""A transcoder in place of an MLP equals NumPy, whoever saved it; its features are a site."""

from pathlib import Path

import numpy as np
import pytest

import backbone_surgery as bs
from tests.families import ROWS
from tests.helpers import make_gpt2, ragged, relative
from tests.reference import run_chunks, tokens
from tests.transcoders import (
    SIZE,
    arrays,
    decode,
    encode,
    save_circuit_tracer,
    save_gemma_scope,
    save_gemma_scope_2,
    save_saelens,
    save_sparsify,
)

EXACT = 1e-5
AT, STREAM, NORMED = "blocks.1.mlp_output", "blocks.1.residual_mid", "blocks.1.mlp_norm"
FORMATS = {
    "transcoder": (save_saelens, {"architecture": "transcoder"}, "relu", False, STREAM),
    "skip": (save_saelens, {"architecture": "skip_transcoder"}, "relu", True, STREAM),
    "jumprelu": (save_saelens, {"architecture": "jumprelu_transcoder"}, "jumprelu", False, STREAM),
    "jumprelu_skip": (
        save_saelens,
        {"architecture": "jumprelu_skip_transcoder"},
        "jumprelu",
        True,
        STREAM,
    ),
    "sparsify": (save_sparsify, {"skip": False}, "topk", False, NORMED),
    "sparsify_skip": (save_sparsify, {}, "topk", True, NORMED),
    "scope": (save_gemma_scope, {}, "jumprelu", False, "rms"),
    "scope_2": (save_gemma_scope_2, {"skip": False}, "jumprelu", False, NORMED),
    "scope_2_skip": (save_gemma_scope_2, {}, "jumprelu", True, NORMED),
}
"""By format: how it is saved, which features are kept, whether it has a skip, what it reads."""


def rms(x):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)  # that of GPT-2's norm


def layer(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def make(path, *others, backbone=None, **options):
    """Splice a transcoder in, with what it reads and what it takes the place of captured."""
    rewrites = [
        bs.Capture(AT, STREAM, NORMED, name="raw"),
        bs.Transcoder(AT, path, **options),
        bs.Capture("blocks.1.transcoder_latents"),
        *others,
        bs.Capture(AT),
    ]
    return bs.operate(backbone or make_gpt2(), rewrites)


def read(captures):
    return {path.removeprefix("raw/"): np.asarray(x) for path, x in captures.items()}


@pytest.mark.by_default(2)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_equals_numpy(kind, tmp_path, rng):
    save, options, kept, skip, source = FORMATS[kind]
    w = arrays(rng)
    edited = make(save(tmp_path, w, **options))
    inputs = tokens(rng, rows=3)
    amounts = {"transcoder_amount": np.array([1, 0, 0.5], "float32")}
    outputs = edited.predict_on_batch({**inputs, **amounts})
    got = outputs["captures"]
    raw = read({k: v for k, v in got.items() if k.startswith("raw/")})
    s = rms(raw[STREAM]) if source == "rms" else raw[source]
    features = encode(s, w, kept)
    assert 0 < (features > 0).mean() < 1
    assert relative(got["blocks.1.transcoder_latents"], features) <= EXACT
    made, x = decode(s, features, w, skip), raw[AT]
    wanted = np.stack([made[0], x[1], 0.5 * (x[2] + made[2])])
    assert relative(got[AT], wanted) <= EXACT
    assert np.array_equal(got[AT][1], x[1])
    cached, captures = run_chunks(bs.rewire(edited), inputs, [4, 1, 4], **amounts)
    assert relative(cached, outputs["hidden_states"]) <= EXACT
    assert relative(captures["blocks.1.transcoder_latents"], features) <= EXACT
    assert not {v.path for v in edited.trainable_variables if "transcoder" in v.path}


@pytest.mark.by_default(2)
@pytest.mark.parametrize("norm", [rms, layer])
@pytest.mark.parametrize("skip", [True, False])
def test_what_it_reads_may_be_said(norm, skip, tmp_path, rng):
    w = arrays(rng)
    path = save_circuit_tracer(tmp_path, w, skip)
    with pytest.raises(bs.SurgeryError, match=r"expected `source`, as no file .* says what it"):
        make(path)
    got = make(path, source=STREAM, norm=norm.__name__).predict_on_batch(tokens(rng))["captures"]
    s = norm(np.asarray(got[f"raw/{STREAM}"]))
    features = encode(s, w)
    assert relative(got["blocks.1.transcoder_latents"], features) <= EXACT
    assert relative(got[AT], decode(s, features, w, skip)) <= EXACT


def test_the_input_of_the_block_may_be_read(tmp_path, rng):
    """Also that of the first block, the embeddings."""
    w = arrays(rng)
    path = save_circuit_tracer(tmp_path, w)
    for block, source in enumerate(["embeddings", "blocks.0"]):
        at = f"blocks.{block}.mlp_output"
        path = Path(path).rename(tmp_path / f"layer_{block}.safetensors")
        rewrites = [bs.Transcoder(at, path, source=source), bs.Capture(source, at)]
        got = bs.operate(make_gpt2(), rewrites).predict_on_batch(tokens(rng))["captures"]
        s = np.asarray(got[source])
        assert relative(got[at], decode(s, encode(s, w), w)) <= EXACT


def test_it_reads_what_other_rewrites_make_of_its_source(tmp_path, rng):
    """Whether they come before it or after, as the MLP does."""
    w = arrays(rng)
    path = save_gemma_scope_2(tmp_path, w)
    steer = bs.Steer("push", {1: rng.normal(size=SIZE)}, at=NORMED)
    capture = bs.Capture(NORMED, AT)
    inputs = tokens(rng)
    for rewrites in ([steer, bs.Transcoder(AT, path)], [bs.Transcoder(AT, path), steer]):
        edited = bs.operate(make_gpt2(), [*rewrites, capture])
        got = edited.predict_on_batch(inputs)["captures"]
        s = np.asarray(got[NORMED])
        assert relative(got[AT], decode(s, encode(s, w, "jumprelu"), w)) <= EXACT


def test_with_error_only_edits_of_features_act(tmp_path, rng):
    w = arrays(rng)
    path = save_gemma_scope_2(tmp_path, w)
    inputs = tokens(rng)
    backbone = make_gpt2()
    plain = make(path, backbone=backbone, error=True)
    outputs = plain.predict_on_batch(inputs)
    assert relative(outputs["hidden_states"], backbone.predict_on_batch(inputs)) <= EXACT
    clamp = bs.Clamp("blocks.1.transcoder_latents", features=(3, 7), values=(2.0, 0.0))
    got = make(path, clamp, backbone=backbone, error=True).predict_on_batch(inputs)["captures"]
    features = np.asarray(got["blocks.1.transcoder_latents"], "float64")
    edited = features.copy()
    edited[..., 3], edited[..., 7] = 2.0, 0.0
    assert np.abs(edited - features).max() > 0.1
    wanted = got[f"raw/{AT}"] + (edited - features) @ w["W_dec"]
    assert relative(got[AT], wanted) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_neo_x"])
def test_all_mlps_at_once(name, tmp_path, rng):
    """A model whose MLPs are all transcoders: generation follows from the uncached graph."""
    backbone = ROWS[name].make()
    size = bs.open_backbone(backbone).token_embedding.output_dim
    rewrites = []
    for block in range(backbone.num_layers):
        w = arrays(rng, size, source=size)
        folder = save_gemma_scope_2(tmp_path / str(block), w, layer=block)
        rewrites.append(bs.Transcoder(f"blocks.{block}.mlp_output", folder, name=f"mlp_{block}"))
    edited = bs.operate(backbone, rewrites)
    lm = bs.CachedCausalLM(edited)
    lm.compile(sampler="greedy")
    text = lm.generate(ragged(rng, (4, 7), 7), max_new_tokens=5, stop_token_ids=None)
    assert bs.check(edited).errors
    for row, length in enumerate((4, 7)):
        ids = text["token_ids"][row : row + 1, : length + 5]
        states = edited.predict_on_batch({"token_ids": ids, "padding_mask": np.ones_like(ids)})
        logits = np.asarray(lm.opened.token_embedding(states, reverse=True))
        assert np.array_equal(logits[0, length - 1 : -1].argmax(-1), ids[0, length:])


@pytest.mark.slow
def test_features_have_gradients(tmp_path, rng):
    lm = bs.CachedCausalLM.from_preset("tiny_gpt2")
    w = arrays(rng, 128, source=128)
    number = lm.backbone.num_layers - 1
    path, last = save_gemma_scope_2(tmp_path, w, layer=number), f"blocks.{number}"
    edited = bs.operate(lm.backbone, [bs.Transcoder(f"{last}.mlp_output", path, error=True)])
    lm = bs.CachedCausalLM(edited, lm.preprocessor)
    asked = {"target": (" happy", " sad"), "at": f"{last}.transcoder_latents"}
    got = bs.attribution(lm, "Lily was", **asked)
    assert np.isfinite(got.values).all()
    by_feature = bs.attribution(lm, "Lily was", by_feature=True, **asked)
    assert by_feature.values.shape == (1, 24)
    assert abs(by_feature.values.sum() - got.values.sum()) <= 1e-4


# Files that are refused.


def test_autoencoders_are_told_from_transcoders(tmp_path, rng):
    w = arrays(rng)
    for save, options in (
        (save_saelens, {"architecture": "transcoder"}),
        (save_sparsify, {}),
        (save_gemma_scope_2, {}),
    ):
        path = save(tmp_path / save.__name__, w, **options) if save is not save_sparsify else None
        path = path or save_sparsify(tmp_path, w)
        with pytest.raises(bs.SurgeryError, match=r"no transcoder.*Use `bs.Transcoder`"):
            bs.operate(make_gpt2(), [bs.SparseAutoencoder("blocks.1", path)])
    for save, options in (
        (save_saelens, {"architecture": "standard"}),
        (save_gemma_scope_2, {"hf_hook_point_out": "a", "hf_hook_point_in": "a"}),
    ):
        path = save(tmp_path / f"{save.__name__}_2", w, **options)
        with pytest.raises(bs.SurgeryError, match=r"no autoencoder.*Use `bs.SparseAutoencoder`"):
            make(path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architecture": "crosscoder"}, "expected `architecture` transcoder, skip_transcoder"),
        ({"normalize_activations": "layer_norm"}, "expected `normalize_activations` none"),
        ({"activation_fn": "topk"}, "expected `activation_fn` relu"),
        ({"d_out": 5}, f"expected `d_out` {SIZE}, the size of the arrays"),
    ],
)
def test_settings_that_cannot_be_run(config, words, tmp_path, rng):
    options = {"architecture": "transcoder", **config}
    with pytest.raises(bs.SurgeryError, match=words):
        make(save_saelens(tmp_path, arrays(rng), **options))


def test_other_files_that_are_refused(tmp_path, rng):
    w = arrays(rng)
    with pytest.raises(bs.SurgeryError, match="a folder with one of sae"):
        make(str(tmp_path))
    with pytest.raises(bs.SurgeryError, match="expected the path of a folder or file, or `layers`"):
        make("")
    path = save_gemma_scope_2(tmp_path, w, affine_connection=False)
    with pytest.raises(bs.SurgeryError, match="expected `affine_connection` as the arrays have it"):
        make(path)
    path = save_sparsify(tmp_path, w, activation="groupmax")
    with pytest.raises(bs.SurgeryError, match="expected a top-k transcoder"):
        make(path)
    path = save_saelens(
        tmp_path / "normed", w, "transcoder", metadata={"hook_name": "blocks.1.ln2"}
    )
    with pytest.raises(bs.SurgeryError, match=r"for TransformerLens' `ln2.hook_normalized` pass"):
        make(path)
    w["W_dec"] = w["W_dec"][:, :-1]
    path = save_gemma_scope(tmp_path / "scope", w)
    with pytest.raises(bs.SurgeryError, match=r"b_dec \[size\], threshold \[latents\], and no"):
        make(path)


def test_places_that_are_refused(tmp_path, rng):
    path = save_gemma_scope_2(tmp_path, arrays(rng))
    for fields, words in (
        ({"at": "embeddings"}, "expected a site of a block that is added to the"),
        ({"at": "blocks.1"}, "expected a site of a block that is added to the"),
        ({"at": AT, "source": "blocks.1"}, "what the files say, to be one site of block 1"),
        (
            {"at": AT, "source": "blocks.0.mlp_norm"},
            "what the files say, to be one site of block 1",
        ),
        (
            {"at": AT, "source": "blocks.*.mlp_norm"},
            "what the files say, to be one site of block 1",
        ),
        ({"at": "blocks.1.attention_output"}, "what the files say, to be one site of block 1"),
        ({"at": AT, "source": "blocks.1.query"}, rf"expected one for \[4, 8\] at .*\[{SIZE}\]"),
        ({"at": AT, "source": "blocks.1.mlp_hidden"}, rf"expected one for \[64\] at .*\[{SIZE}\]"),
        ({"at": "blocks.*.mlp_output"}, "expected one site, the one that it was trained on"),
    ):
        with pytest.raises(bs.SurgeryError, match=words):
            bs.operate(make_gpt2(), [bs.Transcoder(**{"path": path, **fields})])
    twice = [bs.Transcoder(AT, path), bs.Transcoder(AT, path, name="second")]
    with pytest.raises(bs.SurgeryError, match="expected a block without another spliced one"):
        bs.operate(make_gpt2(), twice)
    with pytest.raises(bs.SurgeryError, match="norm 'none' or 'rms' or 'layer'"):
        bs.Transcoder(AT, path, norm="batch")
    with pytest.raises(bs.SurgeryError, match="expected `source` to be the selector"):
        bs.Transcoder(AT, path, source=3)
    with pytest.raises(bs.SurgeryError, match="expected `layers` and `source`"):
        bs.operate(make_gpt2(), [bs.Transcoder(AT, "", layers=(1,))])


@pytest.mark.slow
def test_a_source_beside_files_that_name_a_norm(tmp_path, rng):
    """That which the files name keeps their norm; beside another one a norm must be said."""
    path = save_gemma_scope(tmp_path, arrays(rng))
    inputs = tokens(rng)
    outputs = [
        make(path, backbone=backbone, **options).predict_on_batch(inputs)["hidden_states"]
        for backbone in [make_gpt2()]
        for options in ({}, {"source": STREAM}, {"source": STREAM, "norm": "rms"})
    ]
    assert all(np.array_equal(one, outputs[0]) for one in outputs)
    with pytest.raises(bs.SurgeryError, match=r"'blocks.1.residual_mid' with norm='rms'. Received"):
        make(path, source=NORMED)
    make(path, source=NORMED, norm="none")


def test_files_of_another_layer_are_told_of(tmp_path, rng):
    w = arrays(rng)
    paths = [
        save_gemma_scope_2(tmp_path / "a", w, layer=13),
        save_saelens(
            tmp_path / "b", w, "transcoder", metadata={"hook_name": "blocks.13.hook_mlp_in"}
        ),
    ]
    for path in paths:
        with pytest.warns(UserWarning, match="' is of layer 13"):
            make(path)


@pytest.mark.slow
def test_outputs_of_modules_have_no_site_behind_a_norm(tmp_path, rng):
    hooks = {"hook_name": "blocks.1.mlp.hook_in", "hook_name_out": "blocks.1.mlp.hook_out"}
    w = arrays(rng)
    paths = [save_sparsify(tmp_path, w)]
    paths.append(save_saelens(tmp_path / "saelens", w, "transcoder", metadata=hooks))
    for path in paths:
        make(path)
        make(path, backbone=ROWS["gemma"].make())
        with pytest.raises(bs.SurgeryError, match="behind the norm that follows the MLP"):
            make(path, backbone=ROWS["gemma2"].make())


def test_files_of_circuit_tracer_with_more_arrays(tmp_path, rng):
    w = arrays(rng)
    threshold = {"activation_function.threshold": w["threshold"]}
    path = save_circuit_tracer(tmp_path, w, **threshold)
    got = make(path, source=NORMED).predict_on_batch(tokens(rng))["captures"]
    s = np.asarray(got[f"raw/{NORMED}"])
    assert relative(got[AT], decode(s, encode(s, w, "jumprelu"), w)) <= EXACT
    with pytest.raises(bs.SurgeryError, match="expected a transcoder of ReLU or JumpReLU"):
        make(save_circuit_tracer(tmp_path, w, k=np.array(3)), source=NORMED)


@pytest.mark.slow
def test_a_file_may_be_named_itself(tmp_path, rng):
    """By the names that the programs give, whatever they end with."""
    w = arrays(rng, latents=SIZE)
    inputs, backbone = tokens(rng), make_gpt2()
    for save, name, options in (
        (save_saelens, "sae_weights.safetensors", {"architecture": "transcoder"}),
        (save_gemma_scope_2, "params.safetensors", {}),
        (save_gemma_scope, "params.npz", {}),
    ):
        folder = Path(save(tmp_path / name, w, **options))
        outputs = [
            make(path, backbone=backbone).predict_on_batch(inputs)["hidden_states"]
            for path in (folder, folder / name)
        ]
        assert np.array_equal(*outputs)
    with pytest.raises(bs.SurgeryError, match="Received a path where nothing is"):
        make(tmp_path / "layer_3.safetensors")


def test_a_site_that_the_files_name_and_the_model_has_not(tmp_path, rng):
    path = save_gemma_scope(tmp_path, arrays(rng))
    backbone = ROWS["gpt_neo_x"].make()
    with pytest.raises(
        bs.SurgeryError, match=r"or what the files say.*Received 'blocks.1.residual"
    ):
        bs.operate(backbone, [bs.Transcoder(AT, path)])


def test_the_files_are_read_once(tmp_path, rng):
    path = save_gemma_scope(tmp_path, arrays(rng))
    edited = make(path)
    kept = next(r for r in edited.rewrites if isinstance(r, bs.Transcoder))
    assert (kept.path, kept.source, kept.norm) == ("", STREAM, "rms")
    again = bs.operate(edited.owner, [kept])
    inputs = tokens(rng)
    wanted = edited.predict_on_batch(inputs)["hidden_states"]
    assert np.array_equal(again.predict_on_batch(inputs), wanted)
