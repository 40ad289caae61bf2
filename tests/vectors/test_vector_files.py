"""Files of control vectors: what others accept is what we write, and damage is refused."""

import os
import resource
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import backbone_surgery as bs
from backbone_surgery.opening.family import known_families
from tests.families import ROWS
from tests.helpers import make_gemma2, make_gpt2

INFO = {"method": "pca_diff", "model_hint": "gpt2", "family": "gpt2", "num_blocks": "4"}
SUFFIXES = [".gguf", ".safetensors"]


@pytest.fixture
def vector(rng):
    return bs.ControlVector({b: rng.normal(size=24) for b in (1, 2, 3)}, INFO)


def accepted_by_llama_cpp(path):
    """What llama.cpp refuses a file on, by the rules it states."""
    reader = gguf.GGUFReader(path)
    assert reader.get_field("general.architecture").contents() == "controlvector"
    sizes = set()
    for tensor in reader.tensors:
        prefix, _, number = tensor.name.partition(".")
        assert prefix == "direction"
        assert int(number) > 0
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert len(tensor.shape) == 1
        sizes.add(int(tensor.shape[0]))
    assert len(sizes) == 1
    return {int(t.name.partition(".")[2]): np.array(t.data) for t in reader.tensors}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_is_bit_for_bit(vector, tmp_path, suffix):
    path = tmp_path / f"mood{suffix}"
    vector.save(path)
    loaded = bs.ControlVector.load(path)
    assert loaded == vector
    assert dict(loaded.info) == {**INFO, "hidden_dim": "24"}
    loaded.save(path)
    again = bs.ControlVector.load(path)
    assert (again, dict(again.info)) == (vector, dict(loaded.info))
    assert os.listdir(tmp_path) == [path.name]
    shifted = bs.ControlVector.load(path, shift=-1)
    assert list(shifted.directions) == [0, 1, 2]
    assert np.array_equal(shifted.directions[0], vector.directions[1])


