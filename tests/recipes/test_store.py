"""Damaged and hostile recipes are refused in words, and a save that is killed breaks none."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save

import backbone_surgery as bs
from backbone_surgery.recipes import recipe as recipes
from backbone_surgery.recipes.store import read_recipe, write_recipe
from tests.helpers import make_gpt2
from tests.recipes.edits import Own, Put

ROOT = Path(__file__).parents[2]
JSON, ARRAYS = "recipe.json", "arrays"


@pytest.fixture(scope="module")
def backbone():
    return make_gpt2()


@pytest.fixture(scope="module")
def original(backbone, tmp_path_factory):
    """The bytes of the two files of a recipe."""
    path = tmp_path_factory.mktemp("store") / "original"
    steer = bs.Steer("mood", {0: np.ones(32), 1: np.arange(32)})
    put = Put("blocks.1", keras.layers.Dense(32))
    bs.save_recipe(bs.operate(backbone, [steer, put, Own("blocks.0", [1, (2.5, "x")])]), path)
    return {JSON: (path / JSON).read_bytes(), ARRAYS: deltas(path).read_bytes()}


def deltas(folder):
    (path,) = folder.glob("deltas-*.safetensors")
    return path


def write(folder, files):
    """Write the two files of a recipe, the arrays under the name that `recipe.json` gives them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / JSON).write_bytes(files[JSON])
    name = re.search(rb'"deltas": "([0-9a-f]{16})', files[JSON])
    if name:
        (folder / f"deltas-{name[1].decode()}.safetensors").write_bytes(files[ARRAYS])


@pytest.fixture
def refuse(backbone, tmp_path, monkeypatch):
    """Load a recipe of these files, and expect words before anything is built."""
    monkeypatch.setattr(recipes, "operate", lambda *_: pytest.fail("a bad recipe was built"))

    def load(files, match=None):
        write(tmp_path / "bad", files)
        with pytest.raises(bs.RecipeError, match=match) as caught:
            bs.load_recipe(tmp_path / "bad", backbone)
        assert 20 < len(str(caught.value)) < 2000

    return load


