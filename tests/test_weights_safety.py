"""Damaged and hostile recipes are refused in words, and a save that is killed breaks none."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import backbone_surgery as bs
from backbone_surgery.weights import folder as folders
from backbone_surgery.weights import recipe as recipes
from backbone_surgery.weights.arrays import held, open_file, read_arrays, write_arrays
from backbone_surgery.weights.store import read_recipe
from tests.conftest import make_gpt2
from tests.test_recipe import Own, Put

ROOT = Path(__file__).parents[1]
JSON, ARRAYS = "recipe.json", "deltas.safetensors"


@pytest.fixture(scope="module")
def backbone():
    return make_gpt2()


@pytest.fixture(scope="module")
def original(backbone, tmp_path_factory):
    path = tmp_path_factory.mktemp("safety") / "original"
    steer = bs.Steer("mood", {0: np.ones(32), 1: np.arange(32)})
    put = Put("blocks.1", keras.layers.Dense(32))
    bs.save_recipe(bs.operate(backbone, [steer, put, Own("blocks.0", [1, (2.5, "x")])]), path)
    return {name: (path / name).read_bytes() for name in (JSON, ARRAYS)}


@pytest.fixture
def refuse(backbone, tmp_path, monkeypatch):
    """Load a recipe of these files, and expect words before anything is built."""
    monkeypatch.setattr(recipes, "operate", lambda *_: pytest.fail("a bad recipe was built"))
    path = tmp_path / "bad"

    def load(files, match=None):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        with pytest.raises(bs.SurgeryError, match=match) as caught:
            bs.load_recipe(path, backbone)
        assert 20 < len(str(caught.value)) < 2000
        assert str(tmp_path) not in str(caught.value)

    return load


def signed(document, data):
    """Make the digests of a recipe right again: what somebody who means harm would do."""
    document = json.loads(json.dumps(document))
    document["files"][ARRAYS] |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return {JSON: sealed(document), ARRAYS: data}


def sealed(document):
    rest = {k: v for k, v in document.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps({**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def packed(header, body):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def unpacked(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def test_the_original_is_accepted(original, backbone, tmp_path):
    """And so it is with digests made anew, or else the tests below would test nothing."""
    for name, data in signed(json.loads(original[JSON]), original[ARRAYS]).items():
        (tmp_path / name).write_bytes(data)
    assert len(bs.load_recipe(tmp_path, backbone).rewrites) == 3


# 1,000 of them


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_400_bit_flips(original, refuse, name):
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(original[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        refuse({**original, name: bytes(data)})


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_200_truncations(original, refuse, name):
    """At every boundary of the format, and in between."""
    data = original[name]
    header = 8 + int.from_bytes(original[ARRAYS][:8], "little")
    ends = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 2]
    offsets = [e["data_offsets"] for e in unpacked(original[ARRAYS])[0].values()]
    ends += [header + x for pair in offsets for x in pair]
    ends = [end for end in dict.fromkeys(ends) if end < len(data) - 1]
    rng = random.Random(1)
    for end in [*ends, *(rng.randrange(len(data) - 1) for _ in range(100 - len(ends)))]:
        refuse({**original, name: data[:end]})
    refuse({**original, name: data + b"x"})


def test_300_headers_with_right_digests(original, refuse):
    """One number or word of the header of the arrays is another."""
    document, (header, body) = json.loads(original[JSON]), unpacked(original[ARRAYS])
    rng = random.Random(2)
    values = [-1, 0, 1, 2**31, 2**63, 10**30, 1.5, None, True, "F32", "../x", [], {}, [[1]], "I8"]
    count = 0
    while count < 300:
        name = rng.choice([*header])
        entry = json.loads(json.dumps(header[name]))
        key = rng.choice([*entry])
        value = rng.choice(values)
        if key != "dtype" and rng.random() < 0.7:
            entry[key][rng.randrange(len(entry[key]))] = value
        else:
            entry[key] = value
        if repr(entry) == repr(header[name]):
            continue
        refuse(signed(document, packed({**header, name: entry}, body)))
        count += 1


def test_100_documents_with_right_digests(original, refuse):
    """A part of the document is of another kind, or of none."""
    rng = random.Random(3)
    document = json.loads(original[JSON])
    document["rewrites"] = document["rewrites"][:1]
    places = list(walk(document))
    bad = [{"__class__": "os"}, {"array": "../../etc"}, {"layer": 99}, [[]], {"a": 1, "b": 2}]
    for _ in range(100):
        copy = json.loads(json.dumps(document))
        *parents, key = rng.choice(places)
        inner = copy
        for parent in parents:
            inner = inner[parent]
        inner[key] = rng.choice(bad)
        refuse({JSON: sealed(copy), ARRAYS: original[ARRAYS]})


def walk(value, path=()):
    """Yield the places of a document whose form is fixed: all but free configs and its own seal."""
    items = enumerate(value) if isinstance(value, list) else value.items()
    for key, inner in items:
        if key in ("config", "versions", "layers") or (*path, key) == ("sha256",):
            continue
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from walk(inner, (*path, key))


# Kinds of harm, each with digests that are right


def document_with(original, **parts):
    return {JSON: sealed({**json.loads(original[JSON]), **parts}), ARRAYS: original[ARRAYS]}


@pytest.mark.parametrize(
    "name", ["../deltas.safetensors", "/etc/passwd", "a/deltas.safetensors", "..", "x.pkl"]
)
def test_no_file_outside_of_the_folder_is_named(original, refuse, name):
    files = json.loads(original[JSON])["files"]
    refuse(document_with(original, files={name: files[ARRAYS]}), "what the schema of recipes says")
    refuse(
        document_with(original, files={**files, name: files[ARRAYS]}),
        "what the schema of recipes says",
    )


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_no_link_is_followed(original, backbone, tmp_path, name):
    path = tmp_path / "r"
    path.mkdir()
    for file, data in original.items():
        target = tmp_path / "outside" if file == name else path / file
        target.write_bytes(data)
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(bs.RecipeError, match="expected a regular file"):
        bs.load_recipe(path, backbone)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_a_file(original, backbone, tmp_path, make):
    (tmp_path / JSON).write_bytes(original[JSON])
    make(tmp_path / ARRAYS)
    with pytest.raises(bs.RecipeError, match="expected a regular file"):
        bs.load_recipe(tmp_path, backbone)


@pytest.mark.parametrize(
    "config",
    [
        {"module": "keras.layers", "class_name": "Lambda", "config": {}},
        {"module": "os", "class_name": "system", "config": {}, "registered_name": None},
        {"module": "builtins", "class_name": "function", "config": "print"},
        {"class_name": "__lambda__", "config": {"value": "x"}},
        {"module": "keras", "class_name": "layers.Lambda", "config": {}},
        {"module": "keras.src.layers.core.lambda_layer", "class_name": "Lambda", "config": {}},
        {
            "module": "keras_hub.src.utils.transformers.export.gemma",
            "class_name": "Gemma",
            "config": {},
        },
        {"module": "keras.layers", "class_name": "Nothing", "config": {}},
        {"module": "keras.optimizers", "class_name": "SGD", "config": {}},
        {"module": "keras", "class_name": "layers", "config": {}},
        {"module": "keras.saving", "class_name": "load_model", "config": {}},
        {"module": ["keras.layers"], "class_name": "Dense", "config": {}},
        *(
            {"module": "keras.layers", "class_name": name, "config": {}}
            for name in (
                *("StringLookup", "IntegerLookup", "TextVectorization", "TFSMLayer"),
                *("TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
            )
        ),
        {
            "module": "keras_hub.tokenizers",
            "class_name": "GPT2Tokenizer",
            "registered_name": "keras_hub>GPT2Tokenizer",
            "config": {"vocabulary": "/etc/passwd"},
        },
        {"module": "subprocess", "class_name": "Popen", "config": {"args": ["true"]}},
        {
            "module": "keras.layers",
            "class_name": "Wrapper",
            "config": {"layer": {"module": "keras.layers", "class_name": "Lambda", "config": {}}},
        },
    ],
)
def test_no_code_is_named(original, refuse, config):
    refuse(document_with(original, layers=[config]), "functions and Lambda layers are never saved")


@pytest.mark.parametrize(
    "config",
    [
        {"module": "keras.layers", "class_name": "Dense", "config": {"units": -1}},
        {"module": "keras.initializers", "class_name": "Zeros", "config": {}},
        {},
    ],
)
def test_configs_that_make_no_layer(original, refuse, config):
    refuse(document_with(original, layers=[config]), "expected the config of a layer")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_are_not_finite(original, refuse, value, dtype):
    import ml_dtypes

    header, body = unpacked(original[ARRAYS])
    name = next(iter(header))
    count = header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = np.ones(count // kind.itemsize, kind)
    array[-1] = value
    label = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    header[name] |= {"dtype": label, "shape": [array.size]}
    document = json.loads(original[JSON])
    document["files"][ARRAYS]["arrays"][name] = {"dtype": label, "shape": [array.size]}
    body = array.tobytes() + body[count:]
    refuse(signed(document, packed(header, body)), "Received NaN or infinity")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "well-formed JSON"),
        (b"\xff\xfe{}", "well-formed JSON"),
        (b"[" * 100_000, "well-formed JSON"),
        (b"[" * 60 + b"]" * 60, "nested more than"),
        (b'{"a": 1, "a": 2}', "a key is given twice"),
        (b'{"a": NaN}', "NaN stands for a number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "well-formed JSON"),
        (b"{}", "expected a recipe of format"),
        (b"[]", "expected a recipe of format"),
        (b'{"format": "backbone_surgery.recipe", "version": 99}', "by a newer backbone-surgery"),
        (b'{"format": "backbone_surgery.recipe", "version": true}', "Received version 'True'"),
        (b'{"format": "backbone_surgery.recipe", "version": 1}', "what the schema of recipes says"),
        (b" " * (5 * 2**20), "expected at most 2097152 bytes"),
    ],
    ids=lambda x: None if isinstance(x, bytes) else x,
)
def test_json_that_is_no_recipe(original, refuse, text, words):
    refuse({**original, JSON: text}, words)


def traced(action):
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_100_000_arrays_and_sizes_beyond_memory(original, refuse):
    """Whatever is claimed, memory stays near the size of the files."""
    document = json.loads(original[JSON])
    many = {f"a{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
    files = signed(document, packed(many, b""))
    size = len(files[ARRAYS])
    assert traced(lambda: refuse(files, "the arrays that recipe.json lists")) < 30 * size
    listed = {name: {"dtype": "F32", "shape": [0]} for name in many}
    document["files"][ARRAYS]["arrays"] = listed
    files = signed(document, packed(many, b""))
    assert traced(lambda: refuse(files, "expected at most 2097152 bytes")) < 30 * size

    document = json.loads(original[JSON])
    header, body = unpacked(original[ARRAYS])
    name = next(iter(header))
    huge = {"dtype": "F32", "shape": [2**20, 2**20]}
    document["files"][ARRAYS]["arrays"][name] = huge
    files = signed(document, packed({**header, name: {**header[name], **huge}}, body))
    assert traced(lambda: refuse(files)) < 2e6
    document["files"][ARRAYS]["size"] = 2**45
    files = {JSON: sealed(document), ARRAYS: original[ARRAYS]}
    assert traced(lambda: refuse(files, "expected size 35184372088832")) < 2e6


# The format of arrays, against the library that defined it


def test_arrays_are_those_of_safetensors(tmp_path, rng):
    import ml_dtypes

    arrays = {
        "a": rng.normal(size=(3, 4)).astype("float32"),
        "b": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 2), "int8"),
        "d": np.array(True),
        "e": rng.normal(size=(4, 6)).T,
        "f": rng.integers(0, 9, (2, 2, 2)),
    }
    write_arrays(tmp_path / "ours.safetensors", {k: held(v) for k, v in arrays.items()})
    theirs = load_file(tmp_path / "ours.safetensors")
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, tmp_path / "theirs")
    ours = read_arrays(lambda: open_file(tmp_path / "theirs"), "theirs")
    for name, wanted in arrays.items():
        for found in (theirs[name], ours[name].read()):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


# Killed in the middle of a save

SAVER = """
import os, sys, types
package = types.ModuleType("backbone_surgery")
package.__path__ = [sys.argv[1]]
sys.modules["backbone_surgery"] = package  # the writer alone, without Keras: it starts at once
import numpy as np
from backbone_surgery.weights import folder, store
from backbone_surgery.weights.arrays import held
from pathlib import Path