def test_llama_cpp_accepts_what_we_write(vector, tmp_path):
    vector.save(tmp_path / "mood.gguf")
    found = accepted_by_llama_cpp(tmp_path / "mood.gguf")
    assert {k: v.tolist() for k, v in found.items()} == {
        k: v.tolist() for k, v in vector.directions.items()
    }
    reader = gguf.GGUFReader(tmp_path / "mood.gguf")
    assert reader.get_field("controlvector.model_hint").contents() == "gpt2"
    assert reader.get_field("controlvector.layer_count").contents() == 3


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("room", [100, 1500, 2600])
def test_a_disk_that_is_full_is_told_and_the_old_file_stays(tmp_path, suffix, room):
    path = tmp_path / f"v{suffix}"
    old, new = (bs.ControlVector({1: np.ones(n), 2: np.ones(n)}) for n in (8, 300))
    old.save(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(bs.SurgeryError, match=f"save at '{path}': expected a place that can"):
            new.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_block_0_is_left_out_of_gguf_with_a_warning(rng, tmp_path):
    vector = bs.ControlVector({b: rng.normal(size=8) for b in (0, 1)})
    with pytest.warns(UserWarning, match="direction of block 0 is left out"):
        vector.save(tmp_path / "a.gguf")
    assert list(accepted_by_llama_cpp(tmp_path / "a.gguf")) == [1]
    assert list(bs.ControlVector.load(tmp_path / "a.gguf").directions) == [1]
    vector.save(tmp_path / "a.safetensors")
    assert bs.ControlVector.load(tmp_path / "a.safetensors") == vector
    with pytest.raises(bs.SurgeryError, match=r"Save to \.safetensors"):
        bs.ControlVector({0: np.ones(8)}).save(tmp_path / "b.gguf")
    assert not (tmp_path / "b.gguf").exists()


def written_as_repeng_does(path, directions, **extra):
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(directions))
    for key, value in extra.items():
        writer.add_string(f"controlvector.{key}", value)
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_repeng_writes_is_read(rng, tmp_path):
    # repeng takes layer 0 too, which llama.cpp refuses.
    directions = {layer: rng.normal(size=16).astype("float32") for layer in range(5)}
    written_as_repeng_does(tmp_path / "r.gguf", directions, method="umap", origin="elsewhere")
    loaded = bs.ControlVector.load(tmp_path / "r.gguf")
    assert loaded == bs.ControlVector(directions)
    assert dict(loaded.info) == {"model_hint": "mistral", "method": "umap", "origin": "elsewhere"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_other_programs_wrote_into_a_gguf_file_is_kept(tmp_path, suffix):
    fields = {"general.name": "mood", "general.license": "mit", "maker.note": "on a Sunday"}
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "controlvector")
    writer.add_custom_alignment(64)
    for name, value in fields.items():
        writer.add_string(name, value)
    writer.add_array("maker.seeds", [3, 5])
    writer.add_tensor("direction.1", ONE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = bs.ControlVector.load(tmp_path / "other.gguf")
    assert dict(loaded.info) == {**fields, "maker.seeds": "[3, 5]"}
    loaded.save(tmp_path / f"between{suffix}")
    bs.ControlVector.load(tmp_path / f"between{suffix}").save(tmp_path / "again.gguf")
    reader = gguf.GGUFReader(tmp_path / "again.gguf")
    assert {name: reader.get_field(name).contents() for name in fields} == fields
    assert reader.get_field("controlvector.maker.note") is None


@pytest.mark.parametrize(
    "name", ["sha256", "general.architecture", "general.alignment", "controlvector.a", "GGUF.x"]
)
def test_names_that_files_use_themselves_are_refused(name):
    with pytest.raises(bs.SurgeryError, match="Rename or shorten what does not fit"):
        bs.ControlVector({1: ONE}, {name: "7"})


WITHOUT_LLAMA_CPP = ["opt"]


@pytest.mark.parametrize("family", known_families(), ids=lambda family: family.name)
def test_each_family_has_the_names_of_llama_cpp(family):
    """llama.cpp writes the name of the architecture, and repeng that of the config."""
    known = set(gguf.constants.MODEL_ARCH_NAMES.values())
    as_one_word = {name.translate({ord(c): None for c in "-_."}): name for name in known}
    for name in family.model_types:
        there = as_one_word.get(name.replace("-", "").replace("_", "").replace(".", ""))
        assert there is None or there in family.model_types
    assert known & set(family.model_types) or family.name in WITHOUT_LLAMA_CPP


@pytest.mark.parametrize(
    ("name", "hint"), [("mixtral", "llama"), ("gpt_oss", "gpt-oss"), ("qwen3_moe", "qwen3moe")]
)
def test_vectors_of_llama_cpp_load_without_a_warning(name, hint, rng, tmp_path, recwarn):
    backbone = ROWS[name].make()
    directions = {1: rng.normal(size=32).astype("float32")}
    bs.ControlVector(directions, {"model_hint": hint}).save(tmp_path / "v.gguf")
    loaded = bs.ControlVector.load(tmp_path / "v.gguf", lm=bs.CachedCausalLM(backbone))
    bs.operate(backbone, [bs.Steer("mood", loaded)])
    assert not [w for w in recwarn if "made for" in str(w.message)]


def test_safetensors_hold_what_is_documented(vector, tmp_path):
    vector.save(tmp_path / "v.safetensors")
    tensors = load_file(tmp_path / "v.safetensors")
    assert sorted(tensors) == ["direction.1", "direction.2", "direction.3"]
    assert all(t.dtype == np.float32 and t.shape == (24,) for t in tensors.values())


def test_writing_is_atomic(vector, tmp_path, monkeypatch):
    path = tmp_path / "v.gguf"
    vector.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    for place in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, place, fail)
            with pytest.raises(bs.SurgeryError, match=r"be written\. Received an error: disk full"):
                (2 * vector).save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["v.gguf"]


