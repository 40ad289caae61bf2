"""What one process compiled, the next one loads."""

import json
import subprocess
import sys

import pytest

import backbone_surgery as bs

PROGRAM = """
import json, sys
import jax, numpy as np
counts = {}
jax.monitoring.register_event_listener(
    lambda event, **kw: counts.update({event: counts.get(event, 0) + 1})
)
import backbone_surgery as bs
from tests.conftest import make_gpt2

lm = bs.CachedCausalLM(make_gpt2(seed=int(sys.argv[2]), num_layers=1))
lm.compile(sampler="greedy")
bs.compile_cache(sys.argv[1])
counts.clear()
inputs = {"token_ids": np.array([[1, 2, 3]]), "padding_mask": np.ones((1, 3))}
out = lm.generate(inputs, max_new_tokens=4, stop_token_ids=None)["token_ids"].tolist()
hits, misses = (counts.get(f"/jax/compilation_cache/cache_{k}", 0) for k in ("hits", "misses"))
print(json.dumps({"tokens": out, "hits": hits, "misses": misses}))
"""


def run(folder, seed=0):
    command = [sys.executable, "-c", PROGRAM, str(folder), str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_second_process_compiles_nothing_even_with_other_weights(tmp_path):
    folder = tmp_path / "a" / "cache"
    first = run(folder)
    programs = {p.name for p in folder.iterdir() if p.name.endswith("-cache")}
    second = run(folder, seed=1)
    assert first["misses"] >= 2
    assert second["misses"] == 0
    assert second["hits"] >= first["misses"]
    assert {p.name for p in folder.iterdir() if p.name.endswith("-cache")} == programs
    assert second["tokens"] != first["tokens"]


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(bs.SurgeryError, match=r"compile_cache at .*expected a folder that can be"):
        bs.compile_cache(path)
