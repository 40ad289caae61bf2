"""Weights move by path: each lands where it belongs, or the error says why not."""

import contextlib
import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import keras
import keras_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import backbone_surgery as bs
from backbone_surgery.weights.paths import variable_paths
from tests.helpers import FAMILIES, make_deep_gpt2, make_gpt2

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(params=["gpt2", "gemma2"])
def family(request):
    return request.param


@pytest.fixture
def backbone(family):
    return FAMILIES[family](num_layers=3)


@pytest.fixture
def other(family):
    return FAMILIES[family](seed=3, num_layers=3)


def arrays(model):
    """The weights of a KerasHub backbone by its own paths, read without this library."""
    return {v.path: np.array(v) for v in model.weights}


def block_name(backbone, index):
    return backbone.transformer_layers[index].name


def same(a, b):
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def paths_of(report, kind):
    """The paths of the differences of one kind."""
    return tuple(d.path for d in report.differences if d.kind == kind)


def snapshot(model):
    return {path: np.array(v) for path, v in variable_paths(model).items()}


# Edits, each as a plain clone_fn, so that they also run without an EditedBackbone.


def kind_of(backbone):
    return type(backbone.transformer_layers[0])


def removing(backbone):
    def clone_fn(layer, *args, **kwargs):
        if layer.name == block_name(backbone, 1):
            return args[0]
        return layer(*args, **kwargs)

    return clone_fn