def sealed(document):
    """Make the digest of a document right again: what somebody who means harm would do."""
    rest = {k: v for k, v in document.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True)
    return json.dumps({**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def signed(document, data):
    return {
        JSON: sealed({**document, "deltas": hashlib.sha256(data).hexdigest()}),
        ARRAYS: data,
    }


def unpacked(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def packed(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_the_original_is_accepted(original, backbone, tmp_path):
    """And so it is with digests made anew, or else the tests below would test nothing."""
    write(tmp_path / "r", signed(json.loads(original[JSON]), original[ARRAYS]))
    assert len(bs.load_recipe(tmp_path / "r", backbone).rewrites) == 3


# Damage


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_200_bit_flips(original, refuse, name):
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(original[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        refuse({**original, name: bytes(data)})


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_100_truncations(original, refuse, name):
    """At every boundary of the format, and in between."""
    data = original[name]
    header = 8 + int.from_bytes(original[ARRAYS][:8], "little")
    ends = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 2]
    ends += [header + x for e in unpacked(original[ARRAYS])[0].values() for x in e["data_offsets"]]
    ends = [end for end in dict.fromkeys(ends) if end < len(data) - 1]
    rng = random.Random(1)
    for end in [*ends, *(rng.randrange(len(data) - 1) for _ in range(100 - len(ends)))]:
        refuse({**original, name: data[:end]})
    refuse({**original, name: data + b"x"})


def test_files_of_two_recipes_are_never_taken_together(original, refuse, backbone, tmp_path):
    bs.save_recipe(bs.operate(backbone, [bs.Steer("other", {0: np.ones(32)})]), tmp_path / "b")
    other = {
        JSON: (tmp_path / "b" / JSON).read_bytes(),
        ARRAYS: deltas(tmp_path / "b").read_bytes(),
    }
    refuse({**original, ARRAYS: other[ARRAYS]}, "expected sha256")
    refuse({**other, ARRAYS: original[ARRAYS]}, "expected sha256")


def test_missing_files(original, backbone, tmp_path):
    for name in (JSON, ARRAYS):
        write(tmp_path / "r", original)
        (tmp_path / "r" / JSON if name == JSON else deltas(tmp_path / "r")).unlink()
        with pytest.raises(bs.RecipeError, match="expected a regular file"):
            bs.load_recipe(tmp_path / "r", backbone)
    for path in (tmp_path / "none", tmp_path / "r" / JSON):
        with pytest.raises(bs.RecipeError, match=r"expected a (folder|regular file)"):
            bs.load_recipe(path, backbone)


@pytest.mark.parametrize("path", [None, 3, "", b"x", ["r"]])
def test_what_is_no_path(backbone, path):
    with pytest.raises(bs.SurgeryError, match=r"(load|save)_recipe: expected a path"):
        bs.load_recipe(path, backbone)
    with pytest.raises(bs.SurgeryError, match="save_recipe: expected a path"):
        bs.save_recipe(bs.operate(backbone, []), path)


@pytest.mark.parametrize("name", [JSON, ARRAYS])
def test_no_link_is_followed(original, backbone, tmp_path, name):
    write(tmp_path / "r", original)
    file = tmp_path / "r" / JSON if name == JSON else deltas(tmp_path / "r")
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(bs.RecipeError, match="expected a regular file"):
        bs.load_recipe(tmp_path / "r", backbone)
    before = (tmp_path / "outside").read_bytes()
    with pytest.raises(bs.SurgeryError, match=rf"holds \['{file.name}'\], which would be lost"):
        bs.save_recipe(bs.operate(backbone, []), tmp_path / "r")
    assert (tmp_path / "outside").read_bytes() == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_in_place_of_a_file(original, backbone, tmp_path, make):
    write(tmp_path / "r", original)
    file = deltas(tmp_path / "r")
    file.unlink()
    make(file)
    with pytest.raises(bs.RecipeError, match="expected a regular file"):
        bs.load_recipe(tmp_path / "r", backbone)


# Harm, with digests that are right


def test_100_headers_with_right_digests(original, refuse):
    """One number or word of the header of the arrays is another."""
    document, (header, body) = json.loads(original[JSON]), unpacked(original[ARRAYS])
    rng = random.Random(2)
    values = [-1, 0, 1, 2**31, 2**63, 10**30, 1.5, None, "F99", "../x", [], {}, [[1]], "I8"]
    for _ in range(100):
        name = rng.choice([*header])
        entry = json.loads(json.dumps(header[name]))
        key, value = rng.choice([*entry]), rng.choice(values)
        if key != "dtype" and rng.random() < 0.7:
            entry[key][rng.randrange(len(entry[key]))] = value
        else:
            entry[key] = value
        if entry != header[name]:
            refuse(signed(document, packed({**header, name: entry}, body)))


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
    """Yield the places of a document that a load looks at."""
    unread = ("config", "versions", "layers", "preset", "readable_by", "sha256")
    for key, inner in enumerate(value) if isinstance(value, list) else value.items():
        if key not in unread:
            yield (*path, key)
            if isinstance(inner, dict | list):
                yield from walk(inner, (*path, key))


def document_with(original, **parts):
    return {JSON: sealed({**json.loads(original[JSON]), **parts}), ARRAYS: original[ARRAYS]}


@pytest.mark.parametrize("name", ["../deltas", "/etc/passwd", "..", "x.pkl", "a/b", "0" * 63 + "/"])
def test_no_file_outside_of_the_folder_is_named(original, refuse, name):
    refuse(document_with(original, deltas=name), "the digest of the arrays is none")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16])
def test_values_that_are_not_finite(original, refuse, tmp_path, value, dtype):
    (tmp_path / "a").write_bytes(original[ARRAYS])
    arrays = load_file(tmp_path / "a")
    name = next(iter(arrays))
    arrays[name] = np.array([1, 2, value], dtype)
    refuse(signed(json.loads(original[JSON]), save(arrays)), "Received NaN or infinity")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "JSON of at most"),
        (b"\xff\xfe{}", "JSON of at most"),
        (b"[" * 100_000, "JSON of at most"),
        (b'{"a": NaN}', "NaN in place of a number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON of at most"),
        (b"{}", "expected a recipe of format"),
        (b"[]", "expected a recipe of format"),
        (b'{"format": "backbone_surgery.recipe", "version": 99}', "a newer one"),
        (b'{"format": "backbone_surgery.recipe", "version": true}', "Received version 'True'"),
        (b'{"format": "backbone_surgery.recipe", "version": 1}', "KeyError: 'sha256'"),
        (b" " * (5 * 2**20), "more than 2097152 bytes"),
    ],
    ids=lambda x: None if isinstance(x, bytes) else x,
)
def test_json_that_is_no_recipe(original, refuse, text, words):
    refuse({**original, JSON: text}, words)


@pytest.mark.parametrize("scale", ["x", [], {}, None, True])
def test_a_setting_of_a_layer_that_is_no_number(backbone, refuse, tmp_path, scale):
    bs.save_recipe(bs.operate(backbone, [bs.LowRank("blocks.1.query", rank=2)]), tmp_path / "low")
    document = json.loads((tmp_path / "low" / JSON).read_bytes())
    arrays = deltas(tmp_path / "low").read_bytes()
    document["layers"][0]["config"]["scale"] = scale
    refuse({JSON: sealed(document), ARRAYS: arrays}, "Adapter'> could not be deserialized")


