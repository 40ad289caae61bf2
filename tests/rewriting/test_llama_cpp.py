"""llama.cpp reads what is written here, and gives the same logits: control vectors and adapters.

The files and the logits were made by `scripts/make_llama_cpp_fixtures.py`: llama.cpp ran the vector
that is here, and the adapters of PEFT as `save_peft` wrote them.
"""

import gguf
import numpy as np
import pytest

import backbone_surgery as bs
from tests.helpers import relative
from tests.rewriting.test_lora import FIXTURES, PEFT, load, logits

FOLDER = FIXTURES / "llama_cpp"
KINDS = sorted({name.rpartition("_")[0] for name in np.load(FOLDER / "expected.npz")})


@pytest.mark.by_default(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["steered", "adapted"])
def test_logits_are_those_of_llama_cpp(name, kind):
    backbone, ids = load(name)
    vector = bs.ControlVector.load(FOLDER / "vector.gguf")
    edit = {"steered": bs.Steer("mood", vector), "adapted": bs.Lora("tuned", PEFT / name)}[kind]
    plain, edited = (
        logits(bs.CachedCausalLM(bs.operate(backbone, e)), ids)[0] for e in ([], [edit])
    )
    expected = np.load(FOLDER / "expected.npz")[f"{name}_{kind}"]
    assert relative(edited, expected) <= 1e-5
    assert relative(plain, expected) > 0.05


def test_the_file_that_llama_cpp_read_is_what_is_written(tmp_path):
    vector = bs.ControlVector.load(FOLDER / "vector.gguf")
    vector.save(tmp_path / "again.gguf")
    files = [gguf.GGUFReader(path) for path in (FOLDER / "vector.gguf", tmp_path / "again.gguf")]
    read, again = ({t.name: t.data for t in file.tensors} for file in files)
    assert sorted(again) == ["direction.1", "direction.2"]
    for name, direction in read.items():
        np.testing.assert_array_equal(again[name], direction)