def repeating(backbone):
    def clone_fn(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        return layer(x, **kwargs) if layer.name == block_name(backbone, 1) else x

    return clone_fn


def reordering(backbone):
    blocks = list(backbone.transformer_layers)
    order = dict(zip(blocks, [blocks[0], *reversed(blocks[1:])], strict=True))

    def clone_fn(layer, *args, **kwargs):
        return order.get(layer, layer)(*args, **kwargs)

    return clone_fn


def inserting(backbone):
    def clone_fn(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        return keras.layers.Dense(32)(x) if layer.name == block_name(backbone, 0) else x

    return clone_fn


def wrapping(backbone):
    def clone_fn(layer, *args, **kwargs):
        x = layer(*args, **kwargs)
        if isinstance(layer, kind_of(backbone)):
            return keras.layers.Add()([args[0], x])
        return x

    return clone_fn


EDITS = {f.__name__: f for f in (removing, repeating, reordering, inserting, wrapping)}


@pytest.fixture(params=list(EDITS))
def edit(request):
    return EDITS[request.param]


class Scale(keras.layers.Layer):
    """A layer with a weight, and a rewrite that puts one of its own at each of its sites."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


class ScaleSites(bs.SiteRewrite):
    at = "blocks.*.mlp_output"

    def apply(self, x, place, surgery):
        return Scale()(x)


def plain(backbone, edit):
    return keras.Model(
        backbone.input, bs.clone_layer_graph(backbone.input, backbone.output, edit(backbone))
    )


# The tree


def test_weight_tree_holds_every_weight_once(family, backbone):
    tree = bs.weight_tree(backbone)
    leaves = list(walk(tree))
    assert all(type(leaf) is np.ndarray for leaf in leaves)
    assert len(leaves) == len(backbone.weights)
    block = backbone.transformer_layers[1]
    attention = next(v for v in block.weights if v.path.endswith("query/kernel"))
    name = {"gpt2": "self_attention", "gemma2": "attention"}[family]
    np.testing.assert_array_equal(tree["blocks"]["1"][name]["query"]["kernel"], attention)


def walk(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from walk(value)
        else:
            yield value


def test_weight_tree_is_a_snapshot(backbone):
    tree = bs.weight_tree(backbone)
    before = tree["token_embedding"]["embeddings"].copy()
    backbone.token_embedding.embeddings.assign(before + 1)
    np.testing.assert_array_equal(tree["token_embedding"]["embeddings"], before)


def test_names_that_keras_made_up_do_not_matter():
    def make():
        return keras.Sequential([keras.Input((3,))] + [keras.layers.Dense(3) for _ in range(11)])

    a, b = make(), make()
    assert [v.path for v in a.weights] != [v.path for v in b.weights]
    bs.transfer_weights(b, a)
    for x, y in zip(a.weights, b.weights, strict=True):
        np.testing.assert_array_equal(x, y)


def test_unnamed_weights_are_never_mixed_up():
    """Keras calls those of the first `variable`, `variable_1`, of the second `variable_2`, ..."""

    class Pair(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.a, self.b = self.add_weight(shape=()), self.add_weight(shape=())

        def call(self, x):
            return self.a * x + self.b

    source, _, destination = (
        keras.Sequential([keras.Input((3,)), Pair(name="pair")]) for _ in range(3)
    )
    assert list(variable_paths(destination)) == ["pair.variable", "pair.variable_1"]
    source.layers[0].a.assign(1.0)
    source.layers[0].b.assign(2.0)
    bs.transfer_weights(destination, source, strict=False)
    assert [float(v) for v in destination.weights] == [1.0, 2.0]


def test_inserted_layers_are_named_by_where_they_are(backbone):
    paths = [list(variable_paths(bs.operate(backbone, [ScaleSites()]))) for _ in range(2)]
    assert paths[0] == paths[1]
    count = backbone.num_layers
    assert paths[0][-count:] == [f"blocks.{i}.scale.scale" for i in range(count)]


# Transfer, by value


def test_every_weight_lands_where_keras_itself_puts_it(backbone, other, tmp_path):
    report = bs.transfer_weights(other, backbone)
    same(arrays(other), arrays(backbone))
    assert len(report.copied) == len(backbone.weights)
    assert not report.differences


def test_after_an_edit_weights_land_in_the_owner(backbone, other, edit):
    """The destination was edited by `operate`; what was inserted keeps its weights."""
    edited = bs.operate(other, [edit(other)])
    extra = [p for p in variable_paths(edited) if p not in variable_paths(other)]
    assert bool(extra) == (edit is inserting)
    values = {p: np.array(variable_paths(edited)[p]) for p in extra}
    if extra:
        before = snapshot(edited)
        with pytest.raises(bs.WeightMismatchError, match=r"missing +dense\.kernel"):
            bs.transfer_weights(edited, backbone)
        same(snapshot(edited), before)
    bs.transfer_weights(edited, backbone, strict=not extra)
    same(arrays(other), arrays(backbone))
    same({p: np.array(variable_paths(edited)[p]) for p in extra}, values)


@pytest.mark.by_default(2)
def test_from_an_edited_model_into_the_backbone(backbone, other, edit):
    edited = bs.operate(backbone, [edit(backbone)])
    if edit is inserting:
        with pytest.raises(bs.WeightMismatchError, match=r"unexpected +dense\.kernel"):
            bs.transfer_weights(other, edited)
    bs.transfer_weights(other, edited, strict=edit is not inserting)
    same(arrays(other), arrays(backbone))


def test_a_plain_clone_gets_right_weights_or_an_error(backbone, other, edit):
    """Without `operate` there is no owner: blocks are told apart by their own names."""
    clone = plain(other, edit)
    if edit in (removing, inserting):
        with pytest.raises(bs.WeightMismatchError):
            bs.transfer_weights(clone, backbone)
    bs.transfer_weights(clone, backbone, strict=edit not in (removing, inserting))
    wanted = arrays(backbone)
    for path, value in arrays(clone).items():
        if path in wanted:
            np.testing.assert_array_equal(value, wanted[path], err_msg=path)


def test_rewrites_between_two_edited_models(backbone, other, rng):
    a, b = (bs.operate(m, [ScaleSites()]) for m in (backbone, other))
    for path, variable in variable_paths(a).items():
        if path.endswith("scale.scale"):
            variable.assign(rng.normal(size=variable.shape))
    bs.transfer_weights(b, a)
    same(snapshot(b), snapshot(a))


# What Keras itself does with its own files, and that it is caught here


def test_keras_loads_wrong_weights_after_a_removal_and_this_does_not(family, tmp_path):
    source = FAMILIES[family](seed=3, num_layers=3)
    path = str(tmp_path / "original.weights.h5")
    source.save_weights(path)
    third = arrays(source.transformer_layers[2])
    second = arrays(source.transformer_layers[1])

    backbone = FAMILIES[family](num_layers=3)
    clone = plain(backbone, removing)
    clone.load_weights(path)  # no error from Keras: the third block gets weights of the second
    loaded = arrays(backbone.transformer_layers[2])
    same(dict(zip(loaded, second.values(), strict=True)), loaded)

    backbone = FAMILIES[family](num_layers=3)
    clone = plain(backbone, removing)
    before = arrays(backbone)
    with pytest.raises(bs.WeightMismatchError, match="expected a file saved from a model with"):
        bs.CachedCausalLM(clone).load_weights(path)
    same(arrays(backbone), before)
    bs.operate(backbone, [removing(backbone)]).load_weights(path)
    same(arrays(backbone.transformer_layers[2]), third)


def test_keras_fails_half_way_after_an_insertion_and_this_does_not(family, tmp_path):
    source = FAMILIES[family](seed=3, num_layers=3)
    path = str(tmp_path / "original.weights.h5")
    source.save_weights(path)

    backbone = FAMILIES[family](num_layers=3)
    before = arrays(backbone)
    with pytest.raises(Exception, match=r"Layer|layer|object"):
        plain(backbone, inserting).load_weights(path)
    assert any(not np.array_equal(v, before[p]) for p, v in arrays(backbone).items())

    backbone = FAMILIES[family](num_layers=3)
    before = arrays(backbone)
    with pytest.raises(bs.WeightMismatchError, match="in their order"):
        bs.CachedCausalLM(plain(backbone, inserting)).load_weights(path)
    same(arrays(backbone), before)
    bs.operate(backbone, [inserting(backbone)]).load_weights(path)
    same(arrays(backbone), arrays(source))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filed", "own"),
    [(None, "int8"), ("int8", None), pytest.param("int8", "int4", marks=pytest.mark.slow)],
)
def test_keras_fails_half_way_if_one_is_quantised_and_this_does_not(filed, own, tmp_path):
    def make(seed, mode):
        lm = bs.CachedCausalLM(make_deep_gpt2(seed))
        if mode:
            lm.quantize(mode)
        return lm

    source, path = make(3, filed), str(tmp_path / "original.weights.h5")
    source.save_weights(path)
    lm = make(0, own)
    before = arrays(lm.backbone)
    with pytest.raises(Exception, match=r"Layer|layer|object|shape"):
        lm.backbone.load_weights(path)
    assert any(not np.array_equal(v, before[p]) for p, v in arrays(lm.backbone).items())

    lm = make(0, own)
    before = arrays(lm.backbone)
    words = r"quantised as they are\. Received '\w+' with (float|int)\["
    with pytest.raises(bs.WeightMismatchError, match=words):
        lm.load_weights(path)
    same(arrays(lm.backbone), before)
    other = make(0, filed)
    other.load_weights(path)
    same(arrays(other.backbone), arrays(source.backbone))


def test_keras_mixes_up_reordered_blocks_and_this_does_not(family, backbone, tmp_path):
    path = str(tmp_path / "original.weights.h5")
    FAMILIES[family](seed=3, num_layers=3).save_weights(path)
    before = arrays(backbone)
    with pytest.raises(bs.WeightMismatchError, match="where the model has"):
        bs.CachedCausalLM(plain(backbone, reordering)).load_weights(path)
    same(arrays(backbone), before)


@pytest.mark.slow
def test_sharded_files_and_archives_are_told_apart_too(tmp_path):
    """In shards so small that one layer is spread over several, and as a `.keras` file."""
    source = make_deep_gpt2(3)
    sharded, archive = str(tmp_path / "a.weights.json"), str(tmp_path / "a.keras")
    source.save_weights(sharded, max_shard_size=1e-5)
    source.save(archive)
    assert len(list(tmp_path.glob("a_*.weights.h5"))) > 5
    for path in (sharded, archive):
        for edit, words in ((removing, "where the model has"), (reordering, "_2' where the mod")):
            backbone = make_deep_gpt2()
            before = arrays(backbone)
            with pytest.raises(bs.WeightMismatchError, match=words):
                bs.CachedCausalLM(plain(backbone, edit)).load_weights(path)
            same(arrays(backbone), before)
        bs.operate(backbone, [removing(backbone)]).load_weights(path)
        same(arrays(backbone), arrays(source))


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("save", ["model", "task"])
def test_weights_that_cannot_be_written_leave_the_old_ones(backbone, tmp_path, monkeypatch, save):
    edited = bs.operate(backbone, [bs.Skip("blocks.0")])
    model = edited if save == "model" else bs.CachedCausalLM(edited)
    path = tmp_path / "w.weights.h5"
    model.save_weights(path)
    before = path.read_bytes()

    def fail(model, filepath, **kwargs):
        filepath.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(type(backbone), "save_weights", fail)
    with pytest.raises(bs.SurgeryError, match=r"save_weights at .*: No space left on device"):
        model.save_weights(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_file_without_names_is_refused(tmp_path):
    path = str(tmp_path / "old.h5")
    make_deep_gpt2(3).save(path)
    backbone = make_deep_gpt2()
    before = arrays(backbone)
    with pytest.raises(bs.WeightMismatchError, match="does not tell its layers apart"):
        bs.CachedCausalLM(plain(backbone, removing)).load_weights(path)
    same(arrays(backbone), before)


@pytest.mark.by_default(2)
def test_checkpoints_survive_every_edit(backbone, other, edit, tmp_path):
    """One saved before an edit loads after it, and one saved after it into the original."""
    original, edited_file = (str(tmp_path / f"{n}.weights.h5") for n in ("original", "edited"))
    backbone.save_weights(original)
    edited = bs.operate(other, [edit(other)])
    edited.load_weights(original)
    same(arrays(other), arrays(backbone))
    brings_weights = len(edited.weights) > len(other.weights)
    assert brings_weights == (edit is inserting)
    warned = pytest.warns(UserWarning, match="2 trainable weights, such as")
    with warned if brings_weights else contextlib.nullcontext():
        edited.save_weights(edited_file)
    for variable in backbone.weights:
        variable.assign(np.zeros(variable.shape))
    backbone.load_weights(edited_file)
    same(arrays(backbone), arrays(other))


def test_checkpoints_survive_rewrites(backbone, other, tmp_path):
    path = str(tmp_path / "edited.weights.h5")
    edit = [bs.Steer("mood", {0: np.ones(32)}), ScaleSites()]
    with pytest.warns(UserWarning, match=r"such as 'scale/scale', are not the backbone's"):
        bs.operate(backbone, edit).save_weights(path)
    bs.operate(other, edit[::-1]).load_weights(path)
    same(arrays(other), arrays(backbone))


def test_a_plain_clone_loads_its_own_file(backbone, tmp_path):
    path = str(tmp_path / "own.weights.h5")
    clone = plain(backbone, inserting)
    wanted = snapshot(clone)
    clone.save_weights(path)
    for variable in clone.weights:
        variable.assign(np.zeros(variable.shape))
    bs.CachedCausalLM(clone).load_weights(path)
    same(snapshot(clone), wanted)


def test_a_file_of_another_kind_is_refused(backbone, tmp_path):
    path = str(tmp_path / "other.weights.h5")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.save_weights(path)
    with pytest.raises(bs.WeightMismatchError, match=r"Received 1 layers with weights \(dense\)"):
        bs.operate(backbone, []).load_weights(path)


# Differences


def test_every_difference_is_shown_and_nothing_is_written(backbone):
    tree = bs.weight_tree(backbone)
    first = tree["blocks"]["0"]
    del first[next(iter(first))]
    first["odd"] = {"bias": np.ones(2, "float32")}
    del tree["blocks"]["1"]
    tree["extra"] = {"kernel": np.ones(3)}
    embedding = tree["token_embedding"]
    embedding["embeddings"] = embedding["embeddings"].astype("float16")
    before = snapshot(backbone)
    with pytest.raises(bs.WeightMismatchError) as caught:
        bs.transfer_weights(backbone, tree)
    same(snapshot(backbone), before)
    report, text = caught.value.report, str(caught.value)
    assert set(paths_of(report, "unexpected")) == {"extra.kernel", "blocks.0.odd.bias"}
    assert paths_of(report, "dtype") == ("token_embedding.embeddings",)
    missing = [p for p in before if p.startswith("blocks.1.")]
    assert set(missing) <= set(paths_of(report, "missing"))
    assert re.search(r"dtype +token_emb\S+ +float32\[60, 32\] +float16\[60, 32\]", text)
    assert re.search(r"unexpected +extra\.kernel +- +float64\[3\]", text)
    assert "Nothing was written" in text


def test_not_strict_copies_what_matches_and_reports_the_rest(backbone, other):
    tree = bs.weight_tree(backbone)
    tree["token_embedding"]["embeddings"] = np.zeros((2, 32), "float32")
    before = snapshot(other)
    report = bs.transfer_weights(other, tree, strict=False)
    assert paths_of(report, "shape") == ("token_embedding.embeddings",)
    wanted = {**snapshot(backbone)}
    wanted["token_embedding.embeddings"] = before["token_embedding.embeddings"]
    same(snapshot(other), wanted)
    assert str(report).startswith(f"{len(wanted) - 1} weights copied\n")
    assert re.search(r"shape +token_embedding\.embeddings", str(report))


def test_nothing_that_matches_is_an_error(backbone):
    with pytest.raises(bs.WeightMismatchError, match="Received none that match"):
        bs.transfer_weights(backbone, {"nothing": np.ones(2)}, strict=False)


def test_none_leaves_a_weight_as_it_is(backbone, other):
    tree = bs.weight_tree(backbone)
    tree["token_embedding"]["embeddings"] = None
    before = np.array(other.token_embedding.embeddings)
    report = bs.transfer_weights(other, tree)
    assert report.left == ("token_embedding.embeddings",)
    np.testing.assert_array_equal(other.token_embedding.embeddings, before)


def dense(bias):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=bias)])


def test_a_missing_bias_is_zero():
    with_bias, without = dense(True), dense(False)
    with_bias.layers[0].bias.assign([1.0, 2.0])
    with pytest.raises(bs.WeightMismatchError, match=r"unexpected +dense\.bias"):
        bs.transfer_weights(without, with_bias)
    report = bs.transfer_weights(with_bias, without)
    assert report.zeroed == ("dense.bias",)
    assert not np.array(with_bias.layers[0].bias).any()
    without.layers[0].kernel.assign(np.ones((3, 2)))
    bs.transfer_weights(without, with_bias)
    np.testing.assert_array_equal(without.layers[0].kernel, with_bias.layers[0].kernel)


def lora_alone(backbone):
    return {path: np.ones_like(v) for path, v in snapshot(backbone).items() if "lora_" in path}


def kernels_of_another_shape(backbone):
    kernels = [path for path in snapshot(backbone) if path.endswith("query.kernel")]
    return {path: np.ones((2, 2), "float32") for path in kernels} | {
        "token_embedding.embeddings": np.ones((60, 32), "float32")
    }


@pytest.mark.parametrize("source", [lora_alone, kernels_of_another_shape])
def test_a_bias_stays_where_its_kernel_stays(source):
    backbone = make_deep_gpt2()
    backbone.enable_lora(2)
    before = snapshot(backbone)
    tree = source(backbone)
    report = bs.transfer_weights(backbone, tree, strict=False)
    assert not report.zeroed
    assert "blocks.0.self_attention.query.bias" in paths_of(report, "missing")
    same(snapshot(backbone), {**before, **{path: tree[path] for path in report.copied}})


def test_a_bias_is_left_with_its_kernel():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(3, name="b")]
    )
    for layer in model.layers:
        layer.bias.assign([1.0, 2.0, 3.0])
    tree = {"a": {"kernel": np.ones((3, 3), "float32")}, "b": {"kernel": None}}
    report = bs.transfer_weights(model, tree)
    assert (report.zeroed, report.left) == (("a.bias",), ("b.kernel", "b.bias"))
    np.testing.assert_array_equal(model.layers[1].bias, [1.0, 2.0, 3.0])
    assert not np.array(model.layers[0].bias).any()


def test_a_missing_layer_is_no_missing_bias():
    with pytest.raises(bs.WeightMismatchError, match=r"missing +dense\.bias"):
        bs.transfer_weights(dense(True), {"other": {"kernel": np.ones((3, 2), "float32")}})


def test_other_state_than_trainable_is_copied():
    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])

    a, b = make(), make()
    a.layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    bs.transfer_weights(b, a)
    np.testing.assert_array_equal(b.layers[0].moving_mean, [1.0, 2.0, 3.0])


class Head(keras.layers.Layer):
    """A projection whose kernel may be that of another layer."""

    def __init__(self, tied_to=None, **kwargs):
        super().__init__(**kwargs)
        self.tied_to = tied_to

    def build(self, shape):
        if self.tied_to is None:
            self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        else:
            self.kernel = self.tied_to.kernel

    def call(self, x):
        return x @ self.kernel


def tied_model(tied):
    first = keras.layers.Dense(4, use_bias=False, name="first")
    x = keras.Input((4,))
    y = first(x)
    head = Head(first if tied else None, name="head")
    return keras.Model(x, head(y))


def test_tied_weights_are_one_and_ties_that_differ_are_shown():
    tied, loose = tied_model(True), tied_model(False)
    assert list(variable_paths(tied)) == ["first.kernel"]
    bs.transfer_weights(tied, tied_model(True))
    with pytest.raises(bs.WeightMismatchError, match=r"tied +head\.kernel +tied to first\.kernel"):
        bs.transfer_weights(tied, loose)
    with pytest.raises(
        bs.WeightMismatchError, match=r"tied +head\.kernel .* tied to first\.kernel"
    ):
        bs.transfer_weights(loose, tied)
    loose.layers[-1].kernel.assign(loose.layers[1].kernel)
    bs.transfer_weights(tied, loose)
    np.testing.assert_array_equal(tied.layers[1].kernel, loose.layers[1].kernel)


def test_ties_that_differ_are_shown_under_new_names():
    first = keras.layers.Dense(4, use_bias=False, name="body")
    loose = keras.Sequential([keras.Input((4,)), first, Head(name="tail")])
    names = {"first": "body", "head": "tail"}
    for rename in (names, lambda path: ".".join(names.get(p, p) for p in path.split("."))):
        with pytest.raises(bs.WeightMismatchError, match=r"tied +tail\.kernel .* to body\.kernel"):
            bs.transfer_weights(loose, tied_model(True), rename=rename)
    with pytest.raises(bs.SurgeryError, match=r"Received \['feet'\], which fit none"):
        bs.transfer_weights(loose, tied_model(True), rename={"head": "tail", "feet": "toes"})


# only, rename, cast


def test_only_copies_the_selected_blocks(backbone, other):
    before, wanted = arrays(other), arrays(backbone)
    bs.transfer_weights(other, backbone, only="blocks.1:")
    after = arrays(other)
    for path, value in after.items():
        new = any(layer.name == path.split("/")[0] for layer in backbone.transformer_layers[1:])
        np.testing.assert_array_equal(value, (wanted if new else before)[path], err_msg=path)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("only", "parts"),
    [
        ("blocks.*.query", ["query/"]),
        (
            ["blocks.*.mlp_hidden", "final_norm"],
            ["intermediate", "gating", "final_", "^layer_norm"],
        ),
        ("embeddings", ["_embedding/"]),
        ("blocks.*.attention_norm", ["self_attention_layer_norm", "pre_attention_norm"]),
    ],
)
def test_only_copies_the_weights_of_sites(backbone, other, only, parts):
    before, wanted = arrays(other), arrays(backbone)
    bs.transfer_weights(other, backbone, only=only)
    for path, value in arrays(other).items():
        new = any(re.search(part, path) for part in parts)
        np.testing.assert_array_equal(value, (wanted if new else before)[path], err_msg=path)


def test_only_that_selects_no_weights_is_refused(backbone, other):
    with pytest.raises(bs.SurgeryError, match="expected sites with weights"):
        bs.transfer_weights(other, backbone, only="blocks.*.head_outputs")
    with pytest.raises(bs.SelectorError, match="matches nothing"):
        bs.transfer_weights(other, backbone, only="blocks.40")


def test_a_block_goes_to_another_place():
    source, destination = make_gpt2(3, num_layers=4), make_deep_gpt2()
    bs.transfer_weights(
        destination, source, only="blocks.1", rename={"blocks.1": None, "blocks.3": "blocks.1"}
    )
    third = arrays(source.transformer_layers[3])
    first = arrays(destination.transformer_layers[1])
    for (path, value), wanted in zip(first.items(), third.values(), strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=path)


@pytest.mark.slow
def test_six_blocks_of_twelve():
    small = {"hidden_dim": 8, "num_heads": 2, "intermediate_dim": 8}
    source, destination = make_gpt2(3, num_layers=12, **small), make_gpt2(num_layers=6, **small)
    rules = {f"blocks.{i}": None if i % 2 else f"blocks.{i // 2}" for i in range(12)}
    bs.transfer_weights(destination, source, rename=rules)
    for i in range(6):
        wanted = arrays(source.transformer_layers[2 * i]).values()
        for a, b in zip(arrays(destination.transformer_layers[i]).values(), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_blocks_of_one_model_are_swapped(backbone):
    before = [arrays(block) for block in backbone.transformer_layers]
    bs.transfer_weights(backbone, backbone, rename={"blocks.0": "blocks.1", "blocks.1": "blocks.0"})
    for i, j in ((0, 1), (1, 0), (2, 2)):
        after = arrays(backbone.transformer_layers[i])
        for a, b in zip(after.values(), before[j].values(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_two_blocks_are_swapped_by_a_tree_of_variables(backbone):
    before = [arrays(block) for block in backbone.transformer_layers]
    swap = {"0": "1", "1": "0"}
    tree = {}
    for path, variable in variable_paths(backbone).items():
        parts = path.split(".")
        if parts[0] == "blocks":
            parts[1] = swap.get(parts[1], parts[1])
        tree[".".join(parts)] = variable
    bs.transfer_weights(backbone, tree)
    for i, j in ((0, 1), (1, 0), (2, 2)):
        after = arrays(backbone.transformer_layers[i])
        for a, b in zip(after.values(), before[j].values(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_rename_by_a_function(backbone, other):
    tree = {f"model.{path}": value for path, value in snapshot(backbone).items()}
    bs.transfer_weights(other, tree, rename=lambda path: path.removeprefix("model."))
    same(arrays(other), arrays(backbone))


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"blocks.9": "blocks.1"}, r"Received \['blocks.9'\], which fit none"),
        (np.zeros(0), r"Received array\(\[\], dtype=float64\), which fit none"),
        ({"blocks.0": "blocks.1"}, "to give each array a path of its own"),
        (lambda path: "same", "to give each array a path of its own"),
        (lambda path: 3, "Received 3"),
    ],
)
def test_bad_renames(backbone, other, rename, words):
    before = snapshot(other)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.transfer_weights(other, backbone, rename=rename)
    same(snapshot(other), before)


def test_cast_converts_floats_and_refuses_overflow():
    full, half = make_deep_gpt2(), make_deep_gpt2(3, dtype="float16")
    with pytest.raises(bs.WeightMismatchError, match=r"dtype +blocks\.0"):
        bs.transfer_weights(half, full)
    bs.transfer_weights(half, full, cast=True)
    same(arrays(half), {path: value.astype("float16") for path, value in arrays(full).items()})
    full.token_embedding.embeddings.assign(np.full((60, 32), 1e6))
    with pytest.raises(bs.WeightMismatchError, match=r"dtype +token_embedding\.embeddings"):
        bs.transfer_weights(half, full, cast=True)


def test_integers_are_never_cast(backbone):
    tree = {path: value.astype("int32") for path, value in snapshot(backbone).items()}
    with pytest.raises(bs.WeightMismatchError, match="int32"):
        bs.transfer_weights(backbone, tree, cast=True)


# Files, and Hugging Face


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_a_safetensors_file(family, dtype, tmp_path):
    backbone, other = (
        FAMILIES[family](dtype=dtype, num_layers=3),
        FAMILIES[family](3, dtype=dtype, num_layers=3),
    )
    save_file(snapshot(backbone), tmp_path / "weights.safetensors")
    bs.transfer_weights(other, tmp_path / "weights.safetensors")
    same(snapshot(other), snapshot(backbone))


@pytest.mark.parametrize("size", [4, 100, 5 * 3 * 4, 10**9])
def test_an_array_of_a_file_is_read_in_parts(tmp_path, monkeypatch, size):
    """Parts of so many bytes: none, some and all of the rows of an array."""
    monkeypatch.setattr("backbone_surgery.weights.arrays._CHUNK", size)
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(5, name="second")]
    model = keras.Sequential([keras.Input((7,)), *layers])
    rng = np.random.default_rng(2)
    wanted = {path: rng.normal(size=x.shape).astype("float32") for path, x in arrays(model).items()}
    names = {path: ".".join(path.split("/")[-2:]) for path in wanted}
    save_file({names[path]: x for path, x in wanted.items()}, tmp_path / "parts.safetensors")
    bs.transfer_weights(model, tmp_path / "parts.safetensors")
    same(arrays(model), wanted)


@pytest.mark.parametrize("source", ["weights.h5", "none.safetensors", 3, None])
def test_sources_that_are_none(backbone, source):
    with pytest.raises(bs.SurgeryError, match=r"transfer_weights.*: expected a"):
        bs.transfer_weights(backbone, source)


@pytest.mark.parametrize("leaf", ["text", [1.0], object()])
def test_leaves_that_are_no_arrays(backbone, leaf):
    with pytest.raises(bs.SurgeryError, match=r"at 'x\.y': expected an array of numbers"):
        bs.transfer_weights(backbone, {"x": {"y": leaf}})


@pytest.mark.parametrize("model", [None, 3, "name", keras.Sequential()])
def test_models_that_are_none(model):
    with pytest.raises(bs.SurgeryError, match="weight_tree: expected a built Keras model"):
        bs.weight_tree(model)


def one_head(source, folder):
    """Copy a checkpoint, with the first key/value head alone: KerasHub exports no more of them."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    weights = load_file(folder / "model.safetensors")
    for path in [path for path in weights if re.search("[kv]_proj", path)]:
        weights[path] = weights[path][: config["head_dim"]].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_gemma"])
def test_hugging_face_into_an_edited_backbone_and_back(name, tmp_path):
    """In by KerasHub's converter, across by transfer, out by KerasHub's exporter."""
    folder = FIXTURES / name
    if name == "hf_gemma":
        folder = one_head(folder, tmp_path / "one_head")
    source = keras_hub.models.Backbone.from_preset(str(folder))
    other = type(source).from_config(source.get_config())
    edited = bs.operate(other, [removing(other), bs.Steer("mood", {0: np.ones(other.hidden_dim)})])
    bs.transfer_weights(edited, source)
    edited.owner.export_to_transformers(str(tmp_path / "out"))
    wanted = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value, wanted[path], err_msg=path)


# The digest


def test_digest_tells_one_bit(backbone):
    before = bs.weights_digest(backbone)
    assert before == bs.weights_digest(bs.operate(backbone, [bs.Steer("s", {0: np.ones(32)})]))
    value = np.array(backbone.token_embedding.embeddings)
    changed = value.copy()
    changed[3, 4] = np.nextafter(changed[3, 4], np.float32(9))
    backbone.token_embedding.embeddings.assign(changed)
    assert bs.weights_digest(backbone) != before
    backbone.token_embedding.embeddings.assign(value)
    assert bs.weights_digest(backbone) == before


# Devices


ACROSS = """
import jax, keras, numpy as np
import backbone_surgery as bs
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

first, second = jax.devices()
mesh = Mesh(np.array([first, second]), ("x",))
places = [SingleDeviceSharding(first), SingleDeviceSharding(second)]
places += [NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), ("x",))]

def make(place):
    layers = [keras.layers.Dense(4, name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((4,)), *layers])
    for variable in model.weights:
        variable.assign(jax.device_put(variable.value, place))
    return model

for of_source in [*places, None]:
    for place in places:
        source, destination = make(of_source or places[0]), make(place)
        wanted = [np.array(v) for v in source.weights]
        bs.transfer_weights(destination, source if of_source else bs.weight_tree(source))
        for variable in source.weights:
            variable.value.delete()
        for variable, value in zip(destination.weights, wanted, strict=True):
            assert variable.value.sharding == place, (variable.value.sharding, of_source, place)
            np.testing.assert_array_equal(variable, value)
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(keras.config.backend() != "jax", reason="places arrays of JAX")
def test_weights_stay_on_their_devices():
    """From either device, both or NumPy to either or both; and no memory is shared."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ACROSS]
    out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **flags})
    assert out.stdout == "done\n", out.stderr[-2000:]