if sys.argv[3] == "aside":
    folder.exchange = lambda a, b: False
base = {"family": "f", "class": "c", "config": None, "preset": None, "dtype": "float32",
        "quantization": None, "lora": None, "digest": "sha256:" + "0" * 64}
for line in sys.stdin:
    start = int(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    for count in range(start, start + 10**6):
        document = {"versions": {"count": str(count)}, "base": base,
                    "dtype_policy": "float32", "layers": [], "rewrites": []}
        arrays = {f"a{i}": held(np.full(2**14, count, "int64")) for i in range(4)}
        store.write_recipe(Path(sys.argv[2]), document, arrays)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the saving process is forked")
@pytest.mark.slow
@pytest.mark.parametrize(("way", "kills"), [("exchange", 200), ("aside", 60)])
def test_killed_while_it_saves(tmp_path, way, kills):
    """After each kill the folder holds one save, whole: the last one that ended, or the next."""
    path = tmp_path / "r"
    command = [sys.executable, "-c", SAVER, str(ROOT / "backbone_surgery"), str(path), way]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    rng = random.Random(4)
    count = seen = interrupted = 0
    with subprocess.Popen(command, **pipes) as saver:
        for _ in range(kills):
            saver.stdin.write(f"{count + 1}\n")
            saver.stdin.flush()
            child = int(saver.stdout.readline())
            time.sleep(rng.uniform(0.001, 0.03))
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "ended\n"
            left = [p for p in tmp_path.glob(".r.*.new")]
            interrupted += bool(left)
            for folder in left:
                shutil.rmtree(folder)
            with contextlib.suppress(FileNotFoundError):
                folders.recover(path)
            if not path.exists() and not count:
                continue
            document, arrays = read_recipe(path)
            found = int(document["versions"]["count"])
            assert found >= count
            assert all((a.read() == found).all() and a.shape == (2**14,) for a in arrays.values())
            seen += found > count
            count = found
        saver.stdin.close()
    assert interrupted > kills / 4
    assert seen > kills / 10


@pytest.mark.parametrize("way", ["exchange", "aside"])
def test_an_error_while_it_saves_leaves_the_old_one(backbone, tmp_path, monkeypatch, way):
    if way == "aside":
        monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    lm = bs.CachedCausalLM(backbone)
    lm.save_to_preset(tmp_path / "preset")
    lm.save_to_preset(tmp_path / "preset")
    before = {p: p.read_bytes() for p in (tmp_path / "preset").rglob("*") if p.is_file()}

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(type(backbone), "save_weights", fail)
    with pytest.raises(OSError, match="no space left"):
        lm.save_to_preset(tmp_path / "preset")
    after = {p: p.read_bytes() for p in (tmp_path / "preset").rglob("*") if p.is_file()}
    assert after == before
    assert [p.name for p in tmp_path.iterdir()] == ["preset"]


def test_what_was_set_aside_comes_back(original, backbone, tmp_path):
    """A process that could not exchange folders ended between its two renames."""
    aside = tmp_path / ".r.old"
    aside.mkdir()
    for name, data in original.items():
        (aside / name).write_bytes(data)
    assert len(bs.load_recipe(tmp_path / "r", backbone).rewrites) == 3
    assert not aside.exists()


# Memory

MEASURE = """
import os, sys, threading, time
from pathlib import Path
import keras, backbone_surgery as bs
from backbone_surgery.weights import store
from backbone_surgery.weights.paths import variable_paths
from backbone_surgery.weights.tree import of_variable

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

layers = [keras.layers.Dense(1024, use_bias=False) for i in range(12)]
model = keras.Sequential([keras.Input((1024,)), *layers])
arrays = {path: of_variable(v) for path, v in variable_paths(model).items()}
base = {"family": "f", "class": "c", "config": None, "preset": None, "dtype": "float32",
        "quantization": None, "lora": None, "digest": bs.weights_digest(model)}
document = {"versions": {}, "base": base, "dtype_policy": "float32", "layers": [], "rewrites": []}

def save(name):
    bs.weights_digest(model)
    store.write_recipe(Path(sys.argv[1]) / name, document, arrays)

save("first")
before, peak, done = resident(), [0], []

def watch():
    while not done:
        peak[0] = max(peak[0], resident())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
save("second")
done.append(1)
thread.join()
print(peak[0] - before, sum(a.nbytes for a in arrays.values()), 1024 * 1024 * 4)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_save_is_its_largest_array(tmp_path):
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, size, largest = map(int, out.stdout.split())
    assert size == 12 * largest
    assert grown <= largest + 4e6