@pytest.mark.slow
def test_made_for_another_model(rng, tmp_path):
    lm, other = bs.CachedCausalLM(make_gpt2()), bs.CachedCausalLM(make_gemma2())
    pairs = [([1, 2, 3], [4, 5]), ([6, 7], [8, 9]), ([3], [5])]
    vector = bs.ControlVector.train(lm, pairs, verbose=0)
    path = tmp_path / "v.safetensors"
    vector.save(path)
    assert bs.ControlVector.load(path, lm=lm) == vector
    with pytest.raises(bs.SurgeryError, match=r"field 'family' 'gemma'.*Received 'gpt2'"):
        bs.ControlVector.load(path, lm=other)
    retrained = bs.CachedCausalLM(make_gpt2(seed=3))
    with pytest.raises(bs.SurgeryError, match="field 'source_digest'"):
        bs.ControlVector.load(path, lm=retrained)
    written_as_repeng_does(tmp_path / "r.gguf", {1: np.ones(32, "float32")})
    with pytest.warns(UserWarning, match="of type 'mistral'; this one is of type 'gpt2'"):
        bs.ControlVector.load(tmp_path / "r.gguf", lm=lm)
    for directions in ({1: np.ones(31, "float32")}, {9: np.ones(32, "float32")}):
        written_as_repeng_does(tmp_path / "s.gguf", directions)
        with pytest.raises(bs.SurgeryError, match="Use a vector made for this model"):
            bs.ControlVector.load(tmp_path / "s.gguf", lm=lm)


