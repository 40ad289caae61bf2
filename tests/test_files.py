"""Files: whatever is in them, what reads them says so in words; what writes them writes all."""

import errno
import json
import os
import random
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import backbone_surgery as bs
from backbone_surgery.files import (
    as_path,
    check_folder,
    read_json,
    reading,
    replace_file,
    save_picture,
)
from backbone_surgery.recipes.store import write_recipe
from backbone_surgery.rewriting.autoencoder_files import read_autoencoder
from tests import autoencoders, edits
from tests.helpers import make_gpt2


def damaged(data, rng, count):
    """Yield copies of a file: cut short, with other bits or bytes, and files of other kinds."""
    yield from (b"", b"\0" * 64, b"{}", b"[]", b"null", b"\xff" * 200, data[:-1], data + data)
    for _ in range(count):
        copy = bytearray(data)
        where = rng.randrange(len(copy))
        kind = rng.randrange(3)
        if kind == 0:
            yield bytes(copy[:where])
        elif kind == 1:
            copy[where] ^= 1 << rng.randrange(8)
            yield bytes(copy)
        else:
            copy[where : where + 8] = rng.randbytes(8)
            yield bytes(copy)


@pytest.fixture(scope="module")
def backbone():
    return make_gpt2()


def read_all(load, path, copies):
    """Load every copy: an error in words, or a file that is as good as it was."""
    errors = []
    for copy in copies:
        path.write_bytes(copy)
        try:
            load()
        except bs.SurgeryError as error:
            errors.append(str(error))
    assert all(re.search(r"expected .*Received ", error, re.S) for error in errors)
    return len(errors)


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_damaged_control_vectors(tmp_path, suffix):
    path = tmp_path / f"v.{suffix}"
    bs.ControlVector({1: np.ones(8), 2: np.arange(8)}, {"method": "none"}).save(path)
    copies = damaged(path.read_bytes(), random.Random(0), 300)
    assert read_all(lambda: bs.ControlVector.load(path), path, copies) > 250


def save_autoencoder(folder, kind, rng):
    """Save an autoencoder, and return its files."""
    if kind == "sparsify":
        edits.save_autoencoder(folder, rng, 32, latents=12, k=3)
        return folder / "cfg.json", folder / "sae.safetensors"
    w = autoencoders.arrays(rng, "jumprelu", latents=12)
    if kind == "gemma_scope":
        autoencoders.save_gemma_scope(folder, w)
        return (folder / "params.npz",)
    del w["threshold"]
    autoencoders.save(folder, w, "topk")
    return folder / "cfg.json", folder / "sae_weights.safetensors"


@pytest.mark.parametrize("kind", ["sparsify", "saelens", "gemma_scope"])
def test_damaged_autoencoders(tmp_path, kind, backbone, rng):
    for file in save_autoencoder(tmp_path, kind, rng):
        whole = file.read_bytes()
        copies = [*damaged(whole, random.Random(1), 40)]
        if file.suffix == ".json":
            copies += [b'{"k": "3"}', b'{"k": true}', b'{"k": 1.5}', b'{"k": NaN}', b'{"k": [3]}']
            copies += [b'"k"', b" " * 2**21, b"[" * 10**5, b'{"architecture": [3]}']
            copies += [b'{"normalize_activations": {}, "activation_fn_kwargs": 3}']
        assert read_all(lambda: read_autoencoder(tmp_path), file, copies) > 16
        file.write_bytes(whole)
    bs.operate(backbone, [bs.SparseAutoencoder("blocks.1", str(tmp_path), feature=1)])


@pytest.mark.by_default(1)
@pytest.mark.parametrize("suffix", ["weights.h5", "weights.json", "keras"])
def test_damaged_checkpoints(tmp_path, suffix, backbone):
    path = tmp_path / f"c.{suffix}"
    if suffix == "keras":
        backbone.save(path)
    else:
        shards = {"max_shard_size": 1e-4} if suffix == "weights.json" else {}
        backbone.save_weights(path, **shards)
    edited = bs.operate(make_gpt2(1), [bs.Remove("blocks.1")])
    edited.load_weights(path)
    assert bs.weights_digest(edited) == bs.weights_digest(backbone)
    copies = [*damaged(path.read_bytes(), random.Random(2), 12)]
    copies += [b'{"weight_map": 3}', b'{"weight_map": {"a": "../x"}}', b'{"weight_map": {"a": 1}}']
    assert read_all(lambda: edited.load_weights(path), path, copies) >= 8


@pytest.mark.slow
def test_an_index_of_a_checkpoint_is_read_within_bounds(tmp_path, backbone, monkeypatch):
    monkeypatch.setattr("backbone_surgery.opening.checkpoint._MOST", 100)
    backbone.save_weights(tmp_path / "c.weights.json", max_shard_size=1e-4)
    with pytest.raises(bs.WeightMismatchError, match="more than 100 bytes"):
        bs.operate(backbone, []).load_weights(tmp_path / "c.weights.json")