# Memory


@pytest.mark.slow
def test_memory_of_a_transfer_is_that_of_single_arrays(monkeypatch):
    """Counted after each write, what JAX holds; and at any time, what NumPy takes."""

    def make():
        layers = [keras.layers.Dense(512, use_bias=False) for _ in range(12)]
        return keras.Sequential([keras.Input((512,)), *layers])

    source, destination = make(), make()
    largest, seen = 512 * 512 * 4, []
    bs.transfer_weights(destination, source)  # what is compiled and cached once is not counted
    gc.collect()

    def held_by_jax():
        return sum(x.nbytes for x in jax.live_arrays())

    kind = type(source.weights[0])
    assign = kind.assign

    def counted(variable, value):
        seen.append(held_by_jax())
        assign(variable, value)

    monkeypatch.setattr(kind, "assign", counted)
    before = held_by_jax()
    tracemalloc.start()
    try:
        bs.transfer_weights(destination, source)
        by_numpy = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(seen) == 12
    assert max(seen) - before == largest
    assert held_by_jax() == before
    assert by_numpy < 0.1 * largest


MEASURE = """
import gc, os, sys, threading, time
import keras, backbone_surgery as bs
from safetensors.numpy import save_file

def resident():
    # Without the pages of mapped files, which the system takes back when it needs them.
    _, pages, of_files, *_ = map(int, open("/proc/self/statm").read().split())
    return (pages - of_files) * os.sysconf("SC_PAGE_SIZE")

def make():
    layers = [keras.layers.Dense(4000, use_bias=False, name=f"d{i}") for i in range(4)]
    return keras.Sequential([keras.Input((4000,)), *layers])

source, destination = make(), make()
for variable in [*source.weights, *destination.weights]:
    variable.value.block_until_ready()
if sys.argv[1] != "model":
    source = bs.weight_tree(source)
if sys.argv[1] == "file":
    path = os.path.join(sys.argv[2], "w.safetensors")
    save_file({f"{name}.kernel": x["kernel"] for name, x in source.items()}, path)
    source = path
gc.collect()
time.sleep(1)
before, peak, done = resident(), [0], []

def watch():
    while not done:
        peak[0] = max(peak[0], resident())
        time.sleep(0.0002)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
bs.transfer_weights(destination, source)
done.append(1)
thread.join()
print((peak[0] - before) / (4000 * 4000 * 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("source", ["model", "tree", "file"])
def test_memory_of_a_process_that_transfers(source, tmp_path):
    """Counted in arrays, of which each of both models has four; a little for the first calls."""
    command = [sys.executable, "-c", MEASURE, source, str(tmp_path)]
    # Programs that are read from and written to disk take memory of their own.
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert 0.5 < float(out.stdout) <= 1.2


def nested_graph(order):
    """A plain graph over a GPT-2 that ends in a nested model of some of three layers."""
    backbone = make_deep_gpt2()
    layers = [keras.layers.Dense(32, name=name) for name in order]
    inner = keras.Sequential(layers, name="inner")
    model = keras.Model(backbone.input, inner(backbone.output))
    for layer in layers:
        layer.kernel.assign(np.full((32, 32), "abc".index(layer.name) + 1.0))
    return model


@pytest.mark.by_default(1)
@pytest.mark.parametrize("order", ["ac", "cab", "ab"])
def test_a_file_of_other_layers_in_a_nested_model_is_refused(order, tmp_path):
    path = tmp_path / "x.weights.h5"
    bs.operate(nested_graph("abc"), [bs.Skip("blocks.0")]).save_weights(path)
    bs.operate(nested_graph("abc"), [bs.Skip("blocks.1")]).load_weights(path)
    model = nested_graph(order)
    with pytest.raises(bs.WeightMismatchError, match="expected a file saved from a model with the"):
        bs.operate(model, [bs.Skip("blocks.0")]).load_weights(path)


# Rewrites of every shape


class Around(keras.layers.Layer):
    def __init__(self, block):
        super().__init__()
        self.block, self.scale = block, self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scale * self.block(x)


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("rewrite", "brought"),
    [
        (bs.Remove("blocks.0"), 0),
        (bs.Repeat("blocks.1"), 0),
        (bs.Reorder([1, 0]), 0),
        (bs.Insert("blocks.0", keras.layers.Dense(32)), 2),
        (bs.Wrap("blocks.*", Around), None),
    ],
    ids=["remove", "repeat", "reorder", "insert", "wrap"],
)
def test_transfer_across_a_rewrite_gives_every_weight_its_own_value(
    backbone, other, rewrite, brought
):
    """Into the edited model and out of it; weights that the edit brought are differences."""
    edited = bs.operate(other, [rewrite])
    if brought is None:
        brought = len(other.transformer_layers)
    before = snapshot(other)
    for destination, source in ((edited, backbone), (backbone, edited)):
        for variable in backbone.weights if destination is backbone else ():
            variable.assign(np.zeros(variable.shape))
        if brought:
            with pytest.raises(bs.WeightMismatchError, match=f"Received {brought} differences"):
                bs.transfer_weights(destination, source)
            if destination is edited:
                same(snapshot(other), before)
        report = bs.transfer_weights(destination, source, strict=not brought)
        assert len(report.copied) == len(arrays(other))
        same(arrays(other), arrays(backbone))


def test_a_tree_that_has_a_path_twice_is_refused():
    tree = {"a": {"b": np.ones(2)}, "a.b": np.ones(2)}
    with pytest.raises(bs.SurgeryError, match="expected each path once"):
        bs.transfer_weights(make_gpt2(num_layers=1), tree)