def test_values_nested_deep_with_right_digests(original, refuse):
    value = 1
    for _ in range(2000):
        value = {"list": [value]}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        rewrites = json.loads(original[JSON])["rewrites"]
        rewrites[2]["fields"]["values"] = value
        files = document_with(original, rewrites=rewrites)
    finally:
        sys.setrecursionlimit(limit)
    refuse(files, "RecursionError")


# Other releases


def test_a_newer_version_says_what_can_read_it(original, refuse):
    document = {**json.loads(original[JSON]), "version": 2, "readable_by": "0.9.0"}
    refuse(
        {**original, JSON: json.dumps(document).encode()},
        r"Release 0\.9\.0 of backbone-surgery reads it",
    )


# Writing


def test_arrays_of_every_dtype_come_back(tmp_path, rng, original):
    arrays = {
        "a": rng.normal(size=(3, 4)).astype("float32"),
        "b": rng.normal(size=(5,)).astype(ml_dtypes.bfloat16),
        "c": np.zeros((0, 2), "int8"),
        "d": np.array(True),
        "e": rng.normal(size=(4, 6)).T,
        "f": rng.integers(0, 9, (2, 2, 2)),
    }
    write_recipe(tmp_path / "r", json.loads(original[JSON]), arrays)
    again = read_recipe(tmp_path / "r")[1]
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)


KILLED = """
import json, os, shutil, signal, sys, types
from pathlib import Path

package = types.ModuleType("backbone_surgery")
package.__path__ = [sys.argv[1]]
sys.modules["backbone_surgery"] = package  # the writers alone, without Keras: they start at once
import numpy as np
from backbone_surgery import files
from backbone_surgery.recipes import folder, store

TRACED = {files.__file__, folder.__file__, store.__file__}
os.fsync = lambda descriptor: None  # a process that is killed loses nothing the system has

def save_recipe(path, count):
    base = {"family": "f", "config": {}}
    document = {"versions": {"count": count}, "base": base, "layers": [], "rewrites": []}
    store.write_recipe(path, document, {f"a{i}": np.full(99, count) for i in range(3)})

def read_recipe(path):
    document, arrays = store.read_recipe(path)
    counts = {document["versions"]["count"], *(int(x) for a in arrays.values() for x in a)}
    assert len(arrays) == 3
    return counts

def save_folder(path, count):
    with folder.new_folder(path, lambda name: True) as new:
        (new / "inner").mkdir()
        for name in ("a", "b", "inner/c"):
            (new / name).write_text(str(count))

def read_folder(path):
    names = ("a", "b", "inner/c")
    assert {p.relative_to(path).as_posix() for p in path.rglob("*")} == {*names, "inner"}
    return {int((path / name).read_text()) for name in names}

def killed_after(steps, action):
    child = os.fork()
    if not child:
        left = [steps]
        def trace(frame, event, arg):
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

ways = {"recipe": (save_recipe, read_recipe), "folder": (save_folder, read_folder)}
save, read = ways[sys.argv[3]]
path, states, steps = Path(sys.argv[2]) / "r", [], 0
while True:
    for entry in path.parent.iterdir():
        shutil.rmtree(entry)
    before = sys.argv[4] == "old"
    if before:
        save(path, 1)
    killed = killed_after(steps, lambda: save(path, 2))
    try:
        state = read(path)
        assert len(state) == 1, state
        states.append(*state)
    except Exception as error:
        assert not before, (steps, error)
        states.append(0)
    hidden = [p.name for p in path.parent.iterdir() if p != path]
    assert all(map(files.is_part, hidden)), hidden
    save(path, 3)  # what was left behind is in nobody's way
    assert read(path) == {3}
    if not killed:
        break
    steps += 1
print(json.dumps(states))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the saving process is forked")
@pytest.mark.parametrize("kind", ["recipe", "folder"])
@pytest.mark.parametrize("before", ["old", "nothing"])
def test_killed_at_every_line_of_a_save(tmp_path, kind, before):
    """Then there is what was there before, whole, or what was saved, whole."""
    command = [sys.executable, "-c", KILLED, str(ROOT / "backbone_surgery"), str(tmp_path)]
    out = subprocess.run([*command, kind, before], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr[-2000:]
    states = json.loads(out.stdout)
    first = int(before == "old")
    assert states == sorted(states)
    assert {states[0], states[-1], *states} == {first, 2}
    assert min(states.count(first), states.count(2)) > 3