def test_folders_in_place_of_files(tmp_path, backbone):
    edited = bs.operate(backbone, [])
    for name in ("a.safetensors", "a.weights.h5", "a.keras", "a.gguf"):
        (tmp_path / name).mkdir()
    for name in ("a.weights.h5", "a.keras"):
        with pytest.raises(bs.SurgeryError, match="expected"):
            edited.load_weights(tmp_path / name)
    for name in ("a.gguf", "a.safetensors"):
        with pytest.raises(bs.SurgeryError, match="expected a file"):
            bs.ControlVector.load(tmp_path / name)
    with pytest.raises(bs.SurgeryError, match="file that exists"):
        bs.transfer_weights(backbone, tmp_path / "a.safetensors")


@pytest.mark.parametrize("path", [None, 3, b"x", ["a"], ""])
def test_what_is_no_path(backbone, path):
    with pytest.raises(bs.SurgeryError, match="load_weights: expected a path"):
        bs.operate(backbone, []).load_weights(path)


def test_damaged_safetensors_in_a_transfer(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d")])
    path = tmp_path / "w.safetensors"
    save_file({"d.kernel": np.ones((3, 2), "float32"), "d.bias": np.ones(2, "float32")}, path)
    copies = damaged(path.read_bytes(), random.Random(3), 99)
    assert read_all(lambda: bs.transfer_weights(model, path), path, copies) > 50
    header = json.dumps({"d.kernel": {"dtype": "F8_E5M2", "shape": [3, 2], "data_offsets": [0, 6]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(6))
    with pytest.raises(bs.SurgeryError, match=r"expected a `\.safetensors` file"):
        bs.transfer_weights(model, path)


# The helpers


def test_one_error_for_whatever_is_raised():
    with pytest.raises(bs.RecipeError, match=r"x at 'y': expected z\. .*\(KeyError: 'k'\)\. Mend"):
        with reading("y", "x", "z", bs.RecipeError, "Mend it."):
            raise KeyError("k")
    with pytest.raises(bs.SelectorError, match="as it is"), reading("y", "x", "z"):
        raise bs.SelectorError("as it is")


def test_json_within_bounds(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json(path, 8) == {"a": 1}
    with pytest.raises(ValueError, match="more than 7 bytes"):
        read_json(path, 7)
    path.write_text('{"a": Infinity}')
    with pytest.raises(ValueError, match="Infinity in place of a number"):
        read_json(path, 99)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("one", "two"):
        replace_file(path, lambda part, text=text: part.write_text(text))
        assert path.read_text() == text

    def fail(part):
        part.write_text("thr")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(path, fail)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.txt": "two"}


def test_a_picture_that_is_not_saved_whole_leaves_the_old_one(tmp_path):
    class OnAFullDisk:
        def savefig(self, path, format):
            path.write_text(format)
            raise OSError(errno.ENOSPC, "no space left")

    path = tmp_path / "a.PNG"
    path.write_text("old")
    with pytest.raises(bs.SurgeryError, match=r"plot at .*a.PNG': .* No space left"):
        save_picture(OnAFullDisk(), path, "plot")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.PNG": "old"}


def test_a_folder_for_a_file_must_be_writable(tmp_path, monkeypatch):
    """The tests may run as one who may write everywhere."""
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(bs.SurgeryError, match="expected a folder that can be read and written"):
        check_folder(tmp_path / "a.png", "plot")


@pytest.mark.parametrize("ending", [".gguf", ".safetensors"])
def test_names_as_long_as_a_name_can_be(tmp_path, ending):
    vector, path = bs.ControlVector({1: np.ones(4)}), tmp_path / f"{ending:n>255}"
    vector.save(path)
    assert bs.ControlVector.load(path) == vector
    assert os.listdir(tmp_path) == [path.name]
    with pytest.raises(bs.SurgeryError, match=r"a place that can be written.*name too long"):
        vector.save(tmp_path / f"a{path.name}")


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_to():
    with pytest.raises(bs.SurgeryError, match=r"save at '/proc/a.gguf': expected a place that can"):
        bs.ControlVector({1: np.ones(4)}).save("/proc/a.gguf")
    words = "save_recipe at '/proc/a': expected a place that can be written.* choose another path"
    with pytest.raises(bs.SurgeryError, match=words):
        write_recipe(Path("/proc/a"), {}, {})


def test_a_link_is_written_through(tmp_path):
    (tmp_path / "data").mkdir()
    file, link, chain = tmp_path / "data" / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf"
    link.symlink_to(file)
    chain.symlink_to(link)
    for size in (4, 8):  # at first there is no file yet
        vector = bs.ControlVector({1: np.ones(size)})
        vector.save(chain)
        assert link.is_symlink()
        assert chain.is_symlink()
        assert bs.ControlVector.load(file) == vector
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["a.gguf"]


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "p").mkdir()
    with pytest.raises(bs.SurgeryError, match=r"save at .*p': expected a new file, or a regular"):
        replace_file(tmp_path / "p", lambda part: part.write_text("one"))
    os.mkfifo(tmp_path / "p.gguf")
    with pytest.raises(bs.SurgeryError, match=r"Received a folder, a pipe or a device\."):
        bs.ControlVector({1: np.ones(4)}).save(tmp_path / "p.gguf")
    assert not (tmp_path / "p.gguf").is_file()


def test_paths():
    assert as_path("a/b", "x").name == "b"
    with pytest.raises(bs.SurgeryError, match=r"x: expected a path\. Received None"):
        as_path(None, "x")
