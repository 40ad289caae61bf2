"""Without TensorFlow everything works; on another backend all but generation does."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "tensorflow_text", "torch"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""
SURGERY = """
import numpy as np, keras_hub, keras, backbone_surgery as bs
backbone = keras_hub.models.GPT2Backbone(50, 2, 2, 8, 16, dropout=0)
edited = bs.operate(backbone, [bs.Steer("mood", {1: np.ones(8)})])
inputs = {"token_ids": np.ones((1, 4), "int32"), "padding_mask": np.ones((1, 4), "int32")}
print(keras.backend.backend(), max(bs.check(edited).errors.values()) < 1e-5)
"""


def run(code, backend):
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_generates_without_tensorflow():
    code = """
import backbone_surgery as bs
for name in ("tiny_gpt2", "tiny_gemma"):
    lm = bs.CachedCausalLM.from_preset(name)
    print(lm.generate("Once upon a time there was a girl named Lily.", max_new_tokens=9))
print("tensorflow" in sys.modules)
"""
    lines = run(BLOCK + code, "jax").strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("Once upon a time") for line in lines[:2])
    assert lines[2] == "False"


@pytest.mark.slow
def test_importing_starts_no_backend():
    code = """
import backbone_surgery
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert run(code, "jax").strip() == "False"


@pytest.mark.slow
def test_surgery_on_tensorflow_and_generation_says_it_needs_jax():
    code = (
        SURGERY
        + """
try:
    bs.CachedCausalLM(edited).generate(inputs, stop_token_ids=None)
except bs.SurgeryError as error:
    print(error)
"""
    )
    out = run(code, "tensorflow")
    assert out.startswith("tensorflow True")
    assert "expected the JAX backend of Keras. Received 'tensorflow'" in out


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_what_looks_inside_on_another_backend(backend):
    pytest.importorskip(backend)
    code = (
        SURGERY
        + """
lm = bs.CachedCausalLM(edited)
own = lm(inputs)
lens = bs.logit_lens(lm, [1, 1, 1, 1], at="blocks.*")
best = np.asarray(keras.ops.convert_to_numpy(own)).argmax(-1)
print(np.array_equal(lens.token_ids[-1], best[0]))
for variable in backbone.trainable_variables:
    variable.assign(9 * keras.ops.convert_to_numpy(variable))
texts = [1, 2, 3, 4], [1, 5, 3, 4]
grid = bs.patch_grid(lm, *texts, (6, 7), at="blocks.*.mlp_output")
edges = bs.edge_patching(lm, *texts, (6, 7), by_head=True)
edge = edges.values[edges.senders.index("blocks.1.mlp_output"), -1]
print(abs(edge) > 1e-2 and abs(grid.values[-1, -1] - grid.corrupted - edge) < 1e-5)
examples = [([1, 2, i], [1, 5, i], 7) for i in range(8, 16)]
found, begun = (bs.find_subspace(lm, examples, "blocks.0", positions=1, steps=n) for n in (9, 1))
print(abs(np.linalg.norm(found.directions) - 1) < 1e-5)
print(np.abs(found.directions - begun.directions).max() > 1e-3)
asks = [lambda: bs.Engine(lm), lambda: bs.attribution(lm, [1, 2], target=3)]
asks.append(lambda: bs.edge_attribution(lm, *texts, (6, 7)))
for ask in asks:
    try:
        ask()
    except bs.SurgeryError as error:
        print("the JAX backend" in str(error))
"""
    )
    assert run(code, backend).split() == [backend, *["True"] * 8]


@pytest.mark.slow
def test_nested_surgery_on_tensorflow():
    code = """
import keras, numpy as np, backbone_surgery as bs
class Outer(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="outer")
        self.inner = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
    def call(self, x):
        return x + self.inner[1](self.inner[0](x))
x = keras.Input((3,))
outer, after = Outer(), keras.layers.Dense(3)
model = keras.Model(x, outer(x))
value = np.ones((2, 3), "float32")
before = model.predict_on_batch(value)
new = bs.rewrite_nested(model, "outer.inner.0", lambda layer, x: after(layer(x)))
y = (value @ outer.inner[0].kernel.numpy()) @ after.kernel.numpy() / np.sqrt(1.001)
print(np.allclose(new.predict_on_batch(value), 1 + y, atol=1e-5))
print(np.array_equal(model.predict_on_batch(value), before))
kernel = after.kernel.numpy()
new.compile("sgd", "mse")
new.fit(np.random.normal(size=(4, 3)), np.zeros((4, 3)), verbose=0, shuffle=False)
print(not np.allclose(after.kernel.numpy(), kernel), outer.inner[1].moving_mean.numpy().any())
"""
    assert run(code, "tensorflow").split() == ["True"] * 4