ONE = np.ones(8, "float32")
BAD_GGUF = {
    "name": ({"1x": ONE}, "'direction.1x'"),
    "float16": ({1: ONE.astype("float16")}, "F16 of shape"),
    "two axes": ({1: np.ones((2, 4), "float32")}, "not a 1-D F32"),
    "lengths": ({1: ONE, 2: np.ones(9, "float32")}, "all of one size"),
    "nan": ({1: ONE * np.nan}, "NaN or Inf"),
    "inf": ({1: ONE * np.inf}, "NaN or Inf"),
    "empty": ({}, "without directions"),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_gguf_files_of_something_else_are_refused(tmp_path, name):
    directions, words = BAD_GGUF[name]
    written_as_repeng_does(tmp_path / "b.gguf", directions)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.ControlVector.load(tmp_path / "b.gguf")


def gguf_string(text):
    return struct.pack("<Q", len(text)) + text


def gguf_header(tensors=1, entries=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def gguf_tensor(size, kind=0):
    return gguf_string(b"direction.1") + struct.pack("<IQIQ", 1, size, kind, 0)


DAMAGED_GGUF = {
    "a file that is no GGUF file": b"GGML" + gguf_header()[4:],
    "GGUF version 4, where 2 and 3 are read": gguf_header(version=4),
    "a GGUF header that promises": gguf_header(tensors=2**40),
    "a truncated or damaged GGUF header": gguf_header()[:9],
    "a field of 99 bytes in a file of": gguf_header(entries=1) + struct.pack("<Q", 99),
    "an array of arrays": gguf_header(entries=1) + gguf_string(b"a") + struct.pack("<IIQ", 9, 9, 1),
    "a tensor of 64 numbers in a file of": gguf_header() + gguf_tensor(64),
    "a damaged GGUF file .ValueError": gguf_header() + gguf_tensor(1, kind=999),
}


@pytest.mark.parametrize("words", DAMAGED_GGUF)
def test_damaged_gguf_files_are_refused(tmp_path, words):
    (tmp_path / "d.gguf").write_bytes(DAMAGED_GGUF[words])
    with pytest.raises(bs.SurgeryError, match=f"expected a control vector.*{words}"):
        bs.ControlVector.load(tmp_path / "d.gguf")


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    (tmp_path / "d.safetensors").write_bytes(b"12345678")
    with pytest.raises(bs.SurgeryError, match="Received a damaged safetensors file"):
        bs.ControlVector.load(tmp_path / "d.safetensors")


def test_gguf_of_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("direction.1", ONE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(bs.SurgeryError, match=r"general\.architecture is 'llama'"):
        bs.ControlVector.load(tmp_path / "m.gguf")


BAD_SAFETENSORS = {
    "no format": ({"direction.1": ONE}, {"sha256": "0"}, "field 'format' is None"),
    "version": ({"direction.1": ONE}, {"format_version": "2"}, "'format_version' is '2'"),
    "no checksum": ({"direction.1": ONE}, {"sha256": None}, "without the field 'sha256'"),
    "checksum": ({"direction.1": ONE}, {}, "checksum differs"),
    "name": ({"weight": ONE}, {}, "'weight'"),
    "dtype": ({"direction.1": ONE.astype("float64")}, {}, "F64"),
    "axes": ({"direction.1": np.ones((2, 4), "float32")}, {}, "not a 1-D F32"),
    "lengths": ({"direction.1": ONE, "direction.2": np.ones(9, "float32")}, {}, "all of one size"),
    "none": ({}, {}, "maps blocks to directions"),
}


@pytest.mark.parametrize("name", BAD_SAFETENSORS)
def test_safetensors_files_of_something_else_are_refused(tmp_path, name):
    tensors, metadata, words = BAD_SAFETENSORS[name]
    good = {"format": "backbone-surgery control vector", "format_version": "1", "sha256": "0"}
    metadata = metadata if name == "no format" else {**good, **metadata}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    save_file(tensors, tmp_path / "b.safetensors", metadata)
    with pytest.raises(bs.SurgeryError, match=words):
        bs.ControlVector.load(tmp_path / "b.safetensors")


def test_a_field_that_disagrees_is_named(vector, tmp_path):
    from backbone_surgery.vectors import files, safetensors_file

    info = {**INFO, "hidden_dim": "25"}
    directions = dict(vector.directions)
    path = tmp_path / "v.safetensors"
    safetensors_file.write(path, directions, info, files.checksum(directions, info))
    with pytest.raises(bs.SurgeryError, match="Received size 24"):
        bs.ControlVector.load(path)


def test_paths(vector, tmp_path):
    for action in (vector.save, bs.ControlVector.load):
        with pytest.raises(bs.SurgeryError, match=r"ends in \.gguf or \.safetensors"):
            action(tmp_path / "v.npz")
    with pytest.raises(bs.SurgeryError, match="there is none"):
        bs.ControlVector.load(tmp_path / "v.gguf")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_truncation_is_refused(vector, tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    vector.save(path)
    whole = path.read_bytes()
    # GGUF pads the end of the last tensor to 32 bytes, which nobody needs.
    needed = len(whole) - (32 if suffix == ".gguf" else 0)
    for size in range(0, needed, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(bs.SurgeryError, match="Get"):
            bs.ControlVector.load(path)


def test_a_gguf_file_whose_checksum_was_renamed_is_damaged(tmp_path):
    path = tmp_path / "v.gguf"
    bs.ControlVector({1: ONE}, INFO).save(path)
    path.write_bytes(path.read_bytes().replace(b"controlvector.sha256", b"controlvector.sha257"))
    with pytest.raises(bs.SurgeryError, match="expected the contents that were saved"):
        bs.ControlVector.load(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_flipped_bits_never_change_a_vector_silently(tmp_path_factory, suffix):
    folder = tmp_path_factory.mktemp("flips")
    path = folder / f"v{suffix}"
    rng = np.random.default_rng(1)
    vector = bs.ControlVector({b: rng.normal(size=24) for b in (1, 2, 3)}, INFO)
    vector.save(path)
    whole = path.read_bytes()
    refused = 0
    for bit in rng.choice(8 * len(whole), 600, replace=False):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        try:
            loaded = bs.ControlVector.load(path)
        except bs.SurgeryError:
            refused += 1
        else:
            assert loaded == vector
    assert refused > 500


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_headers_made_of_anything_are_refused_without_allocating(tmp_path_factory, suffix, data):
    path = tmp_path_factory.mktemp("fuzz") / f"v{suffix}"
    bs.ControlVector({1: ONE}).save(path)
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 8))
        number = data.draw(st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        whole[at : at + 8] = struct.pack("<Q", number)
    path.write_bytes(whole)
    tracemalloc.start()
    try:
        loaded = bs.ControlVector.load(path)
        assert np.isfinite(loaded.directions[next(iter(loaded.directions))]).all()
    except bs.SurgeryError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 << 20
