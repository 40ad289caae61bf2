"""With the settings of JAX that docs/performance.md names, a second process compiles nothing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import jax, numpy as np
counts = {"cache_hits": 0, "cache_misses": 0}

def count(event, **kwargs):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(count)
import backbone_surgery as bs
from tests.helpers import make_gpt2

lm = bs.CachedCausalLM(make_gpt2(seed=int(sys.argv[1]), num_layers=1))
lm.compile(sampler="greedy")
inputs = {"token_ids": np.array([[1, 2, 3]]), "padding_mask": np.ones((1, 3))}
tokens = lm.generate(inputs, max_new_tokens=4, stop_token_ids=None)["token_ids"].tolist()
print(json.dumps({"tokens": tokens, **counts}))
"""
DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"


def run(settings, seed):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_compiles_nothing_with_other_weights(tmp_path):
    settings = dict(re.findall(r"^export (JAX_\w+)=(\S+)$", DOCUMENT.read_text(), re.MULTILINE))
    assert len(settings) == 3
    settings["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path)
    first = run(settings, seed=0)
    second = run(settings, seed=1)
    assert first["cache_misses"] >= 2
    assert second["cache_misses"] == 0
    assert second["cache_hits"] >= first["cache_misses"]
    assert second["tokens"] != first["tokens"]
